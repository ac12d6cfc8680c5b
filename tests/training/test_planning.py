"""Parts are planned by unique tokens: nothing is lost, nothing is split, nothing is over the budget that could be under it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from longrein.training import planning
from longrein.training.planning import balanced, default_budget, plan, split_by_rollout
from longrein.training.tree import unique_tokens

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8).map(np.array), min_size=1, max_size=12)


@given(ROWS, st.data(), st.booleans())
def test_every_rollout_is_in_one_part_within_the_budget(rows, data, share):
    owner = np.sort(data.draw(st.lists(st.integers(0, 5), min_size=len(rows), max_size=len(rows))))
    budget = data.draw(st.integers(1, 40))
    parts = plan(rows, owner, budget, share=share)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(rows)))
    homes = [set(owner[part].tolist()) for part in parts]
    assert sum(map(len, homes)) == len(set().union(*homes)), "a rollout's rows stay together"
    for part, home in zip(parts, homes, strict=True):
        held = [rows[row] for row in part]
        tokens = unique_tokens(held) if share else sum(map(len, held))
        assert tokens <= budget or len(home) == 1


def test_siblings_stay_together_where_they_fit():
    rng = np.random.default_rng(0)
    rows, owner = [], []
    for group in range(4):
        prompt = np.concatenate([[group], rng.integers(10, 99, 99)])
        rows += [np.concatenate([prompt, rng.integers(10, 99, 20)]) for _ in range(4)]
    order = rng.permutation(16)
    owner = np.arange(16)
    parts = plan([rows[one] for one in order], owner, 400)  # a group is 180, so two fit and a third does not
    assert [sorted({int(order[row]) // 4 for row in part}) for part in parts] == [[0, 1], [2, 3]]
    assert all(len(part) == 8 for part in parts)


@given(ROWS, st.integers(1, 4), st.data())
def test_ranks_get_as_many_rollouts_as_they_should(rows, ranks, data):
    group = np.sort(data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), min_size=ranks - 1, max_size=ranks - 1)))
    counts = np.diff([0, *cuts, len(rows)]).tolist()
    found = balanced(rows, np.arange(len(rows)), group, counts)
    assert np.bincount(found, minlength=ranks).tolist() == counts


def test_ranks_are_balanced_by_tokens_and_groups_stay_whole():
    lengths = [100, 90, 20, 10]
    rows = [np.full(length, number) for number, length in enumerate(lengths) for _ in range(2)]
    ranks = balanced(rows, np.arange(8), np.arange(8) // 2, [4, 4])
    assert ranks.tolist() in ([0, 0, 1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 1, 1])


def test_updates_are_dealt_at_random_and_siblings_are_neighbours_within_one():
    ids = torch.arange(8).repeat_interleave(4)[:, None].expand(32, 3).clone()
    batch = {
        "prompt_completion_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "row_rollout": torch.arange(32),
        "num_rollouts": 32,
    }
    generator = torch.Generator().manual_seed(0)
    one_update = split_by_rollout(batch, 4, generator)
    assert [sorted(set(part["prompt_completion_ids"][:, 0].tolist())) for part in one_update] == [
        [2 * n, 2 * n + 1] for n in range(4)
    ]
    several = split_by_rollout(batch, 4, generator, windows=4)
    assert any(len(set(part["prompt_completion_ids"][:, 0].tolist())) > 2 for part in several)


def test_the_default_budget_is_what_memory_holds(monkeypatch):
    monkeypatch.setattr(planning, "_free_bytes", lambda device: 2**33)
    config, cpu = SimpleNamespace(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24), torch.device("cpu")
    whole = default_budget(config, cpu, itemsize=4, trained=0, checkpointing=False)
    assert 1024 < whole < 2048
    assert default_budget(config, cpu, itemsize=2, trained=0, checkpointing=False) > 1.9 * whole
    assert default_budget(config, cpu, itemsize=4, trained=0, checkpointing=True) == 16_384
    assert default_budget(config, cpu, itemsize=4, trained=2**30, checkpointing=True) == 1024


def test_free_memory_is_read():
    assert planning._free_bytes(torch.device("cpu")) > 2**24
