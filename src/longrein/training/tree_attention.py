"""Attention over a prefix tree: each token reads its own row's tokens before it, and nothing else.

Always true: the result equals what each row alone would give, and so do its gradients, whichever back end computes it.
Keys and values have fewer heads than queries where the model groups them, and are never repeated in memory.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from longrein.contract import LongreinError
from longrein.training.tree import Ints, PrefixTree
from longrein.training.tree_calls import Blocks, Varlen, has_cudnn
from longrein.training.tree_kernels import Attend, Cascade, at_least_float32

BACKENDS = ("auto", "cudnn", "varlen", "flex", "sdpa")


def wants_aligned(backend: str, device: torch.device, *, half: bool) -> bool:
    """Whether attention is faster over an aligned tree (`PrefixTree.aligned`)."""
    return half and backend in ("auto", "cudnn") and device.type == "cuda" and has_cudnn(device)


class TreeAttention:
    """The attention of one packed pass: what the tree says, prepared once and used by every layer.

    Back ends: `cudnn` (its attention over large blocks, flash attention over the rest: Hopper GPUs and later, half precision),
    `varlen` (flash attention over uneven sequences: CUDA, half precision), `flex` (FlexAttention: CUDA with triton), `sdpa`
    (anything: flash kernels on a processor, else segment by segment), `auto` for the first that can.
    `needed` are the places whose results are of use in a call that says `last`.
    """

    def __init__(self, tree: PrefixTree, device: torch.device, backend: str = "auto", needed: Ints | None = None) -> None:
        if backend not in BACKENDS:
            raise LongreinError(f"no attention back end is called {backend!r}; there are: {', '.join(BACKENDS)}")
        self.tree = tree
        self.device = device
        self.backend = backend
        self.longest = int(tree.positions.max(initial=-1)) + 1
        self._needed = needed
        self._prepared: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        kept: list[Tensor] | None = None,
        last: bool = False,
    ) -> Tensor:
        """(1, heads, N, width) queries over keys and values to (1, N, heads, width).

        `window` is how many tokens a token reads at most, itself included; `softcap` bounds the scores by a tanh. `kept`
        is empty and is filled with what a second run of the same layer can use, or was filled so (not by every back end).
        """
        query, key, value = _one_type(query, key, value)
        scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
        kept = [] if kept is None else kept
        window = None if window is None or window >= self.longest else window
        backend = self._backend_for(query, value, softcap)
        if backend in ("cudnn", "varlen"):
            packed = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
            if backend == "cudnn":  # which plans for strides too, so that those must not depend on how many tokens there are
                packed = [tensor.contiguous() for tensor in packed]
            return _attend(*packed, self._prepare(Blocks if backend == "cudnn" else Varlen, window), scale, kept).unsqueeze(
                0
            )
        if backend == "flex":
            from longrein.training.tree_flex import Flex  # compiles, so imports, much

            return self._prepare(Flex, window)(query, key, value, scale, softcap).transpose(1, 2)
        grouped = [_grouped(tensor, key.shape[1]) for tensor in (query, key, value)]
        if self.device.type == "cpu" and window is None and softcap is None and query.shape[-1] == value.shape[-1]:
            cascade = self._prepare(Cascade, None, self._needed) if last else self._prepare(Cascade)
            out = _attend(*grouped, cascade, scale, kept)
        else:
            out = self._by_segment(grouped[0], grouped[1], grouped[2], scale, window, softcap)
        return out.flatten(0, 1).transpose(0, 1).unsqueeze(0).contiguous()  # some models take a view of it

    def _backend_for(self, query: Tensor, value: Tensor, softcap: float | None) -> str:
        width = query.shape[-1]
        half = query.dtype in (torch.float16, torch.bfloat16)
        flash = half and width % 8 == 0 and width <= 256 and value.shape[-1] == width and softcap is None
        flash = flash and query.device.type == "cuda" and _has_flash(query.device)
        flex = query.device.type == "cuda" and query.dtype != torch.float64 and width >= 16 and can_compile()
        cudnn = flash and width <= 128 and has_cudnn(query.device)
        able = {"cudnn": cudnn, "varlen": flash, "flex": flex, "sdpa": True}
        if self.backend != "auto" and not able[self.backend]:
            raise LongreinError(
                f"the back end {self.backend!r} cannot compute attention of width {width} in {query.dtype} on "
                f"{query.device.type}{'' if softcap is None else ' with bounded scores'}; 'auto' takes one that can"
            )
        return self.backend if self.backend != "auto" else next(name for name, can in able.items() if can)

    def _prepare(self, kind: Any, window: int | None = None, *more: Any) -> Any:
        name = (kind, window, len(more))
        if name not in self._prepared:
            self._prepared[name] = kind(self.tree, self.device, window, *more)
        return self._prepared[name]

    def _by_segment(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        parts = []
        for cut in self._prepare(_cuts, window):
            keys, values = (_along(tensor, cut.slices) for tensor in (key, value))
            queries = query[:, :, cut.start : cut.end]
            if softcap is not None:
                scores = torch.tanh(queries @ keys.transpose(2, 3) * (scale / softcap)) * softcap
                weights = scores.masked_fill(~cut.mask, float("-inf")).softmax(-1, dtype=at_least_float32(scores.dtype))
                parts.append(weights.to(values.dtype) @ values)
            else:
                keys, values = (tensor.expand(-1, queries.shape[1], -1, -1) for tensor in (keys, values))
                parts.append(functional.scaled_dot_product_attention(queries, keys, values, cut.mask, scale=scale))
        return torch.cat(parts, 2)


class Cut(NamedTuple):
    """Queries `start` to `end` of one segment, the stretches of keys they read in order, and which each of them reads."""

    start: int
    end: int
    slices: list[tuple[int, int]]
    mask: Tensor


def _cuts(tree: PrefixTree, device: torch.device, window: int | None) -> Sequence[Cut]:
    """Segments cut so that a cut's keys are few: no more than its own tokens and a window before them."""
    window = len(tree) if window is None else window
    most = max(window, 128)
    cuts = []
    for path in tree.paths:
        begin, stop = int(tree.starts[path[-1]]), int(tree.ends[path[-1]])
        for start in range(begin, stop, most):
            end = min(start + most, stop)
            first = max(0, int(tree.positions[start]) - window + 1)
            last = int(tree.positions[end - 1]) + 1
            slices = []
            for segment in path:
                offset = int(tree.starts[segment] - tree.positions[tree.starts[segment]])  # of places over positions
                low, high = max(first + offset, int(tree.starts[segment])), min(last + offset, int(tree.ends[segment]))
                if low < high:
                    slices.append((low, high))
            queries = torch.arange(last - (end - start), last, device=device)[:, None]
            keys = torch.arange(first, last, device=device)
            cuts.append(Cut(start, end, slices, (keys <= queries) & (keys > queries - window)))
    return cuts


@cache
def _has_flash(device: torch.device) -> bool:
    """NVIDIA's GPUs from Ampere on."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def can_compile() -> bool:
    """Whether what compiles kernels for a GPU is here: triton, and the C compiler it needs."""
    return importlib.util.find_spec("triton") is not None and any(map(shutil.which, ("cc", "gcc", "clang")))


def _attend(*arguments: Any) -> Tensor:
    return Attend.apply(*arguments)  # pyright: ignore[reportReturnType]


def _grouped(tensor: Tensor, groups: int) -> Tensor:
    """(1, heads, N, width) as (groups, heads a group, N, width): the batch is one, so its axis is free for the groups."""
    return tensor.unflatten(1, (groups, -1))[0]


def _along(tensor: Tensor, slices: list[tuple[int, int]]) -> Tensor:
    parts = [tensor[:, :, start:end] for start, end in slices]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _one_type(*tensors: Tensor) -> list[Tensor]:
    """Queries, keys and values in the type torch's own attention would run in."""
    kind = tensors[0].device.type
    common = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensors[-1].dtype
    return [tensor if tensor.dtype == torch.float64 else tensor.to(common) for tensor in tensors]
