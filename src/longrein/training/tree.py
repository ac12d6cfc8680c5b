"""The prefix tree of a micro-batch: every distinct prefix of its rows stands in it once (in an aligned one, a few for each row).

Always true: `ids[places[r]]` are the tokens of row r and `positions[places[r]]` count from 0; tokens are laid out depth
first, so the descendants of a segment follow it without a gap, and token q reads token k exactly when
`k <= q < subtree_ends[segment of k]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from longrein.contract import LongreinError

Ints = NDArray[np.int64]

GRAINS = (256, 128)
"""Tokens at whose multiples an aligned tree forks: the first that costs few tokens."""
FEW = 0.03
"""More tokens, for the sake of forks at such places."""
TAIL = 255
"""Tokens after the last row's, at least, in an aligned tree of many."""


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Rows of token ids with their shared prefixes folded together, whatever made them share.

    >>> tree = PrefixTree.of([np.array([5, 6, 7]), np.array([5, 6, 8, 9])])
    >>> tree.ids.tolist(), tree.positions.tolist(), tree.places[1].tolist()
    ([5, 6, 7, 8, 9], [0, 1, 2, 2, 3], [0, 1, 3, 4])
    >>> tree.starts.tolist(), tree.parents.tolist(), tree.subtree_ends.tolist()
    ([0, 2, 3], [-1, 0, 0], [5, 3, 5])
    """

    ids: Ints
    """(N,) the last token of every distinct prefix."""
    positions: Ints
    """(N,) where each token stands in its row."""
    starts: Ints
    """(S,) where each segment, a maximal run without a fork, starts in `ids`."""
    ends: Ints
    """(S,) where it ends."""
    parents: Ints
    """(S,) the segment it continues; -1 for a root."""
    subtree_ends: Ints
    """(S,) where its last descendant ends."""
    places: list[Ints]
    """For each row, where its tokens stand in `ids`."""

    @classmethod
    def of(cls, rows: Sequence[np.ndarray], *, share: bool = True) -> PrefixTree:
        """The tree of `rows`; with `share=False` each row is a segment of its own, in order: plain packing."""
        rows = _checked(rows)
        return cls._of(rows, *_sorted(rows)) if share else _packed(rows)

    @classmethod
    def aligned(cls, rows: Sequence[np.ndarray], *, share: bool = True) -> PrefixTree:
        """The tree of `rows` with its forks at round places, where that costs few tokens (what rows share beyond such a place
        stands there for each of them), and with some that nothing reads at its end: what fast kernels of a GPU ask for."""
        rows = _checked(rows)
        order, common = _sorted(rows) if share else ([], [])
        forks = [shared < len(rows[before]) for before, shared in zip(order, common[1:], strict=False)]

        def coarse(grain: int) -> list[int]:
            return common[:1] + [
                shared // grain * grain if fork else shared for shared, fork in zip(common[1:], forks, strict=True)
            ]

        few = FEW * (sum(map(len, rows)) - sum(common))
        common = next((one for one in map(coarse, GRAINS) if sum(common) - sum(one) <= few), common)
        tree = cls._of(rows, order, common) if share else _packed(rows)
        tail = TAIL + -(len(tree) + TAIL) % GRAINS[0]
        return tree._with_tail(tail) if few > TAIL and tail <= max(map(len, rows)) else tree  # no position is a new one

    @classmethod
    def _of(cls, rows: list[Ints], order: list[int], common: list[int]) -> PrefixTree:
        """Of rows in this order, of which each shares its first `common` tokens with the one before."""
        places: list[Ints] = [np.empty(0, np.int64)] * len(rows)
        parent_of: dict[int, int] = {}  # where a segment starts, and the token before it
        fresh, depths, size = [], [], 0
        before: Ints = np.empty(0, np.int64)
        for row_index, shared in zip(order, common, strict=True):
            row, new = rows[row_index], len(rows[row_index]) - shared
            forks = shared < len(before)
            if forks:
                parent_of.setdefault(int(before[shared]), int(before[shared]) - 1 if shared else -1)
            if new and (forks or not shared):
                parent_of[size] = int(before[shared - 1]) if shared else -1
            before = np.concatenate([before[:shared], np.arange(size, size + new)]) if new else before
            places[row_index] = before
            fresh.append(row[shared:])
            depths.append(np.arange(shared, shared + new))
            size += new
        starts = np.array(sorted(parent_of), np.int64)
        parent_tokens = np.array([parent_of[start] for start in starts.tolist()], np.int64)
        parents = np.searchsorted(starts, parent_tokens, side="right") - 1
        ends = np.append(starts[1:], size) if size else starts
        subtree_ends = ends.copy()
        for segment in range(len(starts) - 1, -1, -1):
            if (parent := parents[segment]) >= 0:
                subtree_ends[parent] = max(subtree_ends[parent], subtree_ends[segment])
        return cls(_joined(fresh), _joined(depths), starts, ends, parents, subtree_ends, places)

    def _with_tail(self, size: int) -> PrefixTree:
        """With so many tokens more, a row of their own that has no place."""
        more = {"ids": np.zeros(size, np.int64), "positions": np.arange(size)}
        columns = {"starts": len(self), "ends": len(self) + size, "parents": -1, "subtree_ends": len(self) + size}
        more |= {name: np.array([value]) for name, value in columns.items()}
        return replace(self, **{name: np.append(getattr(self, name), values) for name, values in more.items()})

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def reaches(self) -> Ints:
        """(N,) for each token, where the last one that reads it ends."""
        return np.repeat(self.subtree_ends, self.ends - self.starts)

    @cached_property
    def paths(self) -> list[list[int]]:
        """For each segment, the segments from its root to itself."""
        paths: list[list[int]] = []
        for segment, parent in enumerate(self.parents.tolist()):
            paths.append([*paths[parent], segment] if parent >= 0 else [segment])
        return paths


def unique_tokens(rows: Sequence[np.ndarray]) -> int:
    """How many tokens `PrefixTree.of(rows)` holds."""
    rows = _checked(rows)
    return sum(map(len, rows)) - int(sum(_sorted(rows)[1]))


def _checked(rows: Sequence[np.ndarray]) -> list[Ints]:
    arrays = [np.ascontiguousarray(row) for row in rows]
    for index, array in enumerate(arrays):
        if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
            raise LongreinError(
                f"row {index} has shape {array.shape} and type {array.dtype}; a row is a one-dimensional array of integer token ids"
            )
    return [array.astype(np.int64, copy=False) for array in arrays]


def _sorted(rows: list[Ints]) -> tuple[list[int], list[int]]:
    """The rows in an order that puts equal prefixes together, and how many tokens each shares with the one before.

    Bytes of a fixed width a token compare as fast as memory does; which order the tokens have does not matter.
    """
    keys = [row.tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    common = [0] * min(1, len(rows))
    common += [common_prefix(rows[first], rows[second]) for first, second in pairwise(order)]
    return order, common


def common_prefix(first: Ints, second: Ints) -> int:
    """How many tokens two rows have in common from their start."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    at = int(differs.argmax()) if length else 0
    return at if length and differs[at] else length


def _packed(rows: list[Ints]) -> PrefixTree:
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    starts = ends - np.array([len(row) for row in rows], np.int64)
    places = [np.arange(start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    positions = _joined([np.arange(len(row)) for row in rows])
    held = ends > starts
    starts, ends = starts[held], ends[held]
    return PrefixTree(_joined(rows), positions, starts, ends, np.full(len(starts), -1, np.int64), ends, places)


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
