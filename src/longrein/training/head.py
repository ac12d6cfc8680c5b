"""The output head: log-probabilities and entropies of chosen tokens, without the matrix of all logits.

Always true: only the hidden states that score a token are projected, a tile of them at a time, and a tile is gone before the
next one comes. The values and gradients are those of `log_softmax(logits / temperature)`.

There are four ways, from the cheapest: a loss whose slope by each log-probability is known when that log-probability is
(`formed`: three matrix products a tile, none of them twice), a frozen head (two), any loss (`selected`: four, the tile is
made again in the backward pass), and a head that is not a plain linear layer (through the module, checkpointed).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longrein.training.tiles import Form, tile_for, tokens_a_tile

SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier")
"""The names under which models keep a factor of their logits."""

PLAIN = Form()

Slope = Callable[[Tensor, int, int], tuple[Tensor, Tensor | None]]
"""The loss's derivative by the log-probabilities (and entropies) of pairs `start` to `stop`, given the former."""


class Scores(NamedTuple):
    logps: Tensor
    entropies: Tensor | None
    surrogate: Tensor | None = None
    """A scalar whose gradient is the loss's, when its slope was given; the other values then carry none."""


@dataclass(frozen=True)
class Head:
    """How a causal model's last hidden states become log-probabilities."""

    module: Any
    form: Form = PLAIN
    float32: bool = False
    """Project in float32 whatever the model computes in (TRL's `cast_lm_head_to_fp32`)."""

    @classmethod
    def of(cls, model: Any, *, temperature: float = 1.0, float32: bool = False) -> Head:
        config = model.config.get_text_config()
        given = [getattr(config, name, None) for name in SCALES]
        scale = next((value for value in given if value is not None), 1.0)
        if (divisor := getattr(config, "logits_scaling", None)) is not None and all(value is None for value in given):
            scale = divisor if config.model_type == "hyperclovax" else 1 / divisor
        form = Form(float(scale), getattr(config, "final_logit_softcapping", None), temperature)
        return cls(model.get_output_embeddings(), form, float32)

    @property
    def plain(self) -> bool:
        """Whether the weight and the bias say all: no adapter, no hook, no forward of its own."""
        module = self.module
        own = "forward" in vars(module) and not self.float32
        return type(module) is nn.Linear and not (module._forward_hooks or module._forward_pre_hooks or own)

    def score(self, hidden: Tensor, targets: Tensor, *, entropy: bool = True, slope: Slope | None = None) -> Scores:
        """The log-probability of `targets[i]` after `hidden[i]`, and the entropy there.

        With a `slope` (and gradients on) the result has a `surrogate` to run backward instead.
        """
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        dtype = torch.float32 if self.float32 and dtype != torch.float64 else dtype
        slope = slope if torch.is_grad_enabled() else None
        with (
            torch.autocast(device, enabled=False)
            if self.plain
            else torch.autocast(device, dtype, enabled=dtype != hidden.dtype)
        ):
            if not self.plain:
                logps, entropies = self._through_module(hidden.to(dtype) if self.float32 else hidden, targets, entropy)
                return _with_surrogate(logps, entropies, slope)
            weight, bias = (_whole(value) for value in (self.module.weight, self.module.bias))
            if slope is None or dtype == torch.float16 or not weight.requires_grad:
                # in float16 a slope without the scaler's factor would vanish; a frozen head is cheap for any loss
                logps, entropies = _Selected.apply(hidden, weight, bias, targets, self.form, dtype, entropy)
                return _with_surrogate(logps, entropies, slope)
            surrogate, logps, entropies = _Formed.apply(hidden, weight, bias, targets, self.form, dtype, entropy, slope)
            return Scores(logps, entropies, surrogate)

    def _through_module(self, hidden: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        vocabulary = self.module.out_features if hasattr(self.module, "out_features") else 2**17
        size = tokens_a_tile(hidden.device, vocabulary, len(hidden))
        parts = [
            checkpoint(
                self._tile_by_module, hidden[start : start + size], targets[start : start + size], use_reentrant=False
            )
            for start in range(0, max(1, len(hidden)), size)
        ]
        return torch.cat([logps for logps, _ in parts]), torch.cat([values for _, values in parts]) if entropy else None

    def _tile_by_module(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logps = torch.log_softmax(self.logits(hidden), -1)
        return logps.gather(1, targets[:, None])[:, 0], -(logps.exp() * logps).sum(-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """All of them, for a few hidden states."""
        scale, softcap, temperature = self.form
        logits = self.module(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return logits / temperature


def _with_surrogate(logps: Tensor, entropies: Tensor | None, slope: Slope | None) -> Scores:
    if slope is None:
        return Scores(logps, entropies)
    slopes, entropy_slopes = slope(logps.detach(), 0, len(logps))
    surrogate = (logps * slopes).sum()
    if entropy_slopes is not None and entropies is not None:
        surrogate = surrogate + (entropies * entropy_slopes).sum()
    return Scores(logps.detach(), None if entropies is None else entropies.detach(), surrogate)


def _whole(value: Any) -> Any:
    """A sharded parameter (FSDP2's DTensor), gathered."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


class _Gradient:
    """What the tiles add up to: the gradient by hidden states, weight and bias, each only if it is needed."""

    def __init__(
        self, needed: tuple[bool, ...], hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        self._weight = weight
        total = torch.promote_types(dtype, torch.float32)
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = (torch.empty_like if len(hidden) else torch.zeros_like)(weight, dtype=total) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=total) if bias is not None and needed[2] else None

    def add(self, logits: Tensor, hidden: Tensor, start: int) -> None:
        if self.hidden is not None:
            self.hidden[start : start + len(logits)] = logits @ self._weight
        if self.weight is not None:
            _add_product(self.weight, logits.t(), hidden, first=start == 0)
        if self.bias is not None:
            self.bias += logits.sum(0, dtype=self.bias.dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """`total += a @ b`, or `total = a @ b` for the `first`, the product never rounded to a half precision on its way."""
    if a.dtype != total.dtype and total.device.type == "cuda":
        torch.addmm(total.zero_() if first else total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=0 if first else 1)


class _Selected(torch.autograd.Function):
    """Log-probabilities and entropies for any loss: a tile is made again in the backward pass, unless the head is frozen."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, form: Form,
                dtype: torch.dtype, entropy: bool) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        ctx.set_materialize_grads(False)
        frozen = ctx.needs_input_grad[0] and not any(ctx.needs_input_grad[1:3])
        states, matrix, offset = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        size = tokens_a_tile(hidden.device, len(weight), len(hidden))
        tile = tile_for(hidden.device, dtype, size, len(weight), form)
        statistics = torch.promote_types(dtype, torch.float32)
        logps = torch.empty(len(hidden), device=hidden.device, dtype=statistics)
        entropies = torch.empty_like(logps) if entropy else None
        steps = torch.empty_like(hidden) if frozen else None
        for start in range(0, len(hidden), size):
            chosen = slice(start, start + size)
            tile.project(states[chosen], matrix, offset)
            folded = tile.fold(targets[chosen], entropy)
            logps[chosen] = folded.logps
            if entropies is not None and folded.entropies is not None:
                entropies[chosen] = folded.entropies
            if steps is not None:
                steps[chosen] = tile.differentiate(targets[chosen], folded, torch.ones_like(folded.logps), None) @ matrix
        ctx.save_for_backward(hidden, weight, bias, targets, steps)
        ctx.form, ctx.dtype = form, dtype
        return logps, entropies

    @staticmethod
    def backward(ctx: Any, slopes: Tensor | None, entropy_slopes: Tensor | None) -> Any:  # type: ignore[override]
        nothing = (None,) * 4
        hidden, weight, bias, targets, steps = ctx.saved_tensors
        if steps is not None and entropy_slopes is None:
            return None if slopes is None else steps * slopes[:, None].to(steps.dtype), None, None, *nothing
        dtype = ctx.dtype
        states, matrix, offset = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        gradient = _Gradient(ctx.needs_input_grad, hidden, matrix, offset, dtype)
        size = tokens_a_tile(hidden.device, len(weight), len(hidden))
        tile = tile_for(hidden.device, dtype, size, len(weight), ctx.form)
        slopes = torch.zeros(len(hidden), device=hidden.device) if slopes is None else slopes
        for start in range(0, len(hidden), size):
            chosen = slice(start, start + size)
            tile.project(states[chosen], matrix, offset)
            folded = tile.fold(targets[chosen], entropy_slopes is not None)
            inner = None if entropy_slopes is None else entropy_slopes[chosen]
            gradient.add(tile.differentiate(targets[chosen], folded, slopes[chosen], inner), states[chosen], start)
        return *_cast(gradient, weight, bias), *nothing


class _Formed(torch.autograd.Function):
    """The gradient formed in the forward pass, a tile at a time, from slopes that need nothing but the tile's own values."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, form: Form,
                dtype: torch.dtype, entropy: bool, slope: Slope) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        states, matrix, offset = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        gradient = _Gradient(ctx.needs_input_grad, hidden, matrix, offset, dtype)
        size = tokens_a_tile(hidden.device, len(weight), len(hidden))
        tile = tile_for(hidden.device, dtype, size, len(weight), form)
        logps = torch.empty(len(hidden), device=hidden.device, dtype=torch.promote_types(dtype, torch.float32))
        entropies = torch.empty_like(logps) if entropy else None
        surrogate = logps.new_zeros(())
        for start in range(0, len(hidden), size):
            chosen = slice(start, start + size)
            tile.project(states[chosen], matrix, offset)
            folded = tile.fold(targets[chosen], entropy)
            logps[chosen] = folded.logps
            if entropies is not None and folded.entropies is not None:
                entropies[chosen] = folded.entropies
            slopes, inner = slope(folded.logps, start, start + len(folded.logps))
            surrogate += (slopes * folded.logps).sum()
            gradient.add(tile.differentiate(targets[chosen], folded, slopes, inner), states[chosen], start)
        ctx.formed = _cast(gradient, weight, bias)
        ctx.mark_non_differentiable(logps, *(() if entropies is None else (entropies,)))
        return surrogate, logps, entropies

    @staticmethod
    def backward(ctx: Any, factor: Tensor, *_: Any) -> Any:  # type: ignore[override]
        formed, ctx.formed = ctx.formed, None
        if formed is None:
            raise RuntimeError("the gradient of a formed loss can be taken once")
        for one in formed:
            if one is not None:
                one.mul_(factor)
        return *formed, *(None,) * 5


def _cast(gradient: _Gradient, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return (
        gradient.hidden,
        None if gradient.weight is None else gradient.weight.to(weight.dtype),
        None if gradient.bias is None or bias is None else gradient.bias.to(bias.dtype),
    )
