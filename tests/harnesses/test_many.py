"""Many sessions at once: no call is lost, answered twice, or given to another session."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from hunter import REACT, hunter

from longrein.contract import Message, Tool, Verdict
from longrein.engines.scripted import ScriptedEngine
from longrein.harnesses import Outcome, ProcessSessionFactory
from longrein.harnesses.react import verify_hunt
from longrein.proxy import InterceptionServer
from longrein.recorder import Recorder
from longrein.rendering import Rendering
from longrein.rollout import Rollout
from longrein.rooms import ROOMS, TOOLS, look, opening

Named = Callable[[str], Rendering]
SESSIONS = 64


def alone(rooms: Sequence[str], rendering: Rendering) -> Rollout:
    """The same hunt, played by itself in this process: what a session's record must be, to the token."""
    recorder = Recorder(ScriptedEngine(hunter, rendering), rendering)
    rollout = recorder.open("alone")
    messages: list[Message] = opening(rooms[0])
    for turn in range(len(rooms) + 1):
        recorder.generate("alone", turn, messages, list(TOOLS))
        reply = recorder.recorded("alone", turn).reply
        (call,) = reply["tool_calls"]
        seen = look(rooms, json.loads(call["function"]["arguments"])["room"])
        messages += [reply, {"role": "tool", "tool_call_id": call["id"], "content": seen}]
    return rollout


def test_64_sessions_of_the_program_at_once(rendering: Named) -> None:
    found = rendering("qwen3")
    asked: list[str] = []

    def watched(messages: Sequence[Message], tools: Sequence[Tool]) -> Any:
        asked.append(messages[0]["content"])
        return hunter(messages, tools)

    recorder = Recorder(ScriptedEngine(watched, found), found)
    rng = random.Random(5)
    tasks = {f"r{number}": {"rooms": rng.sample(ROOMS, rng.randint(2, 5))} for number in range(SESSIONS)}

    def judge(task: Any, outcome: Outcome) -> Verdict:
        return Verdict(verify_hunt(task, outcome), {"outcome": outcome})

    async def one(factory: ProcessSessionFactory, rollout_id: str) -> tuple[Rollout, Verdict]:
        recorder.open(rollout_id, task=tasks[rollout_id])
        async with factory.create(task=tasks[rollout_id], rollout_id=rollout_id) as session:
            verdict = await session.run_async()
        return recorder.finish(rollout_id), verdict

    async def every(factory: ProcessSessionFactory) -> list[tuple[Rollout, Verdict]]:
        return await asyncio.gather(*[one(factory, rollout_id) for rollout_id in tasks])

    with InterceptionServer() as server:
        factory = ProcessSessionFactory(REACT, server=server, verify=judge, recorder=recorder, timeout=600)
        results = asyncio.run(every(factory))

    for rollout, verdict in results:
        rooms, outcome = tasks[rollout.id]["rooms"], verdict.info["outcome"]
        assert verdict.env_reward == 1.0
        assert json.loads(outcome.last_line()) == {"answer": rooms[-1], "turns": len(rooms) + 1}
        assert all(call.delivered for call in rollout.calls.values())
        assert tokens(rollout) == tokens(alone(rooms, found))
        _reads_as(found.decode(rollout.branches()[0].token_ids.tolist()), outcome.messages)
    assert len(asked) == sum(len(task["rooms"]) + 1 for task in tasks.values())


def tokens(rollout: Rollout) -> list[tuple[list[int], list[int]]]:
    """What was read and written, call by call; each call continues the one before."""
    calls = list(rollout.calls.values())
    assert [call.parent for call in calls] == [None, *[call.id for call in calls[:-1]]]
    return [(rollout.prompt(call.id).tolist(), call.completion_ids.tolist()) for call in calls]


def _reads_as(text: str, messages: Sequence[Message]) -> None:
    """The text holds these messages, in their order."""
    at = 0
    for message in messages:
        words = [message.get("content") or "", *[call["function"]["arguments"] for call in message.get("tool_calls") or ()]]
        for word in words:
            at = text.index(word, at) + len(word)
