"""Every dialect by its vendor's own SDK: the same conversation is the same record, whichever wire it came over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from clients import CLIENTS, Asked, Client
from conversations import LOOK, MOVE
from programs import Program

from longrein import Agent
from longrein.contract import Sampled, SampleRequest, Sampling
from longrein.engines.scripted import ScriptedEngine
from longrein.envs import TreasureHunt
from longrein.proxy import InterceptionServer
from longrein.rollout import Rollout, padded
from longrein.rooms import TOOLS, Action, look, opening, over

MakeProgram = Callable[..., Program]
TWO_CALLS = (
    "<think>\nI look twice.\n</think>\n\nLooking.\n"
    '<tool_call>\n{"name": "look", "arguments": {"room": "attic"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {"room": "barn"}}\n</tool_call>'
)
SHOWN = {"messages": ""}
"""Where a program that did not ask for the reasoning is not shown it."""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", CLIENTS)
def test_the_sdk_holds_a_conversation_of_one_branch(program: MakeProgram, name: str, stream: bool) -> None:
    there = program([TWO_CALLS, "It is in the barn.", "Yes, " + "quite " * 100 + "sure."])
    client = CLIENTS[name](there, [LOOK, MOVE], "You search.")
    client.user("where is the coin?")
    first = client.ask(stream)
    assert (first.text, first.reasoning) == ("Looking.", SHOWN.get(name, "I look twice."))
    assert [call[1:] for call in first.calls] == [("look", {"room": "attic"}), ("look", {"room": "barn"})]
    for call in first.calls:
        client.result(call, f"dark in the {call.arguments['room']}")
    second = client.ask(stream)
    assert (second.text, second.calls) == ("It is in the barn.", [])
    client.user("sure?")
    assert client.ask(stream).text == "Yes, " + "quite " * 100 + "sure."
    one, two, three = there.calls
    assert (one.parent, two.parent, three.parent) == (None, one.id, two.id)
    assert (one.tools, one.finish_reason, two.finish_reason) == ((LOOK, MOVE), "tool_calls", "stop")
    assert [(m["role"], m["content"]) for m in one.messages] == [("system", "You search."), ("user", "where is the coin?")]
    assert [(m["role"], m["content"]) for m in two.messages] == [
        ("tool", "dark in the attic"), ("tool", "dark in the barn")
    ]  # fmt: skip
    assert [m["tool_call_id"] for m in two.messages] == [call["id"] for call in one.reply["tool_calls"]]
    assert (there.traffic.calls, there.traffic.streamed, there.traffic.errors) == (3, 3 * stream, 0)
    (row,) = there.rollout.rows()
    assert row.agent_mask.sum() == there.traffic.tokens


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("chat", {"max_tokens": 3, "temperature": 0.123}),
        ("responses", {"max_output_tokens": 3, "temperature": 0.123}),
        ("messages", {"max_tokens": 3, "extra_body": {"temperature": 0.123}}),
        ("gemini", {"max_output_tokens": 3, "temperature": 0.123}),
    ],
)
def test_a_program_can_ask_for_less_and_the_runs_sampling_wins(
    program: MakeProgram, rendering: Any, name: str, settings: dict[str, Any]
) -> None:
    seen: list[SampleRequest] = []

    class Engine(ScriptedEngine):
        async def sample(self, request: SampleRequest) -> Sampled:
            seen.append(request)
            return await super().sample(request)

    there = program(Engine(lambda m, t: "one two three four", rendering("qwen3")), sampling=Sampling(temperature=0.7))
    client = CLIENTS[name](there)
    client.user("count")
    assert client.ask(**settings).text == "one two three"
    assert there.calls[0].finish_reason == "length"
    assert (seen[0].sampling.temperature, seen[0].sampling.max_tokens) == (0.7, 3)
    (asked,) = there.traffic.asked
    assert asked["temperature"] == 0.123


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", CLIENTS)
def test_of_two_alike_replies_the_one_that_is_echoed_is_continued(program: MakeProgram, name: str, stream: bool) -> None:
    """Two samples of one prompt with the same words: ids and signatures tell them apart."""
    there = program(lambda m, t: TWO_CALLS if m[-1]["role"] == "user" else "done")
    clients: list[Client] = []
    for _ in range(2):
        clients.append(CLIENTS[name](there, [LOOK]))
        clients[-1].user("hi")
    turns = [client.ask(stream) for client in clients]
    for client, turn in zip(clients, turns, strict=True):
        for call in turn.calls:
            client.result(call, "dark")
        client.ask(stream)
    one, two, after_one, after_two = there.calls
    assert (after_one.parent, after_two.parent) == (one.id, two.id)


# White box equals black box


@pytest.fixture(scope="module")
def agent(folder: Any) -> Any:
    agent = Agent.from_pretrained(str(folder("tiny")), seed=5)
    yield agent
    agent.engine.close()


TASKS = TreasureHunt.tasks(3, seed=11)


def hunt(client: Client, rooms: list[str], stream: bool) -> float:
    """The hunt as a program plays it that only knows its SDK."""
    client.user(opening(rooms[0])[0]["content"])
    actions: list[Action] = []
    for _ in range(6):
        calls: list[Asked] = client.ask(stream).calls
        actions = [Action(call.name, str(call.arguments.get("room")), call.id) for call in calls]
        if over(actions):
            break
        for call, action in zip(calls, actions, strict=True):
            client.result(call, look(rooms, action.room) if action.name == "look" else f"There is no {action.name}.")
    return float(bool(actions) and actions[0][:2] == ("answer", rooms[-1]))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", CLIENTS)
def test_white_box_equals_black_box(server: InterceptionServer, agent: Agent, name: str, stream: bool) -> None:
    white = TreasureHunt(tokenizer=agent.tokenizer).run_trial(TASKS, agent, 2)
    assert sum(rollout.turns for rollout in white["rollouts"]) > len(white["rollouts"])  # something to compare
    recorder = agent.recorder()
    rollouts: list[Rollout] = []
    for task in TASKS:
        for index in range(2):
            rollout_id = f"{name}-{stream}-{len(rollouts)}"
            rollout = recorder.open(rollout_id, seed=agent.rollout_seed(task, 0, index), task=task)
            there = Program(server, rollout_id, server.open(rollout_id, recorder=recorder), rollout)
            rollout.reward = hunt(CLIENTS[name](there, TOOLS), task["rooms"], stream)
            assert there.traffic.errors == 0
            assert all(call.delivered for call in there.calls)
            rollouts.append(recorder.finish(rollout_id))
            server.close(rollout_id)
    black = padded(rollouts, pad_id=agent.tokenizer.pad_token_id)
    for key in ("padded_token_ids", "padded_attn_mask", "padded_agent_mask"):
        assert np.array_equal(white[key], black[key]), key
    assert np.array_equal(white["final_rewards"], black["final_rewards"])
    assert np.abs(white["padded_logprobs"] - black["padded_logprobs"]).max() < 1e-5
