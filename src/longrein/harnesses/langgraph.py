"""LangGraph: a graph of a model and its tools, over chat completions. https://pypi.org/project/langgraph/"""

from __future__ import annotations

from longrein.harnesses.harness import LIBRARY_AGENTS, LIBRARY_DEMO, Harness
from longrein.harnesses.package import PyPI

HARNESS = Harness(
    name="langgraph",
    dialect="chat",
    package=PyPI("langgraph", "1.2.20", besides=("langchain-openai==1.7.3",)),
    executable="python",
    arguments=(LIBRARY_AGENTS, "langgraph", "{instruction}"),
    env={"LANGSMITH_TRACING": "false"},
    demo=LIBRARY_DEMO,
)
