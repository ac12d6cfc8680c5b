"""Which request is which call: retries, disconnects, duplicates; the pull way; limits and ends; side calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest
from conversations import LOOK, assistant, result, system, user
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE
from programs import Gated, Program, until

from longrein.contract import ContextLengthError, Intercept, LongreinError, Message, Sampled, SampleRequest, Sampling
from longrein.engines.scripted import ScriptedEngine
from longrein.proxy import CallLimits, InterceptionServer, chat, mark_auxiliary, turn_of
from longrein.proxy.dialect import ModelRequest
from longrein.proxy.exchange import Evidence, Exchange
from longrein.proxy.session import Session
from longrein.recorder import Recorder
from longrein.rendering import Rendering
from longrein.rollout import Branch, Call
from longrein.tool_calls import own_id

MakeProgram = Callable[..., Program]
HI = {"messages": [user("hi")]}


# Exactly once


class BySeed(ScriptedEngine):
    """Answers that are a function of the request's noise, like a model's, each with its own log-probability."""

    def __init__(self, rendering: Rendering) -> None:
        super().__init__([], rendering)

    async def sample(self, request: SampleRequest) -> Sampled:
        sampled = self._sampled(f"{request.seed % 10_000}", request)
        return replace(sampled, logprobs=[-float(request.seed % 1009)] * len(sampled.ids))


@dataclass(eq=False)
class Asking:
    """A request that a program sent, and its connection."""

    conversation: int
    open: bool = True
    exchange: Any = None

    def is_open(self) -> bool:
        return self.open


@settings(max_examples=60)
@given(data=st.data())
def test_each_delivered_token_is_trained_once_and_an_undelivered_one_never(rendering: Any, data: st.DataObject) -> None:
    """Requests alike and not, that are answered, left, asked again and continued in any order."""
    found = rendering("qwen3")
    recorder = Recorder(BySeed(found), found)
    rollout = recorder.open("r", seed=11)

    async def play() -> set[str]:
        session = Session("r", "key", asyncio.get_running_loop(), recorder=recorder)
        conversations = [[user("hi")], [user("other")]]
        waiting: list[Asking] = []
        known: dict[int, list[Exchange]] = {}
        got: set[Exchange] = set()
        for _ in range(data.draw(st.integers(1, 12))):
            which = data.draw(st.integers(0, len(conversations) - 1))
            lost = [e for e in known.get(which, []) if e not in got and not any(a.exchange is e for a in waiting)]
            asking = Asking(which)
            asking.exchange = session.exchange(ModelRequest(tuple(conversations[which])), Evidence(), asking.is_open)
            waiting.append(asking)
            if lost:
                assert asking.exchange is lost[0]
            else:
                assert asking.exchange not in known.get(which, [])
                known.setdefault(which, []).append(asking.exchange)
            answer = await asking.exchange.answer
            parent = rollout.calls[answer.id].parent
            got |= {e for alike in known.values() for e in alike if e.call_id == parent}  # what is quoted was read
            for one in data.draw(st.lists(st.sampled_from(waiting), unique_by=id)):
                whole = data.draw(st.booleans())
                waiting.remove(one)
                one.open = whole
                session.written(one.exchange, one.is_open, whole=whole)
                got |= {one.exchange} if whole else set()
                said = one.exchange.answer.result()
                conversations.append([*conversations[one.conversation], said.message, user("more")])
        return {str(e.call_id) for e in got}

    got = asyncio.run(play())
    for call in rollout.calls.values():
        assert rollout.reason(call) == (None if call.id in got else "undelivered")
    expected = {
        (call.id, index): (token, logprob)
        for call in rollout.calls.values()
        if call.id in got
        for index, (token, logprob) in enumerate(zip(call.completion_ids, call.logprobs, strict=True))
    }
    trained = [item for row in rollout.rows() for item in trained_tokens(rollout.calls, row)]
    assert len(trained) == len(expected)
    assert dict(trained) == expected


def trained_tokens(calls: dict[str, Call], row: Branch) -> list[tuple[tuple[str, int], tuple[int, float]]]:
    """((call, position in its reply), (token, log-probability)) of a row's trained tokens."""
    at, found = 0, []
    for call_id in row.calls:
        at += len(calls[call_id].context_ids)
        for index in range(len(calls[call_id].completion_ids)):
            if row.agent_mask[at]:
                found.append(((call_id, index), (row.token_ids[at], row.logprobs[at])))
            at += 1
    return found


# Retries, disconnects, duplicates


