"""Flash kernels joined over a prefix tree: what all of them share, and those of a processor (`Cascade`).

Always true: a query's keys are split into parts, each read by one kernel call, and the parts are joined by their
log-sum-exp. The kernels' backward, given the joined result and log-sum-exp, yields exactly each part's share of the
gradients; so a result and its log-sum-exp are all that need be kept, and a layer that is run again may be given them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
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
        return *ctx.kernel.backward(grads[0], *ctx.saved_tensors, ctx.scale), None, None, None


class Stretch(NamedTuple):
    """One call of a processor's kernel: these queries read these keys, each up to its own where `causal`."""

    queries: slice
    keys: slice
    causal: bool
    first: bool
    """Nothing was read for these queries before."""


class Cascade:
    """Each segment's keys are read once by all of its subtree: subtrees are contiguous, so no key is copied or masked.

    Given which places are `needed`, few others ask, and their results say nothing. Shapes are (groups, heads a group, N,
    width), with one head a group for keys and values; in memory a token's heads stand together, as a model has them.
    """

    def __init__(self, tree: PrefixTree, device: torch.device, window: None = None, needed: Ints | None = None) -> None:
        asks = _asks(tree, needed)
        self.stretches = list(_stretches(tree, asks))
        self.asking = None if asks.all() else torch.as_tensor(np.flatnonzero(asks), device=device)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        exact = at_least_float32(query.dtype)
        asked = self._asked(query)
        groups, heads, count, _ = asked.shape
        out = _by_token(asked, torch.empty, exact)
        lse = torch.empty((groups, count, heads), dtype=exact).transpose(1, 2)  # as the kernel gives it
        for queries, keys, causal, first in self.stretches:
            read = self._read(query, key, value, keys)
            part, part_lse = attend(asked[:, :, queries], *read, 0.0, causal, scale=scale)
            if first:
                out[:, :, queries], lse[:, :, queries] = part, part_lse
            else:
                join(out[:, :, queries], lse[:, :, queries], part, part_lse)
        return self._spread(out.to(query.dtype), query), lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grad, asked, out = (self._asked(tensor) for tensor in (grad, query, out))
        exact = at_least_float32(query.dtype)
        grad_query, grad_key, grad_value = (_by_token(tensor, torch.zeros, exact) for tensor in (asked, key, value))
        for queries, keys, causal, _ in self.stretches:
            span, read = (slice(None), slice(None), queries), (slice(None), slice(None), keys)
            for_query, for_key, for_value = attend_backward(
                grad[span], asked[span], *self._read(query, key, value, keys), out[span], lse[span], 0.0, causal, scale=scale
            )
            grad_query[span] += for_query
            grad_key[read] += for_key.sum(1, keepdim=True)
            grad_value[read] += for_value.sum(1, keepdim=True)
        return self._spread(grad_query.to(query.dtype), query), grad_key.to(key.dtype), grad_value.to(value.dtype)

    def _read(self, query: Tensor, key: Tensor, value: Tensor, keys: slice) -> list[Tensor]:
        return [tensor[:, :, keys].expand(-1, query.shape[1], -1, -1) for tensor in (key, value)]

    def _asked(self, tensor: Tensor) -> Tensor:
        """Of a value a place, those of the places that ask."""
        by_token = tensor.permute(2, 0, 1, 3)
        return (by_token.contiguous() if self.asking is None else by_token[self.asking]).permute(1, 2, 0, 3)

    def _spread(self, asked: Tensor, like: Tensor) -> Tensor:
        """Back at their places; 0 at the others, since 0 times whatever stood there might not be 0."""
        return asked if self.asking is None else _by_token(like, torch.zeros, asked.dtype).index_copy_(2, self.asking, asked)


def _by_token(like: Tensor, make: Any, dtype: torch.dtype) -> Tensor:
    """Of that shape, with what belongs to a token together in memory."""
    groups, heads, count, width = like.shape
    return make((count, groups, heads, width), dtype=dtype, device=like.device).permute(1, 2, 0, 3)


FEW = 32
"""Queries that are cheaper to compute in vain than to pass over by a call more."""

PIECE = 192
"""Keys a causal call, about: the kernel computes all scores of a query block, also those that it masks."""


def _asks(tree: PrefixTree, needed: Ints | None) -> NDArray[np.bool_]:
    """(N,) which places ask: those that are needed, and runs of few others between two of them."""
    if needed is None:
        return np.ones(len(tree), bool)
    asks = np.zeros(len(tree), bool)
    asks[needed] = True
    for before, after in pairwise(np.flatnonzero(asks).tolist()):
        if after - before <= FEW:
            asks[before:after] = True
    return asks


def _stretches(tree: PrefixTree, asks: NDArray[np.bool_]) -> Iterator[Stretch]:
    """For each segment: it reads its own keys piece by piece, then all below it read them all."""
    index = np.append(0, np.cumsum(asks)).tolist()  # of the first query from each place on
    columns = (tree.starts, tree.ends, tree.subtree_ends, tree.parents)
    for start, end, reach, parent in zip(*(column.tolist() for column in columns), strict=True):
        pieces = list(_pieces(start, end, asks))
        whole = len(pieces) == 1
        for low, high in pieces:
            queries = slice(index[low], index[reach if whole else end])
            if queries.start < queries.stop:
                yield Stretch(queries, slice(low, high), bool(asks[low]), parent < 0 and low == start)
        if not whole and index[end] < index[reach]:
            yield Stretch(slice(index[end], index[reach]), slice(start, end), False, parent < 0)


def _pieces(start: int, end: int, asks: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """A segment cut where those that ask begin and end, and among them into pieces of about the same length."""
    turns = start + 1 + np.flatnonzero(np.diff(asks[start:end]))
    for low, high in pairwise([start, *turns.tolist(), end]):
        count = max(1, round((high - low) / PIECE)) if asks[low] else 1
        yield from pairwise(np.linspace(low, high, count + 1).astype(int).tolist())


def join(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Into a result over some keys, in place, the result over others; log-sum-exps lack the last axis."""
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse).contiguous().unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
