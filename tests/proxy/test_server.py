"""The server over real sockets, with the real `openai` SDK as the program."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from bodies import ANYTHING, BODY
from conversations import LOOK, MOVE, assistant, system, user
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import PATIENCE
from programs import Gated, Program, until

from longrein.contract import LongreinError, Sampled, SampleRequest, Sampling
from longrein.engines.scripted import ScriptedEngine
from longrein.proxy import InterceptionServer
from longrein.recorder import Recorder, run_sync

MakeProgram = Callable[..., Program]
TWO_CALLS = (
    "<think>\nI look twice.\n</think>\n\nLooking.\n"
    '<tool_call>\n{"name": "look", "arguments": {"room": "attic"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {"room": "barn"}}\n</tool_call>'
)


# Replies


def converse(create: Callable[..., Any]) -> list[Any]:
    """A program's loop with two tool calls at once, then an answer."""
    messages: list[Any] = [user("where is the coin?")]
    first = create(model="gpt", messages=messages, tools=[LOOK])
    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    for call in first.choices[0].message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "dark"})
    return [first, create(model="gpt", messages=messages, tools=[LOOK])]


def accumulated(sdk: openai.OpenAI) -> Callable[..., Any]:
    def create(**fields: Any) -> Any:
        with sdk.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
            return stream.get_final_completion()

    return create


@pytest.mark.parametrize("streamed", [False, True])
def test_the_sdk_gets_reasoning_parallel_tool_calls_and_an_answer(program: MakeProgram, streamed: bool) -> None:
    there = program([TWO_CALLS, "It is in the barn."])
    first, second = converse(accumulated(there.sdk) if streamed else there.sdk.chat.completions.create)
    message = first.choices[0].message
    assert (message.content, first.choices[0].finish_reason, first.model) == ("Looking.", "tool_calls", "gpt")
    assert message.model_extra["reasoning_content"] == "I look twice."
    assert [call.function.arguments for call in message.tool_calls] == ['{"room": "attic"}', '{"room": "barn"}']
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("It is in the barn.", "stop")
    one, two = there.calls
    assert two.parent == one.id
    assert (one.delivered, two.delivered) == (True, True)
    assert first.usage.completion_tokens == len(one.completion_ids)
    assert second.usage.prompt_tokens == len(there.rollout.prompt(two.id))
    assert (there.traffic.calls, there.traffic.streamed) == (2, 2 * streamed)
    assert there.traffic.tokens == len(one.completion_ids) + len(two.completion_ids)
    (row,) = there.rollout.rows()
    assert row.agent_mask.sum() == there.traffic.tokens


def test_the_async_sdk_runs_many_rollouts_at_once(program: MakeProgram) -> None:
    there = [program(lambda m, t: f"{m[-1]['content']}!") for _ in range(16)]

    async def play(one: Program, index: int) -> list[str]:
        messages: list[Any] = []
        async with one.async_sdk as sdk:
            for turn in range(3):
                messages.append(user(f"{index}.{turn}"))
                if turn == 1:
                    chunks = await sdk.chat.completions.create(model="m", messages=messages, stream=True)
                    text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
                else:
                    text = (await sdk.chat.completions.create(model="m", messages=messages)).choices[0].message.content
                messages.append(assistant(text))
        return [message["content"] for message in messages[1::2]]

    async def everyone() -> list[list[str]]:
        return await asyncio.gather(*(play(one, index) for index, one in enumerate(there)))

    assert asyncio.run(everyone()) == [[f"{index}.{turn}!" for turn in range(3)] for index in range(16)]
    for one in there:
        assert all(call.delivered for call in one.calls)
        assert len(one.rollout.rows()) == 1


def test_a_stream_on_the_wire_is_events_and_ends_with_done(program: MakeProgram) -> None:
    reply = program(["hello"]).say(user("hi"), stream=True)
    assert reply.headers["content-type"] == "text/event-stream"
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert all("usage" not in chunk for chunk in chunks)


def reply_of(sdk: openai.OpenAI, stream: bool, **fields: Any) -> Any:
    """A reply without tool calls as a program would keep it, without its reasoning."""
    made = sdk.chat.completions.create(model="m", stream=stream, **fields)
    if not stream:
        return made.choices[0].message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
    return assistant("".join(chunk.choices[0].delta.content or "" for chunk in made))


