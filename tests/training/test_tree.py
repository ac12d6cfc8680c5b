"""A prefix tree holds every distinct prefix once, depth first, and says who reads whom; checked against a naive trie."""

from __future__ import annotations

import doctest
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein.contract import LongreinError
from longrein.training import tree as module
from longrein.training.tree import PrefixTree, unique_tokens

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=9).map(np.array), max_size=9)


def prefixes(row) -> list[tuple[int, ...]]:
    return [tuple(row[: t + 1].tolist()) for t in range(len(row))]


@given(ROWS)
def test_every_distinct_prefix_stands_in_it_once(rows):
    tree = PrefixTree.of(rows)
    held: dict[int, tuple[int, ...]] = {}
    for row, places in zip(rows, tree.places, strict=True):
        assert len(places) == len(row)
        assert tree.ids[places].tolist() == row.tolist()
        assert tree.positions[places].tolist() == list(range(len(row)))
        for place, prefix in zip(places.tolist(), prefixes(row), strict=True):
            assert held.setdefault(place, prefix) == prefix
    assert sorted(held) == list(range(len(tree)))
    assert len(set(held.values())) == len(tree) == unique_tokens(rows) == len({p for row in rows for p in prefixes(row)})


@given(ROWS)
def test_a_token_reads_its_own_prefix_and_nothing_else(rows):
    tree = PrefixTree.of(rows)
    prefix_at = {
        int(p): prefix
        for row, ps in zip(rows, tree.places, strict=True)
        for p, prefix in zip(ps, prefixes(row), strict=True)
    }
    for q in range(len(tree)):
        for k in range(len(tree)):
            reads = k <= q < tree.reaches[k]
            assert reads == (prefix_at[q][: len(prefix_at[k])] == prefix_at[k])


@pytest.mark.parametrize("few", [0.0, 0.4, 9.0])
@given(rows=ROWS)
def test_an_aligned_tree_forks_at_round_places(few, rows):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"GRAINS": (4, 2), "FEW": few, "TAIL": 3}.items():
            patch.setattr(module, name, value)
        tree = PrefixTree.aligned(rows)
    exact = PrefixTree.of(rows)
    tail = len(tree) - (max((int(places.max(initial=-1)) for places in tree.places), default=-1) + 1)
    assert len(tree) - tail <= (1 + few) * len(exact)
    assert tail == 0 or (3 <= tail < 3 + 4 and len(tree) % 4 == 0)
    assert tree.positions.max(initial=-1) == exact.positions.max(initial=-1)
    prefix_at: dict[int, tuple[int, ...]] = {}
    for row, places in zip(rows, tree.places, strict=True):
        assert tree.ids[places].tolist() == row.tolist()
        assert tree.positions[places].tolist() == list(range(len(row)))
        prefix_at |= dict(zip(places.tolist(), prefixes(row), strict=True))
        for at, place in enumerate(places.tolist()):  # a row's token reads the row's tokens before it, and no others
            assert [k for k in range(place + 1) if place < tree.reaches[k]] == places[: at + 1].tolist()
    assert sorted(prefix_at) == list(range(len(tree) - tail))
    if few == 9.0:
        parents = set(tree.parents.tolist()) - {-1}
        assert all((tree.ends[s] - tree.starts[s]) % 4 == 0 for s in parents)


def test_an_aligned_tree_of_many_tokens_ends_with_some_that_nothing_reads():
    rows = [np.arange(9000), np.arange(7000)]
    tree, packed = PrefixTree.aligned(rows), PrefixTree.aligned(rows, share=False)
    assert (len(tree), len(packed)) == (9472, 16_384)
    assert (tree.starts.tolist(), packed.starts.tolist()) == ([0, 9000], [0, 9000, 16_000])
    assert [places.tolist() for places in packed.places] == [list(range(9000)), list(range(9000, 16_000))]
    assert len(PrefixTree.aligned([np.arange(8000)])) == 8000
    assert len(PrefixTree.aligned([np.full(250, n) for n in range(40)])) == 10_000  # a model may have no more positions


@given(ROWS)
def test_segments_are_maximal_runs_without_a_fork(rows):
    tree = PrefixTree.of(rows)
    distinct = {p for row in rows for p in prefixes(row)}
    children = {p: {c for c in distinct if c[:-1] == p} for p in distinct | {()}}
    roots_and_forked = {c for p, cs in children.items() if p == () or len(cs) > 1 for c in cs}
    prefix_at = {
        int(p): prefix
        for row, ps in zip(rows, tree.places, strict=True)
        for p, prefix in zip(ps, prefixes(row), strict=True)
    }
    assert {prefix_at[start] for start in tree.starts.tolist()} == roots_and_forked
    assert tree.ends.tolist() == [*tree.starts[1:].tolist(), len(tree)][: len(tree.starts)]
    for segment, parent in enumerate(tree.parents.tolist()):
        before = prefix_at[int(tree.starts[segment])][:-1]
        assert before == (prefix_at[int(tree.ends[parent]) - 1] if parent >= 0 else ())
        assert tree.paths[segment] == ([*tree.paths[parent], segment] if parent >= 0 else [segment])


@given(ROWS)
def test_without_sharing_each_row_is_a_segment_in_order(rows):
    tree = PrefixTree.of(rows, share=False)
    filled = [row for row in rows if len(row)]
    assert tree.ids.tolist() == [token for row in rows for token in row.tolist()]
    assert tree.positions.tolist() == [t for row in rows for t in range(len(row))]
    assert np.concatenate([[0], *tree.places]).tolist()[1:] == list(range(len(tree)))
    assert (tree.ends - tree.starts).tolist() == [len(row) for row in filled]
    assert (tree.parents == -1).all()
    assert (tree.subtree_ends == tree.ends).all()


def test_rows_that_extend_each_other_are_one_segment():
    row = np.arange(100)
    tree = PrefixTree.of([row[:40], row, row[:70], row[:40]])
    assert (tree.starts.tolist(), tree.ends.tolist(), tree.subtree_ends.tolist()) == ([0], [100], [100])


@pytest.mark.parametrize("row", [np.zeros((2, 2), int), np.array([0.5, 1.0])])
def test_a_row_that_is_not_token_ids_is_refused(row):
    with pytest.raises(LongreinError, match=r"row 1 has shape .* integer token ids"):
        PrefixTree.of([np.arange(3), row])


def test_the_example_in_the_docstring():
    assert doctest.testmod(module).failed == 0


def test_a_large_batch_is_quick():
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 150_000, 6_000)
    rows = [np.concatenate([trunk[: rng.integers(4_000, 6_000)], rng.integers(0, 150_000, 3_000)]) for _ in range(16)]
    assert sum(map(len, rows)) > 120_000
    seconds = []
    for _ in range(5):
        started = time.thread_time()  # of the processor: other programs may be busy on this machine
        PrefixTree.of(rows)
        seconds.append(time.thread_time() - started)
    assert min(seconds) < 0.05, "3 ms on a quiet machine"
