"""From rewards to per-token advantages: pure functions over a whole batch of rollouts.

Always true: an advantage is 0 wherever the agent mask is 0 and on every token of a failed rollout, and a failed rollout
changes no other's advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

AdvantageName = Literal["rewards", "group", "turn", "return", "leave_one_out"]
Array = NDArray[np.float32]

EPSILON = 1e-4
"""Added to a spread before dividing by it, as in TRL."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What advantages are made of; arrays of shape (rows, tokens) unless said otherwise."""

    agent_mask: NDArray[np.int64]
    rewards: Array
    row_rollout: NDArray[np.int64]
    """The rollout of each row; a rollout's rows are consecutive."""
    final_rewards: Array
    """One a rollout, NaN for a failed one."""
    group: NDArray[np.int64]
    """The task of each rollout."""
    discount: float = 1.0
    scale: Literal["group", "batch", "none"] = "group"
    """What a deviation is divided by, TRL's `scale_rewards`."""


class Turn(NamedTuple):
    """A run of agent tokens: one reply."""

    row: int
    start: int
    end: int


def advantages(name: AdvantageName, batch: Batch) -> Array:
    """The named advantages of a batch."""
    result = ADVANTAGES[name](batch)
    failed = np.isnan(batch.final_rewards)[batch.row_rollout]
    return np.where(batch.agent_mask.astype(bool) & ~failed[:, None], result, 0).astype(np.float32)


def rewards(batch: Batch) -> Array:
    """Per-token rewards as they are."""
    return batch.rewards


def group(batch: Batch) -> Array:
    """A rollout's reward against its task's other rollouts: less their mean, over their spread."""
    return _on_rollouts(batch, _normalised(batch.final_rewards, batch.group, batch.scale))


def leave_one_out(batch: Batch) -> Array:
    """A rollout's reward less the mean of the task's other rollouts."""
    values = batch.final_rewards.astype(np.float64)
    result = np.zeros_like(values)
    for members in _members(batch.group):
        scored = members[~np.isnan(values[members])]
        if len(scored) > 1:
            others = (values[scored].sum() - values[scored]) / (len(scored) - 1)
            result[scored] = values[scored] - others
    return _on_rollouts(batch, result)


def return_(batch: Batch) -> Array:
    """The discounted reward still to come, on every token of a turn."""
    return _on_turns(batch, {rollout: to_go for rollout, (_, to_go) in _returns(batch).items()})


def turn(batch: Batch) -> Array:
    """The k-th turns of a task's rollouts against each other, by the reward still to come."""
    to_go = {rollout: values for rollout, (_, values) in _returns(batch).items()}
    depth = max(map(len, to_go.values()), default=0)
    table = np.full((len(batch.final_rewards), depth), np.nan)
    for rollout, values in to_go.items():
        if not np.isnan(batch.final_rewards[rollout]):
            table[rollout, : len(values)] = values
    normal = np.stack([_normalised(table[:, k], batch.group, batch.scale) for k in range(depth)], 1) if depth else table
    return _on_turns(batch, {rollout: normal[rollout, : len(values)] for rollout, values in to_go.items()})


ADVANTAGES: dict[str, Callable[[Batch], Array]] = {
    "rewards": rewards,
    "group": group,
    "turn": turn,
    "return": return_,
    "leave_one_out": leave_one_out,
}


def flat_groups(final_rewards: Array, groups: NDArray[np.int64]) -> list[int]:
    """The groups whose scored rollouts all got the same reward: they teach nothing."""
    flat = []
    for members in _members(groups):
        values = final_rewards[members]
        values = values[~np.isnan(values)]
        if len(values) < 2 or np.ptp(values) <= 1e-8:
            flat.append(int(groups[members[0]]))
    return flat


def turns_of(agent_mask: NDArray[np.int64]) -> Iterator[Turn]:
    """The runs of agent tokens, row by row, left to right."""
    edges = np.diff(np.pad(agent_mask.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    starts, ends = np.argwhere(edges == 1), np.argwhere(edges == -1)
    for (row, start), (_, end) in zip(starts, ends, strict=True):
        yield Turn(int(row), int(start), int(end))


def _returns(batch: Batch) -> dict[int, tuple[list[Turn], NDArray[np.float64]]]:
    """Each rollout's turns and the discounted reward still to come at each."""
    turns: dict[int, list[Turn]] = {}
    for one in turns_of(batch.agent_mask):
        turns.setdefault(int(batch.row_rollout[one.row]), []).append(one)
    result = {}
    for rollout, of_rollout in turns.items():
        to_go = np.array([batch.rewards[one.row, one.start : one.end].sum(dtype=np.float64) for one in of_rollout])
        for k in range(len(to_go) - 2, -1, -1):
            to_go[k] += batch.discount * to_go[k + 1]
        result[rollout] = (of_rollout, to_go)
    return result


def _normalised(values: NDArray, groups: NDArray[np.int64], scale: str) -> NDArray[np.float64]:
    """Deviation from the group's mean, NaN values left out; 0 for them."""
    values = values.astype(np.float64)
    result = np.zeros_like(values)
    batch_spread = _spread(values[~np.isnan(values)])
    for members in _members(groups):
        scored = members[~np.isnan(values[members])]
        if not len(scored):
            continue
        deviation = values[scored] - values[scored].mean()
        spread = {"group": _spread(values[scored]), "batch": batch_spread, "none": None}[scale]
        result[scored] = deviation if spread is None else deviation / (spread + EPSILON)
    return result


def _spread(values: NDArray[np.float64]) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def _members(groups: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for name in np.unique(groups):
        yield np.flatnonzero(groups == name)


def _on_rollouts(batch: Batch, values: NDArray) -> Array:
    return np.broadcast_to(values[batch.row_rollout][:, None], batch.agent_mask.shape).astype(np.float32)


def _on_turns(batch: Batch, values: dict[int, NDArray[np.float64]]) -> Array:
    result = np.zeros(batch.agent_mask.shape, np.float32)
    for rollout, (of_rollout, _) in _returns(batch).items():
        for one, value in zip(of_rollout, values[rollout], strict=True):
            result[one.row, one.start : one.end] = value
    return result