def leave(program: Program, engine: Gated, body: Any = HI, **headers: str) -> Any:
    """A client that goes away while its reply is sampled; gives what opens the reply's gate."""
    connection = program.start(body, **headers)
    gate = engine.gate()
    connection.close()
    return gate


@pytest.mark.parametrize("content", ["hi", [{"type": "text", "text": "hi"}]], ids=["word for word", "as parts"])
@pytest.mark.parametrize("streams", [(False, False), (True, True), (True, False)])
def test_the_same_request_joins_the_call_whose_client_left(
    program: MakeProgram, gated: Gated, pool: Any, streams: tuple[bool, bool], content: Any
) -> None:
    there = program(gated)
    gate = leave(there, gated, {**HI, "stream": streams[0]})
    again = pool.submit(there.say, user(content), stream=streams[1])
    until(lambda: there.traffic.joined)
    gate.set_result("once")
    assert "once" in again.result().text
    there.server.end(there.rollout_id)
    (call,) = there.calls
    assert call.delivered
    assert gated.asked.empty()
    assert (there.traffic.calls, there.traffic.joined) == (1, 1)


def test_a_reply_that_was_lost_is_given_to_who_asks_again(program: MakeProgram, gated: Gated) -> None:
    there = program(gated)
    leave(there, gated).set_result("once")
    until(lambda: there.traffic.undelivered)
    assert there.say(user([{"type": "text", "text": "hi"}])).message["content"] == "once"
    assert [call.delivered for call in there.calls] == [True]
    assert there.traffic.undelivered == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_never_comes_back_leaves_a_call_that_is_not_trained(
    program: MakeProgram, gated: Gated, stream: bool
) -> None:
    there = program(gated)
    leave(there, gated, {**HI, "stream": stream}).set_result("lost")
    until(lambda: there.traffic.undelivered)
    there.server.seal(there.rollout_id)
    (call,) = there.calls
    assert there.rollout.reason(call) == "undelivered"
    assert there.rollout.agent_tokens == 0


def test_a_client_that_leaves_in_the_middle_of_a_stream_leaves_an_undelivered_call(
    program: MakeProgram, gated: Gated
) -> None:
    class Impatient(InterceptionServer):
        keep_alive_seconds = 0.01

    with Impatient() as server:
        there = program(gated, on=server)
        connection = there.start({**HI, "stream": True})
        gate = gated.gate()
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        connection.close()
        gate.set_result("lost")
        until(lambda: there.traffic.undelivered)
        assert there.rollout.reason(there.calls[0]) == "undelivered"
        assert there.say(user("hi")).message["content"] == "lost"
        assert there.calls[0].delivered


def test_a_request_that_repeats_a_delivered_call_is_a_sibling(program: MakeProgram) -> None:
    there = program()
    assert there.say(user("hi")).status == there.say(user("hi")).status == 200
    first, second = there.calls
    assert first.id != second.id
    assert len(there.rollout.rows()) == 2


def test_concurrent_calls_are_branches_alike_or_not(program: MakeProgram, gated: Gated, pool: Any) -> None:
    there = program(gated)
    first = pool.submit(there.say, user("start"))
    gated.gate().set_result("go")
    start = [user("start"), first.result().message]
    agents = [pool.submit(there.say, *start, user(text)) for text in ("left", "right", "right")]
    gates = [gated.gate() for _ in agents]
    for gate in gates:
        gate.set_result("done")
    assert [agent.result().status for agent in agents] == [200] * 3
    there.server.end(there.rollout_id)
    root, *leaves = there.calls
    assert [leaf.parent for leaf in leaves] == [root.id] * 3
    rows = there.rollout.rows()
    assert len(rows) == 3
    assert sum(row.agent_mask.sum() for row in rows) == there.traffic.tokens


def test_a_final_turn_that_the_sdk_retries_is_not_trained_twice(program: MakeProgram) -> None:
    there = program(lambda messages, tools: "the end")
    assert there.request(HI, x_stainless_retry_count="0").status == 200
    assert there.request(HI, x_stainless_retry_count="1").message["content"] == "the end"
    assert len(there.calls) == 1
    assert there.request(HI, x_stainless_retry_count="1").status == 200  # of another call: this one was tried twice
    assert len(there.calls) == 2
    assert there.request(HI, x_stainless_retry_count="many").status == 200
    assert len(there.calls) == 3


