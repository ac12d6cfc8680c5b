"""Attention over a prefix tree by a GPU's kernels: flash attention over uneven sequences, and cuDNN's over whole blocks.

Always true: each query stands in one call of `own`, where it reads its own segment (and copies of some ancestors'); what its
other ancestors hold, it reads in calls of `shared`, each for a whole subtree; the results are joined by their log-sum-exp.

cuDNN's kernels are twice as fast on a Hopper GPU, but plan a tenth of a second for every new size. So they are given sizes of
a few kinds: stretches of queries longer than what counts, whose spare results are dropped and whose spare gradients are 0.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from longrein.training.tree import GRAINS, Ints, PrefixTree
from longrein.training.tree_kernels import at_least_float32, join

logger = logging.getLogger(__name__)

At = slice | Tensor
"""Places of a tree."""


class Call(Protocol):
    """One call of a kernel, on tensors of the whole tree, (N, heads, width)."""

    @property
    def queries(self) -> At: ...
    @property
    def keys(self) -> At: ...
    @property
    def repeats(self) -> bool:
        """Some of its keys stand in it several times."""
        ...

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The result of its queries over its keys, and the log-sum-exp of their scores."""
        ...

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of its queries, keys and values, from the joined results."""
        ...


class Flash:
    """torch's own flash attention over sequences of uneven length, as `torch.nn.attention.varlen` calls it."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, call: Uneven, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, call.query_ends, call.key_ends, call.longest_query, call.longest_key, 0.0, call.causal, False,
            scale=scale, window_size_left=call.window, window_size_right=0 if call.causal else -1,
        )  # fmt: skip
        return out, lse

    @staticmethod
    def backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, call: Uneven, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of the noise that dropout would need
        return torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, lse, call.query_ends, call.key_ends, call.longest_query, call.longest_key, 0.0,
            call.causal, state, torch.empty(0, device=query.device),
            scale=scale, window_size_left=call.window, window_size_right=0 if call.causal else -1,
        )  # fmt: skip


class Cudnn:
    """cuDNN's attention of one sequence over another; where `causal`, the first query reads the first key."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        heads_first = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
        attend = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, lse, *_ = attend(*heads_first, None, True, 0.0, causal, False, scale=scale)
        return out[0].transpose(0, 1), lse[0, :, :, 0]

    @staticmethod
    def backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, ...]:
        heads_first = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (grad, query, key, value, out))
        noise = torch.zeros((), dtype=torch.long, device=query.device)  # what dropout would need
        attend_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        grads = attend_backward(
            *heads_first,
            lse[None, :, :, None],
            noise,
            noise,
            None,
            None,
            None,
            len(query),
            len(key),
            0.0,
            causal,
            scale=scale,
        )
        return tuple(found[0].transpose(0, 1) for found in grads)


class Uneven(NamedTuple):
    """A call of flash attention: each run of queries reads the run of keys beside it, aligned at their ends."""

    kernel: Any
    queries: At
    keys: At
    query_ends: Tensor
    key_ends: Tensor
    longest_query: int
    longest_key: int
    causal: bool
    window: int = -1
    """How many tokens before itself a token reads; -1 for all."""
    repeats: bool = False

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return self.kernel.forward(query[self.queries], key[self.keys], value[self.keys], self, scale)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        at, read = self.queries, (key[self.keys], value[self.keys])
        return self.kernel.backward(grad[at], query[at], *read, out[at], lse[:, at].contiguous(), self, scale)


class Block(NamedTuple):
    """A call of cuDNN's attention: it is given more queries and keys than count."""

    kernel: Any
    given: slice
    """Queries, those that count among them."""
    read: slice
    """Keys: those that count, and after them some that no query that counts reads."""
    queries: slice
    keys: slice
    causal: bool

    @property
    def repeats(self) -> bool:
        return False

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = self.kernel.forward(query[self.given], key[self.read], value[self.read], self.causal, scale)
        return out[self._counted], lse[:, self._counted]

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        given, read = self.given, (key[self.read], value[self.read])
        spared = torch.full_like(lse[:, given], torch.inf, memory_format=torch.contiguous_format)
        spared[:, self._counted] = lse[:, self.queries]  # of a query that does not count, no key has a share
        by = self.kernel.backward(grad[given], query[given], *read, out[given], spared, self.causal, scale)
        counted = self.keys.stop - self.keys.start
        return by[0][self._counted], by[1][:counted], by[2][:counted]

    @property
    def _counted(self) -> slice:
        return slice(self.queries.start - self.given.start, self.queries.stop - self.given.start)


