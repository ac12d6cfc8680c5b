"""Every agent program that longrein knows, the real one: it mends a file by its own tools, and its record is exact."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from longrein.contract import Message, Tool
from longrein.engines.scripted import ScriptedEngine
from longrein.harnesses.catalog import FILES, harness
from longrein.harnesses.outcome import Outcome
from longrein.harnesses.process import ProcessSessionFactory
from longrein.proxy import CallLimits, InterceptionServer
from longrein.recorder import Recorder
from longrein.rollout import Rollout

BROKEN = "def add(a, b):\n    return a - b\n"
FIRST = ("pi", "codex", "claude-code", "gemini-cli")
"""One a dialect: those that `make test` runs. The others have the marker `programs`."""
NAMES = [name if name in FIRST else pytest.param(name, marks=pytest.mark.programs) for name in FILES]


class Step(NamedTuple):
    """A tool call of the script."""

    tool: str
    arguments: dict[str, Any]


def steps(name: str, workdir: str, line: str) -> list[Step]:
    """How the policy mends `calc.py` with a program's own tools: it looks, then puts `line` in place of the broken one."""
    path, old = f"{workdir}/calc.py", "    return a - b"
    look = "pwd && cat calc.py"
    patch = f"*** Begin Patch\n*** Update File: calc.py\n@@\n def add(a, b):\n-{old}\n+{line}\n*** End Patch\n"
    todo = {
        "pi": [
            Step("bash", {"command": look}),
            Step("edit", {"path": path, "edits": [{"oldText": old, "newText": line}]}),
        ],
        "codex": [Step("exec_command", {"cmd": look}), Step("apply_patch", {"input": patch})],
        "claude-code": [
            Step("Bash", {"command": look, "description": "Look at the file"}),
            Step("Read", {"file_path": path}),
            Step("Edit", {"file_path": path, "old_string": old, "new_string": line}),
        ],
        "gemini-cli": [
            Step("run_shell_command", {"command": look, "description": "Look at the file"}),
            Step("replace", {"file_path": path, "instruction": "Add.", "old_string": old, "new_string": line}),
        ],
        "opencode": [
            Step("bash", {"command": look, "description": "Look at the file"}),
            Step("read", {"filePath": path}),
            Step("edit", {"filePath": path, "oldString": old, "newString": line}),
        ],
        "qwen-code": [
            Step("run_shell_command", {"command": look, "description": "Look at the file", "is_background": False}),
            Step("read_file", {"file_path": path}),
            Step("edit", {"file_path": path, "old_string": old, "new_string": line}),
        ],
        "goose": [
            Step("shell", {"command": look}),
            Step("edit", {"path": path, "before": old, "after": line}),
        ],
        "mini-swe-agent": [
            Step("bash", {"command": look}),
            Step("bash", {"command": f"sed -i 's/^{old}$/{line}/' calc.py"}),
            Step("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
        ],
    }
    if name not in todo:  # an agent library, with the two tools of `library_agents.py`
        return [Step("run", {"command": look}), Step("write", {"path": path, "text": BROKEN.replace(old, line)})]
    return todo[name]


CALLS_LESS = {"mini-swe-agent": 1}
"""A program that ends with its last tool call asks for no last word."""

BRANCHES = {"smolagents": 3}
"""It writes what it made of a reply into the reply: each of its calls has another history than the one before."""


def in_code(step: Step | None) -> str:
    """An action of a `CodeAgent`."""
    if step is None:
        return 'Thought: Nothing is left to do.\n<code>\nfinal_answer("It adds now.")\n</code>'
    arguments = ", ".join(f"{name}={value!r}" for name, value in step.arguments.items())
    return f"Thought: Next: {step.tool}.\n<code>\nprint({step.tool}({arguments}))\n</code>"


def script(name: str, line: str) -> Callable[[Sequence[Message], Sequence[Tool]], str | Message]:
    """The policy: it thinks, calls a tool a turn, and says that it is done. Where it works it learns from its first look."""

    def answer(messages: Sequence[Message], tools: Sequence[Tool]) -> str | Message:
        if name == "smolagents":
            done = sum(message["role"] == "assistant" for message in messages)
            return in_code((*steps(name, ".", line), None)[done])
        if not tools:
            return {"role": "assistant", "content": "Mending a sum"}
        results = [message for message in messages if message["role"] == "tool"]
        folder = next((word for m in results for word in m["content"].split() if word.startswith("/")), "/nowhere")
        todo = steps(name, folder, line)
        if len(results) >= len(todo):
            return {"role": "assistant", "content": "It adds now.", "reasoning_content": "Nothing is left to do."}
        tool, arguments = todo[len(results)]
        assert tool in [shown["function"]["name"] for shown in tools]
        call = {"id": "x", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
        return {"role": "assistant", "content": "", "reasoning_content": f"Next: {tool}.", "tool_calls": [call]}

    return answer


def verify(task: Any, outcome: Outcome) -> float:
    space: dict[str, Any] = {}
    exec((outcome.workdir / "calc.py").read_text(), space)
    return float(space["add"](2, 3) == 5)


@pytest.fixture(autouse=True)
def harness_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make test` installs the programs beside the other things it fetches."""
    if "LONGREIN_HARNESSES" not in os.environ:
        monkeypatch.setenv("LONGREIN_HARNESSES", str(Path(__file__).parents[3] / ".cache" / "harnesses"))


def play(name: str, rendering: Any, line: str) -> tuple[float, Rollout, Any, Outcome, list[list[int]]]:
    known = harness(name)
    if known.installed() is None:
        message = f"{name} is not in {known.folder}; `longrein harness install {name}` puts it there"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(message)
    drawn: list[list[int]] = []

    class Engine(ScriptedEngine):
        async def sample(self, request: Any) -> Any:
            sampled = await super().sample(request)
            drawn.append(list(sampled.ids))
            return sampled

    recorder = Recorder(Engine(script(name, line), rendering), rendering)
    recorder.open("r", seed=1)
    settings = known.settings()
    settings["files"]["calc.py"] = BROKEN
    with InterceptionServer() as server:
        factory = ProcessSessionFactory(
            **settings, server=server, verify=verify, recorder=recorder, timeout=120, limits=CallLimits(max_calls=12)
        )
        task = {"instruction": "The function add in calc.py is wrong. Mend it."}
        with factory.create(task=task, rollout_id="r") as session:
            outcome = session.wait()
            verdict = session.verify()
            return verdict.env_reward, recorder.finish("r"), server.traffic("r"), outcome, drawn


@pytest.mark.parametrize("name", NAMES)
def test_a_program_mends_a_file_and_its_record_is_exact(name: str, rendering: Any) -> None:
    reward, rollout, traffic, outcome, drawn = play(name, rendering("qwen3"), "    return a + b")
    told = f"{outcome.stdout[-2000:]}\n{outcome.stderr[-2000:]}"
    assert (reward, outcome.exit_code, outcome.limit) == (1.0, 0, None), told
    assert (traffic.errors, traffic.failure) == (0, None), told
    trained = [call for call in rollout.calls.values() if call.excluded is None]
    assert len(trained) == len(steps(name, "", "")) + 1 - CALLS_LESS.get(name, 0)
    # Every token that was sampled is recorded, in the order it was sampled, and is in the rows exactly once.
    if name == "smolagents":  # its stop word ends a reply before the token that the script ends it with
        drawn = [ids[:-1] for ids in drawn]
    assert sorted(call.completion_ids.tolist() for call in rollout.calls.values()) == sorted(drawn)
    assert all(call.delivered for call in rollout.calls.values())
    rows = rollout.rows()
    assert len(rows) == BRANCHES.get(name, 1)
    own = [token for call in trained for token in call.completion_ids.tolist()]
    assert [token for row in rows for token in np.asarray(row.token_ids)[np.asarray(row.agent_mask, bool)].tolist()] == own


@pytest.mark.parametrize("name", NAMES)
def test_a_program_that_is_led_wrong_gets_nothing(name: str, rendering: Any) -> None:
    reward, rollout, traffic, outcome, _ = play(name, rendering("qwen3"), "    return a * b")
    assert (reward, outcome.exit_code, traffic.failure) == (0.0, 0, None)
    assert len(rollout.rows()) == BRANCHES.get(name, 1)
