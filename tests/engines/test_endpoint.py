"""An endpoint that is only text: what it said arrives to the letter, and its troubles are waited out or told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE

from longrein.contract import ContextLengthError, SampleRequest, Sampling
from longrein.engines.endpoint import EndpointEngine, EndpointError, Words
from longrein.recorder import Recorder, run_sync

Answer = Callable[[dict[str, Any]], tuple[int, Any]]
text = st.text(alphabet=st.characters(exclude_categories=["Cs"]))
calls = st.lists(st.fixed_dictionaries({"name": text, "arguments": text}), max_size=3)


@given(text, text, calls)
def test_a_reply_comes_back_to_the_letter(content: str, thought: str, functions: list[dict[str, str]]) -> None:
    words = Words()
    reply = {"content": content, "reasoning_content": thought, "tool_calls": [{"function": one} for one in functions]}
    read = words.parse(words.encode_reply(reply))
    assert read["content"] == content
    assert read.get("reasoning_content", "") == thought
    assert [call["function"] for call in read.get("tool_calls", [])] == functions
    assert words.decode(words.encode(content)) == content
    assert b"".join(words.pieces(words.encode(content))).decode() == content


@pytest.fixture
def endpoint() -> Iterator[Callable[[Answer], EndpointEngine]]:
    """A server on loopback that answers as a function says, and an engine over it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    engines, runners = [], []

    def start(answer: Answer) -> EndpointEngine:
        async def handle(request: web.Request) -> web.Response:
            status, body = answer({**await request.json(), "key": request.headers.get("Authorization")})
            return web.json_response(body, status=status, headers={"Retry-After": "0"})

        async def serve() -> int:
            app = web.Application()
            app.router.add_post("/v1/chat/completions", handle)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            runners.append(runner)
            return runner.addresses[0][1]

        port = asyncio.run_coroutine_threadsafe(serve(), loop).result(PATIENCE)
        engines.append(EndpointEngine(f"http://127.0.0.1:{port}/v1", "some-model", Words(), key="secret", tries=3))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
    for runner in runners:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(PATIENCE)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def said(message: dict[str, Any], reason: str = "stop") -> tuple[int, Any]:
    return 200, {"choices": [{"message": message, "finish_reason": reason}]}


def request(**sampling: Any) -> SampleRequest:
    messages = [{"role": "user", "content": "hi", "from_call": "x"}]
    return SampleRequest([1], Sampling(**sampling), frozenset(), 0, messages=messages)


def test_a_conversation_goes_out_as_chat_and_its_calls_come_back(endpoint: Any) -> None:
    seen: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        seen.append(body)
        function = {"name": "look", "arguments": '{"at": 1}'}
        return said({"content": None, "tool_calls": [{"id": "theirs", "type": "function", "function": function}]})

    engine = endpoint(answer)
    recorder = Recorder(engine, engine._words, sampling=Sampling(temperature=0.5, max_tokens=9))
    recorder.open("r")
    tools = [{"type": "function", "function": {"name": "look"}}]
    call = run_sync(recorder.call("r", [{"role": "user", "content": "go"}], tools))
    result = {"role": "tool", "tool_call_id": call.reply["tool_calls"][0]["id"], "content": "a door"}
    again = run_sync(recorder.call("r", [{"role": "user", "content": "go"}, call.reply, result], tools))
    assert again.parent == call.id
    assert (call.finish_reason, call.reply["tool_calls"][0]["function"]["arguments"]) == ("tool_calls", '{"at": 1}')
    assert {key: seen[0][key] for key in ("model", "temperature", "max_tokens", "tools", "key")} == {
        "model": "some-model", "temperature": 0.5, "max_tokens": 9, "tools": tools, "key": "Bearer secret",
    }  # fmt: skip
    assert seen[1]["messages"][1]["tool_calls"][0]["id"] == seen[1]["messages"][2]["tool_call_id"]


def test_a_busy_endpoint_is_asked_again_and_a_wrong_request_is_not(endpoint: Any) -> None:
    answers = [(429, {}), (503, {}), said({"content": "at last"}, "length")]
    engine = endpoint(lambda body: answers.pop(0))
    sampled = run_sync(engine.sample(request()))
    assert engine._words.decode(sampled.ids) == "at last"
    assert sampled.finish_reason == "length"
    refused = endpoint(lambda body: (401, {"error": "no key"}))
    with pytest.raises(EndpointError, match="refuses the request: 401.*no key"):
        run_sync(refused.sample(request()))
    down = endpoint(lambda body: (500, {"error": "broken"}))
    with pytest.raises(EndpointError, match="did not answer in 3 tries; the last gave: 500"):
        run_sync(down.sample(request()))
    odd = endpoint(lambda body: (200, {"choices": []}))
    with pytest.raises(EndpointError, match="answered with no chat completion"):
        run_sync(odd.sample(request()))


def test_limits_as_the_endpoint_names_them(endpoint: Any) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        if "max_tokens" in body:
            return 400, {"error": "use max_completion_tokens instead"}
        assert body["messages"] == [{"role": "user", "content": "hi"}]
        return said({"content": str(body["max_completion_tokens"])})

    engine = endpoint(answer)
    assert engine._words.decode(run_sync(engine.sample(request(max_tokens=7))).ids) == "7<end>"
    full = endpoint(lambda body: (400, {"error": {"code": "context_length_exceeded"}}))
    with pytest.raises(ContextLengthError):
        run_sync(full.sample(request()))


def test_truncation_goes_out_where_it_is_on(endpoint: Any) -> None:
    seen: list[dict[str, Any]] = []
    engine = endpoint(lambda body: (seen.append(body), said({"content": "yes"}))[1])
    run_sync(engine.sample(request(top_p=0.9, top_k=20, min_p=0.05)))
    run_sync(engine.sample(request()))
    assert {key: seen[0][key] for key in ("top_p", "top_k", "min_p")} == {"top_p": 0.9, "top_k": 20, "min_p": 0.05}
    assert not seen[1].keys() & {"top_p", "top_k", "min_p", "max_tokens"}


@pytest.mark.parametrize(
    ("arguments", "read"),
    [(None, "{}"), ({"at": "é"}, '{"at": "é"}'), ("not json", "not json"), ("\ud800", "\ufffd")],
)
def test_a_call_arrives_as_text_however_the_endpoint_writes_it(endpoint: Any, arguments: Any, read: str) -> None:
    function = {"name": "look", **({} if arguments is None else {"arguments": arguments})}
    engine = endpoint(lambda body: said({"content": "half \ud83d", "tool_calls": [{"function": function}]}))
    parsed = engine._words.parse(run_sync(engine.sample(request())).ids)
    assert parsed["content"] == "half \ufffd"
    assert parsed["tool_calls"][0]["function"] == {"name": "look", "arguments": read}


def test_cancelling_refuses_what_runs_in_words_and_a_caller_can_leave(endpoint: Any) -> None:
    engines: list[EndpointEngine] = []
    arrived = threading.Event()

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        for engine in engines:
            engine.cancel()
        arrived.set()
        return 429, {}

    engines.append(endpoint(answer))

    async def scenario() -> None:
        with pytest.raises(EndpointError, match="told to cancel"):
            await engines[0].sample(request())
        engine = engines.pop()
        arrived.clear()
        leaving = asyncio.create_task(engine.sample(request()))
        await asyncio.to_thread(arrived.wait, PATIENCE)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving

    asyncio.run(scenario())
