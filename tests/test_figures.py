"""Figures by hand, and what an interval has to cover."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from longrein.contract import LongreinError
from longrein.figures import Scored, Task, compared, figures, mean, pass_at_k, success_rate, wilson


def task(name: str, *rewards: float | None) -> Task:
    return Task(name, "Env", [Scored(r, r is not None and r >= 1, None if r is not None else "broke") for r in rewards])


def test_pass_at_k_is_the_share_of_draws_that_hold_a_solved_rollout() -> None:
    for count, solved in itertools.product(range(1, 7), range(7)):
        for k in range(1, count + 1) if solved <= count else ():
            draws = list(itertools.combinations([True] * solved + [False] * (count - solved), k))
            assert pass_at_k(count, solved, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    with pytest.raises(LongreinError, match="pass@3 cannot be told from 2"):
        pass_at_k(2, 1, 3)


def test_wilson_stays_within_0_and_1_and_covers() -> None:
    assert wilson(0.0, 20) == (0.0, pytest.approx(0.1611, abs=1e-3))
    assert wilson(1.0, 20)[1] == 1.0
    rng = np.random.default_rng(1)
    seen = rng.binomial(60, 0.3, 2000) / 60
    covered = np.mean([low <= 0.3 <= high for low, high in (wilson(rate, 60) for rate in seen)])
    assert 0.93 < covered < 0.97


def test_rollouts_of_one_task_do_not_count_as_so_many_tasks() -> None:
    alike = success_rate([[1.0] * 8, [0.0] * 8] * 5)
    assert (alike.low, alike.high) == pytest.approx(wilson(0.5, 10))
    apart = success_rate([[1.0, 0.0] * 4] * 10)
    assert apart.low == pytest.approx(wilson(0.5, 10)[0]), "no spread seen says nothing of the tasks not seen"
    mixed = success_rate([[1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]] * 5)
    assert wilson(0.5, 20)[0] < mixed.low <= wilson(0.5, 80)[0]


def test_the_bootstrap_covers_a_mean_and_is_the_same_each_time() -> None:
    rng = np.random.default_rng(2)
    estimates = [mean(rng.normal(1.0, 2.0, 40).tolist()) for _ in range(200)]
    covered = np.mean([one.low <= 1.0 <= one.high for one in estimates if one.low is not None and one.high is not None])
    assert 0.88 < covered < 0.99
    assert mean([1.0, 2.0, 4.0]) == mean([1.0, 2.0, 4.0])
    assert mean([1.0]).low is None


def test_failed_rollouts_are_counted_and_in_no_figure() -> None:
    told = figures([task("a", 1.0, None), task("b", 0.0, 0.0), task("c", None, None)])
    assert (told["tasks"], told["rollouts"], told["failed"], told["first_failure"]) == (3, 6, 3, "broke")
    assert told["success"]["value"] == 0.5
    assert list(told["pass_at_k"]) == ["1"], "one task has a single scored rollout"
    assert "success" not in figures([task("c", None)])


def test_two_runs_are_compared_by_task() -> None:
    a = [task(str(n), 0.0) for n in range(20)] + [task("only a", 1.0)]
    b = [task(str(n), float(n % 4 != 0)) for n in range(20)] + [task("only b", 0.0), task("0b", None)]
    told = compared(a, b)
    assert (told["tasks"], told["only_a"], told["only_b"]) == (20, 1, 1)
    success = told["figures"][0]
    assert (success["name"], success["a"], success["b"], success["better"], success["worse"]) == ("success", 0, 0.75, 15, 0)
    assert success["difference"]["low"] > 0.5
    assert success["p_value"] < 0.01
    assert compared(a, a)["figures"][1]["p_value"] == 1.0
    with pytest.raises(LongreinError, match="no task in common"):
        compared(a, [task("other", 1.0)])
