"""Where a request stands in its rollout's tree of calls: the call it continues, and the tokens it adds to that call's.

Always true: a place's prompt is its parent's tokens, as they were read and sampled, and its context. A request finds its parent
by what it says, after what programs change without meaning to; ids only tell apart calls that say the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from longrein.contract import Message, Tool
from longrein.digests import Digests, digest_of, extend
from longrein.rendering import ConversationError, Rendering
from longrein.rollout import Call, Ids, Rollout

History = Literal["sampled", "as_sent"]

TIPS = 4
"""How many calls of a rollout have their whole path of tokens at hand. Any other path is walked."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request stands."""

    parent: str | None
    prompt_ids: Ids
    context_ids: Ids
    """What it adds to its parent's tokens; for a new root, the whole prompt."""
    new_messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    request_digest: bytes


class Path(NamedTuple):
    """A way down the tree that one call takes: the noise of its reply is keyed by it."""

    prompt: bytes
    sibling: int

    @property
    def key(self) -> bytes:
        return digest_of(self.prompt, self.sibling.to_bytes(8, "little"))


class Tree:
    """What is known of an open rollout besides its record. Not for two threads at once."""

    def __init__(self, rollout: Rollout, rendering: Rendering, history: History) -> None:
        self.rollout = rollout
        self.turns: list[str | None] = []
        """The calls that were answered as each turn."""
        self._rendering, self._history = rendering, history
        self._digests = Digests()
        self._ends: dict[bytes, list[str]] = {}
        """Digest of a conversation up to and with a reply: the calls that gave it, oldest first."""
        self._paths: dict[str, bytes] = {}
        """A call: the key of its path, its reply included."""
        self._siblings: dict[bytes, set[int]] = {}
        """The key of a prompt: the numbers of the calls that sample it. A call that failed gives its number back."""
        self._tips: dict[str, Ids] = {}
        """The tokens of the calls that were last continued or recorded, so that a longer prompt is one copy, not a walk."""

    def digest(self, messages: Sequence[Message], tools: Sequence[Tool]) -> bytes:
        """Of what is asked; `place` may be asked for these very objects next."""
        return self._digests.of(messages, tools, again=True)[-1]

    def place(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Place:
        """The longest recorded conversation that the request continues, confirmed by its tokens; else a new root."""
        if not messages:
            raise ConversationError("a model call needs at least one message; it was given none")
        digests, shared = self._digests.of(messages, tools), self._digests.shared_tools(tools)
        whole = as_ids(self._rendering.prompt(messages, tools)) if self._history == "as_sent" else None
        for known in range(len(messages) - 1, 0, -1):
            calls = self._ends.get(digests[known])
            if not calls:
                continue
            parent = self._nominated(messages[known - 1], calls)
            before, new = self._tokens(parent), tuple(messages[known:])
            if whole is not None:
                context = _rest(whole, before)
            else:
                context = self._splice(self.rollout.calls[parent], before, messages, known, tools)
            if context is not None:
                return Place(parent, np.concatenate([before, context]), context, new, shared, digests[-1])
        prompt = whole if whole is not None else as_ids(self._rendering.prompt(messages, tools))
        return Place(None, prompt, prompt, tuple(messages), shared, digests[-1])

    def take_path(self, place: Place) -> Path:
        """The first path from here that no call has taken: siblings are told apart by their number."""
        above = str(self.rollout.seed).encode() if place.parent is None else self._paths[place.parent]
        prompt = digest_of(above, place.context_ids.tobytes())
        taken = self._siblings.setdefault(prompt, set())
        path = Path(prompt, next(n for n in itertools.count() if n not in taken))
        taken.add(path.sibling)
        return path

    def leave_path(self, path: Path) -> None:
        """The call came to nothing: asked again, it takes the same path."""
        self._siblings[path.prompt].discard(path.sibling)

    def record(self, place: Place, path: Path, call: Call) -> None:
        self.rollout.add(call)
        end = self._digests.extended(place.request_digest, call.reply, call.tools)
        self._ends.setdefault(end, []).append(call.id)
        as_text = extend(place.request_digest, {"role": "assistant", "content": self.text(call)})
        if as_text != end:
            self._digests.alias(as_text, end)
        self._paths[call.id] = digest_of(path.key, call.completion_ids.tobytes())
        self._tips.pop(place.parent or "", None)
        self._keep(call.id, np.concatenate([place.prompt_ids, call.completion_ids]))

    def text(self, call: Call) -> str:
        """The reply as it was written, without the token that ended it."""
        ids = call.completion_ids.tolist()
        return self._rendering.decode(ids[:-1] if ids and ids[-1] in self._rendering.stop_ids else ids)

    def _splice(self, call: Call, before: Ids, messages: Sequence[Message], known: int, tools: Sequence[Tool]) -> Ids | None:
        """What the request adds to the tokens before; None when that cannot be told without rendering in full."""
        if not self._rendering.keeps_prefixes:
            return None
        last = int(call.completion_ids[-1]) if len(call.completion_ids) else None
        stopped = last in self._rendering.stop_ids
        extension = self._rendering.extension(
            call.reply,
            messages[known:],
            tools,
            system=list(itertools.takewhile(lambda m: m.get("role") in ("system", "developer"), messages)),
            stop_id=last if stopped else None,
        )
        if extension is None or stopped:
            return None if extension is None else as_ids(extension)
        prompt = before[: len(before) - len(call.completion_ids)]
        return as_ids([*self._rendering.close(prompt, call.completion_ids.tolist()), *extension])

    def _nominated(self, reply: Message, calls: list[str]) -> str:
        """Of several calls that gave the same reply to the same conversation, the one this echo shows most signs of."""

        def signs(call_id: str) -> tuple[bool, bool, bool, int]:
            call = self.rollout.calls[call_id]
            thought = call.reply.get("reasoning_content")
            return (
                bool(_tool_ids(call.reply) & _tool_ids(reply)) or reply.get("from_call") == call_id,
                reply.get("content") == self.text(call) or (bool(thought) and reply.get("reasoning_content") == thought),
                call.delivered,
                calls.index(call_id),
            )

        return max(calls, key=signs) if len(calls) > 1 else calls[0]

    def _tokens(self, call_id: str) -> Ids:
        """Everything the model had read and written when this call ended."""
        tokens = self._tips.pop(call_id, None)
        if tokens is None:
            tokens = self.rollout.tokens(call_id)
        self._keep(call_id, tokens)
        return tokens

    def _keep(self, call_id: str, tokens: Ids) -> None:
        self._tips[call_id] = tokens
        if len(self._tips) > TIPS:
            del self._tips[next(iter(self._tips))]


def as_ids(tokens: Sequence[int] | Ids) -> Ids:
    return np.asarray(tokens, np.int32)


def _tool_ids(reply: Message) -> set[str]:
    return {tool_call.get("id") for tool_call in reply.get("tool_calls") or ()}


def _rest(whole: Ids, before: Ids) -> Ids | None:
    """What `whole` adds to `before`, or None when it does not start with it."""
    return whole[len(before) :] if len(whole) > len(before) and np.array_equal(whole[: len(before)], before) else None
