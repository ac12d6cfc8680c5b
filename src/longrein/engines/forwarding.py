"""Forward passes for the engine: what a set of running replies needs next, and the logits they draw from.

Two ways. `SlotForward` packs everything into one pass over the slot cache. `PlainForward` serves any causal model, one reply at
a time, with the model's own cache or with none. Which one is right for a model is not believed but tried: before the first
reply, a few tokens are forwarded both ways, and the faster way is used only where its logits are those of a plain pass.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from longrein.engines.attention import IMPLEMENTATION, Attends, Grouping, Piece, Sharing, Step, Survey, current
from longrein.engines.graphs import Graphs
from longrein.engines.padded import Padded
from longrein.engines.slots import Conversation, Segment, Slots, Wait

logger = logging.getLogger(__name__)

STEP_TOKENS = 4096
"""Prompt tokens forwarded in one step at most; longer prompts take several, and what runs goes on beside them."""
PROBE = 13
"""Tokens that are forwarded to try a way."""


class Reply(Protocol):
    """A reply as a forward sees it: its tokens so far, and a place for what is kept of it."""

    tokens: array[int]
    kept: Any


class Stepped(NamedTuple):
    replies: list[Any]
    """Those that draw now, in the order of the logits' rows."""
    logits: torch.Tensor


class Forward(Protocol):
    forwarded: int
    """Tokens that went through the model."""

    def join(self, reply: Reply, *, alone: bool) -> Wait | None:
        """Take a reply in, or say what it has to wait for."""
        ...

    def make_room(self, running: Sequence[Reply]) -> bool:
        """Whether all that run can go on; False when one has to wait."""
        ...

    def step(self, running: Sequence[Reply]) -> Stepped: ...

    def leave(self, reply: Reply) -> None: ...

    def forget(self) -> None:
        """Drop what is kept of the weights as they were."""
        ...


