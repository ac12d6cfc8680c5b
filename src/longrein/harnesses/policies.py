"""Scripted policies that mend a one-line bug with a program's own tools: straight away, past a compaction, with a sub-agent's help.

Always true: they call no tool but the program's own, and learn where they work from what they see, as a model would.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from longrein.contract import Message, Tool
from longrein.harnesses.harness import Harness, Step
from longrein.harnesses.templates import fill

FILE = "calc.py"
BROKEN = "def add(a, b):\n    return a - b\n"
OLD, RIGHT, WRONG = "    return a - b", "    return a + b", "    return a * b"
ERRAND = "Look for me what is in the file, and tell me."
FINDING = "It subtracts."


def logs(lines: int) -> dict[str, str]:
    """Three long files to read."""
    return {f"log{n}.txt": "".join(f"{n:02}:{i:03} add({i}, {n}) gave {i - n}\n" for i in range(lines)) for n in (1, 2, 3)}


class Policy:
    """It thinks, calls a tool a turn, and says that it is done."""

    def __init__(self, harness: Harness, line: str = RIGHT) -> None:
        self._harness, self._line = harness, line
        self._steps = harness.demo
        self._in_words = isinstance(harness.demo[0], str)
        self._folder: str | None = None

    def __call__(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str | Message:
        if not tools and not self._in_words:
            return _say("Mending a sum")  # a side call
        return self._turn(
            sum(message["role"] == ("assistant" if self._in_words else "tool") for message in messages), messages
        )

    def _turn(self, number: int, messages: Sequence[Message]) -> str | Message:
        """What is said when so many steps are done."""
        if number >= len(self._steps):
            return _say("It adds now.", "Nothing is left to do.")
        return _call(self._steps[number], self._values(messages), number)

    def _values(self, messages: Sequence[Message]) -> dict[str, str]:
        said = [message["content"] for message in messages if message["role"] == "tool"]
        self._folder = self._folder or next((word for text in said for word in text.split() if word.startswith("/")), None)
        text = BROKEN.replace(OLD, self._line)
        return {
            "file": FILE,
            "folder": self._folder or ".",
            "old": OLD,
            "new": self._line,
            "text": text,
            "quoted": repr(text),
            "errand": ERRAND,
            "finding": FINDING,
        }


class Compacting(Policy):
    """It reads long logs first, writes the summary that the program asks for, and goes on from that."""

    def __init__(self, harness: Harness, line: str = RIGHT) -> None:
        super().__init__(harness, line)
        assert harness.compaction is not None
        self._way, self._done, self._summaries = harness.compaction, 0, 0
        look = harness.demo[0]
        break_off = ["I have read the logs."] if self._way.resumed else []
        self._steps = (*(_filled(look, {"file": log}) for log in logs(1)), *break_off, *harness.demo)

    def __call__(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str | Message:
        if not tools or (self._way.asks is not None and self._way.asks in messages[-1]["content"]):
            self._summaries += 1  # no two are alike: which one a program goes on from can be told
            found = f"Summary {self._summaries}: the logs show that the function add in {FILE} subtracts. It is not mended."
            return _say(f"<summary>\n{found}\n</summary>")
        self._done += 1  # counted here: the history that would tell is rewritten
        return self._turn(self._done - 1, messages)


class Delegating(Policy):
    """It sends a sub-agent to look before it mends the file itself; and it is the sub-agent too."""

    def __init__(self, harness: Harness, line: str = RIGHT) -> None:
        super().__init__(harness, line)
        assert harness.sub_agent is not None
        self._steps = (*harness.sub_agent.starts, *harness.demo)
        self._errand = (harness.demo[0], *harness.sub_agent.reports)

    def __call__(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str | Message:
        if not tools or not any(ERRAND in message["content"] for message in messages if message["role"] == "user"):
            return super().__call__(messages, tools)
        done = sum(message["role"] == "tool" for message in messages)
        return _call(self._errand[done], self._values(messages), done) if done < len(self._errand) else _say(FINDING)


def _say(text: str, thought: str | None = None) -> Message:
    return {"role": "assistant", "content": text, **({"reasoning_content": thought} if thought else {})}


def _call(step: Step | str, values: Mapping[str, str], number: int) -> str | Message:
    step = _filled(step, values)
    if isinstance(step, str):
        return step
    call = {"type": "function", "function": {"name": step.tool, "arguments": json.dumps(dict(step.arguments))}}
    return {
        "role": "assistant",
        "content": "",
        "reasoning_content": f"Step {number + 1}: {step.tool}.",
        "tool_calls": [call],
    }


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
