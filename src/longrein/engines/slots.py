"""The key/value cache: conversations in slots, the prompts they share in stems, and what is let go of when it is full.

Always true: the first `stored` tokens of a segment are those whose keys and values stand in its row, and nothing else decides
what is reused. A conversation is a stem and what follows it; rollouts of a task have one stem, stored once. Rows of a shelf are
of equal capacity, and those that draw stand first, so a step reads them in place, without gathering. Both shelves together
never take more than `cache_tokens`, in whole blocks of `BLOCK`; the conversation that was used longest ago goes first, and is
forwarded again if it comes back.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import torch

from longrein.engines.attention import Heads

BLOCK = 64
"""Capacities are whole blocks of so many tokens."""
ROOMY = ((64, 1024), (16, 1024))
"""Rows and capacity that a GPU's slots and stems have at least, where half the bound allows it."""
WORTH_WAITING = 32
"""A request waits a step for a stem that is being forwarded when it can copy so many tokens more from it."""


class Wait(Enum):
    """Why a request is not seated now."""

    FOR_ROOM = "only conversations that run are left, and they take all the room"
    TO_SHARE = "another one forwards what it can copy after the next step"


@dataclass(eq=False)
class Segment:
    """Tokens that stand in one row of a shelf."""

    ids: array[int]
    stored: int = 0
    place: int = -1

    @property
    def tokens(self) -> np.ndarray:
        return np.frombuffer(self.ids, np.int32) if self.ids else np.empty(0, np.int32)


@dataclass(eq=False)
class Stem(Segment):
    """A prompt without its last token, shared by the conversations that start with it."""

    users: set[Conversation] = field(default_factory=set)
    drawing: int = 0
    """How many of them draw."""

    @property
    def complete(self) -> bool:
        return self.stored == len(self.ids)


@dataclass(eq=False)
class Conversation(Segment):
    """What follows a stem; `ids` may run ahead of `stored` by the tokens that wait to be forwarded."""

    stem: Stem = field(default_factory=lambda: Stem(array("i")))
    running: bool = False
    used: int = 0

    @property
    def length(self) -> int:
        """Tokens whose keys and values are there, the stem's included."""
        return self.stem.stored + self.stored


