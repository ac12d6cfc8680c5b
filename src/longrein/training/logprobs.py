"""Log-probabilities of whole trajectories: one function, `(model, rows) -> logps`, for every pass that needs them.

Always true: index t of a result speaks of token t; index 0 is 0, and so is every token that is not scored. Only scored
tokens carry a gradient. Packed or padded, the values and gradients are the same.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from longrein.training.head import Head, Scores, Slope
from longrein.training.packed import packed_hidden
from longrein.training.tree import Ints, PrefixTree


class Logps(NamedTuple):
    logps: Tensor
    entropies: Tensor | None
    aux_loss: Tensor | None
    """A mixture of experts' load-balancing loss, when asked for."""


@dataclass(frozen=True)
class Packing:
    """How packed passes are run."""

    share: bool = True
    """Forward a prefix that rows share once; else rows only stand one after the other, without padding."""
    temperature: float = 1.0
    float32_head: bool = False
    backend: str = "auto"
    aligned: bool = False
    """Let rows part at round places, which a GPU's fastest kernels need (`PrefixTree.aligned`)."""
    compiled: bool | None = None
    """Compile what a layer does around its attention; None: on a GPU."""


class PackedRows:
    """Rows as one packed sequence, and the pairs of it that are scored: a token of the sequence and the one it predicts.

    What no scored token reads is not forwarded, and a pair that several rows hold is scored once.
    """

    def __init__(self, ids: Ints, scored: NDArray[np.bool_], *, share: bool = True, aligned: bool = False) -> None:
        self.rows, self.columns = (index[scored.nonzero()[1] > 0] for index in scored.nonzero())
        """Where the scored tokens stand, row after row."""
        read = np.zeros(len(ids), np.int64)
        np.maximum.at(read, self.rows, self.columns)
        held = np.flatnonzero(read)
        # a forward of nothing has no graph: where nothing is scored, one token is forwarded and adds 0
        make = PrefixTree.aligned if aligned else PrefixTree.of
        self.tree = make([ids[row, : read[row]] for row in held] if len(held) else [ids[0, :1]], share=share)
        starts = np.zeros(len(ids), np.int64)
        starts[held] = np.cumsum([len(place) for place in self.tree.places[: len(held)]]) - read[held]
        places = np.concatenate(self.tree.places) if len(held) else np.empty(0, np.int64)
        pairs = places[starts[self.rows] + self.columns - 1] << 32 | ids[self.rows, self.columns]
        unique, self.pair = np.unique(pairs, return_inverse=True)
        """The pair of each scored token."""
        self.index, self.targets = unique >> 32, unique & 0xFFFFFFFF

    def spread(self, values: Tensor, shape: tuple[int, int]) -> Tensor:
        """Values of pairs as values of tokens, (rows, tokens), 0 where nothing is scored."""
        rows, columns, pair = (torch.as_tensor(one, device=values.device) for one in (self.rows, self.columns, self.pair))
        return values.new_zeros(shape).index_put((rows, columns), values[pair])


def packed_scores(
    model: nn.Module, packed: PackedRows, packing: Packing, *, entropy: bool = False, slope: Slope | None = None
) -> Scores:
    """The scores of the pairs, by one call of a model that carries packed passes (`carry_packed_passes`)."""

    def run(model: Any) -> Scores:
        hidden = packed_hidden(model, packed.tree, needed=packed.index, backend=packing.backend, compiled=packing.compiled)
        head = Head.of(model, temperature=packing.temperature, float32=packing.float32_head)
        targets = torch.as_tensor(packed.targets, device=hidden.device)
        return head.score(hidden, targets, entropy=entropy, slope=slope)

    return model(packed_pass=run)


def carry_packed_passes(model: Any) -> None:
    """Let `model(packed_pass=run)` be `run(model)`: a call that goes through PEFT, DDP and FSDP around it like any other."""
    forward = model.forward

    @functools.wraps(type(model).forward)
    def carrying(self: Any, *args: Any, packed_pass: Any = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) if packed_pass is None else packed_pass(self)

    model.forward = types.MethodType(carrying, model)


def trajectory_logps(
    model: nn.Module,
    token_ids: Tensor,
    attention_mask: Tensor,
    scored: Tensor,
    *,
    packing: Packing | None = None,
    parts: Sequence[Ints] | None = None,
    batch_size: int | None = None,
    entropy: bool = False,
    aux_loss: bool = False,
) -> Logps:
    """Log-probabilities (and entropies) of the scored tokens of right-padded rows.

    With `packing`, the rows of each of `parts` (all rows, unsaid) are one packed pass. Without, `batch_size` rows are one
    padded pass, by a model that carries TRL's fused head (`add_fused_lm_head`), which knows the temperature.
    """
    if packing is None or aux_loss:
        return _padded(model, token_ids, attention_mask, scored, batch_size, entropy, aux_loss)
    ids, chosen = as_arrays(token_ids, attention_mask, scored)
    logps, entropies = None, None
    for rows in [np.arange(len(ids))] if parts is None else parts:
        packed = PackedRows(ids, only(chosen, rows), share=packing.share, aligned=packing.aligned)
        scores = packed_scores(model, packed, packing, entropy=entropy)
        values = packed.spread(scores.logps, ids.shape)
        logps = values if logps is None else logps + values
        if scores.entropies is not None:
            values = packed.spread(scores.entropies, ids.shape)
            entropies = values if entropies is None else entropies + values
    assert logps is not None
    return Logps(logps, entropies, None)


def as_arrays(token_ids: Tensor, attention_mask: Tensor, scored: Tensor) -> tuple[Ints, NDArray[np.bool_]]:
    """Token ids, and which of them are scored."""
    return token_ids.cpu().numpy().astype(np.int64), (scored * attention_mask).cpu().numpy().astype(bool)


def only(scored: NDArray[np.bool_], rows: Ints) -> NDArray[np.bool_]:
    """What is scored, in these rows alone."""
    result = np.zeros_like(scored)
    result[rows] = scored[rows]
    return result


def _padded(
    model: nn.Module,
    token_ids: Tensor,
    attention_mask: Tensor,
    scored: Tensor,
    batch_size: int | None,
    entropy: bool,
    aux_loss: bool,
) -> Logps:
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