def test_white_box_and_proxy_streamed_or_not_give_the_same_tokens(
    server: InterceptionServer, rendering: Any, tokenizer: Any, random_model: Any
) -> None:
    from longrein.engines.transformers import TransformersEngine

    found = rendering("qwen3")
    model = random_model(vocab_size=len(tokenizer("qwen3")), max_position_embeddings=1024)
    sampling = Sampling(max_tokens=8)
    rows = []
    for way in ("white", "whole", "stream"):
        engine = TransformersEngine(model)  # each way finds the cache empty: then not a bit differs
        recorder = Recorder(engine, found, sampling=sampling)
        rollout = recorder.open(f"same-{way}", seed=5)
        key = server.open(rollout.id, recorder=recorder)
        sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key)
        messages = [system("be brief"), user("hi")]
        for _ in range(3):
            if way == "white":
                reply = run_sync(recorder.call(rollout.id, messages, [LOOK])).reply
            else:
                reply = reply_of(sdk, way == "stream", messages=messages, tools=[LOOK])
            messages = [*messages, reply, user("more")]
        server.seal(rollout.id)
        rows.append(recorder.finish(rollout.id).rows())
        engine.close()
    for (white,), (other,) in ((rows[0], rows[1]), (rows[0], rows[2])):
        assert white.token_ids.tolist() == other.token_ids.tolist()
        assert white.agent_mask.tolist() == other.agent_mask.tolist()
        assert white.logprobs.tolist() == other.logprobs.tolist()
    assert rows[0][0].agent_mask.sum() == 24


def test_a_stop_word_ends_the_reply_and_the_quoted_rest_continues_it(program: MakeProgram, rendering: Any) -> None:
    there = program(["Thought.\nAction: look\nObservation: I made this up.\nAction: fly", "done"])
    reply = there.say(user("hi"), stop=["Observation:", "never"])
    assert (reply.message["content"], reply.json["choices"][0]["finish_reason"]) == ("Thought.\nAction: look\n", "stop")
    there.say(user("hi"), assistant(reply.message["content"]), user("Observation: dark"), stop=["Observation:"])
    first, second = there.calls
    assert rendering("qwen3").decode(first.completion_ids).endswith("Observation:")
    assert len(first.logprobs) == len(first.completion_ids)
    assert second.parent == first.id


def test_log_probabilities_are_given_to_who_asks(program: MakeProgram) -> None:
    class Unlikely(ScriptedEngine):
        async def sample(self, request: SampleRequest) -> Sampled:
            sampled = await super().sample(request)
            return Sampled(sampled.ids, [-0.71875] * len(sampled.ids), "stop")

    there = program()
    engine = Unlikely(["yes"], there.server._session(there.rollout_id).rendering)
    silent, asking = program(engine), program(engine)
    for stream in (False, True):
        assert "0.71875" not in silent.say(user("hi"), stream=stream).text
    choice = asking.sdk.chat.completions.create(model="m", messages=[user("hi")], logprobs=True).choices[0]
    assert [(token.token, token.logprob) for token in choice.logprobs.content] == [
        ("yes", -0.71875),
        ("<|im_end|>", -0.71875),
    ]
    ids = asking.calls[0].completion_ids.tolist()
    assert not any(str(token) in asking.say(user("hi"), logprobs=True).text for token in ids)


def test_a_system_message_in_the_middle_stays_there(program: MakeProgram, rendering: Any) -> None:
    found = rendering("qwen3")
    there = program()
    there.say(system("first"), user("one"), system("in the middle"), user("two"))
    text = found.decode(there.rollout.prompt(there.calls[0].id))
    assert text.index("first") < text.index("one") < text.index("in the middle") < text.index("two")


# Sampling


def test_the_runs_sampling_wins_and_what_was_asked_is_recorded(program: MakeProgram, gated: Gated) -> None:
    there = program(gated, sampling=Sampling(temperature=0.5, max_tokens=100))
    asked = [{"temperature": 1.7, "top_p": 0.2, "max_tokens": 500}, {"max_completion_tokens": 9}, {}, {}]
    for fields in asked:
        connection = there.start({"messages": [user("hi")], **fields})
        request, gate = gated.asked.get(timeout=PATIENCE)
        assert request.sampling == Sampling(temperature=0.5, max_tokens=9 if "max_completion_tokens" in fields else 100)
        gate.set_result("yes")
        connection.recv(10)
    assert there.traffic.asked == asked[:2]
    there.server.seal(there.rollout_id)
    assert there.rollout.info["asked"] == asked[:2]


