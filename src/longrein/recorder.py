"""Answers model calls and keeps their tokens: finds where a request stands in the tree (`tree.py`), samples, records.

Always true: a request that continues a recorded conversation gets the recorded tokens plus the tokens of its new messages,
nothing rendered again; a request that does not is a new root. The noise of a reply depends on its rollout's seed and its
path in the tree alone.
"""

from __future__ import annotations

import asyncio
import bisect
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from longrein.contract import ContextLengthError, Engine, LongreinError, Message, Sampled, SampleRequest, Sampling, Tool
from longrein.digests import copied
from longrein.rendering import Rendering
from longrein.rollout import Call, Rollout
from longrein.tool_calls import call_id as tool_call_id
from longrein.tree import History, Place, Tree, as_ids

T = TypeVar("T")


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
        self.history: History = history
        self.context_length = context_length
        self.on_finish = on_finish
        """Told of each record once it has ended."""
        self._open: dict[str, Tree] = {}
        self._lock = threading.Lock()

    def open(self, rollout_id: str, *, seed: int = 0, task: Any = None, env: str = "", group: str = "") -> Rollout:
        """Start the record of a rollout."""
        with self._lock:
            if rollout_id in self._open:
                raise LongreinError(f"rollout {rollout_id!r} is already open")
            rollout = Rollout(id=rollout_id, task=task, seed=seed, env=env, group=group)
            self._open[rollout_id] = Tree(rollout, self.rendering, self.history)
        return rollout

    def rollout(self, rollout_id: str) -> Rollout:
        """The record of a rollout that is open, as far as it goes."""
        return self._tree(rollout_id).rollout

    def finish(self, rollout_id: str) -> Rollout:
        """End the record of a rollout; later calls under its id are refused."""
        with self._lock:
            rollout = self._tree(rollout_id, pop=True).rollout
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
        tree = self._tree(rollout_id)
        return tree.text(run_sync(self.call(rollout_id, messages, tools or (), sampling, turn=turn)))

    def recorded(self, rollout_id: str, turn: int) -> Call:
        """The call that was answered as this turn of a rollout."""
        tree = self._tree(rollout_id)
        call_id = tree.turns[turn] if 0 <= turn < len(tree.turns) else None
        if call_id is None:
            raise LongreinError(f"rollout {rollout_id!r} has no recorded turn {turn}; it has {len(tree.rollout.calls)}")
        return tree.rollout.calls[call_id]

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
        tree = self._tree(rollout_id)
        with self._lock:
            place = tree.place(messages, tools)
            sampling = self._within_context(sampling or self.sampling, len(place.prompt_ids), max_length)
            path = tree.take_path(place)
        request = SampleRequest(
            prompt_ids=place.prompt_ids,
            sampling=sampling,
            stop_ids=self.rendering.stop_ids,
            seed=int.from_bytes(path.key[:8], "little"),
            rollout_id=rollout_id,
            messages=messages,
            tools=tools,
        )
        try:
            sampled = self._stopped(await self.engine.sample(request), stop)
            call = self._make_call(path.key[:8].hex(), place, sampled, delivered, stop)
            with self._lock:
                if self._open.get(rollout_id) is not tree:
                    raise LongreinError(
                        f"rollout {rollout_id!r} ended while this call was sampled; the reply is not recorded"
                    )
                tree.record(place, path, call)
                self._number(tree, call.id, turn)
        except BaseException:  # a cancelled call too: asked again, it draws the same noise
            with self._lock:
                tree.leave_path(path)
            raise
        return _copied(call)

    def digest(self, rollout_id: str, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> bytes:
        """Of what a request asks that is about to be a `call`: the same for any two that differ only in what programs change
        without meaning to."""
        tree = self._tree(rollout_id)
        with self._lock:
            return tree.digest(messages, tools)

    def _tree(self, rollout_id: str, pop: bool = False) -> Tree:
        tree = self._open.pop(rollout_id, None) if pop else self._open.get(rollout_id)
        if tree is None:
            raise LongreinError(f"rollout {rollout_id!r} is not open here; call `open` first, and nothing after `finish`")
        return tree

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

    def _make_call(self, call_id: str, place: Place, sampled: Sampled, delivered: bool, stop: Sequence[str]) -> Call:
        reply = self.rendering.parse(sampled.ids, place.prompt_ids, place.tools)
        for part in reply.keys() & {"content", "reasoning_content"}:
            reply[part] = cut(reply[part], stop)
        for index, tool_call in enumerate(reply.get("tool_calls", ())):
            tool_call["id"] = tool_call_id(call_id, index, tool_call.get("id"))
        asked_for_tool = sampled.finish_reason == "stop" and reply.get("tool_calls")
        truncated = sampled.sampler_logprobs
        return Call(
            id=call_id,
            parent=place.parent,
            context_ids=place.context_ids,
            completion_ids=as_ids(sampled.ids),
            logprobs=np.asarray(sampled.logprobs, np.float32),
            sampler_logprobs=None if truncated is None else np.asarray(truncated, np.float32),
            finish_reason="tool_calls" if asked_for_tool else sampled.finish_reason,
            policy_version=sampled.policy_version,
            versions=None if sampled.versions is None else np.asarray(sampled.versions, np.int32),
            messages=tuple(map(copied, place.new_messages)),
            tools=place.tools,
            reply=reply,
            delivered=delivered,
        )

    @staticmethod
    def _number(tree: Tree, call_id: str, turn: int | None) -> None:
        turn = len(tree.turns) if turn is None else turn
        tree.turns += [None] * (turn + 1 - len(tree.turns))
        tree.turns[turn] = call_id


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


def _copied(call: Call) -> Call:
    """For the caller to keep: what it does to the reply does not reach the record."""
    return replace(call, reply=copied(call.reply))


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first of the stop words in it."""
    return text[: min((at for word in stop if (at := text.find(word)) >= 0), default=len(text))]