class SlotForward:
    """One packed pass a step over conversations in slots."""

    def __init__(self, model: PreTrainedModel, survey: Survey, cache_tokens: int | None) -> None:
        self.model, self.device = model, model.device
        assert survey.dtype is not None
        if cache_tokens is None:
            cache_tokens = default_cache_tokens(survey, self.device, context_length(model) or 0)
        self.slots = Slots(survey.heads, survey.dtype, self.device, cache_tokens)
        self.forwarded = 0
        self._model_kwargs = model_kwargs(model)
        self._configs = configs_of(model)
        self._mask = torch.zeros(1, 1, 1, 1, device=self.device)  # four dimensions: transformers makes none of its own
        self._shared: tuple[int, Sharing] | None = None
        self._grouped: tuple[Sharing, Grouping] | None = None
        cuda = self.device.type == "cuda"
        self.graphs = Graphs(self.slots.slots, self.slots.stems, self._logits, self.device) if cuda else None

    def join(self, reply: Reply, *, alone: bool) -> Wait | None:
        seat = self.slots.seat(np.frombuffer(reply.tokens, np.int32), alone=alone)
        if isinstance(seat, Wait):
            return seat
        reply.kept = seat
        return None

    def leave(self, reply: Reply) -> None:
        conversation, reply.kept = reply.kept, None
        if conversation is not None:
            self.slots.leave(conversation)

    def forget(self) -> None:
        self.slots.forget()

    def make_room(self, running: Sequence[Reply]) -> bool:
        for reply in running:
            conversation: Conversation = reply.kept
            have = len(conversation.stem.ids) + len(conversation.ids)
            conversation.ids.extend(reply.tokens[have:])
        return self.slots.make_room(reply.kept for reply in running)

    def step(self, running: Sequence[Reply]) -> Stepped:
        planned = self._plan(running)
        slots = self.slots.slots
        drawing = [owner for owner in slots.owners[: slots.active] if isinstance(owner, Conversation)]
        ids, positions, pieces = [], [], []
        for segment, count in planned:
            of_stem = not isinstance(segment, Conversation)
            before = 0 if of_stem else len(segment.stem.ids)
            at = segment.stored
            pieces.append(
                Piece(
                    start=len(ids),
                    end=len(ids) + count,
                    in_stems=of_stem,
                    row=segment.place,
                    at=at,
                    stem_row=0 if of_stem else segment.stem.place,
                    stem_length=before,
                )
            )
            ids.extend(segment.ids[at : at + count])
            positions.extend(range(before + at, before + at + count))
        lasts = [len(one.ids) - 1 for one in drawing]
        ids.extend([one.ids[-1] for one in drawing])
        positions.extend([len(one.stem.ids) + last for one, last in zip(drawing, lasts, strict=True)])
        sharing = self._sharing(drawing)
        logits = self.graphs.run(ids, positions, pieces, lasts, sharing) if self.graphs else None
        if logits is None:
            logits = self._packed(ids, positions, pieces, lasts, sharing)
        for segment, count in planned:
            segment.stored += count
        for one in drawing:
            one.stored += 1
        self.forwarded += len(ids)
        of = {id(reply.kept): reply for reply in running}
        return Stepped([of[id(one)] for one in drawing], logits)

    def _plan(self, running: Sequence[Reply]) -> list[tuple[Segment, int]]:
        """The pieces of this step, stems before what follows them; who has all its tokens in it draws."""
        room, planned, stems = STEP_TOKENS, [], {}
        for reply in running:
            conversation: Conversation = reply.kept
            stem = conversation.stem
            if not stem.complete:
                if stem not in stems:
                    stems[stem] = min(len(stem.ids) - stem.stored, room)
                    if stems[stem]:
                        planned.append((stem, stems[stem]))
                        room -= stems[stem]
                if stem.stored + stems[stem] < len(stem.ids):
                    continue
            rest = len(conversation.ids) - 1 - conversation.stored
            if rest > 0:
                if room:
                    planned.append((conversation, min(rest, room)))
                if rest > room:
                    room = 0
                    continue
                room -= rest
            self.slots.activate(conversation)
        return planned

    def _packed(
        self, ids: list[int], positions: list[int], pieces: list[Piece], lasts: list[int], sharing: Sharing
    ) -> torch.Tensor:
        """Everything in one pass, each piece attended by itself."""
        if self._grouped is None or self._grouped[0] is not sharing:
            self._grouped = sharing, sharing.grouping(self.device)
        step = Step(
            slots=self.slots.slots,
            stems=self.slots.stems,
            rows=len(lasts),
            at=torch.tensor(lasts, device=self.device),
            width=max(lasts, default=0) + 1,
            even=min(lasts, default=0) == max(lasts, default=0),
            grouping=self._grouped[1],
            pieces=pieces,
        )
        table = torch.tensor([ids, positions], device=self.device)
        return self._logits(step, table[:1], table[1:])

    def _sharing(self, drawing: Sequence[Conversation]) -> Sharing:
        """Who shares which stem, made anew only when rows have come, gone or moved."""
        if self._shared is None or self._shared[0] != self.slots.changes:
            stems = self.slots.stems.owners[: self.slots.stems.active]
            lengths = [len(stem.ids) if stem else 0 for stem in stems]
            self._shared = self.slots.changes, Sharing([one.stem.place for one in drawing], lengths)
        return self._shared[1]

    def _logits(self, step: Step | Padded, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One packed pass: `[rows, vocabulary]`."""
        with attending(self._configs, step):
            output = self.model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=self._mask,
                use_cache=False,
                logits_to_keep=max(step.rows, 1),
                **self._model_kwargs,
            )
        return output.logits[0, len(output.logits[0]) - step.rows :]


class PlainForward:
    """One reply at a time, by the model alone: with its own cache, or forwarding every token again."""

    def __init__(self, model: PreTrainedModel, *, cached: bool) -> None:
        self.model, self.cached = model, cached
        self.forwarded = 0
        self._model_kwargs = model_kwargs(model)

    def join(self, reply: Reply, *, alone: bool) -> Wait | None:
        reply.kept = _Own()
        return None

    def make_room(self, running: Sequence[Reply]) -> bool:
        return True

    def leave(self, reply: Reply) -> None:
        reply.kept = None

    def forget(self) -> None:
        """Nothing is kept between replies; those that run are told to join again."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self, running: Sequence[Reply]) -> Stepped:
        return Stepped(list(running), torch.cat([self._logits(reply) for reply in running]))

    def _logits(self, reply: Reply) -> torch.Tensor:
        own: _Own = reply.kept
        new = torch.tensor([reply.tokens[own.forwarded :].tolist()], device=self.model.device)
        self.forwarded += new.shape[1]
        kwargs = {"past_key_values": own.cache, "use_cache": True} if self.cached else {"use_cache": False}
        output = self.model(input_ids=new, logits_to_keep=1, **kwargs, **self._model_kwargs)
        if self.cached:
            own.cache, own.forwarded = output.past_key_values, len(reply.tokens)
        return output.logits[:, -1]


class _Own:
    """What a plain reply keeps between its tokens."""

    cache: Any = None
    forwarded = 0


def choose(model: PreTrainedModel, cache_tokens: int | None) -> Forward:
    """The fastest forward whose logits are those of a plain pass."""
    vocabulary = model.config.get_text_config().vocab_size
    tokens = array("i", [(7 * index + 3) % vocabulary for index in range(PROBE)])
    with torch.inference_mode(False), torch.no_grad():
        ids = torch.tensor([tokens.tolist()], device=model.device)
        expected = model(input_ids=ids, use_cache=False, **model_kwargs(model)).logits[0].float()
    try:
        forward = _try_slots(model, tokens, expected, cache_tokens)
    except (Exception, AssertionError) as error:
        logger.info("%s is sampled one reply at a time, without the slot cache: %s", type(model).__name__, error)
    else:
        return forward
    try:
        if _changing_positions(model):
            raise NotImplementedError("its rotary frequencies change with the length")
        _try(PlainForward(model, cached=True), tokens, expected)
        return PlainForward(model, cached=True)
    except Exception as error:
        logger.info("%s is sampled without a cache, every token is forwarded again: %s", type(model).__name__, error)
        return PlainForward(model, cached=False)


def _try_slots(model: PreTrainedModel, tokens: array[int], expected: torch.Tensor, cache_tokens: int | None) -> SlotForward:
    if _changing_positions(model):
        raise NotImplementedError("its rotary frequencies change with the length")
    survey = Survey()
    with attending(configs_of(model), survey):
        ids = torch.tensor([tokens.tolist()], device=model.device)
        mask = torch.zeros(1, 1, 1, 1, device=model.device)
        positions = torch.arange(len(tokens), device=model.device)[None]
        logits = model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=False,
            logits_to_keep=0,
            **model_kwargs(model),
        ).logits[0]
    _check(logits, expected)
    _check_layers(model, survey)
    _try(SlotForward(model, survey, 16 * PROBE), tokens, expected)
    return SlotForward(model, survey, cache_tokens)