def test_an_idempotency_key_says_what_is_the_same(program: MakeProgram, gated: Gated) -> None:
    there = program()
    ids = [there.request(HI, Idempotency_Key=key).json["id"] for key in ("a", "a", "b", "a")]
    assert [ids.index(one) for one in ids] == [0, 0, 2, 0]
    there = program(gated)
    leave(there, gated, Idempotency_Key="a")
    leave(there, gated, Idempotency_Key="b")  # the engine is asked again: another key is another call
    assert there.traffic.calls == 2


def test_the_sdks_own_retry_after_a_timeout_samples_once(program: MakeProgram, gated: Gated, pool: Any) -> None:
    there = program(gated)
    sdk = openai.OpenAI(base_url=f"{there.server.url}/v1", api_key=there.key, timeout=0.3, max_retries=50)
    reply = pool.submit(sdk.chat.completions.create, model="m", messages=[user("hi")])
    gate = gated.gate()
    until(lambda: there.traffic.joined)
    gate.set_result("once")
    assert reply.result().choices[0].message.content == "once"
    assert (len(there.calls), there.traffic.calls) == (1, 1)


def test_a_reply_that_the_program_quotes_has_reached_it(program: MakeProgram, gated: Gated, pool: Any) -> None:
    there = program(gated)
    leave(there, gated).set_result("heard")
    until(lambda: there.traffic.undelivered)
    more = pool.submit(there.say, user("hi"), assistant("heard"), user("more"))
    gated.gate().set_result("yes")
    assert more.result().status == 200
    assert [call.delivered for call in there.calls] == [True, True]


def test_a_reply_is_delivered_before_the_program_can_end(program: MakeProgram) -> None:
    for number in range(60):
        there = program()
        there.say(user("hi"), stream=bool(number % 2))
        there.server.seal(there.rollout_id)
        assert there.calls[0].delivered


@pytest.mark.parametrize("in_time", [True, False])
def test_sealing_waits_for_replies_on_their_way_and_then_nothing_changes(
    program: MakeProgram, pool: Any, monkeypatch: Any, in_time: bool
) -> None:
    monkeypatch.setattr("longrein.proxy.session.GRACE_SECONDS", PATIENCE if in_time else 0.01)
    there = program()
    session = there.server._session(there.rollout_id)

    def is_open() -> bool:
        return True

    async def ask() -> Exchange:
        exchange = session.exchange(chat.parse(HI), Evidence(), is_open)
        await asyncio.wait([exchange.answer])
        return exchange

    async def write(exchange: Exchange) -> None:
        session.written(exchange, is_open, whole=True)

    loop = there.server._running()
    exchange = asyncio.run_coroutine_threadsafe(ask(), loop).result()
    sealing = pool.submit(there.server.seal, there.rollout_id)
    until(lambda: session.ended if in_time else session.sealed)
    asyncio.run_coroutine_threadsafe(write(exchange), loop).result()
    sealing.result()
    assert there.calls[0].delivered == in_time


# The end


def test_a_late_call_gets_409_and_changes_nothing(program: MakeProgram) -> None:
    there = program()
    there.say(user("hi"))
    there.server.seal(there.rollout_id)
    there.server.seal(there.rollout_id)
    before, calls = there.traffic, dict(there.rollout.calls)
    with pytest.raises(openai.ConflictError, match="has ended"):
        there.sdk.chat.completions.create(model="m", messages=[user("hi")])
    assert there.request(method="GET", path="/reward").status == 404
    assert there.request(b"{").status == 400
    assert (there.traffic, there.rollout.calls) == (before, calls)


def test_a_call_that_is_being_sampled_at_the_end_is_answered_with_an_error(
    program: MakeProgram, gated: Gated, pool: Any
) -> None:
    there = program(gated)
    waiting = pool.submit(there.say, user("hi"))
    gate = gated.gate()
    there.server.seal(there.rollout_id)
    assert waiting.result().status == 409
    assert gate.cancelled()
    assert not there.calls
    assert there.traffic.failure is None


@pytest.mark.parametrize("way", ["end", "seal", "close"])
def test_who_waits_for_a_request_wakes_when_there_will_be_none(pulled: MakeProgram, pool: Any, way: str) -> None:
    there = pulled()
    waiting = pool.submit(there.server.next_request, there.rollout_id)
    call = pool.submit(there.say, user("hi"))
    assert waiting.result()["messages"] == [user("hi")]
    waiting = pool.submit(there.server.next_request, there.rollout_id)
    getattr(there.server, way)(there.rollout_id)
    assert waiting.result() is None
    assert call.result().status == 409
    assert there.server.next_request(there.rollout_id) is None
    there.server.end(there.rollout_id)
    assert there.say(user("hi")).status == (401 if way == "close" else 409)


