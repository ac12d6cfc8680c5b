"""A causal language model's hidden states over a prefix tree: one pass, each distinct prefix once.

Always true: the hidden state of a token, and every gradient through it, is what a pass over its row alone would give. The
model's code is its own: only its attention is led through `TreeAttention`, by transformers' attention and mask
interfaces, and only for the duration of a pass.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch._dynamo
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from longrein.contract import LongreinError
from longrein.training.last_layer import LastLayer
from longrein.training.tree import Ints, PrefixTree
from longrein.training.tree_attention import TreeAttention, can_compile

logger = logging.getLogger(__name__)

NAME = "longrein_tree"
"""Of our attention among transformers' attention implementations."""


class Unpackable(LongreinError):
    """The model does something between tokens that a packed pass would get wrong."""


def packed_hidden(
    model: nn.Module,
    tree: PrefixTree,
    *,
    needed: Ints | None = None,
    backend: str = "auto",
    compiled: bool | None = None,
) -> Tensor:
    """(N, hidden) the decoder's last hidden state, after its final norm, of each token of the tree (of those at the places
    `needed`, in their order, where they are said); gradients flow.

    `model` is a causal language model, bare or with PEFT adapters, for which `way_for` says `tree` (or `packed`, for a
    tree made with `share=False`). With `compiled`, what its layers do around their attention is compiled at first use,
    which takes half a minute and makes a pass a third faster on a GPU: there it is the default, for layers that compile.
    """
    decoder = decoder_of(model)
    on_gpu = next(decoder.parameters()).device.type == "cuda"
    compiled = bool(on_gpu and can_compile() and _compiles(model) if compiled is None else compiled)
    if needed is None:
        return hidden_states(model, tree, backend, compiled)
    spare = not compiled and not on_gpu and len(needed) > 0 and _spares(model)
    hidden = hidden_states(model, tree, backend, compiled, needed=np.unique(needed) if spare else None)
    return hidden.index_select(0, torch.as_tensor(needed, device=hidden.device))


def hidden_states(
    model: nn.Module,
    tree: PrefixTree,
    backend: str,
    compiled: bool = False,
    reach: int = 0,
    needed: Ints | None = None,
) -> Tensor:
    """Those of one pass, run as it is told: where places are `needed`, what it gives at others says nothing. Masks are looked at
    up to the position `reach`."""
    decoder = decoder_of(model)
    device = next(decoder.parameters()).device
    if not len(tree):
        raise LongreinError("there is no token to forward: every row given is empty")
    attention = TreeAttention(tree, device, backend, needed)
    ids, positions = (torch.as_tensor(array, device=device)[None] for array in (tree.ids, tree.positions))
    lead = _Lead(decoder, attention, max(reach, attention.longest), _compiled_layers(decoder) if compiled else ())
    if needed is not None:
        last = LastLayer(decoder, torch.as_tensor(needed, device=device), len(tree))
        lead = lead._replace(forwards=last.forwards, last=last.modules)
    with _led(lead), _checkpoints_led(lead):
        # a mask of ones says that nothing is padding; without it positions that jump would be taken for packed rows
        output = decoder(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False)
    return output.last_hidden_state[0]


TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Relative; half precision has 0.1. What a packed pass gets wrong, it gets wrong by the size of the values."""


def trial_rows(model: nn.Module) -> list[np.ndarray]:
    """Short rows with forks at several depths, one row that ends inside another, and one that shares nothing."""
    size = min(model.get_input_embeddings().num_embeddings, 1000)  # pyright: ignore[reportCallIssue]
    ids = np.random.default_rng(0).integers(0, size, 40)
    ids[[5, 10, 15, 20, 25]] = np.arange(5) % size  # where rows fork, they differ
    trunk = ids[:5]
    return [
        np.concatenate(parts)
        for parts in (
            [trunk, ids[5:9]],
            [trunk, ids[10:15], ids[15:18]],
            [trunk, ids[10:15], ids[20:23]],
            [trunk],
            [ids[25:]],
        )
    ]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def configs(decoder: nn.Module) -> list[Any]:
    return list({id(module.config): module.config for module in decoder.modules() if hasattr(module, "config")}.values())


def decoder_of(model: Any) -> Any:
    """The module under the output head."""
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).get_decoder()


class _Lead(NamedTuple):
    """A pass under way: whose attention is led, through what, and up to which position masks are looked at."""

    decoder: nn.Module
    attention: TreeAttention
    reach: int
    forwards: Sequence[tuple[nn.Module, Callable[..., Any]]] = ()
    """Modules, and what runs in place of their `forward`."""
    last: Collection[nn.Module] = ()
    """The modules of the last layer, where its results are of use at some places alone."""
    memo: _Memo | None = None
    """Of the layer that runs, where it may run again."""


class _Memo:
    """What the attention of one checkpointed layer gave, call by call: run again, it is not computed again."""

    def __init__(self) -> None:
        self.results: list[list[Tensor]] = []
        self.calls = 0

    def next(self) -> list[Tensor]:
        if self.calls == len(self.results):
            self.results.append([])
        self.calls += 1
        return self.results[self.calls - 1]


_state = threading.local()


@contextmanager
def _led(lead: _Lead) -> Iterator[None]:
    """The decoder's attention goes through ours, in this thread."""
    before = [(config, config._attn_implementation_internal) for config in configs(lead.decoder)]
    outer = getattr(_state, "lead", None)
    _state.lead = lead
    forwards = [(vars(layer), vars(layer).get("forward")) for layer, _ in lead.forwards]
    for config, _ in before:
        config._attn_implementation_internal = NAME
    for layer, forward in lead.forwards:
        vars(layer)["forward"] = forward
    try:
        yield
    finally:
        _state.lead = outer
        for config, name in before:
            config._attn_implementation_internal = name
        for attributes, forward in forwards:
            attributes.pop("forward") if forward is None else attributes.update(forward=forward)