def test_tool_choice_none_shows_the_model_no_tools(program: MakeProgram, gated: Gated) -> None:
    there = program(gated)
    for choice, shown in (("none", []), ("auto", [LOOK, MOVE]), ("required", [LOOK, MOVE])):
        connection = there.start({"messages": [user("hi")], "tools": [LOOK, MOVE], "tool_choice": choice})
        request, gate = gated.asked.get(timeout=PATIENCE)
        assert list(request.tools) == shown
        gate.set_result("yes")
        connection.recv(10)


@pytest.mark.parametrize(
    ("fields", "param"), [({"n": 3}, "n"), ({"response_format": {"type": "json_object"}}, "response_format")]
)
def test_what_is_not_done_here_is_a_bad_request_to_the_sdk(program: MakeProgram, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        program().sdk.chat.completions.create(model="m", messages=[user("hi")], **fields)
    assert refused.value.param == param


# Errors


def test_an_overlong_prompt_gets_the_providers_error_and_the_program_can_compact(program: MakeProgram) -> None:
    there = program(recorder={"context_length": 40})
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            there.sdk.chat.completions.create(model="m", messages=[user("long " * 50)], stream=stream)
        assert refused.value.code == "context_length_exceeded"
        assert "maximum context length is 40 tokens" in refused.value.message
    assert there.say(user("short")).status == 200
    assert there.traffic.failure is None
    assert there.request(method="GET", path="/v1/models").json["data"][0]["max_model_len"] == 40


def test_a_rollouts_own_length_counts_too(program: MakeProgram) -> None:
    there = program(max_length=40)
    assert there.say(user("long " * 50)).error["code"] == "context_length_exceeded"


class Broken:
    policy_version = 0

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error or ConnectionError("the engine is away")

    async def sample(self, request: SampleRequest) -> Sampled:
        raise self.error

    def close(self) -> None:
        pass


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_breaks_ends_one_rollout_and_says_why(program: MakeProgram, stream: bool) -> None:
    there, other = program(Broken()), program()
    with pytest.raises(openai.InternalServerError, match="has failed") as refused:
        there.sdk.chat.completions.create(model="m", messages=[user("hi")], stream=stream)
    assert "away" not in str(refused.value)
    assert (there.traffic.failure, there.traffic.calls) == ("ConnectionError: the engine is away", 1)
    assert there.say(user("hi")).status == 403
    assert not there.rollout.calls
    assert other.say(user("hi")).status == 200


def test_an_engine_that_cancels_leaves_nobody_waiting(program: MakeProgram) -> None:
    there = program(Broken(asyncio.CancelledError("shut down")))
    assert there.say(user("hi")).status == 500
    assert there.traffic.failure == "CancelledError: shut down"


def test_a_conversation_the_template_refuses_is_the_programs_mistake(server: Any, rendering: Any) -> None:
    found = rendering("mistral_nemo")
    recorder = Recorder(ScriptedEngine(["yes"], found), found)
    there = Program(server, "refused", "", recorder.open("refused"))
    there.key = server.open("refused", recorder=recorder)
    reply = there.say(user("one"), user("two"))
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert "template refuses" in reply.error["message"]
    assert there.traffic.failure is None


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(body=BODY | ANYTHING)
def test_no_body_ever_gets_a_500(program: MakeProgram, body: Any) -> None:
    there = program()
    reply = there.request(body)
    assert reply.status in (200, 400)
    if reply.status == 400:
        assert reply.error["message"]
    assert there.traffic.failure is None
    there.server.close(there.rollout_id)


@given(body=st.binary(max_size=30))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_no_bytes_ever_get_a_500(program: MakeProgram, body: bytes) -> None:
    assert program().request(body).status == 400


@pytest.mark.parametrize("text", ["{", '{"n": "\\ud8"}', '{"n": 1e999}', "[" * 5000])
def test_what_is_not_json_is_said_so(program: MakeProgram, text: str) -> None:
    reply = program().request(text.encode())
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert "not JSON" in reply.error["message"]


def test_half_a_character_is_read_as_an_unknown_one(program: MakeProgram) -> None:
    there = program()
    text = rb"cut \ud83d, \ude00\uD83D whole \ud83d\ude00, a path C:\\\\ud83d"
    reply = there.request(b'{"messages": [{"role": "user", "content": "' + text + b'"}]}')
    assert reply.status == 200
    (message,) = there.calls[0].messages
    assert message["content"] == "cut \ufffd, \ufffd\ufffd whole \N{GRINNING FACE}, a path C:\\\\ud83d"


def test_a_body_over_32_megabytes_is_refused(program: MakeProgram) -> None:
    there = program()
    reply = there.request(b" " * (32 * 1024**2 + 1))
    assert (reply.status, reply.error["message"]) == (413, "The body is larger than 32 MB.")
    assert there.request(b" " * (31 * 1024**2) + b"{}").status == 400


def test_a_client_that_leaves_in_the_middle_of_its_body_breaks_nothing(program: MakeProgram) -> None:
    there = program()
    connection = socket.create_connection(("127.0.0.1", there.server.port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {there.key}\r\n"
    connection.sendall(f"{head}Content-Length: 100\r\n\r\nhalf".encode())
    connection.close()
    for broken in ("Transfer-Encoding: chunked\r\n\r\nzz\r\n", "Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nhalf"):
        with socket.create_connection(("127.0.0.1", there.server.port), timeout=PATIENCE) as connection:
            connection.sendall((head + broken).encode())
            assert connection.recv(12).endswith(b"400")
    assert there.say(user("hi")).status == 200
    assert there.traffic.failure is None


# Routes and keys


def test_the_models_are_the_policy_under_any_name(program: MakeProgram) -> None:
    sdk = program().sdk
    assert [model.id for model in sdk.models.list()] == ["policy"]
    assert sdk.models.retrieve("org/some-model").id == "org/some-model"


def test_the_root_answers_anyone(server: InterceptionServer) -> None:
    assert httpx.get(server.url, timeout=PATIENCE).status_code == 200
    assert httpx.head(f"{server.url}/", timeout=PATIENCE).status_code == 200


def test_a_key_is_needed_and_names_its_rollout_only(program: MakeProgram) -> None:
    there, other = program(), program()
    body = json.dumps({"messages": [user("hi")]}).encode()
    for headers in ({"Authorization": "Bearer nobody"}, {"Authorization": there.key}, {"Authorization": ""}):
        for path in ("/v1/chat/completions", "/v1/models", "/reward"):
            reply = httpx.post(f"{there.server.url}{path}", content=body, headers=headers, timeout=PATIENCE)
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    for name in ("x-api-key", "api-key"):
        headers = {name: there.key}
        reply = httpx.post(f"{there.server.url}/v1/chat/completions", content=body, headers=headers, timeout=PATIENCE)
        assert reply.status_code == 200
    assert (len(there.rollout.calls), len(other.rollout.calls)) == (2, 0)
    there.server.close(there.rollout_id)
    assert there.say(user("hi")).status == 401


def test_other_routes_are_refused_in_words_and_noted(program: MakeProgram) -> None:
    there = program()
    with pytest.raises(openai.NotFoundError, match="Text completions are not served"):
        there.sdk.completions.create(model="m", prompt="hi")
    with pytest.raises(openai.NotFoundError, match="Embeddings are not served"):
        there.sdk.embeddings.create(model="m", input="hi")
    for path in ("/reward", "/v1/verify", "/v1/chat/completions/", "/../etc/passwd"):
        assert there.request(method="GET", path=path).status == 404
    assert there.request(method="DELETE").status == 404
    routes = ["POST /v1/completions", "POST /v1/embeddings", "GET /reward", "GET /v1/verify", "GET /v1/chat/completions/"]
    assert there.traffic.unknown_routes[:5] == routes
    assert (there.traffic.calls, there.traffic.errors) == (0, 7)


# The server itself


class Impatient(InterceptionServer):
    keep_alive_seconds = 0.01


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        received = connection.recv(4096)
        assert received, data
        data += received
    return data


def test_a_stream_says_that_it_waits(program: MakeProgram, gated: Gated) -> None:
    with Impatient() as server:
        there = program(gated, on=server)
        connection = there.start({"messages": [user("hi")], "stream": True})
        gate = gated.gate()
        read_until(connection, b": waiting\n\n")
        gate.set_result("yes")
        assert b'"content":"yes"' in read_until(connection, b"[DONE]")
        server.end(there.rollout_id)
        assert there.calls[0].delivered


def test_an_engine_slower_than_a_programs_read_timeout_is_waited_for(program: MakeProgram, gated: Gated, pool: Any) -> None:
    with Impatient() as server:
        there = program(gated, on=server)
        sdk = there.sdk.with_options(timeout=httpx.Timeout(PATIENCE, read=2), max_retries=0)

        def ask() -> str:
            stream = sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

        said = pool.submit(ask)
        gate = gated.gate()
        with pytest.raises(TimeoutError):  # longer than the program waits between two bytes
            said.result(timeout=2.5)
        gate.set_result("at last")
        assert said.result(timeout=PATIENCE) == "at last"
        assert [call.delivered for call in there.calls] == [True]


def test_a_program_that_gives_up_waiting_and_asks_again_gets_the_same_reply(
    program: MakeProgram, gated: Gated, pool: Any
) -> None:
    there = program(gated)
    sdk = there.sdk.with_options(timeout=httpx.Timeout(PATIENCE, read=0.4), max_retries=50)
    said = pool.submit(sdk.chat.completions.create, model="m", messages=[{"role": "user", "content": "hi"}])
    gate = gated.gate()
    until(lambda: there.traffic.joined)
    gate.set_result("at last")
    assert said.result(timeout=PATIENCE).choices[0].message.content == "at last"
    assert there.traffic.calls == len(there.calls) == 1


def test_an_error_after_a_stream_began_is_an_event(program: MakeProgram, gated: Gated) -> None:
    with Impatient() as server:
        there = program(gated, on=server)
        connection = there.start({"messages": [user("hi")], "stream": True})
        gate = gated.gate()
        read_until(connection, b": waiting\n\n")
        gate.set_exception(ConnectionError("away"))
        assert b'"code":"failed"' in read_until(connection, b'data: {"error"')


def test_a_server_starts_once_stops_twice_and_frees_its_port() -> None:
    server = InterceptionServer(model_name="m")
    with pytest.raises(LongreinError, match="not running"):
        server.open("r")
    with server:
        with pytest.raises(LongreinError, match="already started"):
            server.start()
        with pytest.raises(LongreinError, match=f"cannot listen on 127.0.0.1:{server.port}"):
            InterceptionServer(port=server.port).start()
        port = server.port
    server.stop()
    with InterceptionServer(port=port) as again:
        assert again.url == f"http://127.0.0.1:{port}"


def test_while_rollouts_are_open_garbage_is_not_looked_for_in_what_was_there() -> None:
    gc.unfreeze()
    with InterceptionServer() as server:
        server.open("one")
        server.open("two")
        server.close("one")
        assert gc.get_freeze_count() > 1000
        server.close("two")
        assert gc.get_freeze_count() == 0


def test_a_server_listens_on_a_unix_socket_too(program: MakeProgram, tmp_path: Path) -> None:
    with InterceptionServer(unix_socket=str(tmp_path / "proxy")) as server:
        there = program(on=server)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(tmp_path / "proxy")), timeout=PATIENCE) as client:
            body = {"messages": [user("hi")]}
            reply = client.post(
                "http://proxy/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {there.key}"}
            )
        assert reply.json()["choices"][0]["message"]["content"] == "yes"


