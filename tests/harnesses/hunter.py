"""A policy that hunts well, as a script: it follows the notes and answers where the coin is."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from longrein.contract import Message, Tool

REACT = ["{python}", "-m", "longrein.harnesses.react", "--rooms", "{rooms}"]


def action(name: str, room: str) -> dict[str, object]:
    return {"id": "", "type": "function", "function": {"name": name, "arguments": json.dumps({"room": room})}}


def acts(*actions: dict[str, object], content: str = "") -> Message:
    return {"role": "assistant", "content": content, "tool_calls": list(actions)}


def hunter(messages: Sequence[Message], tools: Sequence[Tool]) -> Message:
    said = messages[-1]["content"]
    if note := re.search(r'note says "(\w+)"', said):
        return acts(action("look", note[1]))
    looked = [call for message in messages for call in message.get("tool_calls") or ()]
    return acts(action("answer", json.loads(looked[-1]["function"]["arguments"])["room"]))
