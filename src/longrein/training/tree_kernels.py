"""Flash kernels joined over a prefix tree, for the processor (`Cascade`) and for CUDA (`Varlen`).

Always true: a query's keys are split into parts, each read by one kernel call, and the parts are joined by their
log-sum-exp. The kernels' backward, given the joined result and log-sum-exp, yields exactly each part's share of the
gradients; so a result and its log-sum-exp are all that need be kept, and a layer that is run again may be given them.
"""

from __future__ import annotations

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


class Cascade:
    """Each segment's keys are read once, by all of its subtree: subtrees are contiguous, so no key is copied or masked.

    Shapes are (groups, heads a group, N, width), with one head a group for keys and values.
    """

    def __init__(self, tree: PrefixTree, device: torch.device, window: None = None) -> None:
        columns = (tree.starts, tree.ends, tree.subtree_ends, tree.parents)
        self.segments = list(zip(*(column.tolist() for column in columns), strict=True))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        exact = at_least_float32(query.dtype)
        out, lse = query.new_empty(query.shape, dtype=exact), query.new_empty(query.shape[:-1], dtype=exact)
        for start, end, reach, parent in self.segments:
            read = self._read(query, key, value, start, end)
            part, part_lse = attend(query[:, :, start:reach], *read, 0.0, True, scale=scale)
            if parent < 0:
                out[:, :, start:reach], lse[:, :, start:reach] = part, part_lse
            else:
                join(out[:, :, start:reach], lse[:, :, start:reach], part, part_lse)
        return out.to(query.dtype), lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grad_query = torch.zeros_like(query, dtype=at_least_float32(query.dtype))
        grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
        for start, end, reach, _ in self.segments:
            span = (slice(None), slice(None), slice(start, reach))
            read = self._read(query, key, value, start, end)
            for_query, for_key, for_value = attend_backward(
                grad[span], query[span], *read, out[span], lse[span], 0.0, True, scale=scale
            )
            grad_query[span] += for_query
            torch.sum(for_key, 1, keepdim=True, out=grad_key[:, :, start:end])
            torch.sum(for_value, 1, keepdim=True, out=grad_value[:, :, start:end])
        return grad_query.to(query.dtype), grad_key, grad_value

    def _read(self, query: Tensor, key: Tensor, value: Tensor, start: int, end: int) -> list[Tensor]:
        return [tensor[:, :, start:end].expand(-1, query.shape[1], -1, -1) for tensor in (key, value)]


