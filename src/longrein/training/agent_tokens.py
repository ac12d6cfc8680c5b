"""Where the agent tokens of each rollout stand in the rows, so that a rollout is one row again, however it forked."""

from __future__ import annotations

import torch
from torch import Tensor


class AgentTokens:
    """`gather` takes (rows, tokens) to (rollouts, agent tokens): a rollout's agent tokens, row after row, padded with 0. In
    that layout TRL's loss sees one row a rollout, and its means and counts are over rollouts.
    """

    def __init__(self, agent_mask: Tensor, row_rollout: Tensor, rollouts: int) -> None:
        rows, columns = agent_mask.nonzero(as_tuple=True)
        owner = row_rollout[rows]
        counts = torch.bincount(owner, minlength=rollouts)
        starts = counts.cumsum(0) - counts
        order = torch.argsort(owner, stable=True)
        rows, columns, owner = rows[order], columns[order], owner[order]
        place = torch.arange(len(owner), device=owner.device) - starts[owner]
        self._from, self._to = (rows, columns), (owner, place)
        self._shape = (rollouts, max(1, int(counts.max())) if rollouts else 1)
        self.counts = counts
        """The agent tokens of each rollout."""
        self.mask = self.gather(torch.ones_like(agent_mask))

    def gather(self, values: Tensor) -> Tensor:
        return values.new_zeros(self._shape).index_put(self._to, values[self._from])
