"""A decoder's last layer, for the tokens whose hidden state is of use: what only the others need is not computed.

Always true: the hidden state of a needed token is that of the whole layer, since a token reads others in attention alone, and
their keys and values are all there. What stands at the other tokens is finite and says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer


class LastLayer:
    """The layer that a decoder runs last, and what runs in place of the `forward` of parts of it: those that hold matrices and
    are given the hidden states alone."""

    def __init__(self, decoder: nn.Module, needed: Tensor, tokens: int) -> None:
        layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
        parts = [part for layer in layers[-1:] for part in layer.children()]
        self.modules = {module for part in parts for module in part.modules()}
        matrices = [part for part in parts if any(parameter.dim() > 1 for parameter in part.parameters())]
        self.forwards = [(part, _sparing(part.forward, needed, tokens)) for part in matrices]


def _sparing(forward: Callable[..., Any], needed: Tensor, tokens: int) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor) or args[0].shape[:-1] != (1, tokens):
            return forward(*args, **kwargs)
        found = forward(args[0].index_select(1, needed))
        if not isinstance(found, Tensor):
            raise TypeError(f"{type(found).__name__} in place of a tensor")
        return found.new_zeros(1, tokens, found.shape[-1]).index_copy(1, needed, found)

    return run
