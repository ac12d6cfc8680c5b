"""Attention over a prefix tree: each token reads its own row's tokens before it, and nothing else.

Always true: the result equals what each row alone would give, and so do its gradients, whichever back end computes it.
Keys and values have fewer heads than queries where the model groups them, and are never repeated in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from longrein.contract import LongreinError
from longrein.training.tree import PrefixTree

BACKENDS = ("auto", "sdpa")


class TreeAttention:
    """The attention of one packed pass: what the tree says, prepared once and used by every layer."""

    def __init__(self, tree: PrefixTree, device: torch.device, backend: str = "auto") -> None:
        if backend not in BACKENDS:
            raise LongreinError(f"no attention back end is called {backend!r}; there are: {', '.join(BACKENDS)}")
        self.tree = tree
        self.device = device
        self.backend = backend
        self.longest = int(tree.positions.max(initial=-1)) + 1
        self._cuts: dict[int, list[Cut]] = {}

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """(1, heads, N, width) queries over keys and values to (1, N, heads, width).

        `window` is how many tokens a token reads at most, itself included; `softcap` bounds the scores by a tanh.
        """
        query, key, value = _one_type(query, key, value)
        groups = key.shape[1]
        scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
        if window is not None and window >= self.longest:
            window = None
        query, key, value = (_grouped(tensor, groups) for tensor in (query, key, value))
        plain = window is None and softcap is None and query.shape[-1] == value.shape[-1]
        if plain and query.device.type == "cpu":
            out: Any = _Cascade.apply(query, key, value, self.tree, scale)
        else:
            out = self._by_segment(query, key, value, scale, window, softcap)
        return out.flatten(0, 1).transpose(0, 1).unsqueeze(0)

    def _by_segment(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        parts = []
        for cut in self._cuts_for(window):
            keys, values = (_along(tensor, cut.slices) for tensor in (key, value))
            queries = query[:, :, cut.start : cut.end]
            if softcap is not None:
                scores = torch.tanh(queries @ keys.transpose(2, 3) * (scale / softcap)) * softcap
                weights = scores.masked_fill(~cut.mask, float("-inf")).softmax(-1, dtype=_at_least_float32(scores))
                parts.append(weights.to(values.dtype) @ values)
            else:
                keys, values = (tensor.expand(-1, queries.shape[1], -1, -1) for tensor in (keys, values))
                parts.append(functional.scaled_dot_product_attention(queries, keys, values, cut.mask, scale=scale))
        return torch.cat(parts, 2)

    def _cuts_for(self, window: int | None) -> list[Cut]:
        window = window or self.longest
        if window not in self._cuts:
            self._cuts[window] = list(_cuts(self.tree, window, self.device))
        return self._cuts[window]


class Cut(NamedTuple):
    """Queries `start` to `end` of one segment, the stretches of keys they read in order, and which each of them reads."""

    start: int
    end: int
    slices: list[tuple[int, int]]
    mask: Tensor


def _cuts(tree: PrefixTree, window: int, device: torch.device) -> Sequence[Cut]:
    """Segments cut so that a cut's keys are few: no more than its own tokens and a window before them."""
    most = max(window, 128)
    cuts = []
    for path in tree.paths:
        begin, stop = int(tree.starts[path[-1]]), int(tree.ends[path[-1]])
        for start in range(begin, stop, most):
            end = min(start + most, stop)
            first = max(0, int(tree.positions[start]) - window + 1)
            last = int(tree.positions[end - 1]) + 1
            slices = []
            for segment in path:
                offset = int(tree.starts[segment] - tree.positions[tree.starts[segment]])  # of places over positions
                low, high = max(first + offset, int(tree.starts[segment])), min(last + offset, int(tree.ends[segment]))
                if low < high:
                    slices.append((low, high))
            queries = torch.arange(last - (end - start), last, device=device)[:, None]
            keys = torch.arange(first, last, device=device)
            cuts.append(Cut(start, end, slices, (keys <= queries) & (keys > queries - window)))
    return cuts


class _Cascade(torch.autograd.Function):
    """Each segment's keys are read once, by all of its subtree, and partial results are joined by their log-sum-exp.

    The flash kernel's backward, given the joined result and log-sum-exp, yields exactly each part's share of the
    gradients, so nothing else is kept. Subtrees are contiguous: there is no mask, and no key is copied.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, scale: float) -> Tensor:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        exact = _at_least_float32(query)
        out = query.new_empty(query.shape, dtype=exact)
        lse = query.new_empty(query.shape[:-1], dtype=exact)
        for start, end, reach, parent in _segments(tree):
            part, part_lse = attend(query[:, :, start:reach], *_read(query, key, value, start, end), 0.0, True, scale=scale)
            if parent < 0:
                out[:, :, start:reach], lse[:, :, start:reach] = part, part_lse
            else:
                before = lse[:, :, start:reach]
                out[:, :, start:reach].lerp_(part.to(exact), torch.sigmoid(part_lse - before).unsqueeze(-1))
                torch.logaddexp(before, part_lse, out=before)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.tree, ctx.scale = tree, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grad_out = grads[0].contiguous()
        exact = _at_least_float32(query)
        grad_query = torch.zeros_like(query, dtype=exact)
        grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
        for start, end, reach, _ in _segments(ctx.tree):
            span = (slice(None), slice(None), slice(start, reach))
            for_query, for_key, for_value = attend_backward(
                grad_out[span], query[span], *_read(query, key, value, start, end), out[span], lse[span], 0.0, True,
                scale=ctx.scale,
            )  # fmt: skip
            grad_query[span] += for_query
            torch.sum(for_key, 1, keepdim=True, out=grad_key[:, :, start:end])
            torch.sum(for_value, 1, keepdim=True, out=grad_value[:, :, start:end])
        return grad_query.to(query.dtype), grad_key, grad_value, None, None


def _segments(tree: PrefixTree) -> Sequence[tuple[int, int, int, int]]:
    columns = (tree.starts, tree.ends, tree.subtree_ends, tree.parents)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _read(query: Tensor, key: Tensor, value: Tensor, start: int, end: int) -> list[Tensor]:
    return [tensor[:, :, start:end].expand(-1, query.shape[1], -1, -1) for tensor in (key, value)]


def _grouped(tensor: Tensor, groups: int) -> Tensor:
    """(1, heads, N, width) as (groups, heads a group, N, width): the batch is one, so its axis is free for the groups."""
    return tensor.unflatten(1, (groups, -1))[0]


def _along(tensor: Tensor, slices: list[tuple[int, int]]) -> Tensor:
    parts = [tensor[:, :, start:end] for start, end in slices]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _one_type(*tensors: Tensor) -> list[Tensor]:
    """Queries, keys and values in the type torch's own attention would run in."""
    kind = tensors[0].device.type
    common = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensors[-1].dtype
    return [tensor if tensor.dtype == torch.float64 else tensor.to(common) for tensor in tensors]


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
