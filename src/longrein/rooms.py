"""The world of the treasure hunt: its rooms, its tools, what they say and who is right. Standard library alone.

The white-box environment (`longrein.envs.TreasureHunt`) and the ReAct program (`longrein.harnesses.react`) play in the same
world with the same words, so the same policy writes the same tokens in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
