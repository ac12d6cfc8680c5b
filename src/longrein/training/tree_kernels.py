"""Flash kernels joined over a prefix tree: what all of them share, and those of a processor (`Cascade`).

Always true: a query's keys are split into parts, each read by one kernel call, and the parts are joined by their
log-sum-exp. The kernels' backward, given the joined result and log-sum-exp, yields exactly each part's share of the
gradients; so a result and its log-sum-exp are all that need be kept, and a layer that is run again may be given them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from longrein.training.tree import Ints, PrefixTree


class Kernel(Protocol):
    """Attention over one tree; shapes are the kernel's own."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The result, and the log-sum-exp of the scores."""
        ...

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value."""
        ...


class Attend(torch.autograd.Function):
    """A kernel with its gradients. `kept` holds the result of an earlier run of the same layer, or is filled with this one's."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, scale: float, kept: list[Tensor]
    ) -> Tensor:
        if not kept:
            kept.extend(kernel.forward(query, key, value, scale))
        out, lse = kept[0].detach(), kept[1]
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.kernel, ctx.scale = kernel, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.kernel.backward(grads[0].contiguous(), *ctx.saved_tensors, ctx.scale), None, None, None


class Stretch(NamedTuple):
    """One call of a processor's kernel: these queries read these keys, each up to its own where `causal`."""

    queries: slice
    keys: slice
    causal: bool
    first: bool
    """Nothing was read for these queries before."""


class Cascade:
    """Each segment's keys are read once, by all of its subtree: subtrees are contiguous, so no key is copied or masked.

    Given which places are `needed`, most of those that are not are passed over, and their results say nothing.
    Shapes are (groups, heads a group, N, width), with one head a group for keys and values.
    """

    def __init__(self, tree: PrefixTree, device: torch.device, window: None = None, needed: Ints | None = None) -> None:
        self.stretches = list(_stretches(tree, np.arange(len(tree)) if needed is None else needed))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        exact = at_least_float32(query.dtype)
        # what is passed over is 0: its gradient is 0, and 0 times whatever stood there might not be
        out, lse = query.new_zeros(query.shape, dtype=exact), query.new_zeros(query.shape[:-1], dtype=exact)
        for queries, keys, causal, first in self.stretches:
            read = self._read(query, key, value, keys)
            part, part_lse = attend(query[:, :, queries], *read, 0.0, causal, scale=scale)
            if first:
                out[:, :, queries], lse[:, :, queries] = part, part_lse
            else:
                join(out[:, :, queries], lse[:, :, queries], part, part_lse)
        return out.to(query.dtype), lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grad_query = torch.zeros_like(query, dtype=at_least_float32(query.dtype))
        grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
        for queries, keys, causal, _ in self.stretches:
            span = (slice(None), slice(None), queries)
            read = self._read(query, key, value, keys)
            for_query, for_key, for_value = attend_backward(
                grad[span], query[span], *read, out[span], lse[span], 0.0, causal, scale=scale
            )
            grad_query[span] += for_query
            torch.sum(for_key, 1, keepdim=True, out=grad_key[:, :, keys])
            torch.sum(for_value, 1, keepdim=True, out=grad_value[:, :, keys])
        return grad_query.to(query.dtype), grad_key, grad_value

    def _read(self, query: Tensor, key: Tensor, value: Tensor, keys: slice) -> list[Tensor]:
        return [tensor[:, :, keys].expand(-1, query.shape[1], -1, -1) for tensor in (key, value)]


FEW = 32
"""Queries that are cheaper to compute in vain than to pass over by a call more."""


def _stretches(tree: PrefixTree, needed: Ints) -> Iterator[Stretch]:
    """For each segment: its subtree reads its keys, from the first place on that is needed."""
    columns = (tree.starts, tree.ends, tree.subtree_ends, tree.parents)
    after = np.append(np.sort(needed), len(tree))
    for start, end, reach, parent in zip(*(column.tolist() for column in columns), strict=True):
        first = int(after[np.searchsorted(after, start)])
        if first >= reach:
            continue
        if first - start < FEW:
            yield Stretch(slice(start, reach), slice(start, end), True, parent < 0)
        else:
            edge = min(first + 1, end)  # up to here, whoever is needed reads all keys
            yield Stretch(slice(first, reach), slice(start, edge), False, parent < 0)
            if edge < end:
                yield Stretch(slice(edge, reach), slice(edge, end), True, False)


def join(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Into a result over some keys, in place, the result over others; log-sum-exps lack the last axis."""
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
