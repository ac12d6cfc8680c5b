"""Side calls of a program: which they are is told from the whole record, so it is asked when the rollout is sealed."""

from __future__ import annotations

from collections.abc import Sequence

from longrein.contract import Message
from longrein.digests import canonical
from longrein.rollout import Call, Rollout

QUOTED = 20
"""Characters of a line that is not met again by chance."""


def mark_auxiliary(rollout: Rollout) -> list[str]:
    """Exclude side calls (a title, a line for the screen) from training; gives their ids.

    They are the conversations without tools whose system prompt is not that of the first conversation with tools, and whose
    words the agent never reads: a summary that it goes on from, after a compaction, is its own doing. A title may be asked for
    before the task is: this is known only at the end.
    """
    calls = list(rollout.calls.values())
    main = next((rollout.path(call.id)[0] for call in calls if call.tools), None)
    if main is None:
        return []
    aside: dict[str, list[Call]] = {}
    own: list[Call] = []
    for call in calls:
        root = rollout.path(call.id)[0]
        side = not root.tools and _system(root.messages) != _system(main.messages)
        (aside.setdefault(root.id, []) if side else own).append(call)
    number = {call.id: place for place, call in enumerate(calls)}
    marked: list[str] = []
    for conversation in reversed(aside.values()):
        if any(_is_read(call, [other for other in own if number[other.id] > number[call.id]]) for call in conversation):
            own += conversation
        else:
            marked += [rollout.update(call.id, excluded="auxiliary").id for call in conversation if call.excluded is None]
    return marked


def _is_read(call: Call, later: Sequence[Call]) -> bool:
    """Whether what this call said was read again: its longest line, unless the call was itself given that."""
    line = max(map(str.strip, _text(call.reply).splitlines()), key=len, default="")
    if len(line) < QUOTED or any(line in _text(message) for message in call.messages):
        return False
    return any(line in _text(message) for other in later for message in other.messages)


def _text(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _system(messages: tuple[Message, ...]) -> list[str]:
    return [canonical({**m, "role": "system"}) for m in messages if m.get("role") in ("system", "developer")]
