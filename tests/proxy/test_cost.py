"""What a long session costs: work that does not grow with what is recorded, and memory for what each turn adds. Counted, not timed."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from conversations import LOOK, MOVE

import longrein.digests
from longrein.contract import Sampled, SampleRequest
from longrein.proxy import chat, responses
from longrein.proxy.dialect import ModelRequest
from longrein.proxy.exchange import Evidence
from longrein.proxy.marks import minted
from longrein.proxy.session import Session
from longrein.recorder import Recorder
from longrein.rendering import Rendering
from longrein.rollout import Rollout

Named = Callable[[str], Rendering]


class AtOnce:
    """An engine that gives the same reply to everything."""

    policy_version = 0

    def __init__(self, ids: list[int]) -> None:
        self.sampled = Sampled(ids, [-0.5] * len(ids), "stop")

    async def sample(self, request: SampleRequest) -> Sampled:
        return self.sampled


class Conversation:
    """A program that sends the whole of a growing conversation at every turn, as JSON."""

    def __init__(self, rendering: Rendering) -> None:
        self.recorder = Recorder(AtOnce(rendering.encode_reply("I see. Go on, please.")), rendering)  # type: ignore[arg-type]
        self.rollout = self.recorder.open("r")
        self.session = Session("r", "key", asyncio.get_running_loop(), recorder=self.recorder)
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "Tell me what you find."}]
        self.last: str | None = None

    def asked(self) -> ModelRequest:
        body = orjson.dumps({"messages": self.messages, "tools": [LOOK, MOVE], "temperature": 0})
        return chat.parse(orjson.loads(body))

    async def turn(self, words: int) -> None:
        request = self.asked()

        def is_open() -> bool:
            return True

        exchange = self.session.exchange(request, Evidence(), is_open)
        answer = await exchange.answer
        self.session.written(exchange, is_open, whole=True)
        self.last = answer.id
        said = f"turn {len(self.messages)} " * (words // 2)
        self.messages += [{"role": "assistant", "content": answer.message["content"]}, {"role": "user", "content": said}]


class StoredConversation(Conversation):
    """A program that speaks the Responses dialect, whose answers are stored unless it says otherwise."""

    def asked(self) -> ModelRequest:
        tools = [{"type": "function", **tool["function"]} for tool in (LOOK, MOVE)]
        body = {"input": self.messages, "tools": tools, "instructions": "Look around. " * 100}
        return responses.parse(orjson.loads(orjson.dumps(body)))


class ContinuedConversation(StoredConversation):
    """One that sends what is new, and the id of the answer before it."""

    def asked(self) -> ModelRequest:
        request = super().asked()
        if self.last is None:
            return request
        body = {
            "input": self.messages[-1:],
            "previous_response_id": minted("resp", self.last),
            "instructions": "Look. " * 200,
        }
        return responses.parse(orjson.loads(orjson.dumps(body)))


@pytest.mark.parametrize("asking", [Conversation, StoredConversation, ContinuedConversation])
def test_150_turns_of_98k_tokens_cost_less_than_10_mb(rendering: Named, asking: type[Conversation]) -> None:
    async def play() -> tuple[int, int]:
        conversation = asking(rendering("qwen3"))
        await conversation.turn(10)
        gc.collect()
        tracemalloc.start()
        try:
            for _ in range(149):
                await conversation.turn(500)
            program = sum(len(message["content"]) for message in conversation.messages)
            gc.collect()
            used, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        calls = list(conversation.rollout.calls)
        assert len(calls) == 150
        return used - program, conversation.rollout.prompt_length(calls[-1])

    used, tokens = asyncio.run(play())
    assert tokens > 98_000
    assert used < 10_000_000


def test_the_work_of_a_turn_does_not_grow(rendering: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rendering("qwen3")
    work = {"canonical": 0, "extension": 0, "prompt": 0, "walked": 0}

    def counted(name: str, function: Callable[..., Any], amount: Callable[..., int]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            work[name] += amount(*args)
            return function(*args, **kwargs)

        return counting

    monkeypatch.setattr("longrein.digests.canonical", counted("canonical", longrein.digests.canonical, lambda *_: 1))
    monkeypatch.setattr(found, "extension", counted("extension", found.extension, lambda reply, new, tools: len(new)))
    monkeypatch.setattr(found, "prompt", counted("prompt", found.prompt, lambda messages, tools: len(messages)))
    monkeypatch.setattr(Rollout, "path", counted("walked", Rollout.path, lambda rollout, call_id: 1))

    async def play() -> list[dict[str, int]]:
        conversation, seen = Conversation(found), []
        for _ in range(40):
            work.update(dict.fromkeys(work, 0))
            await conversation.turn(50)
            seen.append(dict(work))
        assert len(conversation.rollout.branches()) == 1
        return seen

    first, second, *later = asyncio.run(play())
    assert first["prompt"] == 1
    assert all(turn == second for turn in later)
    assert second["extension"] == 1
    assert second["prompt"] == second["walked"] == 0
