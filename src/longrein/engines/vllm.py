"""Samples from running vLLM servers: token ids in, token ids and log-probabilities out.

Always true:
- what is sent is the recorded prompt, id for id, and what comes back are the sampled ids, never text that would be tokenised
  again; a log-probability is the policy's at the sampling temperature, or the request is refused;
- a call has one result: a server that is away is asked again (another replica, or the same one once it is back), and since the
  seed goes with the request, what is sampled anew is what was lost;
- a token's version is what the server says drew it (`vllm_weights.py`); a reply under weights that it was not given is drawn again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from longrein.contract import LongreinError, Sampled, SampleRequest, Sampling
from longrein.engines.balance import Balance
from longrein.engines.vllm_http import Away, Replica, Wire
from longrein.engines.vllm_weights import ServedWeights

logger = logging.getLogger(__name__)


class VLLMEngine(ServedWeights):
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
        replicas = [Replica(url.rstrip("/").removesuffix("/v1")) for url in urls]
        super().__init__(Wire(timeout), replicas, weights, folder)
        self.patience = patience
        self._balance = Balance()
        self._calls: set[asyncio.Task[Any]] = set()
        self._cancellations = 0

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
