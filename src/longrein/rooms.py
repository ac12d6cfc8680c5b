"""The world of the treasure hunt: its rooms, its tools, what they say and who is right. Standard library alone.

The white-box environment (`longrein.envs.TreasureHunt`) and the ReAct program (`longrein.harnesses.react`) play in the same
world with the same words, so the same policy writes the same tokens in both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

ROOMS = (
    "attic", "barn", "cellar", "den", "foyer", "garage", "hall", "kitchen", "larder", "library", "lounge", "nursery",
    "office", "pantry", "porch", "shed", "stable", "study", "tower", "vault",
)  # fmt: skip


def _room_tool(name: str, description: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"room": {"type": "string"}}, "required": ["room"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS: tuple[dict[str, Any], ...] = (
    _room_tool("look", "Look into a room."),
    _room_tool("answer", "Say where the coin is."),
)


def opening(start: str, actions: str = "tools") -> list[dict[str, Any]]:
    """The first messages of a hunt."""
    text = f'Find the coin. The first note says "{start}".'
    if actions == "text":
        text += "\nReply with one line: `look ROOM` to look into a room, or `answer ROOM` once you see the coin."
    return [{"role": "user", "content": text}]


def look(rooms: Sequence[str], room: str) -> str:
    """What is to be seen in a room of a hunt whose notes lead through `rooms`."""
    if room == rooms[-1]:
        return "The coin is here!"
    if room in rooms:
        return f'A note says "{rooms[rooms.index(room) + 1]}".'
    return "Nothing here."


class Action(NamedTuple):
    """What a reply asks for."""

    name: str
    room: str
    call_id: str | None
    """Of the tool call; None for an action that was written as text."""


def actions_of(reply: dict[str, Any]) -> list[Action]:
    """The tool calls of a reply as actions; arguments that do not parse name no room."""
    actions = []
    for call in reply.get("tool_calls") or ():
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError:
            arguments = None
        room = arguments.get("room") if isinstance(arguments, dict) else None
        actions.append(Action(call["function"]["name"], str(room), call["id"]))
    return actions


def over(actions: Sequence[Action]) -> bool:
    """A hunt ends with an answer, or with a reply that is no action."""
    return not actions or any(action.name == "answer" for action in actions)


def answered(actions: Sequence[Action]) -> str | None:
    """The room answered, if that came first: after other actions it is a guess made before seeing what they show."""
    return actions[0].room if actions and actions[0].name == "answer" else None


def result(rooms: Sequence[str], action: Action) -> dict[str, Any]:
    """The message that answers an action."""
    text = look(rooms, action.room) if action.name == "look" else f"There is no {action.name}."
    if action.call_id is None:
        return {"role": "user", "content": text}
    return {"role": "tool", "tool_call_id": action.call_id, "content": text}
