"""Attention over slots: how one packed forward pass of an unchanged transformers model reads and writes the key/value cache.

A step forwards tokens of many conversations as one sequence `[1, tokens]`: first *pieces* (runs of tokens that a conversation
or a stem has not forwarded yet), then one last token for each conversation that draws, in the order of their slots. Everything
in a decoder but attention looks at one token at a time, so only attention has to know; it is put in through transformers'
`AttentionInterface` and finds the step it serves in `current`.

Always true: a token sees exactly the tokens before it in its own conversation (and in the layer's window, where there is one).
A stem, the prompt that several conversations share, is attended once for all of them, and the two parts of a row's context are
merged by their log-sum-exp.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from longrein.contract import LongreinError

IMPLEMENTATION = "longrein_slots"

HIDDEN = -1e30
"""Added to the score of a key that is not seen. Finite, so that a row that sees nothing of a part has no NaN to merge."""


class Heads(NamedTuple):
    """A layer's keys and values as they are cached."""

    kv_heads: int
    key_dim: int
    value_dim: int


class Views(Protocol):
    """Where a layer's keys and values are kept: `[rows, heads, capacity, dim]` each."""

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]: ...


class Piece(NamedTuple):
    """Tokens `start:end` of the step stand at `at` in row `row` of the stems or the slots, after a stem in `stem_row`."""

    start: int
    end: int
    in_stems: bool
    row: int
    at: int
    stem_row: int
    stem_length: int


class Sharing:
    """Which rows share which stem, as numbers of this machine; the same until a row comes, goes or moves."""

    def __init__(self, stem_of_row: Sequence[int], lengths: Sequence[int]) -> None:
        self.lengths = lengths
        """Tokens of each stem."""
        self.of_row = [lengths[stem] for stem in stem_of_row]
        self.members: list[list[int]] = [[] for _ in lengths]
        """The rows of each stem."""
        self.seats: list[tuple[int, int]] = []
        """Each row's stem, and which of its members the row is."""
        for row, stem in enumerate(stem_of_row):
            self.seats.append((stem, len(self.members[stem])))
            self.members[stem].append(row)
        self.most = max(map(len, self.members), default=0)
        self.width = max(lengths, default=0)

    def grouping(self, device: torch.device) -> Grouping:
        return Grouping(
            stems=len(self.lengths),
            width=self.width,
            members=torch.tensor(
                [row for rows in self.members for row in rows + [0] * (self.most - len(rows))], device=device
            ),
            seats=torch.tensor([stem * self.most + index for stem, index in self.seats], device=device),
            lengths=torch.tensor(self.lengths, device=device),
            of_row=torch.tensor(self.of_row, device=device),
            even=len(set(self.lengths)) == 1,
        )


@dataclass
class Grouping:
    """Which rows share which stem, as the tables that attention reads."""

    stems: int
    width: int
    """Tokens of the longest stem; 0 when no row has one."""
    members: torch.Tensor
    """`[stems * most]` rows, stem by stem; a stem with fewer rows repeats row 0."""
    seats: torch.Tensor
    """`[rows]` where each row stands in `members`."""
    lengths: torch.Tensor
    """`[stems]`"""
    of_row: torch.Tensor
    """`[rows]` tokens of each row's stem."""
    even: bool
    """All stems are of one length: nothing has to be hidden."""


