"""Samples from running vLLM servers: token ids in, token ids and log-probabilities out.

Always true:
- what is sent is the recorded prompt, id for id, and what comes back are the sampled ids, never text that would be tokenised
  again; a log-probability is the policy's at the sampling temperature, or the request is refused;
- a call has one result: a server that is away is asked again (another replica, or the same one once it is back), and since the
  seed goes with the request, what is sampled anew is what was lost;
- a token's version is the server's own word: the weights there have a label, vLLM tells for each token under which it was
  drawn, and a label that this client did not give (the server was started again and has its first weights) means that the
  weights are sent once more and the reply is drawn again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from longrein.contract import LongreinError, Sampled, SampleRequest, Sampling
from longrein.engines.balance import Balance
from longrein.engines.vllm_http import HOW_TO_START, Away, Broken, Replica, Wire

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")


class _Weights(NamedTuple):
    """How a server comes to the weights this engine samples from; kept, for a server that is started again."""

    path: str
    body: dict[str, Any]
    folder: Path | None = None
    """What it reads, where that is ours to remove once newer weights are there."""


class VLLMEngine:
    """A client of one or several `longrein serve-vllm MODEL`, all of the same model.

    >>> engine = VLLMEngine("http://127.0.0.1:8000")                                            # doctest: +SKIP
    >>> engine = VLLMEngine(["http://10.0.0.1:8000", "http://10.0.0.2:8000"], weights="disk", folder="/nfs/sync")  # doctest: +SKIP

    `weights` says how `load_weights` reaches the servers: `memory` (shared memory, on one machine) or `disk` (a `folder` that
    the servers can read). A server may be away for `patience` seconds, and a call may take `timeout`.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        weights: Literal["memory", "disk"] = "memory",
        folder: str | Path | None = None,
        patience: float = 300.0,
        timeout: float = 1800.0,
    ) -> None:
        urls = [urls] if isinstance(urls, str) else list(urls)
        if not urls:
            raise LongreinError("VLLMEngine needs the url of a server, such as 'http://127.0.0.1:8000'; it was given none")
        if weights not in ("memory", "disk"):
            raise LongreinError(f"weights is {weights!r}; it must be 'memory' or 'disk'")
        if weights == "disk" and folder is None:
            raise LongreinError("weights='disk' needs a `folder` that this process can write and the servers can read")
        self.weights = weights
        self.patience = patience
        self._folder = Path(folder).absolute() if folder is not None else None
        self._wire = Wire(timeout)
        self._replicas = [Replica(url.rstrip("/").removesuffix("/v1")) for url in urls]
        self._balance = Balance()
        self._calls: set[asyncio.Task[Any]] = set()
        self._may_sample = asyncio.Event()
        self._may_sample.set()
        self._paused = False
        self._cancellations = 0
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

    # ---- sampling

    async def sample(self, request: SampleRequest) -> Sampled:
        return await asyncio.wrap_future(self._wire.submit(self._sample(request)))

    def cancel(self) -> None:
        """Close the connections of all calls in flight, so that the servers stop sampling; later requests are served again."""
        self._cancellations += 1

        async def cancel_all() -> None:
            for call in list(self._calls):
                call.cancel()

        if self._calls:
            self._wire.run(cancel_all())

    def close(self) -> None:
        """End the calls and the connections, and let go of the shared memory. The servers run on."""
        self._wire.close()
        if self._scratch is not None:
            self._scratch.cleanup()

    async def _sample(self, request: SampleRequest) -> Sampled:
        call, cancellations = asyncio.current_task(), self._cancellations
        assert call is not None
        self._calls.add(call)
        failing_since: float | None = None
        try:
            while True:
                await self._may_sample.wait()
                replica = await self._chosen(request)
                replica.calls += 1
                try:
                    sampled = await self._attempt(replica, request)
                    replica.answered()
                    return sampled
                except Away as error:
                    if replica.failed():
                        logger.warning("vLLM at %s: %s; asking again", replica.url, error)
                    failing_since = failing_since or time.monotonic()
                    if time.monotonic() - failing_since > self.patience:
                        raise LongreinError(
                            f"vLLM at {replica.url} gave no answer for {self.patience:g} s; the last error: {error}"
                        ) from error
                finally:
                    replica.calls -= 1
        except asyncio.CancelledError:
            if cancellations != self._cancellations:
                raise LongreinError("the engine was told to cancel what it was sampling") from None
            raise
        finally:
            self._calls.discard(call)

    async def _chosen(self, request: SampleRequest) -> Replica:
        """The replica for this request, once it may be asked."""
        now = time.monotonic()
        here = [index for index, replica in enumerate(self._replicas) if replica.away_until <= now]
        if here:
            loads = [replica.calls for replica in self._replicas]
            return self._replicas[self._balance.choose(request.rollout_id, loads, here)]
        first = min(self._replicas, key=lambda replica: replica.away_until)
        await asyncio.sleep(first.away_until - now)
        return first

    async def _attempt(self, replica: Replica, request: SampleRequest) -> Sampled:
        await self._prepare(replica)
        _check(request.sampling, replica)
        adapter = self._adapter
        body: dict[str, Any] = {
            "token_ids": [int(token) for token in request.prompt_ids],
            "sampling_params": {
                "temperature": request.sampling.temperature,
                "top_p": request.sampling.top_p,
                "top_k": request.sampling.top_k,
                "min_p": request.sampling.min_p,
                "seed": request.seed % 2**63,
                "stop_token_ids": sorted(request.stop_ids),
                "ignore_eos": True,  # what ends a reply is in `stop_ids`, and nothing else
                "logprobs": 0,
                "detokenize": False,
            },
        }
        if request.sampling.max_tokens is not None:
            body["sampling_params"]["max_tokens"] = request.sampling.max_tokens
        if adapter is None:
            return self._read(await self._wire.post(replica, "/inference/v1/generate", body), request, None)
        body["model"] = adapter
        self._adapter_calls[adapter] += 1
        try:
            return self._read(await self._wire.post(replica, "/inference/v1/generate", body), request, adapter)
        except LongreinError as error:
            if "404" in str(error) and adapter in str(error):
                raise Away("it does not know the adapter it was given") from error
            raise
        finally:
            self._adapter_calls[adapter] -= 1

    def _read(self, reply: dict[str, Any], request: SampleRequest, adapter: str | None) -> Sampled:
        choice = reply["choices"][0]
        if choice["finish_reason"] not in ("stop", "length"):
            raise Away(f"the server ended the call ({choice['finish_reason']})")
        ids = choice["token_ids"]
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        if len(ids) != len(logprobs):
            raise LongreinError(f"vLLM gave {len(ids)} tokens and {len(logprobs)} log-probabilities")
        spans = choice.get("weight_versions") or []
        if not all(span["version"] in self._version_of for span in spans):
            raise Away("its weights are not those it was given")
        versions = [self._version_of[span["version"]] for span in spans for _ in range(span["start"], span["end"])]
        if len(versions) != len(ids):
            raise LongreinError(f"vLLM gave {len(ids)} tokens and says of {len(versions)} which weights drew them")
        if adapter is not None:
            versions = [self._version_of[adapter]] * len(ids)
        return Sampled(
            ids=ids,
            logprobs=logprobs,
            finish_reason="stop" if ids and ids[-1] in request.stop_ids else "length",
            policy_version=min(versions, default=self._version),
            versions=versions if len(set(versions)) > 1 else None,
        )

    # ---- weights

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

    # ---- the servers

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


def _check(sampling: Sampling, replica: Replica) -> None:
    """Refuse what the server would tell no true log-probability of.

    It tells them either before the temperature and the truncation (`raw`) or after both (`processed`), never in between.
    """
    mode = replica.logprobs_mode
    if mode == "processed_logprobs" and sampling.truncated:
        raise LongreinError(
            f"vLLM at {replica.url} tells log-probabilities of the truncated distribution only, and top_p, top_k or min_p are "
            "on: sample without them, or at temperature 1 from a server with `--logprobs-mode raw_logprobs`"
        )
    if mode == "raw_logprobs" and sampling.temperature not in (0, 1):
        raise LongreinError(
            f"vLLM at {replica.url} tells log-probabilities of temperature 1 only, and the temperature is "
            f"{sampling.temperature:g}: start it with `--logprobs-mode processed_logprobs`"
        )
    if mode not in ("processed_logprobs", "raw_logprobs"):
        raise LongreinError(
            f"vLLM at {replica.url} runs with --logprobs-mode {mode}, and gives no log-probabilities: use processed_logprobs"
        )
