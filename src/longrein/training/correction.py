"""What sampler and trainer disagree on: they run other kernels, often in bfloat16, and a sampler may be an update behind.

Always true: a token's weight is min(p(trainer) / p(sampler), cap), of the log-probabilities that the trainer computes for its
old policy and that the sampler recorded; it is 1 where they agree, where nothing was recorded and where nothing is trained.

A loss of TRL is linear in its advantages under a positive factor (clipping looks at their sign), so the weight multiplies the
advantages, and the losses stay TRL's own. The truncation is one-sided: a token that the sampler liked less than the trainer
counts for at most `cap`, one it liked more counts for less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Correction(NamedTuple):
    weights: Tensor
    """Of the advantages, one a token."""
    sums: Tensor
    """Tokens, sum of |difference|, sum of weights, capped tokens; added up over ranks."""
    largest: Tensor
    """Largest |difference|."""


def correction(policy_logps: Tensor, recorded_logps: Tensor, trained: Tensor, cap: float) -> Correction:
    """The weight of every token of (rows, tokens), and what the mismatch is measured by."""
    known = (trained != 0) & ~recorded_logps.isnan()
    difference = torch.where(known, policy_logps.detach() - recorded_logps.to(policy_logps.dtype), 0.0)
    ratio = difference.exp()
    weights = ratio.clamp(max=cap)
    size = difference.abs()
    counts = [known.sum(), size.sum(), torch.where(known, weights, 0.0).sum(), (ratio > cap).sum()]
    return Correction(weights, torch.stack([count.double() for count in counts]), size.max())


def mismatch_metrics(found: Correction, gather: Callable[[Tensor], Any] = lambda value: value) -> dict[str, float]:
    """What a person watches, over the tokens of all ranks."""
    tokens, size, weight, capped = gather(found.sums[None]).sum(0).tolist()
    tokens = max(tokens, 1.0)
    return {
        "sampler/logp_diff_mean": size / tokens,
        "sampler/logp_diff_max": float(gather(found.largest[None]).max()),
        "sampler/ratio_mean": weight / tokens,
        "sampler/ratio_capped": capped / tokens,
    }
