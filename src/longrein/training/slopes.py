"""The loss's derivative by each log-probability, known as soon as that log-probability is.

Always true of the clipped token-level losses: a token's term depends on its own log-probability and on values that are there
before the pass. TRL's loss stays the judge: it is computed from the same log-probabilities, and its own derivative compared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from longrein.contract import LongreinError
from longrein.training.logprobs import PackedRows

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo")
"""The losses whose gradient is formed in the forward pass."""


def why_not_clipped(trainer: Any) -> str | None:
    """Which setting makes a token's term depend on other tokens, or the loss another one; None where there is none."""
    args = trainer.args
    settings = {
        f"loss_type={trainer.loss_type!r}": trainer.loss_type not in CLIPPED,
        f"importance_sampling_level={trainer.importance_sampling_level!r}": trainer.importance_sampling_level != "token",
        "delta": args.delta is not None,
        "off_policy_mask_threshold": trainer.off_policy_mask_threshold is not None,
        "top_entropy_quantile": trainer.top_entropy_quantile < 1.0,
        "an entropy bonus": trainer._entropy_bonus_enabled,
        "a router's auxiliary loss": trainer.aux_loss_enabled,
        "use_vllm": trainer.use_vllm,
    }
    return next((name for name, differs in settings.items() if differs), None)


def token_weights(trainer: Any, batch: dict[str, Any], counts: Tensor, mode: str) -> Tensor:
    """(rollouts,) what TRL's loss multiplies a term of each rollout by; `counts` are their agent tokens."""
    steps = trainer.current_gradient_accumulation_steps if mode == "train" else 1
    counts = counts.to(batch["advantages"].dtype)
    rollouts = max(1, len(counts))
    if trainer.loss_type == "grpo":
        return 1 / (counts.clamp(min=1) * rollouts * steps)
    if trainer.loss_type == "bnpo":
        return (1 / (counts.sum().clamp(min=1) * steps)).expand(len(counts))
    if trainer.loss_type == "dr_grpo":
        return torch.full_like(counts, 1 / (rollouts * trainer.max_completion_length * steps))
    share = steps / trainer.args.steps_per_generation if mode == "train" else 1.0
    items = batch["num_items_in_batch"].to(counts.dtype).clamp(min=1.0) / trainer.accelerator.num_processes
    return (1 / (items * share)).expand(len(counts))


class ClippedSlope:
    """The slope of `-min(ratio A, clip(ratio) A) + beta KL`, weighted, summed over the tokens that share a pair."""

    def __init__(
        self,
        packed: PackedRows,
        values: dict[str, Tensor | None],
        *,
        epsilon: tuple[float, float],
        beta: float,
        corrected: bool,
        device: torch.device,
    ) -> None:
        """`corrected` says that the divergence is weighted by the ratio (TRL's `use_bias_correction_kl`).

        `values` are (rows, tokens): `advantages`, `weights`, and `old` and `ref` where there are any.
        """
        order = np.argsort(packed.pair, kind="stable")
        self._pairs = packed.pair[order]
        self._pair = torch.as_tensor(self._pairs, device=device)
        at = tuple(torch.as_tensor(index[order], device=device) for index in (packed.rows, packed.columns))
        self._values = {name: None if value is None else value[at] for name, value in values.items()}
        self._epsilon, self._beta, self._corrected = epsilon, beta, corrected
        self.at, self.used = at, torch.zeros(len(order), device=device)

    def __call__(self, logps: Tensor, start: int, stop: int) -> tuple[Tensor, None]:
        first, last = np.searchsorted(self._pairs, (start, stop))
        terms = slice(int(first), int(last))
        advantages, weights, old, ref = (
            None if (value := self._values[name]) is None else value[terms].to(logps.dtype)
            for name in ("advantages", "weights", "old", "ref")
        )
        assert advantages is not None
        assert weights is not None
        pair = self._pair[terms] - start
        own = logps[pair]
        ratio = torch.exp(own - (own if old is None else old))
        low, high = 1 - self._epsilon[0], 1 + self._epsilon[1]
        unclipped = ratio * advantages
        # at equal terms TRL's minimum takes half of each slope: inside the bounds both are the same, outside one is 0
        moves = (unclipped < ratio.clamp(low, high) * advantages) | ((ratio >= low) & (ratio <= high))
        slopes = torch.where(moves, -unclipped, 0.0)
        if ref is not None and self._beta != 0.0:
            slopes = slopes + self._beta * (ratio * (own - ref) if self._corrected else 1 - torch.exp(ref - own))
        slopes = slopes * weights
        self.used = self.used.to(logps.dtype)
        self.used[terms] = slopes
        return logps.new_zeros(stop - start).index_add_(0, pair, slopes), None

    def check(self, gradient: Tensor) -> None:
        """Refuse to go on where TRL's loss has another gradient, (rows, tokens), than the one that was used."""
        judged, weights = gradient[self.at].to(self.used.dtype), self._values["weights"]
        assert weights is not None
        if not len(judged):
            return
        # the divergence's slope is a difference of numbers near 1: that much of it is rounding where the policies are near
        rounding = 16 * torch.finfo(self.used.dtype).eps * abs(self._beta) * float(weights.abs().max())
        if not torch.allclose(judged, self.used, rtol=1e-3, atol=1e-6 * float(judged.abs().max()) + rounding):
            raise LongreinError(
                f"the loss's slope as formed in the forward pass differs from TRL's by "
                f"{float((judged - self.used).abs().max()):.3g} (largest {float(judged.abs().max()):.3g}); set packing='off' "
                "and report it: TRL's loss must have moved"
            )


class GivenSlope:
    """A slope that is known beforehand, (rows, tokens), by log-probability and by entropy."""

    def __init__(self, packed: PackedRows, by_logp: Tensor, by_entropy: Tensor | None) -> None:
        rows, columns, pair = (
            torch.as_tensor(one, device=by_logp.device) for one in (packed.rows, packed.columns, packed.pair)
        )
        self._by_logp, self._by_entropy = (
            None if value is None else value.new_zeros(len(packed.targets)).index_add_(0, pair, value[rows, columns])
            for value in (by_logp, by_entropy)
        )

    def __call__(self, logps: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        assert self._by_logp is not None
        inner = None if self._by_entropy is None else self._by_entropy[start:stop]
        return self._by_logp[start:stop], inner