class Shelf:
    """Rows of keys and values, the active ones first."""

    def __init__(self, heads: dict[int, Heads], dtype: torch.dtype, device: torch.device) -> None:
        self.rows = self.capacity = self.active = self.taken = 0
        self.moves = 0
        """Counts how often the rows have moved to other memory."""
        self.owners: list[Segment | None] = []
        self._dtype, self._device = dtype, device
        self._counts: dict[tuple[int, int], int] = {}
        self._where: dict[int, tuple[tuple[tuple[int, int], int], ...]] = {}
        for layer, (kv_heads, key_dim, value_dim) in heads.items():
            parts = []
            for shape in ((kv_heads, key_dim), (kv_heads, value_dim)):
                parts.append((shape, self._counts.get(shape, 0)))
                self._counts[shape] = parts[-1][1] + 1
            self._where[layer] = tuple(parts)
        self._tensors: dict[tuple[int, int], torch.Tensor] = {}
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._layers[index]

    def __iter__(self) -> Iterator[Segment]:
        return (owner for owner in self.owners if owner is not None)

    def put(self, segment: Segment) -> None:
        """Give a segment a free row. There must be one."""
        segment.place = self.owners.index(None)
        self.owners[segment.place] = segment
        self.taken += 1

    def drop(self, segment: Segment) -> None:
        self.owners[segment.place] = None
        self.taken -= 1
        segment.place, segment.stored = -1, 0

    def clear(self) -> None:
        self.owners = [None for _ in range(self.rows)]
        self.active = self.taken = 0

    def activate(self, segment: Segment) -> None:
        self._swap(segment.place, self.active)
        self.active += 1

    def deactivate(self, segment: Segment) -> None:
        self.active -= 1
        self._swap(segment.place, self.active)

    def copy(self, source: Segment, target: Segment, tokens: int, *, start: int = 0, to: int = 0) -> None:
        """Copy the keys and values of `tokens` tokens of a row into another."""
        for tensor in self._tensors.values():
            tensor[:, target.place, :, to : to + tokens] = tensor[:, source.place, :, start : start + tokens]

    def fill(self, other: Shelf, source: Segment, target: Segment, tokens: int, to: int) -> None:
        """Copy the first tokens of a row of another shelf into a row of this one."""
        for shape, tensor in self._tensors.items():
            tensor[:, target.place, :, to : to + tokens] = other._tensors[shape][:, source.place, :, :tokens]

    def resize(self, rows: int, capacity: int) -> None:
        """Move everything to rows of another number or capacity; there must be room for what is stored."""
        self.moves += 1
        before, owners = self._tensors, list(self)
        self.owners = [*owners, *[None] * (rows - len(owners))]
        places = [owner.place for owner in owners]
        longest = max((owner.stored for owner in owners), default=0)
        self.rows, self.capacity, self._tensors = rows, capacity, {}
        for shape, count in self._counts.items():
            kv_heads, dim = shape
            tensor = torch.zeros(count, rows, kv_heads, capacity, dim, dtype=self._dtype, device=self._device)
            if longest:
                if places == list(range(len(places))):
                    tensor[:, : len(places), :, :longest] = before[shape][:, : len(places), :, :longest]
                else:
                    for place, old in enumerate(places):
                        tensor[:, place, :, :longest] = before[shape][:, old, :, :longest]
            self._tensors[shape] = tensor
        for place, owner in enumerate(owners):
            owner.place = place
        self._layers = {
            layer: (self._tensors[keys[0]][keys[1]], self._tensors[values[0]][values[1]])
            for layer, (keys, values) in self._where.items()
        }

    def _swap(self, one: int, other: int) -> None:
        if one == other:
            return
        owners = self.owners
        first, second = owners[one], owners[other]
        lengths = first.stored if first else 0, second.stored if second else 0
        for tensor in self._tensors.values():
            kept = tensor[:, one, :, : lengths[0]].clone()
            tensor[:, one, :, : lengths[1]] = tensor[:, other, :, : lengths[1]]
            tensor[:, other, :, : lengths[0]] = kept
        owners[one], owners[other] = second, first
        for place in (one, other):
            if (owner := owners[place]) is not None:
                owner.place = place


