"""A decode step as captured CUDA graphs: launched as one, in place of the hundreds of kernels that make it up.

Always true: a graph is replayed only over the memory and the shapes it was captured with. Shapes are rounded up to a few sizes;
rows that a step pads with write to the spare last place of their slot, and what they draw is not looked at. Where capturing
fails, steps go on without it, and one line in the log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from longrein.engines.attention import Grouping, Step
from longrein.engines.slots import Shelf

logger = logging.getLogger(__name__)

SIZES = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
"""Sizes that numbers of rows are rounded up to; above the last one, and for widths, halves and wholes of powers of two."""
MOST_GRAPHS = 64
"""Graphs kept; the one used longest ago goes first."""

Forwarding = Callable[[Step, torch.Tensor, torch.Tensor], torch.Tensor]


class Shape(NamedTuple):
    """What a graph is captured for."""

    rows: int
    width: int
    stems: int
    most: int
    stem_width: int


class _Graph(NamedTuple):
    graph: Any
    inputs: torch.Tensor
    """`[3, rows]`: ids, positions, and where in their slots."""
    step: Step
    logits: torch.Tensor


class Graphs:
    """The captured steps of one forward."""

    def __init__(self, slots: Shelf, stems: Shelf, forward: Forwarding, device: torch.device) -> None:
        self.slots, self.stems, self.device = slots, stems, device
        self.captured: dict[Shape, _Graph] = {}
        self._forward = forward
        self._pool: Any = None
        self._memory: tuple[int, int] = (-1, -1)
        self._failed = False

    def run(self, step: Step, ids: Sequence[int], positions: Sequence[int], lasts: Sequence[int]) -> torch.Tensor | None:
        """The logits of a step without pieces; None where it has to be forwarded plainly."""
        if self._failed or step.pieces or not step.rows:
            return None
        memory = self.slots.moves, self.stems.moves
        if memory != self._memory:  # the shelves stand elsewhere now
            self.captured.clear()
            self._pool, self._memory = None, memory
        shape = self._shape(step)
        padding = shape.rows - step.rows
        spare = self.slots.capacity - 1
        rows = [[*ids, *[0] * padding], [*positions, *[0] * padding], [*lasts, *[spare] * padding]]
        inputs = torch.tensor(rows, pin_memory=self.device.type == "cuda")
        graph = self.captured.pop(shape, None)
        try:
            graph = graph or self._capture(shape, inputs, step.grouping)
        except Exception as error:
            self._failed = True
            self.captured.clear()
            logger.warning("decode steps are not captured as CUDA graphs and run eagerly: %s", error)
            return None
        self.captured[shape] = graph  # the last one is the one used last
        graph.inputs.copy_(inputs, non_blocking=True)
        _fill(graph.step.grouping, step.grouping, shape)
        graph.graph.replay()
        return graph.logits[: step.rows]

    def _shape(self, step: Step) -> Shape:
        group = step.grouping
        most = len(group.members) // max(group.stems, 1)
        return Shape(
            rows=min(_rounded(step.rows), self.slots.rows),
            width=min(_rounded(max(step.width, 64)), self.slots.capacity),
            stems=min(_rounded(group.stems), self.stems.rows),
            most=_rounded(most),
            stem_width=min(_rounded(max(group.width, 64)), self.stems.capacity) if group.width else 0,
        )

    def _capture(self, shape: Shape, inputs: torch.Tensor, like: Grouping) -> _Graph:
        while len(self.captured) >= MOST_GRAPHS:
            self.captured.pop(next(iter(self.captured)))
        static = inputs.to(self.device)
        zeros = lambda count: torch.zeros(count, dtype=torch.int64, device=self.device)  # noqa: E731
        group = Grouping(
            stems=shape.stems,
            width=shape.stem_width,
            members=zeros(shape.stems * shape.most),
            seats=zeros(shape.rows),
            lengths=zeros(shape.stems),
            of_row=zeros(shape.rows),
            even=False,
        )
        _fill(group, like, shape)

        def step() -> Step:
            return Step(
                slots=self.slots,
                stems=self.stems,
                rows=shape.rows,
                at=static[2],
                width=shape.width,
                even=False,
                grouping=group,
                pieces=[],
            )

        return self._record(static, step)

    def _record(self, inputs: torch.Tensor, step: Callable[[], Step]) -> _Graph:
        with _no_cached_casts():
            aside = torch.cuda.Stream(self.device)
            aside.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(aside):  # kernels load and libraries take their memory before the capture
                for _ in range(2):
                    self._forward(step(), inputs[:1], inputs[1:2])
            torch.cuda.current_stream(self.device).wait_stream(aside)
            captured = step()
            graph = torch.cuda.CUDAGraph()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits = self._forward(captured, inputs[:1], inputs[1:2])
        return _Graph(graph, inputs, captured, logits)


def _fill(static: Grouping, group: Grouping, shape: Shape) -> None:
    """Write a step's tables over those a graph reads; stems and rows that pad have no tokens and sit at place 0."""
    most = len(group.members) // max(group.stems, 1)
    if group.stems:
        static.members.view(shape.stems, shape.most)[: group.stems, :most] = group.members.view(group.stems, most)
        static.seats[: len(group.seats)] = group.seats // most * shape.most + group.seats % most
    static.lengths.zero_()
    static.lengths[: group.stems] = group.lengths
    static.of_row[: len(group.of_row)] = group.of_row


def _rounded(number: int) -> int:
    for size in SIZES:
        if size >= number:
            return size
    power = 1 << (number - 1).bit_length()
    return power * 3 // 4 if power * 3 // 4 >= number else power


@contextmanager
def _no_cached_casts() -> Iterator[None]:
    """Autocast keeps its copies of weights only until it ends; a graph must make its own at every replay."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
