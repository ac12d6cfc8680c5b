"""What a set of scored rollouts says: rates with confidence intervals, pass@k, and two runs compared task by task.

Always true: the tasks are the sample. Rollouts of one task are alike, so an interval never counts them as so many tasks; the same
rollouts give the same figures, resampling included. Rollouts that failed on our side are in no figure but their own count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longrein.contract import LongreinError

Z = 1.959964
"""Of 95%."""
DRAWS = 4000
WILSON = "Wilson, 95%; rollouts of one task count for as many as they are worth"
BOOTSTRAP = f"bootstrap over tasks, 95%, {DRAWS} draws"


@dataclass(frozen=True, slots=True)
class Estimate:
    value: float
    low: float | None
    """None where one task tells nothing of others."""
    high: float | None
    method: str


@dataclass(frozen=True, slots=True)
class Scored:
    """One rollout's outcome."""

    reward: float | None
    """None where our side broke."""
    success: bool
    failed: str | None = None
    limit: str | None = None
    turns: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Task:
    id: str
    """The same in every run that plays it."""
    env: str
    rollouts: list[Scored] = field(default_factory=list)

    @property
    def scored(self) -> list[Scored]:
        return [one for one in self.rollouts if one.reward is not None]


def figures(tasks: Sequence[Task]) -> dict[str, Any]:
    """All the figures of some tasks, as JSON takes them."""
    played = [one for task in tasks for one in task.rollouts]
    kept = [task for task in tasks if task.scored]
    causes = [one.failed for one in played if one.failed]
    told: dict[str, Any] = {"tasks": len(tasks), "rollouts": len(played), "failed": len(causes)}
    told["first_failure"] = causes[0] if causes else None
    if not kept:
        return told
    solved = [[float(one.success) for one in task.scored] for task in kept]
    rewards = [float(np.mean([one.reward for one in task.scored if one.reward is not None])) for task in kept]
    scored = [one for task in kept for one in task.scored]
    told["success"] = asdict(success_rate(solved))
    told["reward"] = asdict(mean(rewards))
    told["pass_at_k"] = {str(k): asdict(estimate) for k, estimate in pass_at_ks(solved).items()}
    told["turns"] = float(np.mean([one.turns for one in scored]))
    told["tokens"] = float(np.mean([one.tokens for one in scored]))
    told["limited"] = sum(one.limit is not None for one in scored)
    return told


def success_rate(solved: Sequence[Sequence[float]]) -> Estimate:
    """The share of solved rollouts, each task weighing the same. The interval is Wilson's, on as many rollouts as those of
    alike tasks are worth: between the number of tasks and the number of rollouts."""
    rates = np.array([np.mean(task) for task in solved])
    rate, tasks, rollouts = float(rates.mean()), len(rates), sum(map(len, solved))
    worth = float(tasks)
    if tasks > 1 and (spread := float(rates.var(ddof=1) / tasks)) > 0:
        worth = min(max(rate * (1 - rate) / spread, tasks), rollouts)
    low, high = wilson(rate, worth)
    return Estimate(rate, low, high, WILSON)


def wilson(rate: float, count: float) -> tuple[float, float]:
    """The 95% interval of a rate seen in `count` tries.

    >>> [round(end, 3) for end in wilson(0.5, 10)]
    [0.237, 0.763]
    """
    center = (rate + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z * math.sqrt(rate * (1 - rate) / count + Z * Z / (4 * count * count)) / (1 + Z * Z / count)
    return max(0.0, center - half), min(1.0, center + half)


def mean(values: Sequence[float]) -> Estimate:
    """The mean over tasks, with the percentiles of the means of tasks drawn again."""
    array = np.array(values, float)
    low, high = np.percentile(_resampled(array), [2.5, 97.5]) if len(array) > 1 else (math.nan, math.nan)
    return Estimate(float(array.mean()), _or_none(low), _or_none(high), BOOTSTRAP)


def pass_at_k(count: int, solved: int, k: int) -> float:
    """The chance that one of `k` rollouts drawn from `count`, of which `solved` did it, did it: unbiased.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 1 <= k <= count:
        raise LongreinError(f"pass@{k} cannot be told from {count} rollouts of a task")
    return 1.0 - math.comb(count - solved, k) / math.comb(count, k)


def pass_at_ks(solved: Sequence[Sequence[float]]) -> dict[int, Estimate]:
    """pass@1, 2, 4, ... and of as many as every task has."""
    least = min(len(task) for task in solved)
    ks = sorted({2**power for power in range(least.bit_length())} | {least})
    return {k: mean([pass_at_k(len(task), round(sum(task)), k) for task in solved]) for k in ks}


@dataclass(frozen=True, slots=True)
class Difference:
    """B less A over the tasks that both played."""

    name: str
    tasks: int
    a: float
    b: float
    difference: Estimate
    p_value: float
    """How often the difference would be this large if the labels A and B meant nothing: a sign-flip test over tasks."""
    better: int
    worse: int


def compared(a: Iterable[Task], b: Iterable[Task]) -> dict[str, Any]:
    """Two runs, paired by task."""
    first, second = ({task.id: task for task in tasks if task.scored} for tasks in (a, b))
    both = [name for name in first if name in second]
    if not both:
        raise LongreinError(
            "the two runs have no task in common; a comparison needs the same tasks (the same env, tasks and seed)"
        )
    rows = []
    for name in ("success", "reward"):
        pairs = np.array([[_score(run[task], name) for task in both] for run in (first, second)])
        rows.append(asdict(_difference(name, pairs[0], pairs[1])))
    return {"tasks": len(both), "only_a": len(first) - len(both), "only_b": len(second) - len(both), "figures": rows}


def _difference(name: str, a: NDArray[np.float64], b: NDArray[np.float64]) -> Difference:
    change = b - a
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (DRAWS, len(change)))
    as_large = np.abs((signs * change).mean(1)) >= abs(change.mean()) - 1e-12
    return Difference(
        name=name,
        tasks=len(change),
        a=float(a.mean()),
        b=float(b.mean()),
        difference=mean(change.tolist()),
        p_value=float((as_large.sum() + 1) / (DRAWS + 1)),
        better=int((change > 0).sum()),
        worse=int((change < 0).sum()),
    )


def _score(task: Task, name: str) -> float:
    return float(np.mean([float(getattr(one, name)) for one in task.scored]))


def _resampled(values: NDArray[np.float64]) -> NDArray[np.float64]:
    rng = np.random.default_rng(0)
    rounds = [rng.choice(values, (100, len(values))).mean(1) for _ in range(DRAWS // 100)]
    return np.concatenate(rounds)


def _or_none(value: float) -> Any:
    """JSON has no NaN."""
    return None if math.isnan(value) else float(value)


def task_from_json(value: Mapping[str, Any]) -> Task:
    return Task(value["id"], value["env"], [Scored(**one) for one in value["rollouts"]])