class Slots:
    """Conversations and stems within a bound; finds what can be reused by comparing tokens."""

    def __init__(self, heads: dict[int, Heads], dtype: torch.dtype, device: torch.device, cache_tokens: int) -> None:
        self.slots, self.stems = Shelf(heads, dtype, device), Shelf(heads, dtype, device)
        self.roomy = device.type == "cuda"
        """Take much memory at first: what is captured for a shelf is lost when it moves."""
        # One conversation of `cache_tokens` always fits: its two rows are rounded up to blocks, and each has one place to spare.
        self.bound = _blocks(cache_tokens) + 2 * BLOCK
        self.conversations: set[Conversation] = set()
        self.changes = 0
        """Counts what makes a step's tables stale: rows that come, go or move."""
        self._clock = 0

    @property
    def allocated(self) -> int:
        """Tokens that there is memory for."""
        return self.slots.rows * self.slots.capacity + self.stems.rows * self.stems.capacity

    def seat(self, tokens: np.ndarray, *, alone: bool = True) -> Conversation | Wait:
        """A running conversation of these tokens, with as much of them stored as anyone has.

        `alone` says that no other request waits with the same tokens; if one does, their prompt becomes a stem.
        """
        needed = len(tokens) - 1  # the last token is always forwarded, by the conversation itself
        shared = {stem: _common(stem.tokens, tokens[:needed]) for stem in self._stems()}
        source, length = self._longest(tokens[:needed], shared)
        if (
            isinstance(source, Conversation)
            and not source.running
            and length == source.length
            and length >= len(source.stem.ids)
        ):
            return self._go_on(source, tokens)
        whole = next((stem for stem, common in shared.items() if common == len(stem.ids) == needed), None)
        if whole is None:
            waiting = max((common for stem, common in shared.items() if not stem.complete), default=0)
            if waiting >= length + WORTH_WAITING:
                return Wait.TO_SHARE
        stem = whole or self._stem_to_share(source, length, needed, alone)
        return self._start(tokens, stem, source, length)

    def leave(self, conversation: Conversation) -> None:
        """The conversation is not sampled for any more; it is kept until its room is needed."""
        self._clock += 1
        self.changes += 1
        conversation.running, conversation.used = False, self._clock
        del conversation.ids[conversation.stored :]
        self._deactivate(conversation)
        if not conversation.stored:
            self.release(conversation)  # nothing was forwarded for it

    def activate(self, conversation: Conversation) -> None:
        """The conversation draws from now on."""
        if not self._draws(conversation):
            self.changes += 1
            self.slots.activate(conversation)
            if not conversation.stem.drawing:
                self.stems.activate(conversation.stem)
            conversation.stem.drawing += 1

    def _deactivate(self, conversation: Conversation) -> None:
        if self._draws(conversation):
            self.slots.deactivate(conversation)
            conversation.stem.drawing -= 1
            if not conversation.stem.drawing:
                self.stems.deactivate(conversation.stem)

    def release(self, conversation: Conversation) -> None:
        """Forget a conversation, and its stem when nobody else has it."""
        self.changes += 1
        self._deactivate(conversation)
        self.conversations.discard(conversation)
        self.slots.drop(conversation)
        conversation.stem.users.discard(conversation)
        if not conversation.stem.users:
            self.stems.drop(conversation.stem)

    def forget(self) -> None:
        """Forget everything; the memory stays."""
        self.changes += 1
        self.conversations.clear()
        for shelf in (self.slots, self.stems):
            shelf.clear()

    def make_room(self, conversations: Iterable[Conversation]) -> bool:
        """See that each conversation can store all its tokens; False where that would need one that runs to go."""
        return self._fit(max((len(one.ids) for one in conversations), default=0))

    def _draws(self, conversation: Conversation) -> bool:
        return 0 <= conversation.place < self.slots.active

    def _stems(self) -> Iterator[Stem]:
        return (owner for owner in self.stems if isinstance(owner, Stem))

    def _longest(self, tokens: np.ndarray, shared: dict[Stem, int]) -> tuple[Segment | None, int]:
        """Who has stored most of the beginning of these tokens, and how much of it; a conversation that can go on first."""
        best: tuple[Segment | None, int] = (None, 0)
        for stem, common in shared.items():
            if min(common, stem.stored) > best[1]:
                best = stem, min(common, stem.stored)
        for stem, common in shared.items():
            own = tokens[len(stem.ids) :]
            if common < len(stem.ids) or not stem.complete or not len(own):
                continue
            for one in stem.users:
                last = min(one.stored, len(own)) - 1
                if last < 0 or (one.length <= best[1] and own[last] != one.ids[last]):
                    continue  # it cannot be the longest
                length = len(stem.ids) + _common(one.tokens[: one.stored], own)
                if length > best[1] or (length == best[1] == one.length and not one.running):
                    best = one, length
        return best

    def _go_on(self, conversation: Conversation, tokens: np.ndarray) -> Conversation | Wait:
        own = tokens[len(conversation.stem.ids) :]
        conversation.running = True  # so that making room does not take it
        if not self._fit(len(own)):
            conversation.running = False
            return Wait.FOR_ROOM
        del conversation.ids[conversation.stored :]
        conversation.ids.extend(own[conversation.stored :].tolist())
        return conversation

    def _stem_to_share(self, source: Segment | None, length: int, needed: int, alone: bool) -> Stem | None:
        """The stem a new conversation can have without losing much; None to make it one of its own."""
        stem = source.stem if isinstance(source, Conversation) else source if isinstance(source, Stem) else None
        if stem is None or not stem.complete or length < len(stem.ids):
            return None
        most = 2 * len(stem.ids) >= needed and alone
        return stem if most or length == needed else None

    def _start(self, tokens: np.ndarray, stem: Stem | None, source: Segment | None, length: int) -> Conversation | Wait:
        made = stem is None
        stem = stem or Stem(array("i", tokens[:-1].tobytes()))
        conversation = Conversation(array("i", tokens[len(stem.ids) :].tobytes()), stem=stem, running=True)
        stem.users.add(conversation)
        keep = {source} if isinstance(source, Conversation) else set(source.users) if isinstance(source, Stem) else set()
        if not self._fit(len(conversation.ids), rows=1, stem=len(stem.ids) if made else None, keep=keep):
            stem.users.discard(conversation)
            return Wait.FOR_ROOM
        self.changes += 1
        self.conversations.add(conversation)
        self.slots.put(conversation)
        if made:
            self.stems.put(stem)
        self._copy(source, stem if made else None, conversation, length)
        return conversation

    def _copy(self, source: Segment | None, made: Stem | None, conversation: Conversation, length: int) -> None:
        """Take over the `length` tokens that the source has stored already."""
        if source is None or source.place < 0:
            return
        origin = source.stem if isinstance(source, Conversation) else source
        if made is None:
            own = length - len(conversation.stem.ids)
            if isinstance(source, Conversation) and source.stem is conversation.stem and own > 0:
                self.slots.copy(source, conversation, own)
                conversation.stored = own
            return
        of_stem = min(length, origin.stored)
        self.stems.copy(origin, made, of_stem)
        if isinstance(source, Conversation) and length > of_stem:
            self.stems.fill(self.slots, source, made, length - of_stem, to=of_stem)
        made.stored = length

    def _fit(self, own: int, rows: int = 0, stem: int | None = None, keep: Iterable[Conversation] = ()) -> bool:
        """Make room for `rows` more conversations, for one of `own` tokens, and for a new stem of `stem` tokens."""
        keep = set(keep)
        enough = self.slots.taken + rows <= self.slots.rows and own < self.slots.capacity
        if enough and (stem is None or (self.stems.taken < self.stems.rows and stem < self.stems.capacity)):
            return True
        while True:
            # One place more than is needed in each row: a captured step writes what it pads with there.
            slots = _needed(self.slots, rows, own + 1)
            stems = _needed(self.stems, 0 if stem is None else 1, (stem or 0) + 1)
            if slots[0] * slots[1] + stems[0] * stems[1] <= self.bound:
                break
            idle = [one for one in self.conversations if not one.running]
            if not idle:
                return False
            # What is about to be copied from goes last.
            self.release(min(idle, key=lambda one: (one in keep, one.used)))
        fits = [
            shelf.rows >= need[0] and shelf.capacity >= need[1] for shelf, need in ((self.slots, slots), (self.stems, stems))
        ]
        if all(fits) and self.allocated <= self.bound:
            return True
        self.changes += 1
        # Room to grow into where the bound allows it, else exactly what is needed.
        grown = [
            (shelf.rows, shelf.capacity) if fit else (_more(shelf.rows, need[0], 1), _more(shelf.capacity, need[1], BLOCK))
            for shelf, need, fit in ((self.slots, slots, fits[0]), (self.stems, stems, fits[1]))
        ]
        roomy = [(max(one[0], first[0]), max(one[1], first[1])) for one, first in zip(grown, ROOMY, strict=True)]
        if self.roomy and _tokens(roomy) <= self.bound // 2:
            wanted = roomy
        else:
            wanted = grown if _tokens(grown) <= self.bound else [slots, stems]
        for shelf, (count, capacity) in zip((self.slots, self.stems), wanted, strict=True):
            if (count, capacity) != (shelf.rows, shelf.capacity):
                shelf.resize(count, capacity)
        return True


def _needed(shelf: Shelf, rows: int, tokens: int) -> tuple[int, int]:
    """The rows and the capacity that hold what is there and `rows` more, one of them of `tokens` tokens."""
    lengths = [len(owner.ids) + 1 for owner in shelf]
    return len(lengths) + rows, _blocks(max([*lengths, tokens]))


def _more(have: int, need: int, step: int) -> int:
    """At least `need`, and half as much again when it has to grow, in whole steps."""
    return have if have >= need else -(-max(need, have * 3 // 2) // step) * step


def _tokens(shelves: Iterable[tuple[int, int]]) -> int:
    return sum(rows * capacity for rows, capacity in shelves)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK) * BLOCK


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two rows have in common from their start."""
    count = min(len(one), len(other))
    differ = one[:count] != other[:count]
    first = int(differ.argmax()) if count else 0
    return first if count and differ[first] else count
