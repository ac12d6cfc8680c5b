"""Samples in this process with a transformers model: a request joins the running batch at the next step and leaves when done.

Always true: a reply is a function of its request and the weights. Its noise is keyed by the request's seed and the position in
the reply, drawn by inverse CDF, so what else is sampled changes the last bits of its log-probabilities, and its tokens only
where a draw falls that near to the border of two tokens. Keys and values never outlive the weights they were made with: before
each step the parameters' version counters and `policy_version` are compared with those of the step before, and a change drops
all of them. A reply that runs while the weights change is forwarded again and goes on under the new ones; `Sampled.versions`
says which token came from which, and `policy_version` is the first token's.

Conversations keep their keys and values between turns and rollouts of a task share their prompt's, found by comparing tokens
(`slots.py`); models that the slot cache does not fit are recognised and sampled plainly (`forwarding.py`).

transformers' own continuous batching is measured beside it (`benchmarks/engine.py`): with pages of 32 tokens in place of its 256, so that
prompts are shared, it took 9.0 and 2.7 times as long for two workloads of rollouts on a CPU (`docs/engines.md`).
"""

from __future__ import annotations

import asyncio
import math
import threading
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from longrein.contract import LongreinError, Sampled, SampleRequest
from longrein.engines import forwarding
from longrein.engines.drawing import Drawer
from longrein.engines.forwarding import Forward
from longrein.engines.slots import Wait


