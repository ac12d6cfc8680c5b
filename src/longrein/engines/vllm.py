"""Samples from a running vLLM server: token ids in, token ids and log-probabilities out.

Always true: what is sent is the recorded prompt, id for id, and what comes back are the sampled ids, never text that would be
tokenised again. The log-probabilities are the policy's at the sampling temperature, so the server must run with
`--logprobs-mode processed_logprobs` unless the temperature is 1.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from longrein.contract import LongreinError, Sampled, SampleRequest

RETRIES = 5
"""How often a server that is away is asked again, after 0.5, 1, 2, 4 and 8 seconds."""


class VLLMEngine:
    """A client of `vllm serve MODEL`.

    >>> engine = VLLMEngine("http://127.0.0.1:8000", "my-model")                              # doctest: +SKIP
    """

    def __init__(self, url: str, model: str, *, timeout: float = 600.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.policy_version = 0
        self._timeout = aiohttp.ClientTimeout(total=timeout)

    async def sample(self, request: SampleRequest) -> Sampled:
        if request.sampling.truncated:
            raise LongreinError(
                "vLLM tells the log-probabilities of the truncated distribution only: sample without top_p, top_k and min_p"
            )
        version = self.policy_version
        body = {
            "model": self.model,
            "prompt": [int(token) for token in request.prompt_ids],
            "max_tokens": request.sampling.max_tokens or 1024,
            "temperature": request.sampling.temperature,
            "seed": request.seed % 2**31,
            "stop_token_ids": sorted(request.stop_ids),
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
        }
        choice = (await self._post("/v1/completions", body))["choices"][0]
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        if len(ids) != len(logprobs):
            raise LongreinError(f"vLLM gave {len(ids)} tokens and {len(logprobs)} log-probabilities")
        stopped = bool(ids) and ids[-1] in request.stop_ids
        return Sampled(ids, logprobs, "stop" if stopped else "length", version)

    def cancel(self) -> None:
        """Requests end with the tasks that await them."""

    def close(self) -> None:
        """Nothing to let go of: every call has a connection of its own."""

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        # A session of its own for each call: requests come from many event loops, and a session belongs to one.
        async with aiohttp.ClientSession(timeout=self._timeout) as session:
            for attempt in range(RETRIES + 1):
                try:
                    async with session.post(self.url + path, json=body) as response:
                        if response.status < 400:
                            return await response.json()
                        text = (await response.text())[:500]
                        if response.status < 500:
                            raise LongreinError(f"vLLM at {self.url} refuses the request ({response.status}): {text}")
                        cause = f"{response.status}: {text}"
                except aiohttp.ClientConnectionError as error:
                    cause = str(error)
                if attempt < RETRIES:
                    await asyncio.sleep(0.5 * 2**attempt)
        raise LongreinError(f"vLLM at {self.url} did not answer after {RETRIES + 1} tries; the last error: {cause}")