@dataclass
class Step:
    """What attention needs to know of one forward pass."""

    slots: Views
    stems: Views
    rows: int
    at: torch.Tensor
    """`[rows]` where each row's last token is written in its slot."""
    width: int
    """Keys of the longest slot, that token included."""
    even: bool
    """All slots are of one length."""
    grouping: Grouping
    pieces: list[Piece]
    tables: dict[Any, torch.Tensor | None] = field(default_factory=dict)
    """Masks and places that layers of a kind have in common."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: How) -> torch.Tensor:
        """`[1, heads, tokens, dim]` queries to `[1, tokens, heads, dim]` of what they read."""
        slots, stems = self.slots.layer(layer), self.stems.layer(layer)
        parts = [_piece(piece, query, key, value, stems, slots, how) for piece in self.pieces]
        if self.rows:
            last = query.shape[2] - self.rows
            parts.append(self._rows(query[0, :, last:], key[0, :, last:], value[0, :, last:], stems, slots, how))
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=0))[None]

    def _rows(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, stems: Any, slots: Any, how: How
    ) -> torch.Tensor:
        rows, (heads, _, dim) = self.rows, query.shape
        keys, values = slots
        kv_heads = key.shape[0]
        places = self._places(kv_heads, keys.shape[2])
        for kept, new in ((keys, key), (values, value)):
            kept.view(-1, kept.shape[-1]).index_copy_(0, places, new.transpose(0, 1).reshape(rows * kv_heads, -1))
        folded = query.transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, dim)  # heads that share keys, as queries
        own = _part(folded, keys[:rows, :, : self.width], values[:rows, :, : self.width], self._own_mask(how, query), how)
        if not self.grouping.width:
            return own.out.reshape(rows, heads, -1)
        shared = self._shared(folded, stems, how)
        weight = torch.sigmoid(shared.lse - own.lse).to(own.out.dtype)[..., None]
        return torch.lerp(own.out, shared.out, weight).reshape(rows, heads, -1)

    def _shared(self, folded: torch.Tensor, stems: Any, how: How) -> Part:
        """What the rows read of their stems: all rows of a stem as one batch of queries."""
        group, (keys, values) = self.grouping, stems
        _, kv_heads, fold, dim = folded.shape
        most = len(group.members) // group.stems
        queries = folded.index_select(0, group.members).view(group.stems, most, kv_heads, fold, dim)
        queries = queries.transpose(1, 2).reshape(group.stems, kv_heads, most * fold, dim)
        stop, count = group.width, group.stems
        mask = self._stem_mask(how, folded, most, fold)
        part = _part(queries, keys[:count, :, :stop], values[:count, :, :stop], mask, how)
        out = part.out.reshape(count, kv_heads, most, fold, -1).transpose(1, 2).reshape(count * most, kv_heads, fold, -1)
        lse = part.lse.reshape(count, kv_heads, most, fold).transpose(1, 2).reshape(count * most, kv_heads, fold)
        return Part(out.index_select(0, group.seats), lse.index_select(0, group.seats))

    def _places(self, kv_heads: int, capacity: int) -> torch.Tensor:
        """`[rows * heads]` where the rows' last tokens are written, counted over a whole layer."""
        name = ("places", kv_heads)
        if name not in self.tables:
            heads = torch.arange(self.rows * kv_heads, device=self.at.device).view(self.rows, kv_heads)
            self.tables[name] = (heads * capacity + self.at[:, None]).view(-1)
        found = self.tables[name]
        assert found is not None
        return found

    def _own_mask(self, how: How, like: torch.Tensor) -> torch.Tensor | None:
        """`[rows, 1, 1, width]`, None where every key is seen."""
        name = ("own", how.window)
        if name not in self.tables:
            self.tables[name] = None
            if not self.even or how.window is not None:
                behind = self.at[:, None] - torch.arange(self.width, device=like.device)
                self.tables[name] = hidden(behind, how.window, like.dtype)[:, None, None]
        return self.tables[name]

    def _stem_mask(self, how: How, like: torch.Tensor, most: int, fold: int) -> torch.Tensor | None:
        """`[stems, 1, 1 or queries, width]`, None where every key is seen."""
        name = ("stem", how.window)
        if name not in self.tables:
            self.tables[name] = None
            group = self.grouping
            keys = torch.arange(group.width, device=like.device)
            if how.window is not None:
                position = (group.of_row + self.at).index_select(0, group.members).view(group.stems, most, 1)
                position = position.expand(-1, -1, fold).reshape(group.stems, most * fold, 1)
                mask = hidden(position - keys, how.window, like.dtype)
                mask = mask.masked_fill(keys >= group.lengths[:, None, None], HIDDEN)
                self.tables[name] = mask[:, None]
            elif not group.even:
                self.tables[name] = hidden(group.lengths[:, None] - 1 - keys, None, like.dtype)[:, None, None]
        return self.tables[name]


class How(NamedTuple):
    """How a layer attends."""

    scaling: float
    window: int | None
    softcap: float | None


class Part(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor


@dataclass
class Survey:
    """Serves one plain sequence and notes what each layer's attention is like."""

    heads: dict[int, Heads] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    strange: str | None = None

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: How) -> torch.Tensor:
        if layer in self.heads:
            self.strange = f"layer {layer} attends twice"
        self.heads[layer] = Heads(key.shape[1], key.shape[3], value.shape[3])
        self.windows[layer] = how.window
        if self.dtype not in (None, key.dtype) or key.dtype != value.dtype:
            self.strange = f"keys and values are {key.dtype}, {value.dtype} and {self.dtype}"
        self.dtype = key.dtype
        return _causal(query[0], key[0], value[0], 0, how)[None]


