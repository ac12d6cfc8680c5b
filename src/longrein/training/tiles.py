"""A tile of logits: some tokens, the whole vocabulary. It is folded into log-probabilities, and turned into a gradient in place.

Always true: statistics are in float32 (float64 for float64 logits), whatever the logits are in; a tile's buffers are reused by
the next one, so what a tile gave as a gradient must be used before the next is folded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Form(NamedTuple):
    """What is done to the head's output before the softmax."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0


class Folded(NamedTuple):
    """What one tile says of its tokens."""

    logps: Tensor
    log_z: Tensor
    entropies: Tensor | None


def tile_for(device: torch.device, dtype: torch.dtype, tokens: int, vocabulary: int, form: Form) -> Tile | TritonTile:
    from longrein.training.trl_compat import logit_kernels

    kernels = logit_kernels(device) if dtype != torch.float64 else None
    if kernels is not None:
        return TritonTile(kernels, device, dtype, tokens, vocabulary, form)
    return Tile(device, dtype, tokens, vocabulary, form)


def tokens_a_tile(device: torch.device, vocabulary: int, tokens: int) -> int:
    """On a GPU large matrix products, on a CPU what its caches hold; no tile is much smaller than the others."""
    elements, least, most = (2**29, 256, 8192) if device.type == "cuda" else (2**23, 16, 1024)
    fits = max(least, min(most, elements // vocabulary // 16 * 16))
    tiles = max(1, -(-tokens // fits))
    return max(16, -(-tokens // tiles // 16) * 16)


class Tile:
    """A tile in plain torch, with as few passes over the logits as there can be."""

    def __init__(self, device: torch.device, dtype: torch.dtype, tokens: int, vocabulary: int, form: Form) -> None:
        self.form = form
        self._statistics = torch.float64 if dtype == torch.float64 else torch.float32
        self._raw = torch.empty((tokens, vocabulary), device=device, dtype=dtype)
        same = dtype == self._statistics
        self._logits = self._raw if same else torch.empty_like(self._raw, dtype=self._statistics)
        self._powers = torch.empty_like(self._logits)
        self._cap_slope: Tensor | None = None

    def project(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self._count = len(hidden)
        raw = self._raw[: self._count]
        if bias is None:
            torch.mm(hidden, weight.t(), out=raw)
        else:
            torch.addmm(bias, hidden, weight.t(), out=raw)

    def fold(self, targets: Tensor, entropy: bool) -> Folded:
        scale, softcap, temperature = self.form
        z = self._z = self._logits[: self._count]
        if self._raw is not self._logits:
            z.copy_(self._raw[: self._count])
        if softcap is not None:
            z.mul_(scale / softcap).tanh_()
            self._cap_slope = 1 - z * z
            z.mul_(softcap / temperature)
        elif scale != temperature:
            z.mul_(scale / temperature)
        picked = z.gather(1, targets[:, None])[:, 0]
        top = z.amax(1)
        z.sub_(top[:, None])
        powers = self._e = torch.exp(z, out=self._powers[: self._count])
        self._sum = powers.sum(1)
        log_sum = self._sum.log()
        log_z = top + log_sum
        entropies = None
        if entropy:
            entropies = log_sum - _dots(powers, z) / self._sum
        self._log_sum = log_sum
        return Folded(picked - log_z, log_z, entropies)

    def differentiate(self, targets: Tensor, folded: Folded, slopes: Tensor, entropy_slopes: Tensor | None) -> Tensor:
        """The gradient by the head's output, from that by the log-probabilities and entropies; the tile is used up."""
        scale, _, temperature = self.form
        factor = scale / temperature
        slopes = slopes.to(self._statistics) * factor
        result = self._e
        if entropy_slopes is None:
            result.mul_((-slopes / self._sum)[:, None])
        else:
            assert folded.entropies is not None
            entropy_slopes = entropy_slopes.to(self._statistics) * factor
            inner = self._z.sub_((self._log_sum - folded.entropies)[:, None])  # log p + entropy
            inner.mul_(entropy_slopes[:, None]).add_(slopes[:, None])
            result.mul_(inner).mul_((-1 / self._sum)[:, None])
        result.scatter_add_(1, targets[:, None], slopes[:, None])
        if self._cap_slope is not None:
            result.mul_(self._cap_slope)
        return result.to(self._raw.dtype)


def _dots(one: Tensor, other: Tensor) -> Tensor:
    """Row by row; on a processor a batched product of vectors takes three times as long."""
    if one.device.type == "cpu":
        return torch.stack([torch.dot(a, b) for a, b in zip(one, other, strict=True)])
    return torch.bmm(one[:, None, :], other[:, :, None])[:, 0, 0]


class TritonTile:
    """A tile by TRL's kernels: one pass to fold it, one to differentiate it, in the dtype of the matrix products."""

    def __init__(
        self, kernels: Any, device: torch.device, dtype: torch.dtype, tokens: int, vocabulary: int, form: Form
    ) -> None:
        self._kernels, self._vocabulary = kernels, vocabulary
        self._raw = torch.empty((tokens, vocabulary), device=device, dtype=dtype)
        self._form = {
            "logit_scale": form.scale,
            "softcap": form.softcap or 1.0,
            "inv_t": 1 / form.temperature,
            "HAS_SOFTCAP": form.softcap is not None,
        }

    def project(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self._tile = self._raw[: len(hidden)]
        torch.mm(hidden, weight.t(), out=self._tile)
        if bias is not None:
            self._tile.add_(bias)

    def fold(self, targets: Tensor, entropy: bool) -> Folded:
        zeros = [torch.zeros(len(targets), device=targets.device) for _ in range(5)]
        top, before = (torch.full_like(zeros[0], float("-inf")) for _ in range(2))
        total, weighted, squares, plain, target = zeros
        self._kernels.forward[(len(targets),)](
            self._tile, self._tile.stride(0), targets, top, total, weighted, squares, plain, before, target,
            0, self._vocabulary, HAS_ENTROPY=entropy, HAS_LOG_SUM_SQ_PROBS=False, HAS_MEAN_LOGITS=False, HAS_IS_TOP1=False,
            BLOCK_SIZE=self._kernels.block, **self._form,
        )  # fmt: skip
        log_z = top + total.log()
        return Folded(target - log_z, log_z, log_z - weighted / total if entropy else None)

    def differentiate(self, targets: Tensor, folded: Folded, slopes: Tensor, entropy_slopes: Tensor | None) -> Tensor:
        filler = folded.log_z
        blocks = -(-self._vocabulary // self._kernels.block)
        self._kernels.backward[(len(targets), blocks)](
            self._tile, self._tile.stride(0), targets, folded.log_z,
            filler if folded.entropies is None else folded.entropies,
            slopes.float().contiguous(), filler if entropy_slopes is None else entropy_slopes.float().contiguous(),
            0, self._vocabulary, HAS_LOGPROB_GRAD=True, HAS_ENTROPY_GRAD=entropy_slopes is not None,
            BLOCK_SIZE=self._kernels.block, **self._form,
        )  # fmt: skip
        return self._tile
