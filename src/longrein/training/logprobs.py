"""Log-probabilities of whole trajectories: one function, `(model, rows) -> logps`, for every pass that needs them.

Always true: index t of a result speaks of token t; index 0 is 0, and so is every token that is not scored. Only scored
tokens carry a gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Logps(NamedTuple):
    logps: Tensor
    entropies: Tensor | None
    aux_loss: Tensor | None
    """A mixture of experts' load-balancing loss, when asked for."""


def trajectory_logps(
    model: nn.Module,
    token_ids: Tensor,
    attention_mask: Tensor,
    scored: Tensor,
    *,
    batch_size: int | None = None,
    entropy: bool = False,
    aux_loss: bool = False,
) -> Logps:
    """Log-probabilities (and entropies) of the scored tokens of right-padded rows, `batch_size` rows a forward.

    The model carries TRL's fused head (`add_fused_lm_head`), which knows the temperature.
    """
    size = batch_size or len(token_ids)
    labels = token_ids.masked_fill(scored == 0, -100)
    labels[:, 0] = -100
    parts = []
    for rows in torch.arange(len(token_ids)).split(size):
        chosen = slice(int(rows[0]), int(rows[-1]) + 1)
        width = int(attention_mask[chosen].sum(1).max().clamp(min=2))  # columns that are padding in all of them
        extra = {"output_router_logits": True} if aux_loss else {}
        output = model(
            input_ids=token_ids[chosen, :width],
            attention_mask=attention_mask[chosen, :width],
            labels=labels[chosen, :width],
            fused_lm_head=True,
            **extra,
        )
        parts.append((output.log_probs, output.entropy if entropy else None, output.aux_loss if aux_loss else None))
    total = token_ids.shape[1]
    return Logps(
        torch.cat([_aligned(logps, total) for logps, _, _ in parts]),
        torch.cat([_aligned(values, total) for _, values, _ in parts]) if entropy else None,
        torch.stack([loss for _, _, loss in parts]).mean() if aux_loss else None,
    )


def _aligned(values: Tensor, total: int) -> Tensor:
    """Values of tokens 1..w-1 as values of tokens 0..total-1."""
    return nn.functional.pad(values, (1, total - 1 - values.shape[1]))


class AgentTokens:
    """Where the agent tokens of each rollout stand in the rows, so that a rollout is one row again, however it forked.

    `gather` takes (rows, tokens) to (rollouts, agent tokens): a rollout's agent tokens, row after row, padded with 0. In
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
        self.mask = self.gather(torch.ones_like(agent_mask))

    def gather(self, values: Tensor) -> Tensor:
        return values.new_zeros(self._shape).index_put(self._to, values[self._from])


def split_by_rollout(batch: dict[str, Any], parts: int, order: torch.Generator) -> list[dict[str, Any]]:
    """A generation batch in `parts` micro-batches of whole rollouts, shuffled; padding that a part does not need goes."""
    count = batch["num_rollouts"]
    device = batch["row_rollout"].device
    result = []
    for chosen in torch.randperm(count, generator=order).to(device).chunk(parts):
        place = torch.full((count,), -1, device=device, dtype=torch.long)
        place[chosen] = torch.arange(len(chosen), device=device)
        rows = torch.nonzero(place[batch["row_rollout"]] >= 0)[:, 0]
        width = max(2, int(batch["attention_mask"][rows].sum(1).max()))
        part = {
            name: value[rows, :width] if isinstance(value, Tensor) and value.dim() == 2 else value
            for name, value in batch.items()
        }
        part["row_rollout"] = place[batch["row_rollout"][rows]]
        part["num_rollouts"] = len(chosen)
        result.append(part)
    return result