class TransformersEngine:
    """Samples from `model`, which may be the trainer's own module: weights are shared, nothing is copied.

    The module is the engine's while replies run: who shares it forwards it before or after, or between `pause` and `resume`.
    `max_batch` replies run at once; the others wait. `cache_tokens` bounds the keys and values that are kept, in tokens: None
    takes a quarter of the free memory of a GPU, an eighth of the machine's on a CPU.

    >>> engine = TransformersEngine(model)                                       # doctest: +SKIP
    >>> asyncio.run(engine.sample(SampleRequest([1, 2], Sampling(max_tokens=8), frozenset({0}), seed=7)))  # doctest: +SKIP
    """

    def __init__(self, model: PreTrainedModel, *, max_batch: int = 256, cache_tokens: int | None = None) -> None:
        if cache_tokens is not None and cache_tokens < 1:
            raise LongreinError(f"cache_tokens is {cache_tokens}; it must be 1 or more, or None")
        self.model = model
        self.max_batch = max_batch
        self.cache_tokens = cache_tokens
        self.policy_version = 0
        self.forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Entered around every run of steps; a trainer puts its autocast here."""
        self._arrived: deque[_Reply] = deque()
        self._waiting: deque[_Reply] = deque()
        self._running: list[_Reply] = []
        self._done: list[_Reply] = []
        self._drawing: tuple[list[_Reply], Drawer] | None = None
        self._forward: Forward | None = None
        self._forwarded = 0
        """Tokens that went through forwards which are no more."""
        self._made_for: tuple[Any, ...] = ()
        self._weights = (0, 0)
        """The policy version and the sum of version counters that what is kept was made with."""
        self._watched: list[torch.Tensor] = []
        self._cancellations = 0
        self._worker: threading.Thread | None = None
        self._changed = threading.Condition()
        self._handing_over: set[asyncio.AbstractEventLoop] = set()
        self._paused = self._steps_run = self._closed = False

    async def sample(self, request: SampleRequest) -> Sampled:
        tokens = self._checked(request)
        loop = asyncio.get_running_loop()
        reply = _Reply(request, tokens, self._limit(request), loop, self._cancellations)
        with self._changed:
            if self._closed:
                raise LongreinError("this engine is closed; make a new one to sample again")
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="longrein-engine", daemon=True)
                self._worker.start()
            self._arrived.append(reply)
            self._handing_over -= {one for one in self._handing_over if one.is_closed()}
            if loop not in self._handing_over:  # everything that asks in this turn of the loop is handed over at once
                self._handing_over.add(loop)
                loop.call_soon(self._hand_over, loop)
        try:
            return await reply.future
        except BaseException:  # nobody waits for it any more
            reply.cancelled = True
            raise

    def cancel(self) -> None:
        """Refuse what waits and, at the next step, what runs; later requests are served again."""
        with self._changed:
            self._cancellations += 1
            if not self._steps_run:  # paused, perhaps: no step comes that would refuse them
                for reply in (*self._waiting, *self._arrived):
                    self._unwanted(reply)
                self._waiting.clear()
                self._arrived.clear()

    def pause(self) -> None:
        """Return once what runs has come to its end; nothing new begins before `resume`. Requests wait."""
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: not self._steps_run)

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy `(name, tensor)` pairs into the model; call it between `pause` and `resume`."""
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                if name not in parameters:
                    raise LongreinError(f"the model has no parameter {name!r}; are these the weights of another model?")
                parameters[name].copy_(tensor)

    def close(self) -> None:
        """End the worker once what runs has come to its end. Requests that wait are refused."""
        with self._changed:
            self._closed, self._paused = True, False
            worker, self._worker = self._worker, None
            self._changed.notify_all()
        if worker is not None and worker is not threading.current_thread():
            worker.join()

    @property
    def context_length(self) -> int | None:
        """Tokens of the longest conversation: what the model reads, within what the cache holds."""
        lengths = [length for length in (forwarding.context_length(self.model), self.cache_tokens) if length is not None]
        return min(lengths, default=None)

    @property
    def forwarded_tokens(self) -> int:
        """Tokens that went through the model so far: what was not found in the cache."""
        return self._forwarded + (self._forward.forwarded if self._forward else 0)

    def _checked(self, request: SampleRequest) -> array[int]:
        """The prompt; what would fail the step it is in, and every other request there, is refused."""
        ids = np.asarray(request.prompt_ids)
        vocabulary = self.model.config.get_text_config().vocab_size
        if not ids.size:
            raise LongreinError("the prompt has no tokens; an engine needs at least one")
        if ids.min() < 0 or ids.max() >= vocabulary:
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise LongreinError(f"the prompt holds the id {wrong}; the model knows ids from 0 to {vocabulary - 1}")
        if self.context_length is not None and ids.size >= self.context_length:
            raise LongreinError(f"the prompt has {ids.size} tokens; the model reads and writes {self.context_length}")
        if request.sampling.max_tokens is None and self.context_length is None:
            raise LongreinError("Sampling.max_tokens is None and the model states no context length; set one")
        return array("i", ids.astype(np.int32).tobytes())

    def _limit(self, request: SampleRequest) -> float:
        room = (self.context_length or math.inf) - len(request.prompt_ids)
        return min(request.sampling.max_tokens or math.inf, room)

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._changed:
            self._handing_over.discard(loop)
            self._changed.notify_all()

    # ---- the worker's thread

    def _work(self) -> None:
        with torch.inference_mode():
            while self._wait_for_work():
                try:
                    with self._sampling_mode(), self.forward_context():
                        self._make_ready()
                        while self._take_in() and not self._weights_changed():
                            self._step()
                            if self._running or self._waiting:
                                self._deliver()
                except BaseException as error:
                    self._fail(error)
                # Who gets the last reply may train at once: the model is as it was, and no step runs.
                with self._changed:
                    self._steps_run = bool(self._running)
                    self._changed.notify_all()
                self._deliver()
        self._drop_forward()
        for reply in (*self._waiting, *self._arrived):
            reply.refuse(LongreinError("the engine was closed before this request was sampled"))

    def _wait_for_work(self) -> bool:
        """Wait until there is something to run; False once the engine is closed."""

        def ready() -> bool:
            asked = bool(self._arrived) and not self._handing_over
            return bool(self._running) or self._closed or (not self._paused and (asked or bool(self._waiting)))

        with self._changed:
            self._changed.wait_for(ready)
            self._steps_run = bool(self._running) or not self._closed
            return self._steps_run

    @contextmanager
    def _sampling_mode(self) -> Iterator[None]:
        in_training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            yield
        finally:
            for module in in_training:
                module.training = True

    def _make_ready(self) -> None:
        """See that the forward fits the model as it is, and that what it keeps was made with these weights."""
        model = self.model
        if model.device.type == "cuda":
            torch.cuda.set_device(model.device)
        self._watched = [*model.parameters(), *model.buffers()]
        adapters = [
            (str(module.active_adapters), module.disable_adapters, str(module.merged_adapters))
            for module in model.modules()
            if hasattr(module, "merged_adapters")  # a layer that PEFT has wrapped
        ]
        where = [tensor.data_ptr() for tensor in self._watched]
        made_for = (model, model.dtype, model.device, self.forward_context, self.cache_tokens, where, adapters)
        weights = (self.policy_version, self._versions())
        if self._forward is None or made_for != self._made_for:
            self._let_go()
            self._drop_forward()  # its memory is free before the next one takes some
            self._forward = forwarding.choose(model, self.cache_tokens)
            self._made_for = made_for
        elif self._weights != weights:
            self._let_go()
            self._forward.forget()
        self._weights = weights

    def _versions(self) -> int:
        """Grows with every change in place of a weight, whoever makes it."""
        return sum(0 if tensor.is_inference() else tensor._version for tensor in self._watched)

    def _weights_changed(self) -> bool:
        return self._weights != (self.policy_version, self._versions())

    def _drop_forward(self) -> None:
        self._forwarded, self._forward, self._drawing = self.forwarded_tokens, None, None

    def _let_go(self) -> None:
        """What runs is forwarded again: what was kept of it is not right any more."""
        for reply in self._running:
            reply.kept = None
        self._waiting.extendleft(reversed(self._running))
        self._running = []

    def _take_in(self) -> bool:
        """Let go of what is not wanted any more and take in what waits; whether anything runs."""
        assert self._forward is not None
        for reply in [reply for reply in self._running if self._unwanted(reply)]:
            self._running.remove(reply)
            self._forward.leave(reply)
        with self._changed:
            self._waiting.extend(self._arrived)
            self._arrived.clear()
            open_to_new = not (self._paused or self._closed)
        waiting = [reply for reply in self._waiting if not self._unwanted(reply)]
        self._waiting.clear()
        same = Counter(reply.prompt_key for reply in waiting) if len(waiting) > 1 else {}
        full = False
        for reply in waiting:
            full = full or len(self._running) >= self.max_batch
            if full or not (open_to_new or reply.begun):
                self._waiting.append(reply)
                continue
            wait = self._forward.join(reply, alone=same.get(reply.prompt_key, 1) == 1)
            if wait is None:
                self._running.append(reply)
                reply.begun = True
            elif wait is Wait.FOR_ROOM and not self._running:
                reply.refuse(self._no_room(reply))
            else:
                self._waiting.append(reply)
                full = wait is Wait.FOR_ROOM
        return bool(self._running)

    def _no_room(self, reply: _Reply) -> LongreinError:
        return LongreinError(
            f"a conversation of {len(reply.tokens)} tokens does not fit into the cache; make the engine with a larger cache_tokens"
        )

    def _unwanted(self, reply: _Reply) -> bool:
        if reply.cancellations != self._cancellations:
            reply.refuse(LongreinError("the engine was told to cancel what it was sampling"))
            return True
        return reply.cancelled

    def _step(self) -> None:
        assert self._forward is not None
        while not self._forward.make_room(self._running):
            youngest = self._running.pop()  # it is forwarded again when there is room
            self._forward.leave(youngest)
            if not self._running:
                return youngest.refuse(self._no_room(youngest))
            self._waiting.appendleft(youngest)
        replies, logits = self._forward.step(self._running)
        if not replies:
            return None
        drawn = self._drawer(replies, logits.device).draw(logits, np.array([len(reply.ids) for reply in replies]))
        for reply, *token in zip(replies, *drawn, strict=True):
            reply.append(*token, self._weights[0])
            if reply.finish is not None:
                self._done.append(reply)
                self._running.remove(reply)
                self._forward.leave(reply)
        return None

    def _drawer(self, replies: list[_Reply], device: torch.device) -> Drawer:
        if self._drawing is None or self._drawing[0] != replies:
            samplings, seeds = [r.request.sampling for r in replies], [r.request.seed for r in replies]
            self._drawing = replies, Drawer(samplings, seeds, device)
        return self._drawing[1]

    def _deliver(self) -> None:
        """Tell each event loop of its finished replies, all at once."""
        done, self._done = self._done, []
        for loop in {reply.loop for reply in done}:
            of_loop = [reply for reply in done if reply.loop is loop]
            _in_loop(loop, lambda replies=of_loop: [reply.deliver() for reply in replies])

    def _fail(self, error: BaseException) -> None:
        """A step broke: whoever was in it hears of it, and nothing it left behind is used."""
        with self._changed:
            asked = [*self._running, *self._waiting, *self._arrived]
            self._arrived.clear()
        self._running = []
        self._waiting.clear()
        self._drop_forward()
        for reply in asked:
            reply.refuse(error)


