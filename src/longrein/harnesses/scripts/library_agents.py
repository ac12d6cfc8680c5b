"""A small coding agent in each of four agent libraries: `python library_agents.py LIBRARY TASK`.

It is run by the library's own interpreter, where longrein is not installed: the standard library and that library are all it
imports. The model is where `OPENAI_BASE_URL` says; the agent works in the folder it is started in.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

INSTRUCTIONS = "You are a coding agent. Look at the files with `run`, change them with `write`, then say what you did."
MAX_TURNS = 40
MODEL = os.environ["OPENAI_MODEL"]
URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]


def run(command: str) -> str:
    """Run a shell command and return what it prints.

    Args:
        command: The command.
    """
    done = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr + (f"\n[exit code {done.returncode}]" if done.returncode else "")


def write(path: str, text: str) -> str:
    """Write a file, in place of what was there.

    Args:
        path: The path of the file.
        text: What the file shall hold.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return f"wrote {Path(path).write_text(text)} characters to {path}"


def by_smolagents(task: str) -> str:
    from smolagents import CodeAgent, LogLevel, OpenAIModel, tool

    model = OpenAIModel(MODEL, api_base=URL, api_key=KEY)
    agent = CodeAgent([tool(run), tool(write)], model, max_steps=MAX_TURNS, verbosity_level=LogLevel.OFF)
    return str(agent.run(task))


def by_openai_agents(task: str) -> str:
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    tools = [function_tool(run), function_tool(write)]
    agent = Agent("coder", instructions=INSTRUCTIONS, tools=tools, model=MODEL)
    return str(Runner.run_sync(agent, task, max_turns=MAX_TURNS).final_output)


def by_pydantic_ai(task: str) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
    return str(Agent(model, instructions=INSTRUCTIONS, tools=[run, write]).run_sync(task).output)


def by_langgraph(task: str) -> str:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    tools = [tool(run), tool(write)]
    model = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY).bind_tools(tools)
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    messages = [("system", INSTRUCTIONS), ("user", task)]
    said = graph.compile().invoke({"messages": messages}, {"recursion_limit": 2 * MAX_TURNS})
    return str(said["messages"][-1].content)


AGENTS = {
    "smolagents": by_smolagents,
    "openai-agents": by_openai_agents,
    "pydantic-ai": by_pydantic_ai,
    "langgraph": by_langgraph,
}

if __name__ == "__main__":
    print(AGENTS[sys.argv[1]](sys.argv[2]))
