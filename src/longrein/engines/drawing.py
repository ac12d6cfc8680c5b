"""Draws tokens from logits: one number of noise a token, by inverse CDF.

Always true: what a row draws is a function of its logits, its sampling, its seed and its position in the reply, never of the
rows beside it. The log-probability is the policy's at the sampling temperature, before any truncation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from longrein.contract import LongreinError, Sampling
from longrein.noise import uniforms

BLOCK = 256
"""The distribution is summed in blocks of so many tokens; only the block that is drawn from is summed token by token."""


class Drawn(NamedTuple):
    ids: list[int]
    logprobs: list[float]
    sampler_logprobs: list[float]


class Drawer:
    """Draws for a fixed list of rows; make a new one when the rows change."""

    def __init__(self, samplings: Sequence[Sampling], seeds: Sequence[int], device: torch.device) -> None:
        temperatures = np.array([s.temperature or 1.0 for s in samplings], np.float32)
        self._temperatures = None if (temperatures == 1).all() else torch.from_numpy(temperatures).to(device)[:, None]
        greedy = np.array([s.temperature == 0 for s in samplings])
        self._greedy = torch.from_numpy(greedy).to(device) if greedy.any() else None
        self._samplings = samplings if any(s.truncated for s in samplings) else None
        self._seeds = np.array([seed % 2**64 for seed in seeds], np.uint64)

    def draw(self, logits: torch.Tensor, positions: np.ndarray) -> Drawn:
        """One token for each row of `logits`; `positions` are those of the tokens in their replies."""
        scores = logits.float()
        if self._temperatures is not None:
            scores = scores / self._temperatures
        noise = torch.from_numpy(uniforms(self._seeds, positions.astype(np.uint64))).to(logits.device)
        if self._samplings is None:
            drawn = _inverse_cdf(scores, noise)
            ids, logprobs = drawn.ids, drawn.logprobs
            sampler_logprobs = logprobs
            logps = scores
        else:
            logps = torch.log_softmax(scores, dim=-1)
            drawn = _inverse_cdf(truncated(logps, self._samplings), noise)
            ids, sampler_logprobs = drawn.ids, drawn.logprobs
            logprobs = logps.gather(1, ids[:, None])[:, 0].double()
        if self._greedy is not None:
            ids = torch.where(self._greedy, logps.argmax(-1), ids)
            whole = torch.log_softmax(scores, dim=-1)
            kept = whole if self._samplings is None else truncated(whole, self._samplings)
            logprobs, sampler_logprobs = (t.gather(1, ids[:, None])[:, 0].double() for t in (whole, kept))
        table = torch.stack([ids.double(), logprobs, sampler_logprobs]).cpu().numpy()  # one transfer from the device
        if not np.isfinite(table).all():
            raise LongreinError(
                "the model's logits are not numbers that can be drawn from (NaN or infinite): its weights have diverged, its "
                "dtype overflows, or the temperature is too near to 0"
            )
        return Drawn(table[0].astype(np.int64).tolist(), table[1].tolist(), table[2].tolist())


class _Found(NamedTuple):
    ids: torch.Tensor
    logprobs: torch.Tensor


def _inverse_cdf(scores: torch.Tensor, noise: torch.Tensor) -> _Found:
    """The token at `noise` of the way through each row's distribution; scores are logits or log-probabilities."""
    rows, vocabulary = scores.shape
    blocks = -(-vocabulary // BLOCK)
    top = scores.amax(-1, keepdim=True)
    mass = scores.new_zeros(rows, blocks * BLOCK)
    torch.sub(scores, top, out=mass[:, :vocabulary]).exp_()
    mass = mass.view(rows, blocks, BLOCK)
    upto = mass.sum(-1, dtype=torch.float64).cumsum(-1)
    total = upto[:, -1]
    at = _below(noise * total, total)
    # Where the scores are no numbers nothing is found; what is past the end would be an error that kills a GPU's context.
    block = torch.searchsorted(upto, at[:, None], right=True).clamp_(max=blocks - 1)
    before = upto.gather(1, (block - 1).clamp_(min=0))[:, 0].where(block[:, 0] > 0, 0.0)
    inner = mass[torch.arange(rows, device=mass.device), block[:, 0]].double().cumsum(-1)
    within = torch.searchsorted(inner, _below(at - before, inner[:, -1])[:, None], right=True)
    ids = (block * BLOCK + within)[:, 0].clamp_(max=vocabulary - 1)
    logprobs = (scores.gather(1, ids[:, None]) - top)[:, 0].double() - total.log()
    return _Found(ids, logprobs)


def _below(value: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """`value`, and where rounding made it `end` the number before: so that a token that has mass is found."""
    return torch.minimum(value, torch.nextafter(end, torch.zeros_like(end)))


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