class Attends(Protocol):
    """What a forward pass attends with."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: How) -> torch.Tensor: ...


class _Current(threading.local):
    step: Attends | None = None


current = _Current()
"""The step that this thread forwards."""


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if current.step is None:
        raise LongreinError(
            "the model was forwarded by one thread while its engine sampled in another: pause the engine, or give it a copy"
        )
    if kwargs.get("s_aux") is not None:
        raise NotImplementedError("attention sinks")
    how = How(query.shape[-1] ** -0.5 if scaling is None else float(scaling), sliding_window, softcap)
    return current.step.attend(module.layer_idx, query, key, value, how), None


AttentionInterface.register(IMPLEMENTATION, _attend)


def hidden(behind: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """The mask of keys that are `behind` tokens before their query: those after it, or out of the window, are hidden."""
    unseen = behind < 0
    if window is not None:
        unseen |= behind >= window
    return torch.zeros(behind.shape, dtype=dtype, device=behind.device).masked_fill_(
        unseen, HIDDEN if dtype != torch.float16 else -6e4
    )


def _part(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, how: How) -> Part:
    """Attention over a part of the context, with the log-sum-exp of its scores to merge it by."""
    if query.device.type == "cpu" and how.softcap is None and key.shape[-1] == value.shape[-1]:
        flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return Part(*flash(query, key, value, attn_mask=mask, scale=how.scaling))
    scores = _scores(query, key, how)
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1).to(value.dtype)
    return Part(torch.matmul(weights, value), scores.logsumexp(-1))


def _scores(query: torch.Tensor, key: torch.Tensor, how: How) -> torch.Tensor:
    key = key.transpose(-1, -2)
    if query.is_cuda and query.dim() == 4 and query.dtype in (torch.bfloat16, torch.float16):
        # The scores are not rounded to the short type; rows and heads of a shelf are one dimension without a copy.
        scores = torch.bmm(query.flatten(0, 1), key.flatten(0, 1), out_dtype=torch.float32).view(*query.shape[:3], -1)
    else:
        scores = torch.matmul(query, key).to(torch.promote_types(query.dtype, torch.float32))
    scores = scores * how.scaling
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    return scores


def _piece(
    piece: Piece, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, stems: Any, slots: Any, how: How
) -> torch.Tensor:
    """Write a piece's keys and values where they belong; `[tokens, heads, dim]` of what its tokens read."""
    keys, values = stems if piece.in_stems else slots
    end = piece.at + piece.end - piece.start
    keys[piece.row, :, piece.at : end] = key[0, :, piece.start : piece.end]
    values[piece.row, :, piece.at : end] = value[0, :, piece.start : piece.end]
    seen_keys, seen_values = keys[piece.row, :, :end], values[piece.row, :, :end]
    if piece.stem_length and not piece.in_stems:
        stem = stems[0][piece.stem_row, :, : piece.stem_length], stems[1][piece.stem_row, :, : piece.stem_length]
        seen_keys, seen_values = torch.cat([stem[0], seen_keys], dim=1), torch.cat([stem[1], seen_values], dim=1)
    before = seen_keys.shape[1] - (piece.end - piece.start)
    return _causal(query[0, :, piece.start : piece.end], seen_keys, seen_values, before, how)


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, before: int, how: How) -> torch.Tensor:
    """`[heads, tokens, dim]` queries that come after `before` of the keys, to `[tokens, heads, dim]`."""
    grouped = query.shape[0] != key.shape[0]
    plain = how.softcap is None and key.shape[-1] == value.shape[-1]
    if plain and not before and (how.window is None or query.shape[1] <= how.window):
        out = F.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=how.scaling, enable_gqa=grouped
        )
        return out[0].transpose(0, 1)
    rows = torch.arange(before, before + query.shape[1], device=query.device)
    mask = hidden(rows[:, None] - torch.arange(key.shape[1], device=query.device), how.window, query.dtype)
    return masked(query[None], key[None], value[None], mask, how)[0].transpose(0, 1)


def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, how: How) -> torch.Tensor:
    """`[batch, heads, tokens, dim]` of what the queries read of the keys that the mask leaves them."""
    fold = query.shape[1] // key.shape[1]
    plain = how.softcap is None and key.shape[-1] == value.shape[-1]
    if fold > 1 and (query.is_cuda or not plain):  # a GPU's quick kernels take a mask or heads in groups, not both
        key, value = (part.unsqueeze(2).expand(-1, -1, fold, -1, -1).flatten(1, 2) for part in (key, value))
        fold = 1
    if plain:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=how.scaling, enable_gqa=fold > 1)
    return torch.matmul((_scores(query, key, how) + mask).softmax(-1).to(value.dtype), value)