class _Probe:
    def __init__(self, tokens: array[int]) -> None:
        self.tokens, self.kept = tokens, None


def _try(forward: Forward, tokens: array[int], expected: torch.Tensor) -> None:
    """Two replies to one prompt, token by token, then a longer prompt: every way a token can be forwarded."""
    first = PROBE // 2
    replies = [_Probe(tokens[:first]), _Probe(tokens[:first])]
    for reply in replies:
        forward.join(reply, alone=False)
    for length in range(first, first + 3):
        for reply in replies:
            reply.tokens = tokens[:length]
        if not forward.make_room(replies):
            raise NotImplementedError("no room to try it")
        for row in forward.step(replies).logits:
            _check(row, expected[length - 1])
    forward.leave(replies[0])
    again = _Probe(tokens[:])
    forward.join(again, alone=True)
    replies[1].tokens = tokens[: first + 3]
    forward.make_room([replies[1], again])
    for reply, row in zip(*forward.step([replies[1], again]), strict=True):
        _check(row, expected[len(reply.tokens) - 1])


def _check(logits: torch.Tensor, expected: torch.Tensor) -> None:
    bound = 1e-3 if logits.dtype in (torch.float32, torch.float64) else 0.1
    scale = float(expected.abs().max().clamp(min=1.0))
    distance = float((logits.float() - expected).abs().max())
    if not distance <= bound * scale:  # NaN is a difference too
        raise NotImplementedError(f"its logits differ by {distance:.2g} from a plain pass")


def _check_layers(model: PreTrainedModel, survey: Survey) -> None:
    """Refuse what a short trial cannot show: windows that attention is not told of, and layers of other kinds."""
    text = model.config.get_text_config()
    if survey.strange is not None:
        raise NotImplementedError(survey.strange)
    layers = text.num_hidden_layers
    if set(survey.heads) != set(range(layers)):
        raise NotImplementedError(f"{len(survey.heads)} of its {layers} layers attend")
    window = getattr(text, "sliding_window", None)
    if getattr(text, "use_sliding_window", True) is False:
        window = None
    plain = "full_attention" if window is None or getattr(text, "layer_types", None) else "sliding_attention"
    types = getattr(text, "layer_types", None) or [plain] * layers
    for layer, kind in enumerate(types):
        if kind not in ("full_attention", "sliding_attention"):
            raise NotImplementedError(f"layer {layer} is {kind}")
        told = survey.windows[layer]
        if told != (window if kind == "sliding_attention" else None):
            raise NotImplementedError(f"layer {layer} is {kind} and attention is told the window {told}")


def _changing_positions(model: PreTrainedModel) -> bool:
    def kinds(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from (kind for kind in (value.get("rope_type"), value.get("type")) if isinstance(kind, str))
            for inner in value.values():
                yield from kinds(inner)

    text = model.config.get_text_config()
    found = [*kinds(getattr(text, "rope_parameters", None)), *kinds(getattr(text, "rope_scaling", None))]
    return any(kind in ("dynamic", "longrope") for kind in found)


def model_kwargs(model: PreTrainedModel) -> dict[str, Any]:
    # A mixture of experts would compute its auxiliary loss, over a mask that does not fit.
    return {"output_router_logits": False} if hasattr(model.config.get_text_config(), "output_router_logits") else {}


def configs_of(model: PreTrainedModel) -> list[Any]:
    """The configs that the model's attention modules look at."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return [config for config in configs.values() if hasattr(config, "_attn_implementation_internal")]


@contextmanager
def attending(configs: Sequence[Any], step: Attends) -> Iterator[None]:
    """Let the model attend as this step says, for one pass."""
    before = [config._attn_implementation_internal for config in configs]
    try:
        current.step = step
        for config in configs:
            config._attn_implementation_internal = IMPLEMENTATION
        yield
    finally:
        current.step = None
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation


def context_length(model: PreTrainedModel) -> int | None:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def default_cache_tokens(survey: Survey, device: torch.device, at_least: int) -> int:
    """A quarter of the device's free memory, an eighth of the machine's on a CPU; one whole conversation in any case."""
    assert survey.dtype is not None
    numbers = sum(heads.kv_heads * (heads.key_dim + heads.value_dim) for heads in survey.heads.values())
    if device.type == "cuda":
        memory = torch.cuda.mem_get_info(device)[0] // 4
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8
    return max(at_least, memory // (numbers * survey.dtype.itemsize))
