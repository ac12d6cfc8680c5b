"""Every back end gives what each row alone would give. What needs a GPU runs where there is one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from longrein.contract import LongreinError
from longrein.training import tree, tree_calls, tree_flex, tree_kernels
from longrein.training.tree import PrefixTree
from longrein.training.tree_attention import TreeAttention, wants_aligned
from longrein.training.tree_calls import Block, Uneven, Varlen
from longrein.training.tree_flex import BLOCK, Flex, _blocks, bucket
from longrein.training.tree_kernels import Attend, Cascade

CPU = torch.device("cpu")
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12).map(np.array), min_size=1, max_size=7)


def inputs(tree, heads=4, groups=2, width=8, dtype=torch.float64, device=CPU):
    noise = torch.Generator().manual_seed(0)
    shapes = ((1, count, len(tree), width) for count in (heads, groups, groups))
    return [torch.randn(shape, generator=noise, dtype=torch.float64).to(device, dtype).requires_grad_() for shape in shapes]


def reference(query, key, value, tree, window=None, softcap=None):
    """By the definition: q reads k where k is in its row's prefix, and less than a window before it."""
    query, key, value = (tensor.detach().double().cpu().requires_grad_() for tensor in (query, key, value))
    at, reach, place = torch.arange(len(tree)), torch.as_tensor(tree.reaches), torch.as_tensor(tree.positions)
    reads = (at <= at[:, None]) & (at[:, None] < reach)
    if window is not None:
        reads &= place[:, None] - place < window
    repeated = [tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value)]
    scores = query @ repeated[0].transpose(2, 3) * query.shape[-1] ** -0.5
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    out = scores.masked_fill(~reads, float("-inf")).softmax(-1) @ repeated[1]
    return (query, key, value), out.transpose(1, 2)


def error(tree, out, leaves, needed=slice(None), **how) -> float:
    """The worst of the result (at the places that are needed) and the three gradients, relative."""
    expected_leaves, expected = reference(*leaves, tree, **how)
    expected, out = expected[:, needed], out[:, needed]
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (expected * weights).sum().backward()
    (out * weights.to(out)).sum().backward()
    pairs = [(expected, out), *((theirs.grad, ours.grad) for theirs, ours in zip(expected_leaves, leaves, strict=True))]
    floor = max(value.norm() for value, _ in pairs) * 1e-3
    return max(
        ((ours.detach().double().cpu() - theirs).norm() / theirs.norm().clamp(min=floor)).item() for theirs, ours in pairs
    )


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, groups=st.sampled_from([1, 2, 4]), piece=st.integers(1, 5))
def test_on_a_processor_piece_by_piece(rows, groups, piece):
    tree = PrefixTree.of(rows)
    leaves = inputs(tree, groups=groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_kernels, "PIECE", piece)
        out = TreeAttention(tree, CPU)(*leaves)
    assert error(tree, out, leaves) < 1e-12


@settings(max_examples=40, deadline=None)
@given(
    rows=ROWS, window=st.sampled_from([None, 1, 3]), softcap=st.sampled_from([None, 0.7]), groups=st.sampled_from([1, 2, 4])
)
def test_on_a_processor(rows, window, softcap, groups):
    tree = PrefixTree.of(rows)
    leaves = inputs(tree, groups=groups)
    out = TreeAttention(tree, CPU)(*leaves, window=window, softcap=softcap)
    assert error(tree, out, leaves, window=window, softcap=softcap) < 1e-12


@pytest.mark.parametrize("few", [0, 3, tree_kernels.FEW])
@settings(max_examples=40, deadline=None)
@given(rows=ROWS, chosen=st.integers(0, 2**32), groups=st.sampled_from([1, 4]))
def test_on_a_processor_for_the_places_that_are_needed(few, rows, chosen, groups):
    tree = PrefixTree.of(rows)
    needed = np.random.default_rng(chosen).permutation(len(tree))[: 1 + chosen % len(tree)]
    leaves = inputs(tree, groups=groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_kernels, "FEW", few)
        out = TreeAttention(tree, CPU, needed=needed)(*leaves, last=True)
    assert error(tree, out, leaves, needed=needed) < 1e-12
    assert torch.isfinite(out).all()


def spans(cascade):
    return [(one.queries.start, one.queries.stop, one.keys.start, one.keys.stop, one.causal) for one in cascade.stretches]


