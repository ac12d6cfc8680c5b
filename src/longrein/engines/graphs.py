"""Steps as captured CUDA graphs: each launched as one, in place of the hundreds of kernels that make it up.

A step is forwarded in two parts: the pieces, as padded batches (`padded.py`), then one token for each row that draws, so that replies
go on at full speed while others begin. Pieces that are long enough to keep a GPU busy are forwarded plainly.

Always true: a graph is replayed only over the memory and the shapes it was captured with. Shapes are rounded up to a few sizes;
rows that a step pads with write to the spare last place of their slot, and what they draw is not looked at. A shape is captured
when it comes again and no graph at hand covers it, or when one that is much larger has covered it often. Where capturing fails,
steps go on without it, and one line in the log says why.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from longrein.engines.attention import Grouping, Piece, Sharing, Step
from longrein.engines.padded import COLUMNS, Padded, batches, numbers_of
from longrein.engines.slots import Shelf

logger = logging.getLogger(__name__)

COUNTS = [1, 4, 16, 64]
"""Sizes that numbers of rows and of pieces are rounded up to; above the last one, powers of two."""
LENGTHS = [32, 128, 512]
"""Sizes that the lengths of pieces are rounded up to; longer ones are forwarded plainly."""
NARROWEST = 256
"""Widths are rounded up to this, or else to powers of two."""
BATCH_TOKENS = 2048
"""Tokens of a padded batch of pieces."""
MOST_GRAPHS = 64
"""Graphs kept; the one used longest ago goes first."""
MUCH_LARGER, OFTEN = 4, 64
"""A shape gets a graph of its own after `OFTEN` steps that one of more than `MUCH_LARGER` times its size has served."""


class Rows(NamedTuple):
    """The shape of a step in which rows draw."""

    rows: int
    width: int
    stems: int
    most: int
    stem_width: int

    @property
    def size(self) -> int:
        return self.rows * (self.width + NARROWEST) + self.stems * self.most * self.stem_width


class Pieces(NamedTuple):
    """The shape of a padded batch of pieces."""

    count: int
    length: int
    width: int
    stem_width: int
    of_stems: bool

    @property
    def size(self) -> int:
        return self.count * self.length * (self.width + self.stem_width + NARROWEST)


Shape = Rows | Pieces
S = TypeVar("S", Rows, Pieces)


class _Graph(NamedTuple):
    graph: Any
    inputs: torch.Tensor
    """All numbers of a step, one after the other."""
    logits: torch.Tensor


class Graphs:
    """The captured steps of one forward."""

    def __init__(
        self,
        slots: Shelf,
        stems: Shelf,
        forward: Callable[[Step | Padded, torch.Tensor, torch.Tensor], torch.Tensor],
        device: torch.device,
    ) -> None:
        self.slots, self.stems, self.device = slots, stems, device
        self.captured: dict[Shape, _Graph] = {}
        self.captures = 0
        """Graphs captured so far, those included that are not kept any more."""
        self._forward = forward
        self._wanted: Counter[Shape] = Counter()
        self._pool: Any = None
        self._memory: tuple[int, int] = (-1, -1)
        self._failed = False

    def run(
        self, ids: Sequence[int], positions: Sequence[int], pieces: Sequence[Piece], lasts: Sequence[int], sharing: Sharing
    ) -> torch.Tensor | None:
        """Forward the pieces, then the rows, whose logits are returned; None where the step has to be forwarded plainly."""
        if self._failed:
            return None
        memory = self.slots.moves, self.stems.moves
        if memory != self._memory:  # the shelves stand elsewhere now
            self.captured.clear()
            self._pool, self._memory = None, memory
        try:
            for of_stems in (True, False):  # what follows a stem reads it
                self._store([piece for piece in pieces if piece.in_stems is of_stems], ids, positions)
            if not lasts:
                return torch.empty(0, device=self.device)
            return self._rows(ids[len(ids) - len(lasts) :], positions[len(ids) - len(lasts) :], lasts, sharing)
        except _CaptureFailed as error:
            self._failed = True
            self.captured.clear()
            logger.warning("steps are not captured as CUDA graphs and run eagerly: %s", error.__cause__)
            return None

    def _rows(self, ids: Sequence[int], positions: Sequence[int], lasts: Sequence[int], sharing: Sharing) -> torch.Tensor:
        shape = self._shape_to_run(
            Rows(
                rows=min(_rounded(len(lasts), COUNTS), self.slots.rows),
                width=min(_rounded(max(lasts) + 1, [NARROWEST]), self.slots.capacity),
                stems=min(_rounded(len(sharing.lengths)), self.stems.rows),
                most=_rounded(sharing.most),
                stem_width=min(_rounded(sharing.width, [NARROWEST]), self.stems.capacity) if sharing.width else 0,
            )
        )
        count, rows = len(lasts), shape.rows
        numbers = np.zeros(5 * rows + shape.stems * (shape.most + 1), np.int64)
        by_row = numbers[: 5 * rows].reshape(5, rows)
        by_row[2, count:] = self.slots.capacity - 1  # what pads is written to the spare place
        by_row[:3, :count] = ids, positions, lasts
        by_row[3, :count] = [stem * shape.most + index for stem, index in sharing.seats]
        by_row[4, :count] = sharing.of_row
        members = numbers[5 * rows : -shape.stems].reshape(shape.stems, shape.most)
        for stem, of_stem in enumerate(sharing.members):
            members[stem, : len(of_stem)] = of_stem
        numbers[-shape.stems :][: len(sharing.lengths)] = sharing.lengths
        return self._run(shape, numbers)[:count]

    def _store(self, pieces: Sequence[Piece], ids: Sequence[int], positions: Sequence[int]) -> None:
        """Forward pieces of one kind for their keys and values."""
        short = []
        for piece in pieces:
            if piece.end - piece.start <= LENGTHS[-1]:
                short.append(piece)
            else:
                self._store_long(piece, ids, positions)
        for length, batch in batches(short, LENGTHS, BATCH_TOKENS):
            of_stems = batch[0].in_stems
            own = self.stems if of_stems else self.slots
            stem_width = max(piece.stem_length for piece in batch)
            shape = self._shape_to_run(
                Pieces(
                    count=_rounded(len(batch), COUNTS),
                    length=length,
                    width=min(
                        _rounded(max(piece.at + piece.end - piece.start for piece in batch), [NARROWEST]), own.capacity
                    ),
                    stem_width=min(_rounded(stem_width, [NARROWEST]), self.stems.capacity) if stem_width else 0,
                    of_stems=of_stems,
                )
            )
            numbers = np.zeros((COLUMNS + shape.length) * shape.count, np.int64)
            table = numbers[: COLUMNS * shape.count].reshape(COLUMNS, shape.count)
            tokens = numbers[COLUMNS * shape.count :].reshape(shape.count, shape.length)
            for index, piece in enumerate(batch):
                table[:, index] = numbers_of(piece)
                tokens[index, : piece.end - piece.start] = ids[piece.start : piece.end]
            self._run(shape, numbers)

    def _store_long(self, piece: Piece, ids: Sequence[int], positions: Sequence[int]) -> None:
        where = slice(piece.start, piece.end)
        table = torch.tensor([ids[where], positions[where]], device=self.device)
        alone = piece._replace(start=0, end=piece.end - piece.start)
        nobody = Sharing([], []).grouping(self.device)
        at = table.new_empty(0)
        step = Step(self.slots, self.stems, rows=0, at=at, width=1, even=True, grouping=nobody, pieces=[alone])
        self._forward(step, table[:1], table[1:])

    def _shape_to_run(self, shape: S) -> S:
        """The shape itself, or that of a graph at hand that covers it well enough."""
        if shape in self.captured:
            return shape
        covering = [one for one in self.captured if isinstance(one, type(shape)) and _covers(one, shape)]
        self._wanted[shape] += 1
        if covering:
            smallest = min(covering, key=lambda one: one.size)
            if smallest.size <= MUCH_LARGER * shape.size or self._wanted[shape] < OFTEN:
                return smallest
        return shape

    def _run(self, shape: Shape, numbers: np.ndarray) -> torch.Tensor:
        """Replay the shape's graph over these numbers; a shape that comes for the first time is forwarded without one."""
        inputs = torch.from_numpy(numbers)
        if self.device.type == "cuda":
            inputs = inputs.pin_memory()
        graph = self.captured.pop(shape, None)
        if graph is None:
            static = inputs.to(self.device)
            if self._wanted[shape] < 2:
                return self._pass(shape, static)
            graph = self._capture(shape, static)
        self.captured[shape] = graph  # the last one is the one used last
        graph.inputs.copy_(inputs, non_blocking=True)
        graph.graph.replay()
        return graph.logits

    def _pass(self, shape: Shape, inputs: torch.Tensor) -> torch.Tensor:
        if isinstance(shape, Rows):
            ids, positions, at, seats, of_row = inputs[: 5 * shape.rows].view(5, shape.rows)
            group = Grouping(
                stems=shape.stems,
                width=shape.stem_width,
                members=inputs[5 * shape.rows : -shape.stems],
                seats=seats,
                lengths=inputs[-shape.stems :],
                of_row=of_row,
                even=False,
            )
            step = Step(self.slots, self.stems, shape.rows, at, shape.width, even=False, grouping=group, pieces=[])
            return self._forward(step, ids[None], positions[None])
        own = self.stems if shape.of_stems else self.slots
        table = inputs[: COLUMNS * shape.count].view(COLUMNS, shape.count)
        padded = Padded(own, self.stems, table, shape.length, shape.width, shape.stem_width)
        return self._forward(padded, inputs[None, COLUMNS * shape.count :], padded.positions)

    def _capture(self, shape: Shape, inputs: torch.Tensor) -> _Graph:
        while len(self.captured) >= MOST_GRAPHS:
            self.captured.pop(next(iter(self.captured)))
        self.captures += 1
        try:
            return self._record(inputs, lambda: self._pass(shape, inputs))
        except Exception as error:
            raise _CaptureFailed from error

    def _record(self, inputs: torch.Tensor, run: Callable[[], torch.Tensor]) -> _Graph:
        with _no_cached_casts():
            aside = torch.cuda.Stream(self.device)
            aside.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(aside):  # kernels load and libraries take their memory before the capture
                run()
            torch.cuda.current_stream(self.device).wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits = run()
        return _Graph(graph, inputs, logits)


class _CaptureFailed(Exception):
    """Its cause says why."""


def _covers(one: Shape, other: Shape) -> bool:
    if isinstance(one, Pieces) and isinstance(other, Pieces) and one.of_stems is not other.of_stems:
        return False
    return all(mine >= its for mine, its in zip(one, other, strict=True))


def _rounded(number: int, sizes: Sequence[int] = ()) -> int:
    """The first of the sizes that is enough; a power of two where none is."""
    for size in sizes:
        if size >= number:
            return size
    return 1 << max(number - 1, 0).bit_length()


@contextmanager
def _no_cached_casts() -> Iterator[None]:
    """Autocast keeps its copies of weights only until it ends; a graph must make its own at every replay."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