def test_a_rollout_may_close_at_any_moment_for_who_pulls(pulled: MakeProgram) -> None:
    there = pulled()
    server, lock = there.server, there.server._lock

    class AnotherThreadIsNext:
        def __enter__(self) -> None:
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            server._lock = lock
            lock.release()
            server.close(there.rollout_id)

    server._lock = AnotherThreadIsNext()  # type: ignore[assignment]
    assert server.next_request(there.rollout_id) is None


def test_a_stopping_server_wakes_everyone(pulled: MakeProgram, pool: Any) -> None:
    with InterceptionServer() as server:
        there = pulled(on=server)
        waiting = pool.submit(server.next_request, there.rollout_id)
    assert waiting.result() is None


# Budgets


def test_a_budget_of_calls_ends_with_a_clear_error(program: MakeProgram) -> None:
    there = program(limits=CallLimits(max_calls=2))
    for _ in range(2):
        assert there.say(user("hi")).status == 200
    assert there.traffic.limit is None
    with pytest.raises(openai.PermissionDeniedError, match="all 2 model calls were used") as refused:
        there.sdk.chat.completions.create(model="m", messages=[user("hi")])
    assert refused.value.code == "budget_exhausted"
    assert (there.traffic.limit, there.traffic.calls, there.traffic.failure) == ("calls", 2, None)


def test_a_budget_of_tokens_shortens_the_last_reply_and_then_ends(program: MakeProgram) -> None:
    there = program(lambda m, t: "one two three four", limits=CallLimits(max_tokens=7))
    assert there.say(user("hi")).json["usage"]["completion_tokens"] == 5
    last = there.say(user("hi")).json
    assert (last["usage"]["completion_tokens"], last["choices"][0]["finish_reason"]) == (2, "length")
    assert (there.traffic.limit, there.traffic.tokens) == ("tokens", 7)
    assert there.say(user("hi")).error["type"] == "insufficient_quota"


def test_a_pulled_rollout_ends_at_its_limit_too(pulled: MakeProgram, pool: Any, rendering: Any) -> None:
    there = pulled(limits=CallLimits(max_calls=1, max_tokens=50), rendering=rendering("qwen3"))
    call = pool.submit(there.say, user("hi"))
    intercept = there.server.next_request(there.rollout_id)
    there.server.deliver(there.rollout_id, intercept, "yes")
    assert call.result().json["usage"]["completion_tokens"] == 2
    waiting = pool.submit(there.server.next_request, there.rollout_id)
    assert there.say(user("more")).status == 403
    assert waiting.result() is None
    assert there.traffic.limit == "calls"
    with pytest.raises(LongreinError, match="cannot be counted"):
        pulled(limits=CallLimits(max_tokens=1))


# The pull way


def serve(server: InterceptionServer, rollout_id: str, answer: Callable[[Intercept], str | Message]) -> list[Intercept]:
    seen = []
    while (intercept := server.next_request(rollout_id)) is not None:
        seen.append(intercept)
        server.deliver(rollout_id, intercept, answer(intercept))
    return seen


CALL = '<tool_call>\n{"name": "look", "arguments": {"room": "attic"}}\n</tool_call>'


