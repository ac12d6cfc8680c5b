"""The conversations by which a tokenizer's chat template is tried, before anything is sampled."""

from __future__ import annotations

from longrein.contract import Message, Tool


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


LOOK: Tool = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"room": {"type": "string"}}, "required": ["room"]},
    },
}
CALL = {"id": "callabcde", "type": "function", "function": {"name": "look", "arguments": {"room": "é 1"}}}
RESULT = {"role": "tool", "tool_call_id": "callabcde", "name": "look", "content": "dark"}
SYSTEM: Message = {"role": "system", "content": "be brief"}
PROBES: tuple[tuple[list[Message], list[Tool]], ...] = (
    ([user("hi")], []),
    ([SYSTEM, user("hi")], []),
    ([SYSTEM, user("hi")], [LOOK]),
    ([user("hi"), said("yes?"), user("bye")], []),
    ([user("hi"), {**said(""), "tool_calls": [CALL]}, RESULT], [LOOK]),
)
