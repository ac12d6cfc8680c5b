"""Answers model calls and keeps their tokens: finds the call a request continues, splices, samples, records.

Always true: a request that continues a recorded conversation gets the recorded tokens plus the tokens of its new messages,
nothing rendered again; a request that does not is a new root. The noise of a reply depends on its rollout's seed and its
path in the tree alone.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np

from longrein.contract import Engine, LongreinError, Message, Sampled, SampleRequest, Sampling, Tool
from longrein.digests import Digests, copied, digest_of, extend
from longrein.rendering import ConversationError, Rendering
from longrein.rollout import Call, Ids, Rollout
from longrein.tool_calls import call_id as tool_call_id

History = Literal["sampled", "as_sent"]
T = TypeVar("T")

TIPS = 4
"""How many calls of a rollout have their whole path of tokens at hand. Any other path is walked."""


class ContextLengthError(LongreinError):
    """The prompt leaves no room for a reply in the model's context."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(f"the prompt has {tokens} tokens and the limit is {limit}: no room for a reply")
        self.tokens, self.limit = tokens, limit


@dataclass(slots=True)
class _Open:
    """What the recorder knows of a rollout besides its record."""

    rollout: Rollout
    digests: Digests = field(default_factory=Digests)
    ends: dict[bytes, list[str]] = field(default_factory=dict)
    """Digest of a conversation up to and with a reply: the calls that gave it, oldest first."""
    paths: dict[str, bytes] = field(default_factory=dict)
    """A call: the key of its path, its reply included."""
    siblings: dict[bytes, set[int]] = field(default_factory=dict)
    """The key of a prompt: the numbers of the calls that sample it. A call that failed gives its number back."""
    turns: list[str | None] = field(default_factory=list)
    tips: dict[str, Ids] = field(default_factory=dict)
    """The tokens of the calls that were last continued or recorded, so that a longer prompt is one copy, not a walk."""

    def tokens(self, call_id: str) -> Ids:
        """Everything the model had read and written when this call ended."""
        tokens = self.tips.pop(call_id, None)
        if tokens is None:
            tokens = self.rollout.tokens(call_id)
        self.keep(call_id, tokens)
        return tokens

    def keep(self, call_id: str, tokens: Ids) -> None:
        self.tips[call_id] = tokens
        if len(self.tips) > TIPS:
            del self.tips[next(iter(self.tips))]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a request stands in its rollout's tree."""

    parent: str | None
    prompt_ids: Ids
    context_ids: Ids
    new_messages: tuple[Message, ...]
    request_digest: bytes