@pytest.mark.parametrize("with_rendering", [False, True])
def test_the_seeds_loop_generates_delivers_and_keeps_one_branch(
    pulled: MakeProgram, pool: Any, rendering: Any, with_rendering: bool
) -> None:
    found = rendering("qwen3")
    there = pulled(rendering=found if with_rendering else None)
    recorder = Recorder(ScriptedEngine([f"<think>\nhm\n</think>\n\nWell.\n{CALL}", "done"], found), found)
    rollout = recorder.open(there.rollout_id)

    def generate(intercept: Intercept) -> str:
        turn, messages, tools = turn_of(intercept), intercept["messages"], intercept["tools"]
        return recorder.generate(there.rollout_id, turn, messages, tools, Sampling())

    worker = pool.submit(serve, there.server, there.rollout_id, generate)
    sdk = there.sdk.chat.completions
    first = sdk.create(model="m", messages=[user("hi")], tools=[LOOK]).choices[0]
    assert (first.finish_reason, first.message.content) == ("tool_calls", "Well.")
    quoted = first.message.model_dump(exclude_none=True)
    messages = [user("hi"), quoted, result("dark", quoted["tool_calls"][0]["id"])]
    stream = sdk.create(model="m", messages=messages, tools=[LOOK], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "done"
    there.server.end(there.rollout_id)
    seen = worker.result()
    assert [intercept["request_id"] for intercept in seen] == [f"{there.rollout_id}/0", f"{there.rollout_id}/1"]
    assert [set(intercept) for intercept in seen] == [{"messages", "tools", "request_id"}] * 2
    assert seen[0]["tools"] == [LOOK]
    assert recorder.recorded(there.rollout_id, 1).parent == recorder.recorded(there.rollout_id, 0).id
    assert len(rollout.rows()) == 1
    assert there.traffic.undelivered == []


def test_a_structured_reply_is_delivered_as_it_is(pulled: MakeProgram, pool: Any) -> None:
    there = pulled()
    call = pool.submit(there.say, user("hi"))
    intercept = there.server.next_request(there.rollout_id)
    given = {"content": None, "tool_calls": [{"function": {"name": "look", "arguments": {"room": "attic"}}}]}
    with pytest.raises(LongreinError, match="function.name"):
        there.server.deliver(there.rollout_id, intercept, {"tool_calls": [{}]})
    there.server.deliver(there.rollout_id, intercept, given)
    (made,) = call.result().message["tool_calls"]
    assert made["function"] == {"name": "look", "arguments": '{"room": "attic"}'}
    assert made["id"]
    for late in (intercept, {**intercept, "request_id": "nobody/0"}):
        with pytest.raises(LongreinError, match="waits for an answer"):
            there.server.deliver(there.rollout_id, late, "again")


def test_a_pulled_call_keeps_the_models_own_id_beside_the_turns(pulled: MakeProgram, pool: Any, rendering: Any) -> None:
    there = pulled(rendering=rendering("mistral_nemo"))
    asked = pool.submit(there.say, user("hi"), tools=[LOOK])
    intercept = there.server.next_request(there.rollout_id)
    call = '{"name": "look", "arguments": {}, "id": "abcdefghi"}'
    there.server.deliver(there.rollout_id, intercept, f"[TOOL_CALLS][{call}, {call}]")
    ids = [one["id"] for one in asked.result().message["tool_calls"]]
    assert ids == ["call_turn0_0_abcdefghi", "call_turn0_1_abcdefghi"]
    assert [own_id(one) for one in ids] == ["abcdefghi"] * 2


def test_a_pulled_call_whose_client_left_is_joined_not_asked_again(pulled: MakeProgram) -> None:
    there = pulled()
    connection = there.start(HI)
    intercept = there.server.next_request(there.rollout_id)
    connection.close()
    there.server.deliver(there.rollout_id, intercept, "once")
    until(lambda: there.traffic.undelivered == [0])
    assert there.say(user("hi")).message["content"] == "once"
    until(lambda: there.traffic.undelivered == [])
    assert there.traffic.calls == 1


def test_a_long_stream_that_is_not_read_to_its_end_was_not_delivered(pulled: MakeProgram) -> None:
    there = pulled()
    connection = there.start({**HI, "stream": True})
    there.server.deliver(there.rollout_id, there.server.next_request(there.rollout_id), "word " * 2_000_000)
    assert connection.recv(15) == b"HTTP/1.1 200 OK"
    assert there.traffic.undelivered == []  # it is still being written
    connection.close()
    until(lambda: there.traffic.undelivered == [0])


def test_a_stop_word_cuts_delivered_text(pulled: MakeProgram, pool: Any) -> None:
    there = pulled()
    call = pool.submit(there.say, user("hi"), stop="END")
    there.server.deliver(there.rollout_id, there.server.next_request(there.rollout_id), "before END after")
    assert call.result().message["content"] == "before"


def test_a_call_can_be_refused_in_the_providers_words(pulled: MakeProgram, pool: Any) -> None:
    there = pulled()
    for error, status, code in ((ContextLengthError(9, 8), 400, "context_length_exceeded"), (OSError("x"), 500, "failed")):
        call = pool.submit(there.say, user("hi"))
        there.server.refuse(there.rollout_id, there.server.next_request(there.rollout_id), error)
        assert (call.result().status, call.result().error["code"]) == (status, code)
    assert there.traffic.failure == "OSError: x"


def test_waiting_on_the_servers_own_loop_is_refused(pulled: MakeProgram) -> None:
    there = pulled()

    async def inside(method: str) -> None:
        getattr(there.server, method)(there.rollout_id)

    for method in ("next_request", "end", "seal", "close"):
        with pytest.raises(LongreinError, match=f"{method} waits, and was called on the server's own loop"):
            asyncio.run_coroutine_threadsafe(inside(method), there.server._running()).result(timeout=PATIENCE)


def test_a_direct_rollout_has_nothing_to_pull_and_unknown_ones_are_told(
    program: MakeProgram, server: InterceptionServer
) -> None:
    there = program()
    with pytest.raises(LongreinError, match="answered by its recorder"):
        server.next_request(there.rollout_id)
    with pytest.raises(LongreinError, match="already open"):
        server.open(there.rollout_id)
    with pytest.raises(LongreinError, match="'nobody' is not open"):
        server.next_request("nobody")


def test_many_pulled_rollouts_at_once_are_never_crossed(server: InterceptionServer) -> None:
    transcripts: dict[int, list[str]] = {}

    def worker(number: int) -> None:
        serve(server, f"many{number}", lambda intercept: intercept["messages"][-1]["content"][::-1])

    def program(number: int, key: str) -> None:
        there, messages = Program(server, f"many{number}", key), []
        for turn in range(4):
            messages.append(user(f"{number}.{turn}"))
            messages.append(there.say(*messages).message)
        transcripts[number] = [message["content"] for message in messages[1::2]]
        server.end(there.rollout_id)

    threads = []
    for number in range(32):
        key = server.open(f"many{number}")
        threads += [threading.Thread(target=worker, args=(number,)), threading.Thread(target=program, args=(number, key))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE)
    assert transcripts == {number: [f"{number}.{turn}"[::-1] for turn in range(4)] for number in range(32)}


# Side calls


@pytest.mark.parametrize("title_first", [False, True])
def test_a_side_call_is_its_own_root_and_not_trained(program: MakeProgram, title_first: bool) -> None:
    there = program()
    main = {"messages": [system("You are an agent."), user("find it")], "tools": [LOOK]}
    title = {"messages": [system("Write a title."), user("find it")]}
    for body in (title, main) if title_first else (main, title):
        there.request(body)
    there.request({"messages": [*title["messages"], assistant("yes"), user("shorter")]})
    there.request({**main, "tool_choice": "none"})  # the same agent, told to use words
    there.request({"messages": [system("You search."), user("find it")], "tools": [LOOK]})  # a sub-agent
    assert all(call.excluded is None for call in there.calls)
    there.server.seal(there.rollout_id)
    reasons = {call.messages[0].get("content"): there.rollout.reason(call) for call in there.calls}
    assert reasons == {
        "You are an agent.": None,
        "You search.": None,
        "Write a title.": "auxiliary",
        "shorter": "auxiliary",
    }
    assert len(there.rollout.rows()) == 3


def test_a_summary_that_the_agent_goes_on_from_is_its_own_and_a_title_is_not(program: MakeProgram) -> None:
    draft, summary, title = (
        f"<summary>\n{it} is in the attic, said the note.\n</summary>" for it in ("It", "The coin", "A")
    )
    replies = {"find it": "yes", "sum up": draft, "better": summary, "name it": title, "ok?": "is in the attic"}
    there = program(lambda messages, tools: replies.get(messages[-1]["content"], "yes"))
    agent = system("You are an agent.")
    there.request({"messages": [agent, user("find it")], "tools": [LOOK]})
    for told in (["find it", "name it"], ["ok?"], ["find it", "sum up"], [f"find it; so far: {draft}", "better"]):
        there.request({"messages": [system("You write for an agent."), *map(user, told)]})
    there.request({"messages": [agent, user(f"Go on from {summary}, find it")], "tools": [LOOK]})
    there.server.seal(there.rollout_id)
    reasons = [there.rollout.reason(call) for call in there.calls]
    assert reasons == [None, "auxiliary", "auxiliary", None, None, None]


def test_side_calls_are_trained_when_asked_and_nothing_is_one_where_no_call_has_tools(program: MakeProgram) -> None:
    with InterceptionServer(train_auxiliary=True) as server:
        there = program(on=server)
        there.say(system("agent"), user("hi"), tools=[LOOK])
        there.say(user("a title?"))
        server.seal(there.rollout_id)
        assert all(there.rollout.reason(call) is None for call in there.calls)
        assert len(mark_auxiliary(there.rollout)) == 1
    there = program()
    there.say(system("one"), user("hi"))
    there.say(system("two"), user("hi"))
    there.server.seal(there.rollout_id)
    assert all(there.rollout.reason(call) is None for call in there.calls)
