"""Which rollouts are forwarded together: planned by the tokens that a prefix tree holds, not by rows.

Always true: a rollout's rows stay together; every rollout is in exactly one part; a part holds no more unique tokens than the
budget, unless one rollout alone does. The loss does not depend on any of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longrein.training.tree import Ints, common_prefix, unique_tokens

MOST_TOKENS = {"cpu": 16_384, "cuda": 131_072}
"""Beyond this a larger pass is no faster."""


def plan(rows: Sequence[Ints], owner: Ints, budget: int, *, share: bool = True) -> list[Ints]:
    """The rows of each part, given each row's tokens and its rollout.

    Rollouts are taken in the order of their tokens, so that those that share a prefix are neighbours. Where the budget ends
    a part, the cut is made where the least is shared, no earlier than in the middle of what would fit.
    """
    of_rollout: dict[int, list[int]] = {}
    for row, rollout in enumerate(owner.tolist()):
        of_rollout.setdefault(rollout, []).append(row)
    keys = [row.astype(np.int64).tobytes() for row in rows]
    rollouts = sorted(of_rollout.values(), key=lambda held: min(keys[row] for row in held))
    parts, first = [], 0
    while first < len(rollouts):
        held = _Held(share)
        shared = []  # by each rollout with those before it
        for rollout in rollouts[first:]:
            raw, before = sum(len(rows[row]) for row in rollout), held.tokens
            for row in rollout:
                held.add(rows[row], keys[row])
            shared.append(raw - (held.tokens - before))
            if held.tokens > budget and len(shared) > 1:
                fits = len(shared) - 1
                size = min(range(max(1, fits // 2), fits + 1), key=lambda size: (shared[size], -size))
                break
        else:
            size = len(shared)
        parts.append(rollouts[first : first + size])
        first += size
    return [np.array(sorted(row for held in part for row in held), np.int64) for part in parts]


class _Held:
    """Rows in the order of their bytes, and how many tokens their tree has."""

    def __init__(self, share: bool) -> None:
        self.tokens = 0
        self._share = share
        self._keys: list[bytes] = []

    def add(self, row: Ints, key: bytes) -> None:
        self.tokens += len(row)
        if self._share:
            at = bisect_left(self._keys, key)
            neighbours = self._keys[max(0, at - 1) : at + 1]
            self.tokens -= max((common_prefix(row, np.frombuffer(other, np.int64)) for other in neighbours), default=0)
            self._keys.insert(at, key)


def balanced(rows: Sequence[Ints], owner: Ints, group: Ints, counts: Sequence[int]) -> Ints:
    """The rank of each rollout: `counts[r]` rollouts for rank r, a task's rollouts together where they fit, and about as many
    unique tokens for each."""
    ranks = np.full(len(group), -1, np.int64)
    if len(counts) == 1:
        return np.zeros_like(ranks)
    members = [np.flatnonzero(group == name) for name in np.unique(group)]
    tokens = [unique_tokens([rows[row] for row in np.flatnonzero(np.isin(owner, chosen)).tolist()]) for chosen in members]
    room, load = list(counts), [0.0] * len(counts)
    for one in sorted(range(len(members)), key=lambda index: -tokens[index]):
        waiting = members[one]
        while len(waiting):
            able = [rank for rank in range(len(room)) if room[rank] >= len(waiting)]
            # one that fits nowhere whole goes where the most of it fits
            rank = (
                min(able, key=load.__getitem__)
                if able
                else max(range(len(room)), key=lambda rank: (room[rank], -load[rank]))
            )
            taken, waiting = waiting[: room[rank]], waiting[room[rank] :]
            ranks[taken] = rank
            room[rank] -= len(taken)
            load[rank] += tokens[one] * len(taken) / len(members[one])
    return ranks


def split_by_rollout(batch: dict[str, Any], parts: int, order: torch.Generator, *, windows: int = 1) -> list[dict[str, Any]]:
    """A generation batch in `parts` micro-batches of whole rollouts; padding that a part does not need goes.

    The rollouts are dealt to `windows` updates at random; within an update, those that share a prefix are neighbours.
    """
    count = batch["num_rollouts"]
    device = batch["row_rollout"].device
    ids, owner = batch["prompt_completion_ids"].cpu().numpy(), batch["row_rollout"].cpu().numpy()
    first = {int(rollout): ids[row].astype(np.int64).tobytes() for row, rollout in reversed(list(enumerate(owner)))}
    dealt = torch.randperm(count, generator=order)
    by_window = [sorted(window.tolist(), key=lambda one: first.get(one, b"")) for window in dealt.chunk(windows)]
    arranged = torch.tensor([one for window in by_window for one in window], device=device)
    result = []
    for chosen in arranged.chunk(parts):
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


def default_budget(config: Any, device: torch.device, *, itemsize: int, trained: int, checkpointing: bool) -> int:
    """The tokens of one training pass that half of the device's free memory holds, by the model's shape, once a gradient and
    two moments of the `trained` parameters have their place.

    A token keeps about 16 hidden and 4 intermediate vectors a layer; with gradient checkpointing one hidden vector a layer, and
    the rest for a single layer. The head adds three hidden vectors in float32.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    layer = (16 * hidden + 4 * (getattr(config, "intermediate_size", None) or 4 * hidden)) * itemsize
    kept = layers * hidden * itemsize + layer if checkpointing else layers * layer
    fits = (_free_bytes(device) - 12 * trained) // 2 // (kept + 12 * hidden)
    return int(max(1024, min(fits, MOST_TOKENS.get(device.type, MOST_TOKENS["cuda"]))))


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        with open("/proc/meminfo") as file:
            known = dict(line.split(":", 1) for line in file)
        return int(known["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return 2**33