class Varlen:
    """A tree by calls of flash attention alone, or, given a kernel for `blocks`, by those too."""

    def __init__(
        self, tree: PrefixTree, device: torch.device, window: int | None = None, kernel: Any = Flash, blocks: Any = None
    ) -> None:
        self.own, self.shared = _calls(tree, device, window, kernel, blocks)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        if len(self.own) + len(self.shared) == 1:
            return self.own[0].forward(query, key, value, scale)
        exact = at_least_float32(query.dtype)
        out = query.new_empty((*query.shape[:2], value.shape[-1]), dtype=exact if self.shared else query.dtype)
        lse = query.new_empty((query.shape[1], len(query)), dtype=exact)
        for call in self.own:
            found, found_lse = call.forward(query, key, value, scale)
            _put(out, call.queries, found)
            _put(lse.T, call.queries, found_lse.T)
        for call in self.shared:
            found, found_lse = call.forward(query, key, value, scale)
            join(out[call.queries].transpose(0, 1), lse[:, call.queries], found.transpose(0, 1), found_lse)
        return out.to(query.dtype), lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = (grad.contiguous(), query, key, value, out, lse, scale)
        repeats = any(call.repeats for call in self.own)
        if len(self.own) + len(self.shared) == 1 and not repeats:
            return self.own[0].backward(*given)
        exact = at_least_float32(query.dtype) if self.shared or repeats else query.dtype
        by_query = torch.empty_like(query, dtype=exact)
        by_key, by_value = ((torch.zeros_like if repeats else torch.empty_like)(one, dtype=exact) for one in (key, value))
        for call in self.own:  # every query, and every key, is in one of them
            found = call.backward(*given)
            _put(by_query, call.queries, found[0])
            for total, one in ((by_key, found[1]), (by_value, found[2])):
                if isinstance(call.keys, Tensor) and repeats:
                    total.index_add_(0, call.keys, one.to(exact))
                elif repeats:
                    total[call.keys] += one
                else:
                    _put(total, call.keys, one)
        for call in self.shared:
            found = call.backward(*given)
            for total, at, one in zip(
                (by_query, by_key, by_value), (call.queries, call.keys, call.keys), found, strict=True
            ):
                total[at] += one
        return by_query.to(query.dtype), by_key.to(query.dtype), by_value.to(query.dtype)


class Blocks(Varlen):
    def __init__(self, tree: PrefixTree, device: torch.device, window: int | None = None) -> None:
        super().__init__(tree, device, window, blocks=Cudnn)


def has_cudnn(device: torch.device) -> bool:
    """Whether cuDNN's attention may be used here, is worth its planning, and gives what it should."""
    hopper = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    allowed = torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
    return hopper and allowed and _cudnn_is_right(device)


@cache
def _cudnn_is_right(device: torch.device) -> bool:
    """Tried once, on a few tokens of which not all count, against flash attention."""
    noise = torch.Generator(device).manual_seed(0)
    query, key, value, grad = (
        torch.randn((256, heads, 128), generator=noise, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2, 4)
    )
    ends, given, counted = _ends([200], device), slice(0, 256), slice(0, 200)
    calls = (
        Block(Cudnn, given, given, counted, counted, causal=True),
        Uneven(Flash, counted, counted, ends, ends, 200, 200, causal=True),
    )
    found = []
    try:
        for call in calls:
            out, lse = torch.zeros_like(query), torch.zeros((4, 256), device=device)
            out[counted], lse[:, counted] = call.forward(query, key, value, 0.1)
            found.append([out, lse, *call.backward(grad, query, key, value, out, lse, 0.1)])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever it runs into, flash attention stands
        logger.warning("attention is flash attention alone, since cuDNN's does not run here: %s", error)
        return False
    apart = [float((one.float() - other.float()).norm() / other.float().norm()) for one, other in zip(*found, strict=True)]
    right = all(one < 0.02 for one in apart)  # NaN is not
    if not right:
        logger.warning("attention is flash attention alone, since cuDNN's is wrong here: by %s", apart)
    return right


JOIN_COST = 0.8
"""Of joining a query's result, forward and backward, over that of copying a key for one more descendant: bytes moved."""
COPIES = 8
"""Of a tree's tokens, at most: keys that are copied for descendants."""
STEP = 256
"""Lengths of blocks are multiples of it."""
LARGE = 2560
"""Tokens of a segment from which a block of its own is faster than a place among others in a call of flash attention."""
THIN = 256
"""Keys from which a subtree reads them as blocks."""