class Recorder:
    """A `GenerateAPI` over an engine: every call it answers is in the record, token for token.

    `history="sampled"` keeps what the model wrote in its later context, even what the caller dropped (reasoning);
    `history="as_sent"` renders what the caller sent, at the price of branches.
    """

    def __init__(
        self,
        engine: Engine,
        rendering: Rendering,
        *,
        sampling: Sampling | None = None,
        history: History = "sampled",
        context_length: int | None = None,
        on_finish: Callable[[Rollout], None] | None = None,
    ) -> None:
        if history not in ("sampled", "as_sent"):
            raise LongreinError(f"history is {history!r}; it must be 'sampled' or 'as_sent'")
        self.engine = engine
        self.rendering = rendering
        self.sampling = sampling or Sampling()
        self.history = history
        self.context_length = context_length
        self.on_finish = on_finish
        """Told of each record once it has ended."""
        self._open: dict[str, _Open] = {}
        self._lock = threading.Lock()

    def open(self, rollout_id: str, *, seed: int = 0, task: Any = None, env: str = "", group: str = "") -> Rollout:
        """Start the record of a rollout."""
        with self._lock:
            if rollout_id in self._open:
                raise LongreinError(f"rollout {rollout_id!r} is already open")
            state = _Open(Rollout(id=rollout_id, task=task, seed=seed, env=env, group=group))
            self._open[rollout_id] = state
        return state.rollout

    def rollout(self, rollout_id: str) -> Rollout:
        """The record of a rollout that is open, as far as it goes."""
        return self._state(rollout_id).rollout

    def finish(self, rollout_id: str) -> Rollout:
        """End the record of a rollout; later calls under its id are refused."""
        with self._lock:
            rollout = self._state(rollout_id, pop=True).rollout
        if self.on_finish is not None:
            self.on_finish(rollout)
        return rollout

    def generate(
        self,
        rollout_id: str,
        turn: int,
        messages: list[Message],
        tools: list[Tool] | None = None,
        sampling: Sampling | None = None,
    ) -> str:
        """The seam's `GenerateAPI`: one reply as text; its tokens are at `recorded(rollout_id, turn)`."""
        call = run_sync(self.call(rollout_id, messages, tools or (), sampling, turn=turn))
        return self._text(call)

    def recorded(self, rollout_id: str, turn: int) -> Call:
        """The call that was answered as this turn of a rollout."""
        state = self._state(rollout_id)
        call_id = state.turns[turn] if 0 <= turn < len(state.turns) else None
        if call_id is None:
            raise LongreinError(f"rollout {rollout_id!r} has no recorded turn {turn}; it has {len(state.rollout.calls)}")
        return state.rollout.calls[call_id]

    async def call(
        self,
        rollout_id: str,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        sampling: Sampling | None = None,
        *,
        turn: int | None = None,
        max_length: int | None = None,
        delivered: bool = True,
        stop: Sequence[str] = (),
    ) -> Call:
        """Answer one model call and record it. `max_length` bounds prompt and reply together, below the model's context.

        A reply ends with the token that completes one of the words in `stop`, and its message before that word.
        A caller whose reply may get lost on the way passes `delivered=False`, and updates the rollout once it has arrived.
        """
        state = self._state(rollout_id)
        with self._lock:
            place = self._place(state, messages, tools)
            sampling = self._within_context(sampling or self.sampling, len(place.prompt_ids), max_length)
            prompt_key = self._prompt_key(state, place)
            taken = state.siblings.setdefault(prompt_key, set())
            number = next(n for n in itertools.count() if n not in taken)
            taken.add(number)
        path_key = digest_of(prompt_key, number.to_bytes(8, "little"))
        request = SampleRequest(
            prompt_ids=place.prompt_ids,
            sampling=sampling,
            stop_ids=self.rendering.stop_ids,
            seed=int.from_bytes(path_key[:8], "little"),
            rollout_id=rollout_id,
            messages=messages,
            tools=tools,
        )
        try:
            sampled = self._stopped(await self.engine.sample(request), stop)
            call = self._make_call(path_key[:8].hex(), place, state.digests.shared_tools(tools), sampled, delivered, stop)
            with self._lock:
                if self._open.get(rollout_id) is not state:
                    raise LongreinError(
                        f"rollout {rollout_id!r} ended while this call was sampled; the reply is not recorded"
                    )
                self._record(state, place, call, path_key)
                self._number(state, call.id, turn)
        except BaseException:  # a cancelled call too: asked again, it draws the same noise
            taken.discard(number)
            raise
        return _copied(call)

    def digest(self, rollout_id: str, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> bytes:
        """Of what a request asks that is about to be a `call`: the same for any two that differ only in what programs change
        without meaning to."""
        state = self._state(rollout_id)
        with self._lock:
            return state.digests.of(messages, tools, again=True)[-1]

    def _state(self, rollout_id: str, pop: bool = False) -> _Open:
        state = self._open.pop(rollout_id, None) if pop else self._open.get(rollout_id)
        if state is None:
            raise LongreinError(f"rollout {rollout_id!r} is not open here; call `open` first, and nothing after `finish`")
        return state

    def _place(self, state: _Open, messages: Sequence[Message], tools: Sequence[Tool]) -> _Place:
        if not messages:
            raise ConversationError("a model call needs at least one message; it was given none")
        digests = state.digests.of(messages, tools)
        whole = _ids(self.rendering.prompt(messages, tools)) if self.history == "as_sent" else None
        for known in range(len(messages) - 1, 0, -1):
            calls = state.ends.get(digests[known])
            if not calls:
                continue
            parent = self._nominated(state.rollout, messages[known - 1], calls)
            before, new = state.tokens(parent), tuple(messages[known:])
            if whole is not None:
                context = _rest(whole, before)
            else:
                context = self._splice(state.rollout.calls[parent], before, messages, known, tools)
            if context is not None:
                return _Place(parent, np.concatenate([before, context]), context, new, digests[-1])
        prompt = whole if whole is not None else _ids(self.rendering.prompt(messages, tools))
        return _Place(None, prompt, prompt, tuple(messages), digests[-1])

    def _splice(self, call: Call, before: Ids, messages: Sequence[Message], known: int, tools: Sequence[Tool]) -> Ids | None:
        """What the request adds to the tokens before; None when that cannot be told without rendering in full."""
        if not self.rendering.keeps_prefixes:
            return None
        last = int(call.completion_ids[-1]) if len(call.completion_ids) else None
        stopped = last in self.rendering.stop_ids
        extension = self.rendering.extension(
            call.reply,
            messages[known:],
            tools,
            system=list(itertools.takewhile(lambda m: m.get("role") in ("system", "developer"), messages)),
            stop_id=last if stopped else None,
        )
        if extension is None or stopped:
            return None if extension is None else _ids(extension)
        prompt = before[: len(before) - len(call.completion_ids)]
        return _ids([*self.rendering.close(prompt, call.completion_ids.tolist()), *extension])

    def _nominated(self, rollout: Rollout, reply: Message, calls: list[str]) -> str:
        """Of several calls that gave the same reply to the same conversation, the one this echo shows most signs of."""

        def signs(call_id: str) -> tuple[bool, bool, bool, int]:
            call = rollout.calls[call_id]
            thought = call.reply.get("reasoning_content")
            return (
                bool(_tool_ids(call.reply) & _tool_ids(reply)) or reply.get("from_call") == call_id,
                reply.get("content") == self._text(call) or (bool(thought) and reply.get("reasoning_content") == thought),
                call.delivered,
                calls.index(call_id),
            )

        return max(calls, key=signs) if len(calls) > 1 else calls[0]

    def _prompt_key(self, state: _Open, place: _Place) -> bytes:
        above = str(state.rollout.seed).encode() if place.parent is None else state.paths[place.parent]
        return digest_of(above, place.context_ids.tobytes())

    def _within_context(self, sampling: Sampling, prompt_length: int, max_length: int | None) -> Sampling:
        lengths = [length for length in (self.context_length, max_length) if length is not None]
        if not lengths:
            return sampling
        room = min(lengths) - prompt_length
        if room < 1:
            raise ContextLengthError(prompt_length, min(lengths))
        return replace(sampling, max_tokens=min(room, sampling.max_tokens or room))

    def _stopped(self, sampled: Sampled, stop: Sequence[str]) -> Sampled:
        """The reply as if sampling had ended at the first stop word. What came later was never part of it."""

        def said(length: int) -> bool:
            text = self.rendering.decode(sampled.ids[:length])
            return any(word in text for word in stop)

        if not stop or not said(len(sampled.ids)):
            return sampled
        end = bisect.bisect_left(range(len(sampled.ids)), True, key=said)
        drawn, versions = sampled.sampler_logprobs, sampled.versions
        return replace(
            sampled,
            ids=sampled.ids[:end],
            logprobs=sampled.logprobs[:end],
            sampler_logprobs=None if drawn is None else drawn[:end],
            versions=None if versions is None else versions[:end],
            finish_reason="stop",
        )

    def _make_call(
        self,
        call_id: str,
        place: _Place,
        tools: tuple[Tool, ...],
        sampled: Sampled,
        delivered: bool,
        stop: Sequence[str] = (),
    ) -> Call:
        reply = self.rendering.parse(sampled.ids, place.prompt_ids, tools)
        reply["content"] = cut(reply["content"], stop)
        for index, tool_call in enumerate(reply.get("tool_calls", ())):
            tool_call["id"] = tool_call_id(call_id, index, tool_call.get("id"))
        asked_for_tool = sampled.finish_reason == "stop" and reply.get("tool_calls")
        truncated = sampled.sampler_logprobs
        return Call(
            id=call_id,
            parent=place.parent,
            context_ids=place.context_ids,
            completion_ids=_ids(sampled.ids),
            logprobs=np.asarray(sampled.logprobs, np.float32),
            sampler_logprobs=None if truncated is None else np.asarray(truncated, np.float32),
            finish_reason="tool_calls" if asked_for_tool else sampled.finish_reason,
            policy_version=sampled.policy_version,
            versions=None if sampled.versions is None else np.asarray(sampled.versions, np.int32),
            messages=tuple(map(copied, place.new_messages)),
            tools=tools,
            reply=reply,
            delivered=delivered,
        )

    def _record(self, state: _Open, place: _Place, call: Call, path_key: bytes) -> None:
        state.rollout.add(call)
        end = state.digests.extended(place.request_digest, call.reply, call.tools)
        state.ends.setdefault(end, []).append(call.id)
        as_text = extend(place.request_digest, {"role": "assistant", "content": self._text(call)})
        if as_text != end:
            state.digests.alias(as_text, end)
        state.paths[call.id] = digest_of(path_key, call.completion_ids.tobytes())
        state.tips.pop(place.parent or "", None)
        state.keep(call.id, np.concatenate([place.prompt_ids, call.completion_ids]))

    def _text(self, call: Call) -> str:
        """The reply as it was written, without the token that ended it."""
        ids = call.completion_ids.tolist()
        return self.rendering.decode(ids[:-1] if ids and ids[-1] in self.rendering.stop_ids else ids)

    @staticmethod
    def _number(state: _Open, call_id: str, turn: int | None) -> None:
        turn = len(state.turns) if turn is None else turn
        state.turns += [None] * (turn + 1 - len(state.turns))
        state.turns[turn] = call_id


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end from ordinary code, also from inside a running event loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    outcome: list[Any] = []

    def target() -> None:
        try:
            outcome.append((asyncio.run(coroutine), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=target, name="longrein-run-sync")
    thread.start()
    thread.join()
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def _ids(tokens: Sequence[int] | Ids) -> Ids:
    return np.asarray(tokens, np.int32)


def _tool_ids(reply: Message) -> set[str]:
    return {tool_call.get("id") for tool_call in reply.get("tool_calls") or ()}


def _rest(whole: Ids, before: Ids) -> Ids | None:
    """What `whole` adds to `before`, or None when it does not start with it."""
    return whole[len(before) :] if len(whole) > len(before) and np.array_equal(whole[: len(before)], before) else None


def _copied(call: Call) -> Call:
    """For the caller to keep: what it does to the reply does not reach the record."""
    return replace(call, reply=copied(call.reply))


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first of the stop words in it."""
    return text[: min((at for word in stop if (at := text.find(word)) >= 0), default=len(text))]