class _Reply:
    """A request on its way to its reply."""

    def __init__(
        self,
        request: SampleRequest,
        tokens: array[int],
        limit: float,
        loop: asyncio.AbstractEventLoop,
        cancellations: int,
    ) -> None:
        self.request, self.tokens, self.limit = request, tokens, limit
        self.prompt_key = hash(tokens.tobytes())
        self.loop = loop
        self.future: asyncio.Future[Sampled] = loop.create_future()
        self.cancellations = cancellations
        """How often the engine had been told to cancel when this came."""
        self.cancelled = self.begun = False
        self.versions: list[int] = []
        self.kept: Any = None
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.sampler_logprobs: list[float] = []
        self.finish: str | None = None

    def append(self, token: int, logprob: float, sampler_logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.versions.append(version)
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.sampler_logprobs.append(sampler_logprob)
        if token in self.request.stop_ids:
            self.finish = "stop"
        elif len(self.ids) >= self.limit:
            self.finish = "length"

    def deliver(self) -> None:
        """In the event loop that waits for it."""
        if self.future.done():
            return
        sampled = Sampled(
            ids=self.ids,
            logprobs=self.logprobs,
            finish_reason=self.finish or "aborted",
            policy_version=self.versions[0],
            sampler_logprobs=self.sampler_logprobs if self.request.sampling.truncated else None,
            versions=self.versions if self.versions[0] != self.versions[-1] else None,
        )
        self.future.set_result(sampled)

    def refuse(self, error: BaseException) -> None:
        _in_loop(self.loop, lambda: self.future.done() or self.future.set_exception(error))


def _in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], Any]) -> None:
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        return  # the loop is closed: nobody waits there any more
