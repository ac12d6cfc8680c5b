"""The rows a training step sees, made from a seed: what agents do, in sizes of our choice.

Always true: the same name, size and seed give the same rows; a token of a row is sampled (1 in its mask) in one row only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Row(NamedTuple):
    ids: Ints
    mask: Ints
    """1 where the agent wrote the token."""
    rollout: int


class Size(NamedTuple):
    """Lengths in tokens: means of what is drawn unevenly."""

    rollouts: int
    prompt: int
    turns: int
    reply: int
    observation: int


CPU = {
    "group": Size(16, 300, 2, 30, 110),
    "long_prompt": Size(8, 2000, 2, 30, 110),
    "harness": Size(4, 300, 6, 30, 110),
    "per_turn": Size(4, 300, 7, 30, 110),
    "none": Size(16, 100, 2, 30, 110),
}
GPU = {
    "group": Size(16, 2000, 8, 250, 750),
    "harness": Size(4, 4000, 13, 250, 750),
    "per_turn": Size(4, 4000, 8, 250, 750),
    "none": Size(16, 2000, 8, 250, 750),
}
"""Rows of 4,000 to 20,000 tokens."""
SIZES = {"cpu": CPU, "cuda": GPU}
"""A fifth to a quarter of what follows the prompt is the agent's, as in programs that read files and the output of commands."""


class Maker:
    def __init__(self, size: Size, vocabulary: int, seed: int) -> None:
        self.size, self.vocabulary = size, vocabulary
        self.rng = np.random.default_rng(seed)

    def tokens(self, count: int) -> Ints:
        return self.rng.integers(10, self.vocabulary, max(1, count))

    def uneven(self, mean: int) -> int:
        """A length whose logarithm is normal: most are short, some are several times the mean."""
        return max(2, int(mean * self.rng.lognormal(-0.25, 0.7)))

    def turns(self) -> int:
        return int(self.rng.integers(max(1, self.size.turns // 2), 2 * self.size.turns))

    def turn(self, so_far: Row, *, last: bool = False) -> Row:
        reply, observation = self.tokens(self.uneven(self.size.reply)), self.tokens(self.uneven(self.size.observation))
        parts = [reply] if last else [reply, observation]
        mask = [np.ones(len(reply), np.int64)] + ([] if last else [np.zeros(len(observation), np.int64)])
        return Row(np.concatenate([so_far.ids, *parts]), np.concatenate([so_far.mask, *mask]), so_far.rollout)

    def opening(self, prompt: Ints, rollout: int) -> Row:
        return Row(prompt, np.zeros(len(prompt), np.int64), rollout)


def group(make: Maker) -> list[Row]:
    """The rollouts of one task: a prompt they share, then each its own turns."""
    prompt = make.tokens(make.size.prompt)
    return [_conversation(make, make.opening(prompt, rollout)) for rollout in range(make.size.rollouts)]


def none(make: Maker) -> list[Row]:
    """Rollouts that share nothing."""
    return [
        _conversation(make, make.opening(make.tokens(make.uneven(make.size.prompt)), rollout))
        for rollout in range(make.size.rollouts)
    ]


def per_turn(make: Maker) -> list[Row]:
    """One row a call: each repeats the conversation so far and trains its own reply."""
    prompt = make.tokens(make.size.prompt)
    rows = []
    for rollout in range(make.size.rollouts):
        so_far = make.opening(prompt, rollout)
        for _ in range(make.turns()):
            reply = make.turn(so_far, last=True)
            rows.append(reply)
            observed = make.tokens(make.uneven(make.size.observation))
            so_far = make.opening(np.concatenate([reply.ids, observed]), rollout)
    return rows


def harness(make: Maker) -> list[Row]:
    """Programs that own their loop: a system prompt in common, histories that fork (a retried call, a sub-agent that starts
    from the middle), and one compaction, after which a summary and the last turns go on as a new history."""
    system = make.tokens(make.size.prompt)
    rows = []
    for rollout in range(make.size.rollouts):
        trunk = make.opening(system, rollout)
        trained = 0  # tokens of the trunk that a row has trained
        for turn in range(make.size.turns):
            before, trunk = trunk, make.turn(trunk)
            if turn % 3 == 1:  # a side branch from before this turn
                branch = make.turn(make.turn(before._replace(mask=np.zeros_like(before.mask))), last=True)
                rows.append(branch)
            if turn == make.size.turns // 2:  # compaction
                rows.append(_from(trunk, trained))
                kept = trunk.ids[-make.size.reply :]
                trunk = make.opening(np.concatenate([system, make.tokens(make.size.reply), kept]), rollout)
                trained = len(trunk.ids)
        rows.append(_from(make.turn(trunk, last=True), trained))
    return rows


def _from(row: Row, first: int) -> Row:
    return row._replace(mask=row.mask * (np.arange(len(row.ids)) >= first))


def _conversation(make: Maker, row: Row) -> Row:
    turns = make.turns()
    for turn in range(turns):
        row = make.turn(row, last=turn == turns - 1)
    return row


WORKLOADS: dict[str, Callable[[Maker], list[Row]]] = {
    "group": group,
    "long_prompt": group,
    "harness": harness,
    "per_turn": per_turn,
    "none": none,
}


def rows_of(name: str, device: str, vocabulary: int, *, seed: int = 0, **sizes: int) -> list[Row]:
    """The rows of a workload, of other sizes where they are given; on a GPU none is longer than 20,000 tokens."""
    size = SIZES[device][name]._replace(**sizes)
    made = WORKLOADS[name](Maker(size, vocabulary, seed))
    return [Row(row.ids[:20_000], row.mask[:20_000], row.rollout) for row in made]