_compiled: weakref.WeakKeyDictionary[nn.Module, list[tuple[nn.Module, Callable[..., Any]]]] = weakref.WeakKeyDictionary()


def _compiled_layers(decoder: nn.Module) -> list[tuple[nn.Module, Callable[..., Any]]]:
    """The decoder's layers compiled for any number of tokens; attention itself is left out, and runs as it is."""
    if decoder not in _compiled:
        layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
        _compiled[decoder] = [(layer, torch.compile(layer.forward, dynamic=True)) for layer in layers]
    return _compiled[decoder]


_compile: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def _compiles(model: nn.Module) -> bool:
    """Whether the decoder's layers compile, forward and backward; it is tried once, on a few rows, and said where they do not."""
    decoder = decoder_of(model)
    if decoder not in _compile:
        trained = [parameter for parameter in decoder.parameters() if parameter.requires_grad]
        try:
            with torch.enable_grad(), _unchecked(decoder):
                hidden = hidden_states(model, PrefixTree.of(trial_rows(model)), "auto", compiled=True)
                if hidden.requires_grad:
                    torch.autograd.grad(hidden.float().sum(), trained, allow_unused=True)
            _compile[decoder] = True
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler runs into, the layers as they are stand
            _compile[decoder] = False
            logger.warning("the layers of %s run as they are, since they do not compile: %s", type(decoder).__name__, error)
    return _compile[decoder]


@contextmanager
def _unchecked(decoder: nn.Module) -> Iterator[None]:
    """Without gradient checkpointing, of which some kinds bear no gradients but those of a whole backward pass."""
    checked = [module for module in decoder.modules() if getattr(module, "gradient_checkpointing", False)]
    for module in checked:
        vars(module)["gradient_checkpointing"] = False
    try:
        yield
    finally:
        for module in checked:
            vars(module)["gradient_checkpointing"] = True


_spare: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def _spares(model: nn.Module) -> bool:
    """Whether the decoder's last layer gives the same where it is computed for some tokens alone; tried once, on a few rows."""
    decoder = decoder_of(model)
    if decoder not in _spare:
        tree = PrefixTree.of(trial_rows(model))
        needed = np.arange(2, len(tree), 3)
        with evaluating(model), torch.no_grad(), torch.autocast(next(decoder.parameters()).device.type, enabled=False):
            whole = hidden_states(model, tree, "auto")[needed].float()
            try:
                apart = (hidden_states(model, tree, "auto", needed=needed)[needed].float() - whole).norm() / whole.norm()
            except Exception:  # whatever it runs into, the whole layer stands
                apart = torch.inf
        _spare[decoder] = bool(apart < TOLERANCE.get(next(decoder.parameters()).dtype, 0.1))
    return _spare[decoder]


@contextmanager
def _checkpoints_led(lead: _Lead) -> Iterator[None]:
    """Layers that gradient checkpointing runs again, in the backward pass, find the same attention."""

    def led(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def run(layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            memo = _Memo()

            def again(*inputs: Any, **options: Any) -> Any:
                memo.calls = 0
                with _led(lead._replace(memo=memo)):
                    return layer(*inputs, **options)

            return checkpoint(again, *args, **kwargs)

        return run

    modules = [module for module in lead.decoder.modules() if "_gradient_checkpointing_func" in vars(module)]
    before: list[Any] = [module._gradient_checkpointing_func for module in modules]
    for module, checkpoint in zip(modules, before, strict=True):
        vars(module)["_gradient_checkpointing_func"] = led(checkpoint)
    try:
        yield
    finally:
        for module, checkpoint in zip(modules, before, strict=True):
            vars(module)["_gradient_checkpointing_func"] = checkpoint


HARMLESS = ("position_ids", "cache_position")
"""Tensors some models hand to their attention that plain attention makes no use of."""


@torch.compiler.disable
def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention."""
    lead: _Lead = _state.lead
    name = type(module).__name__
    if attention_mask is None:
        raise Unpackable(f"{name} gives its attention no mask, so how far it reads is unknown")
    if dropout:
        raise Unpackable(f"{name} has attention dropout of {dropout}")
    if extra := [key for key, item in kwargs.items() if isinstance(item, Tensor) and key not in HARMLESS]:
        raise Unpackable(f"{name} gives its attention {', '.join(extra)}, which is not known here")
    window = int(attention_mask)
    kept = lead.memo.next() if lead.memo else None
    how: dict[str, Any] = {"scale": scaling, "window": window or None, "softcap": softcap}
    return lead.attention(query, key, value, **how, kept=kept, last=module in lead.last), None


def _mask(*args: Any, mask_function: Callable[..., Tensor], **kwargs: Any) -> Tensor:
    """What transformers calls in place of making a mask: how far back a token reads, 0 for all the way."""
    lead: _Lead = _state.lead
    last = lead.reach - 1
    zero = torch.zeros((), dtype=torch.long)
    queries, keys = torch.tensor([[last], [max(0, last - 1)]]), torch.arange(last + 1)
    reads = mask_function(zero, zero, queries, keys)
    window = int(reads[0].sum())
    expected = (keys <= queries) & (keys > queries - window)
    if not torch.equal(reads.broadcast_to(expected.shape), expected):
        raise Unpackable("the model's attention mask is neither causal nor a sliding window")
    return torch.full((1, 1, 1, 1), window if window <= last else 0)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)
