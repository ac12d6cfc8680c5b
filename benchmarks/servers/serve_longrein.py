"""longrein's proxy over an engine that answers at once: messages rendered by the real Qwen3 tokenizer, spliced and recorded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import control
from serve_stub import REPLY
from transformers import AutoTokenizer

from longrein.contract import Sampled, SampleRequest
from longrein.proxy import InterceptionServer
from longrein.recorder import Recorder
from longrein.rendering import rendering_for

TOKENIZER = Path(__file__).parents[2] / ".cache/tokenizers/qwen3"


class StubEngine:
    """The same reply to every request."""

    policy_version = 0

    def __init__(self, ids: list[int], seconds: float) -> None:
        self._sampled = Sampled(ids, [-0.5] * len(ids), "stop")
        self._seconds = seconds

    async def sample(self, request: SampleRequest) -> Sampled:
        if self._seconds:
            await asyncio.sleep(self._seconds)
        return self._sampled

    def cancel(self) -> None:
        pass

    def close(self) -> None:
        pass


def main() -> None:
    rendering = rendering_for(AutoTokenizer.from_pretrained(TOKENIZER))
    recorder = Recorder(StubEngine(rendering.encode_reply(REPLY), control.options().seconds), rendering)
    server = InterceptionServer().start()
    opened: list[str] = []

    def fresh(count: int) -> list[str]:
        for rollout_id in opened:
            server.close(rollout_id)
            recorder.finish(rollout_id)
        opened[:] = [f"r{number}" for number in range(count)]
        for rollout_id in opened:
            recorder.open(rollout_id)
        return [server.open(rollout_id, recorder=recorder) for rollout_id in opened]

    control.serve(server.url, fresh)
    server.stop()


if __name__ == "__main__":
    main()
