"""A real vLLM server on a CPU, of the small policy, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from served import TINY, serve

from longrein.engines.vllm import VLLMEngine
from longrein.engines.vllm_server import VLLMServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    with serve(tmp_path_factory.mktemp("vllm") / "server.log", lora_rank=8) as server:
        yield server


@pytest.fixture
def engine(server: VLLMServer) -> Iterator[VLLMEngine]:
    """A client of the server, which has its first weights again."""
    engine = VLLMEngine(server.url)
    engine.pause()
    engine.load_checkpoint(TINY)
    engine.resume()
    yield engine
    engine.close()