def test_what_is_not_needed_is_passed_over():
    trunk = np.arange(1000)
    tree = PrefixTree.of([np.concatenate([trunk, 2000 + np.arange(n, n + 100)]) for n in (0, 200, 400)])
    cascade = Cascade(tree, CPU, needed=np.array([999, 1050, 1055, 1250]))
    assert cascade.asking is not None
    assert cascade.asking.tolist() == [999, *range(1050, 1056), 1250]
    assert spans(cascade) == [
        (0, 1, 0, 999, False),
        (0, 1, 999, 1000, True),
        (1, 8, 0, 1000, False),  # all that follow the trunk read it whole
        (1, 7, 1000, 1050, False),
        (1, 7, 1050, 1056, True),  # few are not worth a call
        (7, 8, 1200, 1250, False),  # nothing in the second branch is needed
        (7, 8, 1250, 1251, True),
    ]


def test_few_scores_are_computed_in_vain():
    tree = PrefixTree.of([np.arange(500), np.concatenate([np.arange(400), 1000 + np.arange(30)])])
    assert spans(Cascade(tree, CPU)) == [
        (0, 400, 0, 200, True),
        (200, 400, 200, 400, True),
        (400, 530, 0, 400, False),
        (400, 500, 400, 500, True),
        (500, 530, 500, 530, True),
    ]


