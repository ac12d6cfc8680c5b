"""Every dialect by its vendor's own SDK: the same conversation is the same record, whichever wire it came over."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from bodies import ANYTHING, BODIES
from clients import CLIENTS, Asked, Client
from conversations import ARGUMENTS, LOOK, MOVE, NAME, TEXT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import Gated, Program

from longrein import Agent
from longrein.contract import Sampled, SampleRequest, Sampling
from longrein.digests import canonical
from longrein.engines.scripted import ScriptedEngine
from longrein.envs import TreasureHunt
from longrein.proxy import InterceptionServer
from longrein.proxy.dialect import Answer, DialectError
from longrein.proxy.marks import minted
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
    ("name", "asking"),
    [
        ("chat", {"max_tokens": 3, "temperature": 0.123}),
        ("responses", {"max_output_tokens": 3, "temperature": 0.123}),
        ("messages", {"max_tokens": 3, "extra_body": {"temperature": 0.123}}),
        ("gemini", {"max_output_tokens": 3, "temperature": 0.123}),
    ],
)
def test_a_program_can_ask_for_less_and_the_runs_sampling_wins(
    program: MakeProgram, rendering: Any, name: str, asking: dict[str, Any]
) -> None:
    seen: list[SampleRequest] = []

    class Engine(ScriptedEngine):
        async def sample(self, request: SampleRequest) -> Sampled:
            seen.append(request)
            return await super().sample(request)

    there = program(Engine(lambda m, t: "one two three four", rendering("qwen3")), sampling=Sampling(temperature=0.7))
    client = CLIENTS[name](there)
    client.user("count")
    assert client.ask(**asking).text == "one two three"
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


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize(
    ("function", "is_call"),
    [
        ('{"name": "look", "arguments": {"room": 123456789012345678901234567890}}', True),
        ('{"name": "look", "arguments": {"room": "\\u0000\\ufeff\\ud83d\\ude00 e\\u0301"}}', True),
        ('{"name": "look", "arguments": {"room": ' + "[" * 31 + "]" * 31 + "}}", True),
        ('{"name": "look", "arguments": {"room": ' + "[" * 300 + "]" * 300 + "}}", False),
        ('{"name": "lo\\ud800ok", "arguments": {}}', False),
    ],
    ids=["long number", "odd text", "nested", "too deep", "half a character"],
)
def test_whatever_call_the_model_writes_the_program_can_go_on(
    program: MakeProgram, name: str, stream: bool, function: str, is_call: bool
) -> None:
    there = program([f"<tool_call>\n{function}\n</tool_call>", "done"])
    client = CLIENTS[name](there, [LOOK])
    client.user("hi")
    calls = client.ask(stream).calls
    assert len(calls) == is_call
    for call in calls:
        client.result(call, "dark")
    if not calls:
        client.user("what?")
    assert client.ask(stream).text == "done"
    one, two = there.calls
    assert two.parent == one.id
    assert (there.traffic.failure, there.traffic.errors) == (None, 0)


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


# Any body, any reply

DIALECTS = {name: found for name, found in BODIES.items() if "," not in name}
REPLIES = st.builds(
    lambda content, reasoning, calls: {
        "role": "assistant",
        "content": content,
        **({"reasoning_content": reasoning} if reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
    },
    TEXT | st.text(max_size=300),
    TEXT | st.text(max_size=300),
    st.lists(st.tuples(NAME, ARGUMENTS), max_size=3).map(
        lambda calls: [
            {
                "id": minted("call", "00c0ffee00c0ffee", index),
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for index, (name, arguments) in enumerate(calls)
        ]
    ),
)


@pytest.mark.parametrize("name", BODIES)
@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_no_body_ever_gets_a_500(program: MakeProgram, name: str, data: st.DataObject) -> None:
    _, path, bodies = BODIES[name]
    there = program()
    reply = there.request(data.draw(bodies | ANYTHING), path=path)
    assert reply.status in (200, 400)
    if reply.status == 400:
        assert reply.json["error"]["message"]
    assert there.traffic.failure is None
    there.server.close(there.rollout_id)


@pytest.mark.parametrize("name", DIALECTS)
@given(data=st.data())
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
def test_any_body_is_a_request_or_a_clear_error(name: str, data: st.DataObject) -> None:
    dialect, _, bodies = DIALECTS[name]
    refused = request = None
    try:
        request = dialect.parse(data.draw(bodies | ANYTHING))
    except DialectError as error:
        refused = error
    if request is not None:
        assert all(isinstance(message["content"], str) for message in request.messages)
        assert all(isinstance(tool["function"]["name"], str) for tool in request.tools)
    if refused is not None:
        assert (refused.status, bool(refused.message)) == (400, True)
        json.dumps([dialect.error_body(refused), dialect.error_event(refused)])


def echoed(name: str, body: Any) -> dict[str, Any]:
    """A request that quotes a reply and says more."""
    if name == "chat":
        return {"messages": [USER, body["choices"][0]["message"], USER]}
    if name == "responses":
        return {"input": [USER, *body["output"], USER]}
    if name == "messages":
        return {"messages": [USER, {"role": "assistant", "content": body["content"]}, USER]}
    said = {"role": "user", "parts": [{"text": "hi"}]}
    return {"contents": [said, body["candidates"][0]["content"], said]}


USER = {"role": "user", "content": "hi"}
WANTING = {
    "chat": {},
    "responses": {"include": ["reasoning.encrypted_content"]},
    "messages": {"thinking": {"type": "adaptive", "display": "omitted"}},
    "gemini": {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}},
}


@pytest.mark.parametrize("name", DIALECTS)
@given(message=REPLIES)
def test_a_reply_that_is_sent_back_is_the_same_message(name: str, message: dict[str, Any]) -> None:
    dialect = DIALECTS[name][0]
    first = {"messages": [USER], "input": "hi", "contents": [{"parts": [{"text": "hi"}]}], **WANTING[name]}
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    answer = Answer("00c0ffee00c0ffee", message, finish, 7, 5)
    body = dialect.whole(answer, dialect.parse(first), created=3, model="policy")
    json.dumps(body)
    before, again, after = dialect.parse(echoed(name, body)).messages
    assert (before, after) == (USER, USER)
    assert canonical(again) == canonical(message)
    assert again.get("reasoning_content") == message.get("reasoning_content")
    assert [call["id"] for call in again.get("tool_calls", ())] == [call["id"] for call in message.get("tool_calls", ())]
    if name != "chat" and (message.get("tool_calls") or (message.get("reasoning_content") and name != "gemini")):
        assert again["from_call"] == "00c0ffee00c0ffee"


@pytest.mark.parametrize(
    ("path", "headers", "shape"),
    [
        ("/v1/responses", {}, {"message", "type", "param", "code"}),
        ("/v1/messages", {}, {"message", "type"}),
        ("/v1/messages/count_tokens", {}, {"message", "type"}),
        ("/v1/nothing", {"anthropic_version": "2023-06-01"}, {"message", "type"}),
        ("/v1beta/models/m:generateContent", {}, {"message", "code", "status"}),
        ("/v1beta/nothing", {}, {"message", "code", "status"}),
    ],
)
def test_an_error_has_the_shape_of_its_dialect(program: MakeProgram, path: str, headers: Any, shape: set[str]) -> None:
    for authorization, status in (("Bearer nobody", 401), (None, 404 if "nothing" in path else 400)):
        said = {"Authorization": authorization} if authorization else {}
        reply = program().request({}, path=path, **said, **headers)
        assert (reply.status, set(reply.json["error"])) == (status, shape)


@pytest.mark.parametrize("name", DIALECTS)
def test_a_full_context_is_said_in_the_words_the_dialects_programs_look_for(program: MakeProgram, name: str) -> None:
    there = program(max_length=8)
    body = {"messages": [USER], "input": "hi " * 9, "contents": [{"parts": [{"text": "hi " * 9}]}]}
    body["messages"] = [{"role": "user", "content": "hi " * 9}]
    reply = there.request(body, path=DIALECTS[name][1])
    words = {
        "chat": "maximum context length is 8 tokens",
        "responses": "maximum context length is 8 tokens",
        "messages": "prompt is too long: ",
        "gemini": "exceeds the maximum number of tokens allowed (8)",
    }
    assert reply.status == 400
    assert words[name] in reply.json["error"]["message"]
    if name == "responses":
        assert reply.json["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("name", CLIENTS)
def test_a_stream_that_waits_for_its_reply_says_so_and_goes_on(
    program: MakeProgram, gated: Gated, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InterceptionServer, "keep_alive_seconds", 0.01)
    there = program(gated)
    client = CLIENTS[name](there)
    client.user("hi")
    with ThreadPoolExecutor() as pool:
        turn = pool.submit(client.ask, True)
        gate = gated.gate()
        time.sleep(0.05)  # several times the pause between two signs of life
        gate.set_result("there")
        assert turn.result(timeout=60).text == "there"
