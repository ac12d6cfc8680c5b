"""What the vLLM client says when the server is away or refuses; sampling itself is tested against a real server."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from aiohttp import web

from longrein.contract import LongreinError, SampleRequest, Sampling
from longrein.engines import vllm
from longrein.engines.vllm import VLLMEngine

REQUEST = SampleRequest([1, 2], Sampling(max_tokens=2), frozenset({0}), seed=1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: Any) -> None:
    monkeypatch.setattr(vllm, "RETRIES", 1)


async def served(status: int, body: Any, asked: list[Any]) -> Any:
    """A reply through a server on loopback that always answers the same."""

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response(body, status=status)

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        return await VLLMEngine(f"http://{host}:{port}/v1", "policy").sample(REQUEST)
    finally:
        await runner.cleanup()


def test_a_server_that_refuses_is_not_asked_again() -> None:
    asked: list[Any] = []
    with pytest.raises(LongreinError, match=r"refuses the request \(404\).*no such model"):
        asyncio.run(served(404, {"error": "no such model"}, asked))
    assert len(asked) == 1
    assert asked[0]["prompt"] == [1, 2]


def test_a_server_that_breaks_is_asked_again_and_then_given_up() -> None:
    asked: list[Any] = []
    with pytest.raises(LongreinError, match=r"did not answer after 2 tries; the last error: 500"):
        asyncio.run(served(500, {"error": "oops"}, asked))
    assert len(asked) == 2


def test_a_server_that_is_away_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers here
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(LongreinError, match=f"vLLM at {url} did not answer after 2 tries"):
            asyncio.run(VLLMEngine(url, "policy").sample(REQUEST))


def test_truncated_sampling_is_refused() -> None:
    request = SampleRequest([1], Sampling(top_p=0.9, max_tokens=1), frozenset({0}), seed=1)
    with pytest.raises(LongreinError, match="sample without top_p, top_k and min_p"):
        asyncio.run(VLLMEngine("http://127.0.0.1:1", "policy").sample(request))


def test_tokens_and_log_probabilities_must_fit() -> None:
    body = {"choices": [{"token_ids": [3, 0], "logprobs": {"token_logprobs": [-0.5]}}]}
    with pytest.raises(LongreinError, match="vLLM gave 2 tokens and 1 log-probabilities"):
        asyncio.run(served(200, body, []))
