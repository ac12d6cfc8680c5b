"""Advantages by name: by hand, against TRL's formula, and what failed rollouts must not do."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from trl.trainer.utils import nanstd

from longrein.training.advantages import ADVANTAGES, Batch, advantages, flat_groups, turns_of

NAN = float("nan")


def batch(masks: list[list[int]], rewards: list[list[float]], finals: list[float], **changes: Any) -> Batch:
    """One row a rollout, all of one group, unless said otherwise."""
    count = len(masks)
    given = {
        "agent_mask": np.array(masks),
        "rewards": np.array(rewards, np.float32),
        "row_rollout": np.arange(count),
        "final_rewards": np.array(finals, np.float32),
        "group": np.zeros(len(finals), np.int64),
    }
    return Batch(**{**given, **changes})


def flat(finals: list[float], groups: list[int], scale: str = "group") -> Batch:
    """Rollouts of one token each."""
    mask = [[0, 1]] * len(finals)
    return batch(mask, [[0, value] for value in finals], finals, group=np.array(groups), scale=scale)  # type: ignore[arg-type]


TWO_TURNS = batch(
    masks=[[0, 1, 1, 0, 1], [0, 1, 0, 1, 1]],
    rewards=[[0, 0.5, 0.5, 0, 3.0], [0, 2.0, 0, 0, 1.0]],
    finals=[4.0, 3.0],
)


def test_rewards_are_as_they_are():
    assert advantages("rewards", TWO_TURNS).tolist() == [[0, 0.5, 0.5, 0, 3], [0, 2, 0, 0, 1]]


def test_group_by_hand():
    spread = np.sqrt(0.5) + 1e-4
    expected = [[0, 0.5 / spread, 0.5 / spread, 0, 0.5 / spread], [0, -0.5 / spread, 0, -0.5 / spread, -0.5 / spread]]
    assert advantages("group", TWO_TURNS) == pytest.approx(np.array(expected), abs=1e-5)


def test_leave_one_out_by_hand():
    result = advantages("leave_one_out", flat([1, 2, 6, NAN], [0, 0, 0, 0]))
    assert result[:, 1].tolist() == [1 - 4, 2 - 3.5, 6 - 1.5, 0]


def test_return_is_the_reward_still_to_come():
    halved = dataclasses.replace(TWO_TURNS, discount=0.5)
    assert advantages("return", TWO_TURNS).tolist() == [[0, 4, 4, 0, 3], [0, 3, 0, 1, 1]]
    assert advantages("return", halved).tolist() == [[0, 2.5, 2.5, 0, 3], [0, 2.5, 0, 1, 1]]


def test_return_runs_through_every_later_turn():
    three = batch([[0, 1, 0, 1, 0, 1]], [[0, 1, 0, 2, 0, 4]], [7], discount=0.5)
    assert advantages("return", three).tolist() == [[0, 3, 0, 4, 0, 4]]


def test_turn_compares_the_kth_turns_by_the_reward_still_to_come():
    first, second = np.array([4.0, 3.0]), np.array([3.0, 1.0])
    a, b = ((values - values.mean()) / (values.std(ddof=1) + 1e-4) for values in (first, second))
    expected = [[0, a[0], a[0], 0, b[0]], [0, a[1], 0, b[1], b[1]]]
    assert advantages("turn", TWO_TURNS) == pytest.approx(np.array(expected), abs=1e-5)


def test_a_turn_that_only_one_rollout_reached_has_nothing_to_be_compared_with():
    longer = batch([[0, 1, 0, 1], [0, 1, 0, 0]], [[0, 1, 0, 5], [0, 2, 0, 0]], [6, 2])
    result = advantages("turn", longer)
    assert result[0, 3] == 0
    assert result[0, 1] == pytest.approx(-result[1, 1])
    assert result[0, 1] > 0


def test_turns_of_a_forked_rollout_follow_its_rows():
    forked = batch(
        masks=[[0, 1, 0, 0], [0, 0, 0, 1], [0, 1, 0, 1]],
        rewards=[[0, 1, 0, 0], [0, 0, 0, 2], [0, 5, 0, 7]],
        finals=[3, 12],
        row_rollout=np.array([0, 0, 1]),
    )
    assert advantages("return", forked).tolist() == [[0, 3, 0, 0], [0, 0, 0, 2], [0, 12, 0, 7]]
    assert (advantages("group", forked)[:2].sum(1) < 0).all()


def test_turns_are_runs_of_agent_tokens():
    assert list(turns_of(np.array([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]))) == [
        (0, 1, 3), (0, 4, 5), (2, 1, 5)
    ]  # fmt: skip


def test_flat_groups():
    finals = np.array([1, 1, 0, 1, NAN, 2, NAN, NAN], np.float32)
    assert flat_groups(finals, np.array([0, 0, 1, 1, 2, 2, 3, 3])) == [0, 2, 3]


values = st.floats(-10, 10, width=32)
groups = st.integers(2, 5).flatmap(
    lambda size: st.lists(st.lists(values, min_size=size, max_size=size), min_size=1, max_size=4)
)


@given(groups, st.sampled_from(["group", "batch", "none"]))
def test_group_is_trls_formula(table: list[list[float]], scale: str):
    rewards = torch.tensor(table, dtype=torch.float64).flatten()
    size = len(table[0])
    means = rewards.view(-1, size).mean(1).repeat_interleave(size)
    expected = rewards - means
    if scale == "group":
        expected = expected / (nanstd(rewards.view(-1, size), dim=1).repeat_interleave(size) + 1e-4)
    elif scale == "batch":
        expected = expected / (nanstd(rewards) + 1e-4)
    result = advantages("group", flat(rewards.tolist(), np.repeat(range(len(table)), size).tolist(), scale))
    np.testing.assert_allclose(result[:, 1], expected.numpy(), rtol=1e-4, atol=1e-4)


def test_group_is_trls_formula_where_rollouts_failed():
    rewards = torch.tensor([1.0, NAN, 4.0, 2.0], dtype=torch.float64)
    expected = (rewards - rewards.nanmean()) / (nanstd(rewards) + 1e-4)
    result = advantages("group", flat(rewards.tolist(), [0, 0, 0, 0]))
    np.testing.assert_allclose(result[:, 1], expected.nan_to_num().numpy(), rtol=1e-5)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    rollouts, size, width = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(2, 7))
    count = rollouts * size
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    owner = np.repeat(np.arange(count), rng.integers(1, 3, count))
    mask = rng.integers(0, 2, (len(owner), width))
    mask[:, 0] = 0
    rewards = (rng.normal(size=mask.shape) * mask).astype(np.float32)
    finals = np.bincount(owner, rewards.sum(1), count).astype(np.float32)
    scale = draw(st.sampled_from(["group", "batch", "none"]))
    return Batch(mask, rewards, owner, finals, np.arange(count) // size, draw(st.sampled_from([1.0, 0.5])), scale)  # type: ignore[arg-type]


@given(batches(), st.sampled_from(sorted(ADVANTAGES)))
def test_advantages_are_finite_and_on_agent_tokens_alone(one: Batch, name: Any):
    result = advantages(name, one)
    assert result.shape == one.agent_mask.shape
    assert result.dtype == np.float32
    assert np.isfinite(result).all()
    assert (result[one.agent_mask == 0] == 0).all()


@given(batches(), st.sampled_from(sorted(ADVANTAGES)), st.randoms())
def test_a_failed_rollout_gets_nothing_and_is_not_there_for_the_others(one: Batch, name: Any, random: Any):
    failed = random.randrange(len(one.final_rewards))
    finals = one.final_rewards.copy()
    finals[failed] = NAN
    rewards = one.rewards.copy()
    rewards[one.row_rollout == failed] = random.choice([NAN, 0.0, 5.0])
    result = advantages(name, dataclasses.replace(one, final_rewards=finals, rewards=rewards))
    assert (result[one.row_rollout == failed] == 0).all()

    kept = np.flatnonzero(np.arange(len(finals)) != failed)
    rows = one.row_rollout != failed
    without = dataclasses.replace(
        one,
        agent_mask=one.agent_mask[rows],
        rewards=one.rewards[rows],
        row_rollout=np.searchsorted(kept, one.row_rollout[rows]),
        final_rewards=one.final_rewards[kept],
        group=one.group[kept],
    )
    np.testing.assert_array_equal(result[rows], advantages(name, without))


@given(batches())
def test_group_sums_to_zero_over_a_task(one: Batch):
    unscaled = dataclasses.replace(one, agent_mask=np.ones_like(one.agent_mask), scale="none")
    first_rows = np.unique(one.row_rollout, return_index=True)[1]
    per_rollout = advantages("group", unscaled)[first_rows, 0]
    for name in np.unique(one.group):
        assert per_rollout[one.group == name].sum() == pytest.approx(0, abs=1e-4)
