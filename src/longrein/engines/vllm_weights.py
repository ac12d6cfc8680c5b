"""The weights that vLLM servers sample from: how they come there, and how their versions are told.

Always true: a token's version is the server's own word. The weights there have a label, vLLM tells for each token under which it
was drawn, and a label that this client did not give (the server was started again and has its first weights) means that they
are sent once more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from longrein.contract import LongreinError
from longrein.engines.vllm_http import HOW_TO_START, Away, Broken, Replica, Wire

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")


class _Weights(NamedTuple):
    """How a server comes to the weights this engine samples from; kept, for a server that is started again."""

    path: str
    body: dict[str, Any]
    folder: Path | None = None
    """What it reads, where that is ours to remove once newer weights are there."""


class ServedWeights:
    """What a client of vLLM servers knows of the weights in them; they change between `pause` and `resume`."""

    def __init__(
        self, wire: Wire, replicas: list[Replica], weights: Literal["memory", "disk"], folder: str | Path | None
    ) -> None:
        if weights not in ("memory", "disk"):
            raise LongreinError(f"weights is {weights!r}; it must be 'memory' or 'disk'")
        if weights == "disk" and folder is None:
            raise LongreinError("weights='disk' needs a `folder` that this process can write and the servers can read")
        self.weights = weights
        self._wire, self._replicas = wire, replicas
        self._folder = Path(folder).absolute() if folder is not None else None
        self._may_sample = asyncio.Event()
        self._may_sample.set()
        self._paused = False
        self._name = f"longrein-{uuid.uuid4().hex[:12]}"
        self._updates = itertools.count(1)
        self._version = 0
        self._version_of: dict[str, int] = {}
        """The label of some weights, or the name of an adapter: their policy version."""
        self._base = f"{self._name}:0:"
        self._label = self._new_label()
        self._weights: _Weights | None = None
        self._adapter: str | None = None
        self._adapters: dict[str, _Weights] = {}
        self._adapter_calls: Counter[str] = Counter()
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    # What the engine is told, from any thread

    @property
    def policy_version(self) -> int:
        return self._version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        if version == self._version:
            return
        self._version = version
        if self._adapter is not None:
            self._version_of[self._adapter] = version
        else:
            self._label = self._new_label()
            self._wire.run(self._on_all(self._put_label, only=lambda replica: replica.ready or replica.paused))

    def pause(self) -> None:
        """Return once no server samples. Calls in flight keep their tokens and read them anew with the weights that come."""
        self._paused = True
        self._wire.run(self._pause())

    def resume(self) -> None:
        self._paused = False
        self._wire.run(self._resume())

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Send `(name, tensor)` pairs to every server; call it between `pause` and `resume`."""
        from safetensors.torch import save_file

        self._check_paused()
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
        if not tensors:
            raise LongreinError("load_weights was given no weights")
        folder = self._new_folder()
        file = folder / "model.safetensors"
        save_file(tensors, file, metadata={"format": "pt"})
        if self.weights == "disk":
            self._replace(_reload(folder, folder))
        else:
            call = {"method": "load_shared_weights", "kwargs": {"path": str(file)}}
            self._replace(_Weights("/collective_rpc", call, folder))

    def load_checkpoint(self, path: str | Path) -> None:
        """Sample from a saved model, in a folder that the servers can read; call it between `pause` and `resume`."""
        self._check_paused()
        path = Path(path).absolute()
        if not path.is_dir():
            raise LongreinError(f"{path} is no folder; a checkpoint is what `save_pretrained` writes")
        self._replace(_reload(path))

    def load_adapter(self, path: str | Path) -> None:
        """Sample with the LoRA adapter in a folder that the servers can read; call it between `pause` and `resume`.

        Each adapter has a name of its own on the servers, so calls in flight end with the one they began with.
        """
        self._check_paused()
        path = Path(path).absolute()
        if not (path / "adapter_config.json").is_file():
            raise LongreinError(f"{path} holds no adapter_config.json; an adapter is what peft's `save_pretrained` writes")
        folder = self._new_folder()
        shutil.copytree(path, folder, dirs_exist_ok=True)  # vLLM reads it when it is first used, and maybe again later
        name = f"{self._name}-{next(self._updates)}"
        self._adapters[name] = _Weights("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, folder)
        self._version_of[name] = self._version
        self._adapter = name
        self._wire.run(self._on_all(self._put_adapter, strict=True))
        self._wire.run(self._drop_adapters())

    def weights_replaced(self) -> None:
        """Somebody else put new weights into the servers, between `pause` and `resume` (TRL's NCCL transfer does).

        A server that is started again is then not given them: whoever sent them must send them again.
        """
        self._check_paused()
        self._replace(_Weights("", {}))

    def _replace(self, weights: _Weights) -> None:
        before, self._weights, self._adapter = self._weights, weights, None
        self._base = f"{self._name}:{next(self._updates)}:"
        self._label = self._new_label()
        self._wire.run(self._on_all(self._put_weights if weights.path else self._put_label, strict=True))
        if before is not None and before.folder is not None:
            shutil.rmtree(before.folder, ignore_errors=True)

    def _new_label(self) -> str:
        label = f"{self._base}{self._version}"
        self._version_of[label] = self._version
        return label

    def _check_paused(self) -> None:
        if not self._paused:
            raise LongreinError("weights change between `pause` and `resume`; call `engine.pause()` first")

    def _new_folder(self) -> Path:
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=f"{self._name}-", dir=self._folder))
        if self._scratch is None:
            if not SHARED_MEMORY.is_dir():
                raise LongreinError(f"{SHARED_MEMORY} is not there to share memory: use weights='disk' and a `folder`")
            self._scratch = tempfile.TemporaryDirectory(prefix="longrein-", dir=SHARED_MEMORY, ignore_cleanup_errors=True)
        return Path(tempfile.mkdtemp(dir=self._scratch.name))

    # The servers, on the wire's loop

    async def _prepare(self, replica: Replica) -> None:
        """Make sure that a server has our weights under our label, as it has not when it is new here or was started again."""
        if replica.ready:
            return
        async with replica.lock:
            if replica.ready:
                return
            config = (await self._wire.get(replica, "/server_info?config_format=json"))["vllm_config"]
            replica.logprobs_mode = config["model_config"]["logprobs_mode"]
            label = (await self._wire.get(replica, "/weight_info"))["weight_version"]
            if self._weights is not None and not label.startswith(self._base):
                if not self._weights.path:
                    raise LongreinError(
                        f"vLLM at {replica.url} was started again, and the weights it had were sent to it by another: it "
                        "cannot be given them from here. Start the run again"
                    )
                await self._wire.post(replica, "/pause?mode=keep")
                await self._put_weights(replica)
            elif label != self._label:
                await self._put_label(replica)
            if self._adapter is not None:
                await self._put_adapter(replica)
            if not self._paused:
                await self._wire.post(replica, "/resume")  # from our pause, or from one whose client is no more
            replica.ready = True

    async def _put_weights(self, replica: Replica) -> None:
        assert self._weights is not None
        await self._wire.post(replica, self._weights.path, self._weights.body)
        await self._put_label(replica)

    async def _put_adapter(self, replica: Replica) -> None:
        assert self._adapter is not None
        adapter = self._adapters[self._adapter]
        try:
            await self._wire.post(replica, adapter.path, adapter.body)
        except LongreinError as error:
            if "already been loaded" not in str(error):
                raise

    async def _drop_adapters(self) -> None:
        """Forget adapters that no call uses any more."""
        for name in [name for name in self._adapters if name != self._adapter and not self._adapter_calls[name]]:
            unused = self._adapters.pop(name)
            await self._on_all(
                lambda replica, name=name: self._wire.post(replica, "/v1/unload_lora_adapter", {"lora_name": name})
            )
            if unused.folder is not None:
                shutil.rmtree(unused.folder, ignore_errors=True)

    async def _put_label(self, replica: Replica) -> None:
        await self._wire.post(replica, "/update_weight_version", {"new_version": self._label})

    async def _pause(self) -> None:
        async def pause(replica: Replica) -> None:
            await self._wire.post(replica, "/pause?mode=keep")
            replica.paused = True

        self._may_sample.clear()
        await self._on_all(pause, only=lambda replica: True)

    async def _resume(self) -> None:
        async def resume(replica: Replica) -> None:
            replica.paused = False
            await self._wire.post(replica, "/resume")

        await self._on_all(resume)
        self._may_sample.set()

    async def _on_all(
        self,
        act: Callable[[Replica], Coroutine[Any, Any, Any]],
        *,
        only: Callable[[Replica], bool] = lambda replica: replica.paused,
        strict: bool = False,
    ) -> None:
        """Act on every replica. One that is away is made ready when it is next asked for a reply; with `strict`, one that
        says it failed is an error."""

        async def on_one(replica: Replica) -> None:
            try:
                async with replica.lock:
                    if only(replica):
                        await act(replica)
            except Away as error:
                if strict and isinstance(error, Broken):
                    raise LongreinError(
                        f"vLLM at {replica.url} cannot take the weights ({error}); {HOW_TO_START}"
                    ) from error
                logger.warning("vLLM at %s: %s; it is made ready when it is back", replica.url, error)
                replica.ready = replica.paused = False

        await asyncio.gather(*(on_one(replica) for replica in self._replicas))


def _reload(path: Path, folder: Path | None = None) -> _Weights:
    return _Weights("/collective_rpc", {"method": "load_saved_weights", "kwargs": {"path": str(path)}}, folder)
