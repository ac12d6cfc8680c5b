"""Samples in this process with a transformers model, everything that waits as one batch.

Always true: a reply is a function of its request and the weights. Its noise is keyed by the request's seed and the position
in the reply, drawn by inverse CDF, so the batch around it changes the last bits of its log-probabilities, and its tokens only
where a draw falls that near to the border of two tokens. Nothing is kept between batches, so weights may change whenever no
batch is running.

A first, plain form: a batch is prefilled with left padding and decoded in step; requests that come meanwhile form the next.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from longrein.contract import LongreinError, Sampled, SampleRequest, Sampling
from longrein.noise import uniforms

GATHER_SECONDS = 0.002
"""How long a batch waits for one more request after the last one came."""


class TransformersEngine:
    """Samples from `model`, which may be the trainer's own module: weights are shared, nothing is copied.

    >>> engine = TransformersEngine(model)                                       # doctest: +SKIP
    >>> asyncio.run(engine.sample(SampleRequest([1, 2], Sampling(max_tokens=8), frozenset({0}), seed=7)))  # doctest: +SKIP
    """

    def __init__(self, model: PreTrainedModel, *, max_batch: int = 256) -> None:
        self.model = model
        self.max_batch = max_batch
        self.policy_version = 0
        self.forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Entered around every batch; a trainer puts its autocast here."""
        self._waiting: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._cancellations = 0
        self._worker: threading.Thread | None = None
        self._lock = threading.Lock()
        self._batch_may_run = threading.Event()
        self._batch_may_run.set()
        self._no_batch_runs = threading.Condition()
        self._batch_runs = False
        self._closed = False

    async def sample(self, request: SampleRequest) -> Sampled:
        self._check(request)
        future: Future[Sampled] = Future()
        with self._lock:
            if self._closed:
                raise LongreinError("this engine is closed; make a new one to sample again")
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="longrein-engine", daemon=True)
                self._worker.start()
            self._waiting.put(_Waiting(request, future, self._cancellations))
        return await asyncio.wrap_future(future)

    def cancel(self) -> None:
        """Refuse what waits, and the running batch at its next token; later requests are served again."""
        self._cancellations += 1

    def pause(self) -> None:
        """Return once no batch runs; none starts before `resume`. Requests wait."""
        self._batch_may_run.clear()
        with self._no_batch_runs:
            self._no_batch_runs.wait_for(lambda: not self._batch_runs)

    def resume(self) -> None:
        self._batch_may_run.set()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy `(name, tensor)` pairs into the model; call it between `pause` and `resume`."""
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                if name not in parameters:
                    raise LongreinError(f"the model has no parameter {name!r}; are these the weights of another model?")
                parameters[name].copy_(tensor)

    def close(self) -> None:
        """End the worker. Requests that wait are refused."""
        self.resume()
        with self._lock:
            self._closed = True
            worker, self._worker = self._worker, None
            self._waiting.put(None)
        if worker is not None and worker is not threading.current_thread():
            worker.join()

    def _check(self, request: SampleRequest) -> None:
        """Refuse what would fail the batch it is in, and every other request there."""
        ids = np.asarray(request.prompt_ids)
        vocabulary = self.model.config.get_text_config().vocab_size
        if not ids.size:
            raise LongreinError("the prompt has no tokens; an engine needs at least one")
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise LongreinError(f"the prompt holds the id {ids.max()}; the model knows ids from 0 to {vocabulary - 1}")
        if self.context_length is not None and ids.size >= self.context_length:
            raise LongreinError(f"the prompt has {ids.size} tokens; the model reads and writes {self.context_length}")
        if request.sampling.max_tokens is None and self.context_length is None:
            raise LongreinError("Sampling.max_tokens is None and the model states no context length; set one")

    @property
    def context_length(self) -> int | None:
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def _work(self) -> None:
        while (batch := self._gather()) is not None:
            batch = [waiting for waiting in batch if waiting.future.set_running_or_notify_cancel()]
            if not batch:
                continue
            self._begin_batch()
            try:
                replies = self._generate([waiting.request for waiting in batch], batch[0].cancellations)
            except BaseException as error:
                for waiting in batch:
                    waiting.future.set_exception(error)
            else:
                for waiting, reply in zip(batch, replies, strict=True):
                    waiting.future.set_result(reply)
            finally:
                with self._no_batch_runs:
                    self._batch_runs = False
                    self._no_batch_runs.notify_all()

    def _begin_batch(self) -> None:
        while True:
            self._batch_may_run.wait()
            with self._no_batch_runs:
                self._batch_runs = True
                if self._batch_may_run.is_set():
                    return
                self._batch_runs = False  # a pause came between the two
                self._no_batch_runs.notify_all()

    def _gather(self) -> list[_Waiting] | None:
        """Everything that waits, up to `max_batch`; None once the engine is closed."""
        item = self._waiting.get()
        batch = []
        while item is not None:
            batch.append(item)
            if len(batch) == self.max_batch:
                return batch
            try:
                item = self._waiting.get(timeout=GATHER_SECONDS)
            except queue.Empty:
                return batch
        for waiting in batch:
            if waiting.future.set_running_or_notify_cancel():
                waiting.future.set_exception(LongreinError("the engine was closed before this request was sampled"))
        return None

    def _generate(self, requests: Sequence[SampleRequest], cancellations: int) -> list[Sampled]:
        in_training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            with torch.no_grad(), self.forward_context():
                batch = _Batch(self.model, requests, self.policy_version, self.context_length)
                return batch.run(cancelled=lambda: self._cancellations != cancellations)
        finally:
            for module in in_training:
                module.training = True


class _Waiting(NamedTuple):
    request: SampleRequest
    future: Future[Sampled]
    cancellations: int
    """How often the engine had been told to cancel when this came."""


class _Drawn(NamedTuple):
    ids: torch.Tensor
    logprobs: torch.Tensor
    sampler_logprobs: torch.Tensor


class _Batch:
    """One batch on its way from prompts to replies."""

    def __init__(self, model: PreTrainedModel, requests: Sequence[SampleRequest], version: int, context: int | None) -> None:
        self.model, self.requests, self.version = model, requests, version
        self.device = model.device
        # A mixture of experts would compute its auxiliary loss, over a mask that the cache makes too long.
        routed = hasattr(model.config.get_text_config(), "output_router_logits")
        self.model_kwargs: dict[str, Any] = {"output_router_logits": False} if routed else {}
        self.limits = [
            min(request.sampling.max_tokens or math.inf, (context or math.inf) - len(request.prompt_ids))
            for request in requests
        ]
        self.ids: list[list[int]] = [[] for _ in requests]
        self.logprobs: list[list[float]] = [[] for _ in requests]
        self.sampler_logprobs: list[list[float]] = [[] for _ in requests]
        self.finish: list[str | None] = [None] * len(requests)

    def run(self, cancelled: Callable[[], bool]) -> list[Sampled]:
        rows = list(range(len(self.requests)))
        input_ids, mask, positions = self._left_padded()
        cache = DynamicCache(config=self.model.config)
        while True:
            if cancelled():
                raise LongreinError("the engine was told to cancel what it was sampling")
            output = self.model(
                input_ids=input_ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                **self.model_kwargs,
            )
            drawn = self._draw(output.logits[:, -1], rows)
            self._append(rows, drawn)
            alive = [index for index, row in enumerate(rows) if self.finish[row] is None]
            if not alive:
                return [self._sampled(row) for row in range(len(self.requests))]
            next_ids, positions = drawn.ids[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            if 2 * len(alive) <= len(rows):  # finished rows ride along until half the batch is done
                keep = torch.tensor(alive, device=self.device)
                cache.batch_select_indices(keep)
                rows = [rows[index] for index in alive]
                next_ids, positions, mask = next_ids[keep], positions[keep], mask[keep]
            input_ids = next_ids

    def _left_padded(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        width = max(len(request.prompt_ids) for request in self.requests)
        ids = np.zeros((len(self.requests), width), np.int64)
        mask = np.zeros_like(ids)
        for row, request in enumerate(self.requests):
            ids[row, width - len(request.prompt_ids) :] = request.prompt_ids
            mask[row, width - len(request.prompt_ids) :] = 1
        positions = np.maximum(mask.cumsum(1) - 1, 0)
        return tuple(torch.from_numpy(a).to(self.device) for a in (ids, mask, positions))  # type: ignore[return-value]

    def _draw(self, logits: torch.Tensor, rows: Sequence[int]) -> _Drawn:
        samplings = [self.requests[row].sampling for row in rows]
        temperature = logits.new_tensor([s.temperature or 1.0 for s in samplings], dtype=torch.float32)
        logps = torch.log_softmax(logits.float() / temperature[:, None], dim=-1)
        kept = truncated(logps, samplings)
        seeds = np.array([self.requests[row].seed % 2**64 for row in rows], np.uint64)
        positions = np.array([len(self.ids[row]) for row in rows], np.uint64)
        noise = torch.from_numpy(uniforms(seeds, positions)).to(self.device)
        cumulative = kept.double().exp().cumsum(-1)
        mass = cumulative[:, -1]
        below = torch.minimum(noise * mass, torch.nextafter(mass, torch.zeros_like(mass)))  # so that a kept token is found
        ids = torch.searchsorted(cumulative, below[:, None], right=True)[:, 0]
        greedy = torch.tensor([s.temperature == 0 for s in samplings], device=self.device)
        ids = torch.where(greedy, logps.argmax(-1), ids)
        index = ids[:, None]
        return _Drawn(ids, logps.gather(1, index)[:, 0], kept.gather(1, index)[:, 0])

    def _append(self, rows: Sequence[int], drawn: _Drawn) -> None:
        columns = zip(rows, drawn.ids.tolist(), drawn.logprobs.tolist(), drawn.sampler_logprobs.tolist(), strict=True)
        for row, token, logprob, sampler_logprob in columns:
            if self.finish[row] is not None:
                continue
            self.ids[row].append(token)
            self.logprobs[row].append(logprob)
            self.sampler_logprobs[row].append(sampler_logprob)
            if token in self.requests[row].stop_ids:
                self.finish[row] = "stop"
            elif len(self.ids[row]) >= self.limits[row]:
                self.finish[row] = "length"

    def _sampled(self, row: int) -> Sampled:
        return Sampled(
            ids=self.ids[row],
            logprobs=self.logprobs[row],
            finish_reason=self.finish[row] or "aborted",
            policy_version=self.version,
            sampler_logprobs=self.sampler_logprobs[row] if self.requests[row].sampling.truncated else None,
        )


def truncated(logps: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Log-probabilities after top-k, top-p and min-p, in that order, renormalised; -inf where a token was cut."""
    rows = [index for index, sampling in enumerate(samplings) if sampling.truncated]
    if not rows:
        return logps
    part = logps[rows]
    values, order = part.sort(dim=-1, descending=True)
    chosen = [samplings[row] for row in rows]
    vocabulary = part.shape[-1]
    top_k = torch.tensor([s.top_k or vocabulary for s in chosen], device=part.device)
    top_p = torch.tensor([s.top_p for s in chosen], device=part.device, dtype=part.dtype)
    min_p = torch.tensor([s.min_p for s in chosen], device=part.device, dtype=part.dtype)
    cut = torch.arange(vocabulary, device=part.device)[None] >= top_k[:, None]
    values = torch.log_softmax(values.masked_fill(cut, -torch.inf), dim=-1)
    before = values.exp().cumsum(-1) - values.exp()  # mass ahead of each token: the first one always stays
    cut |= (before >= top_p[:, None]) & (top_p < 1)[:, None]
    cut |= values.exp() < min_p[:, None] * values[:, :1].exp()
    values = torch.log_softmax(values.masked_fill(cut, -torch.inf), dim=-1)
    result = logps.clone()
    result[rows] = torch.empty_like(part).scatter_(1, order, values)
    return result