class Flash:
    """torch's own flash attention over sequences of uneven length, as `torch.nn.attention.varlen` calls it."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, part.query_ends, part.key_ends, part.longest_query, part.longest_key, 0.0, part.causal, False,
            scale=scale, window_size_left=part.window, window_size_right=0 if part.causal else -1,
        )  # fmt: skip
        return out, lse

    @staticmethod
    def backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, part: Part, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of the noise that dropout would need
        return torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, lse, part.query_ends, part.key_ends, part.longest_query, part.longest_key, 0.0,
            part.causal, state, torch.empty(0, device=query.device),
            scale=scale, window_size_left=part.window, window_size_right=0 if part.causal else -1,
        )  # fmt: skip


class Part(NamedTuple):
    """One call of a varlen kernel: which queries and keys it takes, in order (None for all), and where each run ends."""

    queries: Tensor | None
    keys: Tensor | None
    query_ends: Tensor
    key_ends: Tensor
    longest_query: int
    longest_key: int
    causal: bool
    window: int
    """How many tokens before itself a token reads; -1 for all."""
    repeats: bool
    """Whether a key is taken more than once."""


class Varlen:
    """One call in which each segment reads itself and copies of its ancestors, and a few in which a subtree reads an ancestor.

    Copying a segment's keys for each descendant, or reading them once by the whole subtree and joining the results: each
    segment has what moves fewer bytes. Shapes are (N, heads, width).
    """

    def __init__(self, tree: PrefixTree, device: torch.device, window: int | None = None, kernel: Any = Flash) -> None:
        self.kernel = kernel
        self.parts = [part.to(device) for part in _parts(tree, window)]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        first, *rest = self.parts
        out, lse = self.kernel.forward(query, _take(key, first.keys), _take(value, first.keys), first, scale)
        if rest:
            out = out.to(at_least_float32(query.dtype))
        for part in rest:
            found, found_lse = self.kernel.forward(*self._inputs(part, query, key, value), part, scale)
            at = part.queries
            joined, joined_lse = out[at], lse[:, at]
            join(joined.transpose(0, 1), joined_lse, found.transpose(0, 1), found_lse)
            out[at], lse[:, at] = joined, joined_lse
        return out.to(query.dtype), lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        exact = at_least_float32(query.dtype) if len(self.parts) > 1 or self.parts[0].repeats else query.dtype
        totals = [tensor.new_zeros(tensor.shape, dtype=exact) for tensor in (query, key, value)]
        for part in self.parts:
            inputs = self._inputs(part, query, key, value)
            part_out, part_lse = _take(out, part.queries), lse if part.queries is None else lse[:, part.queries].contiguous()
            grads = self.kernel.backward(_take(grad, part.queries), *inputs, part_out, part_lse, part, scale)
            for total, found, at in zip(totals, grads, (part.queries, part.keys, part.keys), strict=True):
                if at is None:
                    total += found
                elif part.repeats and at is part.keys:
                    total.index_add_(0, at, found.to(exact))
                else:
                    total[at] += found
        return tuple(total.to(query.dtype) for total in totals)  # pyright: ignore[reportReturnType]

    def _inputs(self, part: Part, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        return [_take(query, part.queries), _take(key, part.keys), _take(value, part.keys)]


class _Part(NamedTuple):
    queries: list[Ints] | None
    keys: list[Ints]
    query_lengths: list[int]
    key_lengths: list[int]
    causal: bool
    window: int
    size: int

    def to(self, device: torch.device) -> Part:
        keys = np.concatenate(self.keys)
        repeats = len(np.unique(keys)) < len(keys)
        plain = len(keys) == self.size and not repeats and bool((np.diff(keys) == 1).all())
        return Part(
            None if self.queries is None else torch.as_tensor(np.concatenate(self.queries), device=device),
            None if plain else torch.as_tensor(keys, device=device),
            _ends(self.query_lengths, device),
            _ends(self.key_lengths, device),
            max(self.query_lengths),
            max(self.key_lengths),
            self.causal,
            self.window,
            repeats,
        )


JOIN_COST = 1.5
"""Of joining a query's result, forward and backward, over that of copying a key for one more descendant."""


def _parts(tree: PrefixTree, window: int | None) -> list[_Part]:
    count = len(tree.starts)
    lengths = (tree.ends - tree.starts).tolist()
    descendants = [
        int(np.searchsorted(tree.starts, end)) - index - 1 for index, end in enumerate(tree.subtree_ends.tolist())
    ]
    below = (tree.subtree_ends - tree.ends).tolist()
    apart = [window is None and JOIN_COST * below[s] < lengths[s] * descendants[s] for s in range(count)]
    tokens = [np.arange(start, end) for start, end in zip(tree.starts.tolist(), tree.ends.tolist(), strict=True)]
    own: list[Ints] = []
    for segment, path in enumerate(tree.paths):
        keys = np.concatenate([tokens[s] for s in path if s == segment or not apart[s]])
        own.append(keys if window is None else keys[-(window - 1 + lengths[segment]) :])
    parts = [_Part(None, own, lengths, [len(keys) for keys in own], True, -1 if window is None else window - 1, len(tree))]
    levels: dict[int, list[int]] = {}
    for segment in range(count):
        if apart[segment]:  # segments with as many such ancestors have no descendant in common
            levels.setdefault(sum(apart[s] for s in tree.paths[segment]), []).append(segment)
    for segments in levels.values():
        queries = [np.arange(tree.ends[s], tree.subtree_ends[s]) for s in segments]
        keys = [tokens[s] for s in segments]
        parts.append(_Part(queries, keys, [len(q) for q in queries], [len(k) for k in keys], False, -1, len(tree)))
    return parts


def join(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Into a result over some keys, in place, the result over others; log-sum-exps lack the last axis."""
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _ends(lengths: list[int], device: torch.device) -> Tensor:
    return torch.as_tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)


def _take(tensor: Tensor, index: Tensor | None) -> Tensor:
    return tensor if index is None else tensor.index_select(0, index)
