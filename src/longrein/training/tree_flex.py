"""Attention over a prefix tree by FlexAttention: one compiled kernel that skips the blocks no query reads.

Always true: the block mask says exactly `k <= q < reach of k` (and, with a window, that q stands less than it after k).
Token counts are rounded up to one of a few sizes, so that a kernel is compiled once per size and not per batch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from longrein.training.tree import Ints, PrefixTree

BLOCK = 128


def bucket(tokens: int) -> int:
    """The least of 4, 5, 6 or 7 times a power of two, in blocks, that holds so many tokens."""
    blocks = -(-tokens // BLOCK)
    step = 1 << max(0, blocks.bit_length() - 3)
    return -(-blocks // step) * step * BLOCK


class Flex:
    """Attention over one tree; shapes are transformers' (1, heads, N, width)."""

    def __init__(self, tree: PrefixTree, device: torch.device, window: int | None = None) -> None:
        self.extra = bucket(len(tree)) - len(tree)
        self.mask = _block_mask(tree, len(tree) + self.extra, device, window)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None) -> Tensor:
        size = query.shape[2]
        query, key, value = (torch.nn.functional.pad(tensor, (0, 0, 0, self.extra)) for tensor in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        out = _compiled()(query, key, value, _capped(softcap), self.mask, scale, grouped)
        return out[:, :, :size]


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


@cache
def _capped(softcap: float | None) -> Any:
    """One function per bound: a new one each pass would be compiled anew."""
    if softcap is None:
        return None

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.tanh(score / softcap) * softcap

    return capped


def _block_mask(tree: PrefixTree, size: int, device: torch.device, window: int | None) -> BlockMask:
    pad = size - len(tree)
    reaches = np.concatenate([tree.reaches, np.arange(len(tree), size) + 1])  # padding reads itself alone
    positions = np.concatenate([tree.positions, np.zeros(pad, np.int64)])
    some, whole = _blocks(reaches, positions, window)
    reach, place = (torch.as_tensor(array, dtype=torch.int32, device=device) for array in (reaches, positions))
    if window is None:

        def reads(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < reach[key])
    else:

        def reads(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < reach[key]) & (place[query] - place[key] < window)

    ordered = [_ordered(blocks, device) for blocks in (some & ~whole, whole)]
    return BlockMask.from_kv_blocks(*ordered[0], *ordered[1], BLOCK_SIZE=BLOCK, mask_mod=reads, seq_lengths=(size, size))


def _blocks(reaches: Ints, positions: Ints, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(query blocks, key blocks): where some query may read some key, and where every query reads every key."""
    reach, place = reaches.reshape(-1, BLOCK), positions.reshape(-1, BLOCK)
    first = np.arange(len(reach))[:, None] * BLOCK
    before = first > first.T
    some = (before & (reach.max(1) > first)) | (first == first.T)
    whole = before & (reach.min(1) >= first + BLOCK)
    if window is not None:
        some &= place.min(1)[:, None] - place.max(1) < window
        whole &= place.max(1)[:, None] - place.min(1) < window
    return some, whole


def _ordered(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each query block how many key blocks it has, and which, as FlexAttention wants them."""
    order = np.argsort(~blocks, axis=1, kind="stable")
    return tuple(torch.as_tensor(array, dtype=torch.int32, device=device)[None, None] for array in (blocks.sum(1), order))  # pyright: ignore[reportReturnType]
