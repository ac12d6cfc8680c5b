"""Side calls of a program: which they are is told from the whole record, so it is asked when the rollout is sealed."""

from __future__ import annotations

from longrein.contract import Message
from longrein.digests import canonical
from longrein.rollout import Rollout


def mark_auxiliary(rollout: Rollout) -> list[str]:
    """Exclude side calls (a title, a summary for the screen) from training; gives their ids.

    They are the conversations without tools whose system prompt is not that of the first conversation with tools. A title may
    be asked for before the task is: this is known only at the end.
    """
    main = next((rollout.path(call.id)[0] for call in rollout.calls.values() if call.tools), None)
    if main is None:
        return []
    marked = []
    for call in list(rollout.calls.values()):
        root = rollout.path(call.id)[0]
        if not root.tools and _system(root.messages) != _system(main.messages) and call.excluded is None:
            rollout.update(call.id, excluded="auxiliary")
            marked.append(call.id)
    return marked


def _system(messages: tuple[Message, ...]) -> list[str]:
    return [canonical({**m, "role": "system"}) for m in messages if m.get("role") in ("system", "developer")]
