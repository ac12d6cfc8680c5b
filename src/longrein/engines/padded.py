"""Pieces as one padded batch: how a GPU forwards short runs of tokens of many conversations with a few kernels of fixed shapes.

Always true: a batch holds pieces of stems or of conversations, never both, and its table alone says where its tokens are written
and what they see, so that a captured pass serves every batch of its shape. Tokens that pad are written to the spare last place
of a row, and nobody reads what they compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from longrein.engines.attention import How, Piece, Views, hidden, masked

COLUMNS = 5
"""Numbers that a table has for each piece."""


def numbers_of(piece: Piece) -> list[int]:
    """A piece's column of the table. All zeros is a piece without tokens."""
    return [piece.row, piece.at, piece.end - piece.start, piece.stem_row, piece.stem_length]


@dataclass
class Padded:
    """What attention needs to know of a pass over `[pieces * length]` tokens."""

    own: Views
    """Where the pieces are written."""
    stems: Views
    table: torch.Tensor
    """`[COLUMNS, pieces]`"""
    length: int
    width: int
    """Keys of the longest row that is written to, the new ones included."""
    stem_width: int
    """Keys of the longest stem that comes before a piece; 0 where none does."""
    rows: int = 0
    """Logits that are wanted."""
    tables: dict[Any, torch.Tensor] = field(default_factory=dict)

    @property
    def positions(self) -> torch.Tensor:
        """`[1, pieces * length]`"""
        _, at, tokens, _, stem_length = self.table[:, :, None]
        index = torch.arange(self.length, device=self.table.device)
        return (stem_length + at + index).masked_fill(index >= tokens, 0).view(1, -1)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: How) -> torch.Tensor:
        """`[1, heads, tokens, dim]` queries to `[1, tokens, heads, dim]` of what they read."""
        own = self.own.layer(layer)
        places = self._places(key.shape[1], own[0].shape[2])
        for kept, new in zip(own, (key, value), strict=True):
            kept.view(-1, kept.shape[-1]).index_copy_(0, places, new[0].transpose(0, 1).reshape(-1, new.shape[-1]))
        row, _, _, stem_row, _ = self.table
        seen = [part[:, :, : self.width].index_select(0, row) for part in own]
        if self.stem_width:
            before = [part[:, :, : self.stem_width].index_select(0, stem_row) for part in self.stems.layer(layer)]
            seen = [torch.cat(parts, dim=2) for parts in zip(before, seen, strict=True)]
        queries = query[0].unflatten(1, (-1, self.length)).transpose(0, 1)
        out = masked(queries, seen[0], seen[1], self._mask(how, query.dtype), how)
        return out.transpose(1, 2).reshape(1, query.shape[2], query.shape[1], -1)

    def _places(self, kv_heads: int, capacity: int) -> torch.Tensor:
        """`[tokens * heads]` where the tokens are written, counted over a whole layer."""
        name = ("places", kv_heads)
        if name not in self.tables:
            row, at, tokens, _, _ = self.table[:, :, None]
            index = torch.arange(self.length, device=row.device)
            place = (at + index).masked_fill(index >= tokens, capacity - 1)
            heads = row * kv_heads + torch.arange(kv_heads, device=row.device)
            self.tables[name] = (heads[:, None] * capacity + place[:, :, None]).view(-1)
        return self.tables[name]

    def _mask(self, how: How, dtype: torch.dtype) -> torch.Tensor:
        """`[pieces, 1, length, stem_width + width]`"""
        name = ("mask", how.window)
        if name not in self.tables:
            _, at, _, _, stem_length = self.table[:, :, None, None]
            device = at.device
            last = at + torch.arange(self.length, device=device)[:, None]
            behind = last - torch.arange(self.width, device=device)
            if self.stem_width:
                keys = torch.arange(self.stem_width, device=device)
                of_stem = (stem_length + last - keys).masked_fill(keys >= stem_length, -1)
                behind = torch.cat([of_stem, behind], dim=-1)
            self.tables[name] = hidden(behind, how.window, dtype)[:, None]
        return self.tables[name]


def batches(pieces: Sequence[Piece], lengths: Sequence[int], most_tokens: int) -> list[tuple[int, list[Piece]]]:
    """The pieces in batches of one of the lengths each, the longest first, of at most `most_tokens` tokens with what pads them."""
    rest, made = sorted(pieces, key=lambda piece: piece.start - piece.end), []
    while rest:
        length = next(size for size in lengths if size >= rest[0].end - rest[0].start)
        count = max(most_tokens // length, 1)
        made.append((length, rest[:count]))
        rest = rest[count:]
    return made
