"""Which way a model's rows may be forwarded: the best that is exact for it, found by trying it.

Always true: a model for which a packed pass would give another log-probability, or another gradient, is padded, whatever it
is; a shared token has one random draw, so what is random in training is not shared.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from longrein.training.head import Head
from longrein.training.packed import (
    TOLERANCE,
    Unpackable,
    configs,
    decoder_of,
    evaluating,
    hidden_states,
    trial_rows,
)
from longrein.training.tree import PrefixTree

logger = logging.getLogger(__name__)


class Way(NamedTuple):
    """How a model's rows may be forwarded: `tree` (each distinct prefix once), `packed` (no padding) or `padded`."""

    name: Literal["tree", "packed", "padded"]
    reason: str
    """Why not a better one; empty for `tree`."""


_ways: weakref.WeakKeyDictionary[nn.Module, dict[Any, Way]] = weakref.WeakKeyDictionary()


def way_for(model: nn.Module) -> Way:
    """The best way that is exact for this model as it stands, said once in the log where it is not the tree."""
    config = getattr(model, "config", None)  # what may change while a model is trained is looked at each time
    key = (model.training, getattr(config, "output_router_logits", False), _random(model))
    known = _ways.setdefault(model, {})
    if key not in known:
        known[key] = _decide(model)
        if known[key].name != "tree":
            logger.warning("%s: rows are forwarded %s, since %s", type(model).__name__, *known[key])
    return known[key]


def _decide(model: nn.Module) -> Way:
    try:
        _refuse(model)
        if not (reason := _random(model) or _difference(model, share=True)):
            return Way("tree", "")
        worse = _difference(model, share=False)
        return Way("padded", worse) if worse else Way("packed", reason)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a packed pass of an unknown model runs into, the padded one stands
        return Way("padded", str(error) or type(error).__name__)


def _refuse(model: nn.Module) -> None:
    """Raise where a look at the model is enough to know that its rows cannot be packed."""
    for name, adapter in getattr(model, "peft_config", {}).items():
        if getattr(adapter, "is_prompt_learning", False) or getattr(adapter, "alora_invocation_tokens", None):
            raise Unpackable(f"the adapter {name!r} ({type(adapter).__name__}) acts on rows, not on tokens")
    decoder = decoder_of(model)
    if any(hasattr(parameter, "ds_id") or hasattr(parameter, "device_mesh") for parameter in decoder.parameters()):
        raise Unpackable("its parameters are sharded, and only a pass of the whole model gathers them")
    for module in decoder.modules():
        if isinstance(module, nn.Conv1d):
            raise Unpackable(f"{type(decoder).__name__} has a convolution over tokens")
    for config in configs(decoder):
        if getattr(config, "output_router_logits", False):
            raise Unpackable("the load-balancing loss of its experts counts every token of every row")
        if model.training:
            for name, value in vars(config).items():
                if "att" in name and "drop" in name and isinstance(value, float) and value > 0:
                    raise Unpackable(f"{name} is {value}")


def _random(model: nn.Module) -> str:
    """What would give a shared token one random draw where each of its rows has its own."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            return f"{name} drops out {module.p} of its inputs, differently in each row"
    if model.training and any(getattr(config, "router_jitter_noise", 0) for config in configs(model)):
        return "router_jitter_noise is not 0, and differs in each row"
    return ""


REACH = 1 << 17
"""Masks are looked at up to this position when a way is decided: chunks and windows are long."""


def _difference(model: nn.Module, *, share: bool) -> str:
    """Where a packed pass over a few short rows differs from a plain pass over each; empty where it does not.

    Every module's output is compared and not the logits only: what comes out of a fresh model's new layer may be
    multiplied by zero today.
    """
    decoder = decoder_of(model)
    rows = trial_rows(model)
    tree = PrefixTree.of(rows, share=share)
    device = next(decoder.parameters()).device
    places = torch.as_tensor(np.concatenate(tree.places), device=device)
    with evaluating(model), torch.no_grad(), torch.autocast(device.type, enabled=False):
        with _outputs(decoder) as packed:
            hidden = hidden_states(model, tree, "auto", reach=REACH)
        packed["its output head"] = [Head.of(model).logits(hidden)[None].to(hidden.dtype)]
        plain = []
        for row in rows:
            with _outputs(decoder) as outputs:
                result = model(input_ids=torch.as_tensor(row, device=device)[None], use_cache=False)
            plain.append(outputs | {"its output head": [result.logits]})
    for name, results in packed.items():
        for index, result in enumerate(results):
            if result.shape[:2] != (1, len(tree)):  # not by token: a router's choices, an expert's share
                continue
            expected = torch.cat([outputs[name][index][0] for outputs in plain]).flatten(1).float()
            errors = (result[0, places].flatten(1).float() - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-6)
            exact = result.dtype in TOLERANCE  # in half precision a token may be routed to another expert by rounding
            error = (errors if exact else errors[places >= int(tree.ends[0])]).quantile(1.0 if exact else 0.5).item()
            if not error < TOLERANCE.get(result.dtype, 0.1):
                return f"a packed pass changes what {name or type(decoder).__name__} gives by {error:.2g}"
    return ""


@contextmanager
def _outputs(decoder: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """What each module gives during the pass, call by call."""
    found: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(first, Tensor) and first.dim() >= 2:
                found.setdefault(name, []).append(first)

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in decoder.named_modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
