"""Weights from the trained model to an engine that samples from a copy of it.

Always true: an engine is paused while its weights change, and what it samples afterwards is stamped with the version they
belong to. Full weights go as `(name, tensor)` pairs under the names of the model on disk; of a PEFT model its adapter goes.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from torch.distributed.tensor import DTensor

from longrein.contract import Engine, LongreinError
from longrein.engines.scripted import ScriptedEngine
from longrein.engines.transformers import TransformersEngine
from longrein.training.processes import on_main_process


def samples_elsewhere(engine: Engine, model: Any) -> bool:
    """Whether an engine samples from weights that are not the trained module's own. A script samples from none."""
    shares = isinstance(engine, TransformersEngine) and engine.model is model
    return not shares and not isinstance(engine, ScriptedEngine)


def send(engine: Engine, model: Any, accelerator: Any, version: int) -> None:
    """Have `engine` sample from the weights of `model` as they are now. Every rank calls this; the main one sends."""
    model = accelerator.unwrap_model(model)
    if is_peft_model(model):
        on_main_process(accelerator, lambda: _send_adapter(engine, model, version))
        return
    weights = _weights(model)
    if _in_pieces(model):  # putting them together takes every rank, keeping them only the main one
        weights = iter([(name, whole.cpu()) for name, whole in weights if accelerator.is_main_process])
    on_main_process(accelerator, lambda: _send_weights(engine, weights, version))


def _send_weights(engine: Engine, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
    with _paused(engine, version):
        engine.load_weights(weights)


def _send_adapter(engine: Any, model: Any, version: int) -> None:
    if not hasattr(engine, "load_adapter"):
        raise LongreinError(f"{type(engine).__name__} takes no LoRA adapters; train all weights, or sample from vLLM")
    if _in_pieces(model):
        raise LongreinError("an adapter that is spread over ranks cannot be sent to vLLM; train it without sharding")
    with tempfile.TemporaryDirectory(prefix="longrein-adapter-") as folder:
        model.save_pretrained(folder, selected_adapters=[model.active_adapter])
        with _paused(engine, version):
            engine.load_adapter(folder)


@contextlib.contextmanager
def _paused(engine: Engine, version: int) -> Iterator[None]:
    """Nothing is sampled in here, and what is sampled afterwards is of this version."""
    engine.pause()
    try:
        yield
        engine.policy_version = version
    finally:
        engine.resume()


def _weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters, one at a time, under the names they have on disk."""
    for name, parameter in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "").removeprefix("module.")
        with _gathered(parameter):
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            yield name, whole.detach()


def _in_pieces(model: Any) -> bool:
    return any(isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters())


def _gathered(parameter: Any) -> Any:
    """A context in which a parameter of ZeRO-3 is whole."""
    if not hasattr(parameter, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed  # type: ignore[import-not-found]

    return deepspeed.zero.GatheredParameters([parameter])


class WeightTransfer(Protocol):
    """What TRL's `AsyncGRPOTrainer` takes as `weight_transfer`."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...


class EngineWeightTransfer:
    """TRL's `WeightTransferProtocol` into any engine: weights change while nothing is sampled.

    >>> AsyncGRPOTrainer(model, args=args, train_dataset=tasks, rollout_worker=worker,
    ...     weight_transfer=EngineWeightTransfer(agent.engine))                                 # doctest: +SKIP

    `by` is TRL's own `WeightTransferClient`, where a vLLM engine's weights go over NCCL rather than through the engine.
    """

    def __init__(self, engine: Engine, by: WeightTransfer | None = None) -> None:
        if by is not None and not hasattr(engine, "weights_replaced"):
            raise LongreinError(f"a transfer to vLLM servers needs a vLLM engine; this is a {type(engine).__name__}")
        self.engine = engine
        self.by = by

    def init_weight_transfer(self) -> None:
        if self.by is not None:
            self.by.init_weight_transfer()

    def pause(self) -> None:
        self.engine.pause()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """TRL counts versions from 0 and says the new one only after `resume`: what comes in between is stamped here."""
        if self.by is None:
            self.engine.load_weights(iterator)
        else:
            self.by.send_weights(iterator)
            self.engine.weights_replaced()  # type: ignore[attr-defined]
        self.engine.policy_version += 1

    def resume(self) -> None:
        self.engine.resume()

    def destroy(self) -> None:
        self.engine.resume()
        if self.by is not None:
            self.by.destroy()