WITHOUT_TORCH = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "trl", "datasets", "accelerate"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
import json, urllib.request
from tokenizers import Tokenizer

class Light:
    name_or_path = "qwen3"
    def __init__(self, file):
        self._inner = Tokenizer.from_file(file)
        self.unk_token_id = None
    def encode(self, text, add_special_tokens=False):
        return self._inner.encode(text, add_special_tokens=add_special_tokens).ids
    def decode(self, ids, skip_special_tokens=False):
        return self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)
    def convert_tokens_to_ids(self, token):
        return self._inner.token_to_id(token)
    def get_vocab(self):
        return self._inner.get_vocab()

import longrein.contract, longrein.rollout
from longrein.engines.scripted import ScriptedEngine
from longrein.proxy import InterceptionServer
from longrein.recorder import Recorder
from longrein.rendering import rendering_for

rendering = rendering_for(Light(sys.argv[1]), renderer="qwen3")
recorder = Recorder(ScriptedEngine(["yes"], rendering), rendering)
recorder.open("r")
with InterceptionServer() as server:
    key = server.open("r", recorder=recorder)
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    request = urllib.request.Request(server.url + "/v1/chat/completions", body, {"Authorization": f"Bearer {key}"})
    print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
    server.seal("r")
(row,) = recorder.finish("r").rows()
print(row.agent_mask.sum(), "torch" in sys.modules, "transformers" in sys.modules)
"""


def test_the_seam_runs_without_torch(tokenizer: Any) -> None:
    file = f"{tokenizer('qwen3').name_or_path}/tokenizer.json"
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, file], capture_output=True, text=True, timeout=480)
    assert done.stdout.split() == ["yes", "2", "False", "False"], done.stderr