class Plain:
    """The varlen kernel's contract, written out: keys are aligned with queries at the end; only results are rounded."""

    @staticmethod
    def forward(query, key, value, part, scale):
        outs, lses = [], []
        for _, queries, keys, values, hidden in Plain.runs(query, key, value, part):
            scores = (queries @ keys.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
            lses.append(scores.logsumexp(-1))
            outs.append((scores.softmax(-1) @ values).transpose(0, 1))
        return torch.cat(outs).to(query.dtype), torch.cat(lses, 1).to(tree_kernels.at_least_float32(query.dtype))

    @staticmethod
    def backward(grad, query, key, value, out, lse, part, scale):
        grads = [torch.zeros_like(tensor) for tensor in (query, key, value)]
        grad, out = grad.double(), out.double()
        for (q, k), queries, keys, values, hidden in Plain.runs(query, key, value, part):
            given, share = grad[q].transpose(0, 1), (grad[q] * out[q]).sum(-1).T[..., None]
            chances = (queries @ keys.transpose(1, 2) * scale - lse[:, q, None]).exp().masked_fill(hidden, 0)
            of_scores = chances * (given @ values.transpose(1, 2) - share) * scale
            for_heads = (of_scores @ keys, of_scores.transpose(1, 2) @ queries, chances.transpose(1, 2) @ given)
            for total, found, span in zip(grads, for_heads, (q, k, k), strict=True):
                total[span] = found.transpose(0, 1).unflatten(1, (total.shape[1], -1)).sum(2)
        return grads

    @staticmethod
    def runs(query, key, value, part):
        ends = list(zip(part.query_ends.tolist(), part.key_ends.tolist(), strict=True))
        query, key, value = query.double(), key.double(), value.double()
        for (q0, k0), (q1, k1) in pairwise(ends):
            q, k = slice(q0, q1), slice(k0, k1)
            keys, values = (t[k].repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(0, 1) for t in (key, value))
            ahead = torch.arange(k1 - k0) - torch.arange(q1 - q0)[:, None] - (k1 - k0 - (q1 - q0))
            hidden = (ahead > 0) & part.causal | (ahead < -part.window) & (part.window >= 0)
            yield (q, k), query[q].transpose(0, 1), keys, values, hidden


@pytest.mark.parametrize(  # every ancestor read apart, the cheaper of two, every one copied, all but the longest
    ("cost", "copies"), [(0.0, 99), (1.5, 99), (1e9, 99), (1e9, 0.5)]
)
@settings(max_examples=25, deadline=None)
@given(rows=ROWS, window=st.sampled_from([None, 1, 3]), groups=st.sampled_from([1, 4]), again=st.booleans())
def test_how_varlen_splits_a_tree(cost, copies, rows, window, groups, again):
    tree = PrefixTree.of(rows)
    leaves = inputs(tree, groups=groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_calls, "JOIN_COST", cost)
        patch.setattr(tree_calls, "COPIES", copies)
        kernel = Varlen(tree, CPU, window, Plain)
    kept: list[torch.Tensor] = []
    for _ in range(1 + again):  # a layer run again is given what it gave
        out = Attend.apply(*(leaf[0].transpose(0, 1) for leaf in leaves), kernel, 8**-0.5, kept)
    assert error(tree, out[None], leaves, window=window) < 1e-12


def test_deep_trees_are_split_by_what_is_cheaper():
    trunk = np.arange(1000)
    bushy = [np.concatenate([trunk[: 100 * n], [2000 + n]]) for n in range(1, 10)]  # short branches off a long trunk
    split = Varlen(PrefixTree.of([trunk, *bushy]), CPU, kernel=Plain)
    assert len(split.shared) > 0
    assert len(split.own[0].key_ends) - 1 == 19
    wide = [np.concatenate([trunk[:10], np.full(300, 2000 + n)]) for n in range(9)]  # a short prompt, long answers
    split = Varlen(PrefixTree.of(wide), CPU, kernel=Plain)
    assert (len(split.own), len(split.shared)) == (1, 0)
    assert split.own[0].key_ends[-1] == 10 + 9 * 310


def test_a_long_chain_of_forks_copies_no_more_keys_than_there_is_memory_for():
    trunk = np.arange(10_000)
    rows = [np.concatenate([trunk[: 20 * n], 20_000 + 1000 * n + np.arange(200)]) for n in range(1, 501)]
    tree = PrefixTree.of([trunk, *rows])
    read = Varlen(tree, CPU, kernel=Plain).own[0].key_ends[-1]
    assert len(tree) < read <= (1 + tree_calls.COPIES) * len(tree)


class PlainBlocks:
    """cuDNN's contract, written out: the first query reads the first key; of a query whose log-sum-exp is infinite no key has a
    share."""

    @staticmethod
    def forward(query, key, value, causal, scale):
        return Plain.forward(*PlainBlocks.squared(query, key, value, causal), scale)

    @staticmethod
    def backward(grad, query, key, value, out, lse, causal, scale):
        *square, part = PlainBlocks.squared(query, key, value, causal)
        return Plain.backward(grad, *square, out, lse, part, scale)

    @staticmethod
    def squared(query, key, value, causal):
        assert not causal or len(query) == len(key)  # else keys are aligned elsewhere than in `Plain`
        ends = [torch.tensor([0, len(one)]) for one in (query, key)]
        return query, key, value, Uneven(Plain, slice(None), slice(None), *ends, len(query), len(key), causal)


def forked(seed: int) -> list[np.ndarray]:
    """Rows that fork from others at any place, repeat them, end inside them or share nothing; some are empty."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 9, rng.integers(1, 30))]
    for _ in range(rng.integers(0, 12)):
        trunk = rows[rng.integers(len(rows))]
        kept = trunk[: rng.integers(len(trunk) + 1)] if rng.random() < 0.8 else trunk
        rows.append(np.concatenate([kept, rng.integers(0, 9, rng.choice([0, 1, 2, 8, 25]))]))
    return rows


@pytest.mark.parametrize(("step", "large", "thin"), [(4, 3, 2), (2, 100, 2), (8, 1, 100), (2, 1, 2), (8, 3, 2)])
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 2**32).map(forked),
    window=st.sampled_from([None, None, 3]),
    groups=st.sampled_from([1, 4]),
    share=st.sampled_from([True, True, False]),
    few=st.sampled_from([0.0, 0.5]),
)
@example(rows=[np.array([1, 1, 2]), np.array([1, 1, 3])], window=None, groups=1, share=True, few=0.0)  # less than a step
def test_how_blocks_split_an_aligned_tree(step, large, thin, rows, window, groups, share, few):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"STEP": step, "LARGE": large, "THIN": thin, "GRAINS": (2,)}.items():
            patch.setattr(tree_calls, name, value)
        for name, value in {"GRAINS": (4, 2), "FEW": few, "TAIL": step - 1}.items():
            patch.setattr(tree, name, value)
        made = PrefixTree.aligned(rows, share=share)
        kernel = Varlen(made, CPU, window, Plain, PlainBlocks)
    leaves = inputs(made, groups=groups)
    out = Attend.apply(*(leaf[0].transpose(0, 1) for leaf in leaves), kernel, 8**-0.5, [])
    assert error(made, out[None], leaves, window=window) < 1e-12


def test_parts_are_joined_before_they_are_rounded(monkeypatch):
    """A token 40 forks deep is as exact as one that reads all its keys at once."""
    for name, value in {"STEP": 8, "LARGE": 64, "THIN": 8, "GRAINS": (8,)}.items():
        monkeypatch.setattr(tree_calls, name, value)
    trunk = np.arange(8 * 40 + 64)
    deep = PrefixTree.of([trunk, *(np.append(trunk[: 8 * n], [1000] * 8) for n in range(1, 41))])
    kernel = Varlen(deep, CPU, None, Plain, PlainBlocks)
    assert len(kernel.own) == 2
    assert len(kernel.shared) > 40
    leaves = inputs(deep, dtype=torch.bfloat16)
    out = Attend.apply(*(leaf[0].transpose(0, 1) for leaf in leaves), kernel, 8**-0.5, [])
    assert error(deep, out[None], leaves) < 0.004  # the last rounding alone takes 0.002


class NotFinite(PlainBlocks):
    """Of a query whose log-sum-exp is infinite, a share that is no number."""

    @staticmethod
    def backward(grad, query, key, value, out, lse, causal, scale):
        by_query, by_key, by_value = PlainBlocks.backward(grad, query, key, value, out, lse, causal, scale)
        return by_query, by_key + 0 * lse.sum(), by_value


class Sharing(PlainBlocks):
    """What the queries that do not count read, is counted."""

    @staticmethod
    def backward(grad, query, key, value, out, lse, causal, scale):
        return PlainBlocks.backward(grad, query, key, value, out, lse.masked_fill(lse.isinf(), 5.0), causal, scale)


class Otherwise(PlainBlocks):
    """A kernel whose results have a shape of their own."""

    @staticmethod
    def forward(query, key, value, causal, scale):
        out, lse = PlainBlocks.forward(query, key, value, causal, scale)
        return out, lse[0, :, :, 0]


@pytest.mark.parametrize(
    ("kernel", "right"), [(PlainBlocks, True), (NotFinite, False), (Sharing, False), (Otherwise, False)]
)
def test_blocks_are_tried_before_they_are_used(kernel, right, monkeypatch, caplog):
    monkeypatch.setattr(tree_calls, "Cudnn", kernel)
    monkeypatch.setattr(tree_calls, "Flash", Plain)
    assert tree_calls._cudnn_is_right.__wrapped__(CPU) is right
    assert right or "attention is flash attention alone" in caplog.text


@pytest.mark.parametrize(
    ("generation", "given", "allowed", "exact", "taken"),
    [
        (9, {}, True, False, True),
        (10, {"backend": "cudnn"}, True, False, True),
        (8, {}, True, False, False),
        (9, {"backend": "varlen"}, True, False, False),
        (9, {"half": False}, True, False, False),
        (9, {"device": CPU}, True, False, False),
        (9, {}, False, False, False),
        (9, {}, True, True, False),  # its sums have no order
    ],
)
def test_when_blocks_are_taken(generation, given, allowed, exact, taken, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (generation, 0))
    monkeypatch.setattr(tree_calls, "_cudnn_is_right", lambda device: True)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: allowed)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: exact)
    assert wants_aligned(**{"backend": "auto", "device": torch.device("cuda"), "half": True} | given) is taken


def test_blocks_come_in_few_sizes_and_compute_little_in_vain():
    rng = np.random.default_rng(0)
    squares, stretches, spare, counted = set(), set(), 0, 0
    for make in 20 * [PrefixTree.aligned, PrefixTree.of]:
        prompt = rng.integers(0, 99, rng.integers(100, 4000))
        rows = [np.concatenate([prompt, rng.integers(0, 99, rng.integers(2000, 12_000))]) for _ in range(8)]
        made = make(rows)
        split = Varlen(made, CPU, kernel=Plain, blocks=PlainBlocks)
        for call in (*split.own, *split.shared):
            if isinstance(call, Block):
                sizes = call.given.stop - call.given.start, call.read.stop - call.read.start
                assert call.given.start >= 0
                assert max(call.given.stop, call.read.stop) <= len(made)
                assert sizes[0] % tree_calls.STEP == 0 == sizes[1] % min(tree.GRAINS)
                assert call.keys.stop - call.keys.start >= (tree_calls.LARGE if call.causal else tree_calls.THIN)
                squares.add(sizes) if call.causal else stretches.add(sizes)
                counted += (call.queries.stop - call.queries.start) * (call.keys.stop - call.keys.start)
                spare += sizes[0] * sizes[1]
    assert len(squares) <= 12_000 / tree_calls.STEP
    assert len({queries for queries, _ in stretches}) <= 20
    assert spare < 1.05 * counted


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), window=st.sampled_from([None, 1, 70, 200]))
def test_flex_looks_at_every_block_it_must_and_masks_no_block_it_need_not(seed, window):
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 9, rng.integers(1, 300))]
    for _ in range(rng.integers(0, 6)):
        trunk = rows[rng.integers(len(rows))]
        rows.append(np.concatenate([trunk[: rng.integers(len(trunk) + 1)], rng.integers(0, 9, rng.integers(1, 300))]))
    tree = PrefixTree.of(rows)
    mask = Flex(tree, CPU, window).mask
    size = bucket(len(tree))
    at = torch.arange(size)
    reads = mask.mask_mod(torch.zeros(()), torch.zeros(()), at[:, None], at[None])
    reach, place = torch.as_tensor(tree.reaches), torch.as_tensor(tree.positions)
    held = at[: len(tree)]
    expected = (held <= held[:, None]) & (held[:, None] < reach)
    if window is not None:
        expected &= place[:, None] - place < window
    assert torch.equal(reads[: len(tree), : len(tree)], expected)
    assert not reads[: len(tree), len(tree) :].any()
    assert reads.any(1).all()  # a row of padding that read nothing would be NaN
    tiles = reads.reshape(size // BLOCK, BLOCK, size // BLOCK, BLOCK)
    padding = np.zeros(size - len(tree), np.int64)
    some, whole = _blocks(
        np.concatenate([tree.reaches, np.arange(len(tree), size) + 1]), np.concatenate([tree.positions, padding]), window
    )
    assert not (tiles.any(3).any(1).numpy() & ~some).any()
    assert not (whole & ~tiles.all(3).all(1).numpy()).any()
    if window is None:
        assert (some == tiles.any(3).any(1).numpy()).all()
    held_by = mask.to_dense()[0, 0].bool().numpy()
    assert (held_by == some).all()


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_what_flex_gives_before_it_is_compiled(window, softcap, monkeypatch):
    monkeypatch.setattr(tree_flex, "_compiled", lambda: flex_attention)
    tree = PrefixTree.of([row[:250] for row in GPU_ROWS])
    leaves = [leaf.detach().float() for leaf in inputs(tree, width=16)]
    out = Flex(tree, CPU, window)(*leaves, 16**-0.5, softcap).transpose(1, 2)
    _, expected = reference(*leaves, tree, window=window, softcap=softcap)
    assert (out - expected).norm() < 1e-5 * expected.norm()


def test_few_sizes_are_compiled_and_little_is_padded():
    sizes = {bucket(n) for n in range(1, 100_000, 7)}
    assert len(sizes) < 40
    assert all(n <= bucket(n) < max(1.25 * n + BLOCK, 2 * BLOCK) for n in range(1, 100_000, 7))


@pytest.mark.parametrize("backend", ["cudnn", "varlen", "flex"])
def test_a_back_end_that_cannot_says_so(backend):
    tree = PrefixTree.of([np.arange(5)])
    with pytest.raises(LongreinError, match=f"{backend}' cannot compute attention of width 8 in torch.float64 on cpu"):
        TreeAttention(tree, CPU, backend)(*inputs(tree))


GPU_ROWS = [
    np.concatenate([np.arange(cut), 1000 * n + np.arange(70 + 50 * n)]) for n, cut in enumerate((300, 300, 190, 40, 0, 299))
]


@CUDA
@pytest.mark.parametrize("backend", ["varlen", "flex", "sdpa"])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("width", [64, 128])
def test_on_a_gpu_in_half_precision(backend, window, softcap, width):
    if backend == "varlen" and softcap:
        pytest.skip("flash attention has no bounded scores here")
    tree = PrefixTree.of(GPU_ROWS)
    leaves = inputs(tree, heads=8, groups=2, width=width, dtype=torch.bfloat16, device=torch.device("cuda"))
    out = TreeAttention(tree, torch.device("cuda"), backend)(*leaves, window=window, softcap=softcap)
    assert error(tree, out, leaves, window=window, softcap=softcap) < 0.02


@CUDA
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("window", [None, 64])
def test_on_a_gpu_by_cudnn(width, window):
    if not tree_calls.has_cudnn(torch.device("cuda")):
        pytest.skip("no cuDNN attention here")
    prompt = np.arange(1000)
    rows = [np.concatenate([prompt[:cut], 10_000 * n + np.arange(size)]) for n, (cut, size) in enumerate(
        [(1000, 2700), (1000, 3001), (700, 400), (700, 2600), (0, 5000)])]  # fmt: skip
    made = PrefixTree.aligned(rows)
    calls = tree_calls.Blocks(made, torch.device("cuda"))
    assert [type(call) for call in calls.own].count(Block) > 2
    assert any(isinstance(call, Block) for call in calls.shared)
    leaves = inputs(made, heads=8, groups=2, width=width, dtype=torch.bfloat16, device=torch.device("cuda"))
    out = TreeAttention(made, torch.device("cuda"), "cudnn")(*leaves, window=window)
    assert error(made, out, leaves, window=window) < 0.02


@CUDA
@pytest.mark.parametrize("cost", [0.0, 1.5, 1e9])
def test_on_a_gpu_however_varlen_splits_the_tree(cost, monkeypatch):
    monkeypatch.setattr(tree_calls, "JOIN_COST", cost)
    test_on_a_gpu_in_half_precision("varlen", None, None, 128)
