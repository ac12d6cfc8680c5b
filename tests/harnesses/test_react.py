"""The ReAct program: a process of its own that plays by the rules of the environment of the same game."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hunter import REACT, action, acts, hunter

from longrein.contract import Message, Tool
from longrein.engines.scripted import ScriptedEngine
from longrein.envs.hunt import HuntConfig, HuntEpisode
from longrein.harnesses import Outcome, ProcessSessionFactory
from longrein.harnesses.react import assembled, verify_hunt
from longrein.proxy import InterceptionServer
from longrein.recorder import Recorder
from longrein.rendering import Rendering
from longrein.rooms import TOOLS

Named = Callable[[str], Rendering]
TASK = {"rooms": ["attic", "barn", "cellar"]}
VERIFY = "longrein.harnesses.react.verify_hunt"

SCRIPTS: dict[str, Any] = {
    "found": hunter,
    "two looks at once": [acts(action("look", "attic"), action("look", "shed")), acts(action("answer", "cellar"))],
    "an unknown tool": [acts(action("dig", "attic")), acts(action("answer", "barn"))],
    "answer after a look": [acts(action("look", "attic"), action("answer", "cellar"))],
    "two answers": [acts(action("answer", "cellar"), action("answer", "attic"))],
    "no tool call": [acts(action("look", "attic")), "The coin is in the cellar."],
    "arguments that are no object": [
        acts({"id": "", "type": "function", "function": {"name": "look", "arguments": "[1]"}}),
        "no",
    ],
    "words and a call": [acts(action("look", "attic"), content="Let me see."), acts(action("answer", "cellar"))],
    "turning in circles": lambda messages, tools: acts(action("look", "attic")),
}


@pytest.fixture(scope="module")
def server() -> Iterator[InterceptionServer]:
    with InterceptionServer() as server:
        yield server


def episode(script: Any, rendering: Rendering) -> tuple[list[list[Message]], float]:
    """What the environment of the game sends, call by call, and the reward it gives."""
    recorder = Recorder(ScriptedEngine(script, rendering), rendering)
    recorder.open("r")
    config = HuntConfig()
    played = HuntEpisode(dict(TASK), config)
    messages, sent, reward = list(played.start()), [], 0.0
    for turn in range(config.max_turns):
        sent.append(list(messages))
        recorder.generate("r", turn, messages, list(played.tools))
        reply = recorder.recorded("r", turn).reply
        step = played.step(reply)
        reward += step.reward
        if step.done:
            break
        messages += [reply, *step.messages]
    return sent, reward


def plain(conversations: Sequence[Sequence[Message]]) -> list[list[Message]]:
    """Without what the wire may add to or leave out of an assistant message, and the ids of its calls by their order."""
    result = []
    for conversation in conversations:
        ids: dict[str, int] = {}
        messages: list[Message] = []
        for message in conversation:
            copy: Message = {"role": message["role"], "content": message.get("content") or ""}
            if calls := message.get("tool_calls"):
                copy["tool_calls"] = [call["function"] for call in calls]
                for call in calls:
                    ids[call["id"]] = len(ids)
            if message["role"] == "tool":
                copy["answers"] = ids[message["tool_call_id"]]
            messages.append(copy)
        result.append(messages)
    return result


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_it_sends_what_the_environment_would(server: InterceptionServer, rendering: Named, name: str, stream: bool) -> None:
    found = rendering("qwen3")
    seen: list[list[Message]] = []
    script = SCRIPTS[name] if callable(SCRIPTS[name]) else ScriptedEngine(SCRIPTS[name], found)._script

    def watched(messages: Sequence[Message], tools: Sequence[Tool]) -> Any:
        seen.append([dict(message) for message in messages])
        assert list(tools) == list(TOOLS)
        return script(messages, tools)

    sent, reward = episode(script, found)
    recorder = Recorder(ScriptedEngine(watched, found), found)
    rollout = recorder.open("r")
    command = [*REACT, "--stream"] if stream else REACT
    factory = ProcessSessionFactory(command, server=server, verify=VERIFY, recorder=recorder, timeout=240)
    with factory.create(task=TASK, rollout_id="r") as session:
        verdict, outcome = session.run(), session.wait()
    assert outcome.stderr == ""
    assert outcome.exit_code == 0
    assert plain(seen) == plain(sent)
    assert verdict.env_reward == reward
    assert len(rollout.branches()) == 1
    assert json.loads(outcome.last_line())["turns"] == len(sent)


def test_the_pull_way_end_to_end(server: InterceptionServer, rendering: Named) -> None:
    found = rendering("qwen3")
    factory = ProcessSessionFactory(REACT, server=server, verify=VERIFY, timeout=240, rendering=found)
    turns = []
    with factory.create(task=TASK, rollout_id="pull") as session:
        while (intercept := session.next_request()) is not None:
            assert intercept["tools"] == list(TOOLS)
            turns.append(len(intercept["messages"]))
            session.deliver(intercept, hunter(intercept["messages"], intercept["tools"]))
        assert session.verify().env_reward == 1.0
        assert json.loads(session.wait().last_line()) == {"answer": "cellar", "turns": 4}
        assert session.wait().messages[0]["role"] == "user"
    assert turns == [1, 3, 5, 7]


def test_the_pull_way_with_a_recorder_as_the_generate_api(server: InterceptionServer, rendering: Named) -> None:
    found = rendering("qwen3")
    recorder = Recorder(ScriptedEngine(hunter, found), found)
    rollout = recorder.open("texts")
    factory = ProcessSessionFactory(REACT, server=server, verify=VERIFY, timeout=240, rendering=found)
    with factory.create(task=TASK, rollout_id="texts") as session:
        turn = 0
        while (intercept := session.next_request()) is not None:
            text = recorder.generate("texts", turn, intercept["messages"], intercept["tools"])
            session.deliver(intercept, text)
            turn += 1
        assert session.verify().env_reward == 1.0
    assert len(rollout.calls) == 4
    assert len(rollout.branches()) == 1


def test_a_model_that_refuses_ends_it_with_a_word(server: InterceptionServer) -> None:
    env = {**os.environ, "OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "nobody"}
    command = [sys.executable, "-m", "longrein.harnesses.react", "--rooms", "attic,barn"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "the model answered 401" in done.stderr
    assert json.loads(done.stdout) == {"answer": None, "turns": 0}


def test_without_an_address_it_says_so() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    command = [sys.executable, "-m", "longrein.harnesses.react", "--rooms", "attic,barn"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "OPENAI_BASE_URL is not set" in done.stderr


@pytest.mark.parametrize(
    ("stdout", "reward"),
    [
        ('{"answer": "cellar", "turns": 4}\n', 1.0),
        ('noise\n{"answer": "cellar", "turns": 4}\n\n', 1.0),
        ('{"answer": "barn", "turns": 4}\n', 0.0),
        ('{"answer": null, "turns": 4}\n', 0.0),
        ('"cellar"\n', 0.0),
        ("cellar\n", 0.0),
        ("", 0.0),
    ],
)
def test_the_verdict_reads_the_last_line(stdout: str, reward: float) -> None:
    assert verify_hunt(TASK, Outcome(stdout=stdout, stderr="", exit_code=0, workdir=Path("/"))) == reward


def test_deltas_add_up() -> None:
    def delta(**fields: Any) -> dict[str, Any]:
        return {"choices": [{"delta": fields}]}

    chunks = [
        delta(role="assistant"),
        delta(reasoning_content="hm"),
        delta(content="a"),
        delta(content="b"),
        delta(tool_calls=[{"index": 0, "id": "x", "type": "function", "function": {"name": "look", "arguments": ""}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"room"'}}]),
        delta(tool_calls=[{"index": 1, "id": "y", "function": {"name": "answer", "arguments": "{}"}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": ': "den"}'}}]),
        {"choices": [], "usage": {}},
    ]
    assert assembled(chunks) == {
        "role": "assistant",
        "content": "ab",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "x", "type": "function", "function": {"name": "look", "arguments": '{"room": "den"}'}},
            {"id": "y", "type": "function", "function": {"name": "answer", "arguments": "{}"}},
        ],
    }


def test_it_starts_in_about_a_tenth_of_a_second() -> None:
    """Its processor time, that is: other programs may be busy on this machine."""
    code = (
        "import longrein.harnesses.react as react; react.Chat('http://x', 'k', 'm', False)\n"
        "import sys, time; print(time.process_time(), sorted({'torch', 'transformers', 'numpy', 'aiohttp'} & set(sys.modules)))"
    )
    times = []
    for _ in range(3):
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout
        seconds, _, heavy = said.strip().partition(" ")
        assert heavy == "[]"
        times.append(float(seconds))
        time.sleep(0.05)
    assert min(times) < 0.3
