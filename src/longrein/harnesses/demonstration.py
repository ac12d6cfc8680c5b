"""One episode of an agent program with a scripted policy: what training with the program is like, without a model.

Always true: the program is the real one, in its sandbox, and all of its calls go through the proxy and the recorder; only the
replies are written beforehand. They mend a one-line bug with the program's own tools, or, if told so, put in another one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longrein.contract import Message, Tool
from longrein.engines.scripted import Script, ScriptedEngine
from longrein.harnesses.harness import Harness, Step
from longrein.harnesses.outcome import Outcome
from longrein.harnesses.process import ProcessSessionFactory
from longrein.harnesses.templates import fill
from longrein.proxy import CallLimits, InterceptionServer, Traffic
from longrein.recorder import Recorder
from longrein.rendering import Rendering
from longrein.rollout import Rollout

FILE = "calc.py"
BROKEN = "def add(a, b):\n    return a - b\n"
OLD, RIGHT, WRONG = "    return a - b", "    return a + b", "    return a * b"
INSTRUCTION = f"The function add in {FILE} is wrong. Mend it."
MAX_CALLS = 20


@dataclass(frozen=True, slots=True)
class Demonstration:
    """An episode that was played."""

    harness: Harness
    version: str
    reward: float
    rollout: Rollout
    traffic: Traffic
    outcome: Outcome
    seconds: float

    def summary(self) -> dict[str, Any]:
        """A line of `longrein harness bench`."""
        rows = [row.token_ids.tolist() for row in self.rollout.rows()]
        calls = list(self.rollout.calls.values())
        return {
            "program": self.harness.name,
            "version": self.version,
            "dialect": self.harness.dialect,
            "streamed": self.traffic.streamed > 0,
            "reward": self.reward,
            "calls": len(calls),
            "side_calls": sum(call.excluded is not None for call in calls),
            "branches": len(rows),
            "sampled_tokens": sum(len(call.completion_ids) for call in calls),
            "trained_tokens": self.rollout.agent_tokens,
            "forwarded_tokens": sum(map(len, rows)),
            "unique_tokens": unique_tokens(rows),
            "seconds": round(self.seconds, 2),
        }


class Policy:
    """The scripted policy: it thinks, calls a tool a turn, and says that it is done."""

    def __init__(self, harness: Harness, line: str) -> None:
        self._demo, self._line = harness.demo, line

    def __call__(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str | Message:
        in_words = isinstance(self._demo[0], str)
        if not tools and not in_words:
            return {"role": "assistant", "content": "Mending a sum"}  # a side call
        done = sum(message["role"] == ("assistant" if in_words else "tool") for message in messages)
        if done >= len(self._demo):
            return {"role": "assistant", "content": "It adds now.", "reasoning_content": "Nothing is left to do."}
        step = _filled(self._demo[done], self._values(messages))
        if isinstance(step, str):
            return step
        call = {"type": "function", "function": {"name": step.tool, "arguments": json.dumps(dict(step.arguments))}}
        return {"role": "assistant", "content": "", "reasoning_content": f"Next: {step.tool}.", "tool_calls": [call]}

    def _values(self, messages: Sequence[Message]) -> dict[str, str]:
        """Where the policy works it learns from its first look, as a model would."""
        said = [message["content"] for message in messages if message["role"] == "tool"]
        folder = next((word for text in said for word in text.split() if word.startswith("/")), ".")
        text = BROKEN.replace(OLD, self._line)
        return {"file": FILE, "folder": folder, "old": OLD, "new": self._line, "text": text, "quoted": repr(text)}


def demonstrate(
    harness: Harness,
    rendering: Rendering,
    *,
    line: str = RIGHT,
    policy: Script | None = None,
    timeout: float = 120.0,
    engine: type[ScriptedEngine] = ScriptedEngine,
) -> Demonstration:
    """Play the episode; `line` is what the policy puts in place of the broken one, unless another `policy` is given."""
    recorder = Recorder(engine(policy or Policy(harness, line), rendering), rendering)
    settings = harness.settings()
    settings["files"][FILE] = BROKEN
    with InterceptionServer() as server:
        factory = ProcessSessionFactory(
            **settings,
            server=server,
            verify=verify,
            recorder=recorder,
            timeout=timeout,
            limits=CallLimits(max_calls=MAX_CALLS),
        )
        rollout = recorder.open("demonstration")
        began = time.perf_counter()
        with factory.create(task={"instruction": INSTRUCTION}, rollout_id=rollout.id) as session:
            outcome = session.wait()
            seconds = time.perf_counter() - began
            reward = session.verify().env_reward
            traffic = server.traffic(rollout.id)
    rollout = recorder.finish(rollout.id)
    version = harness.installed() or "on PATH"
    return Demonstration(harness, version, reward, rollout, traffic, outcome, seconds)


def unique_tokens(rows: Sequence[list[int]]) -> int:
    """How many tokens a forward pass reads that reads a shared beginning once.

    >>> unique_tokens([[1, 2, 3], [1, 2, 4, 5], [1, 2, 3]])
    5
    """
    total, before = 0, np.array([], np.int64)
    for row in sorted(rows):
        now = np.asarray(row, np.int64)
        common = min(len(before), len(now))
        differ = np.flatnonzero(before[:common] != now[:common])
        total += len(now) - (int(differ[0]) if len(differ) else common)
        before = now
    return total


def verify(task: Any, outcome: Outcome) -> float:
    """The file is read, not run: it was written by a script of ours, or by a program gone astray."""
    left = outcome.workdir / FILE
    return float(left.is_file() and left.read_text() == BROKEN.replace(OLD, RIGHT))


def _filled(step: Step | str, values: Mapping[str, str]) -> Step | str:
    if isinstance(step, str):
        return fill(step, {}, values, "demo", strict=False)
    return Step(step.tool, {name: _inside(value, values) for name, value in step.arguments.items()})


def _inside(value: Any, values: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return fill(value, {}, values, "demo", strict=False)
    if isinstance(value, Mapping):
        return {name: _inside(inner, values) for name, inner in value.items()}
    return [_inside(inner, values) for inner in value] if isinstance(value, list) else value