def _calls(
    tree: PrefixTree, device: torch.device, window: int | None, kernel: Any, blocks: Any
) -> tuple[list[Call], list[Call]]:
    """What each query reads on its own, and what subtrees read of an ancestor.

    Copying a segment's keys for each descendant, or reading them once by the whole subtree: each segment has what is cheaper.
    """
    starts, ends, reaches = (column.tolist() for column in (tree.starts, tree.ends, tree.subtree_ends))
    segments = range(len(starts))
    blocky = blocks is not None and window is None
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    thick = [blocky and lengths[s] >= THIN and lengths[s] % min(GRAINS) == 0 and reaches[s] >= STEP for s in segments]
    descendants = (np.searchsorted(tree.starts, tree.subtree_ends) - np.arange(len(starts)) - 1).tolist()
    cheaper = [JOIN_COST * (reaches[s] - ends[s]) < lengths[s] * descendants[s] for s in segments]
    apart = [window is None and reaches[s] > ends[s] and (thick[s] or cheaper[s]) for s in segments]
    copies = [0 if apart[s] or window is not None else lengths[s] * descendants[s] for s in segments]
    for s in sorted(segments, key=lambda s: -copies[s]):
        if sum(copies) <= COPIES * len(tree):
            break
        apart[s], copies[s] = True, 0
    copied = [[one for one in path[:-1] if not apart[one]] for path in tree.paths]
    large = [blocky and not copied[s] and lengths[s] >= LARGE and starts[s] + _up(lengths[s]) <= len(tree) for s in segments]
    own: list[Call] = []
    if small := [s for s in segments if not large[s]]:
        own.append(_uneven(tree, device, window, kernel, small, copied))
    for s in np.flatnonzero(large).tolist():
        given, counted = slice(starts[s], starts[s] + _up(lengths[s])), slice(starts[s], ends[s])
        own.append(Block(blocks, given, given, counted, counted, True))
    shared: list[Call] = []
    for s in np.flatnonzero(apart).tolist():
        keys = slice(starts[s], ends[s])
        if thick[s]:
            shared += [
                Block(blocks, given, keys, counted, keys, False) for given, counted in _stretches(ends[s], reaches[s])
            ]
        else:
            below = reaches[s] - ends[s]
            runs = _ends([below], device), _ends([lengths[s]], device)
            shared.append(Uneven(kernel, slice(ends[s], reaches[s]), keys, *runs, below, lengths[s], causal=False))
    return own, shared


def _uneven(
    tree: PrefixTree, device: torch.device, window: int | None, kernel: Any, segments: list[int], copied: list[list[int]]
) -> Uneven:
    """The segments that are read by flash attention: each reads itself, and copies of ancestors before it."""
    tokens = [np.arange(start, end) for start, end in zip(tree.starts.tolist(), tree.ends.tolist(), strict=True)]
    lengths = [len(tokens[s]) for s in segments]
    read: list[Ints] = []
    for s in segments:
        keys = np.concatenate([tokens[one] for one in (*copied[s], s)])
        read.append(keys if window is None else keys[-(window - 1 + len(tokens[s])) :])
    queries = _places(np.concatenate([tokens[s] for s in segments]), tree, device)
    repeats = sum(map(len, read)) > sum(lengths)
    keys = torch.as_tensor(np.concatenate(read), device=device) if repeats else queries
    reads = [len(one) for one in read]
    return Uneven(
        kernel,
        queries,
        keys,
        _ends(lengths, device),
        _ends(reads, device),
        max(lengths),
        max(reads),
        causal=True,
        window=-1 if window is None else window - 1,
        repeats=repeats,
    )


def _put(total: Tensor, at: At, values: Tensor) -> None:
    if isinstance(at, Tensor):
        total.index_copy_(0, at, values.to(total.dtype))
    else:
        total[at].copy_(values)


def _places(places: Ints, tree: PrefixTree, device: torch.device) -> At:
    return slice(0, len(tree)) if len(places) == len(tree) else torch.as_tensor(places, device=device)


def _stretches(start: int, end: int) -> Iterator[tuple[slice, slice]]:
    """Queries from `start` to `end` in stretches of few lengths: those given to a kernel, and which of them count."""
    while end - start >= STEP:
        size = 2 ** ((end - start) // STEP).bit_length() // 2 * STEP
        size += size // 2 if size > STEP and start + size + size // 2 <= end else 0
        yield slice(start, start + size), slice(start, start + size)
        start += size
    if start < end:
        yield slice(end - STEP, end), slice(start, end)


def _up(length: int) -> int:
    return -(-length // STEP) * STEP


def _ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.as_tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)
