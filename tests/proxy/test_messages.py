"""The Anthropic Messages dialect: what its blocks mean, what its events say, and the routes beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import pytest
from clients import MessagesClient, ThinkingClient
from conversations import LOOK, user
from programs import Program

from longrein.proxy import messages
from longrein.proxy.dialect import Answer, DialectError, ModelRequest
from longrein.proxy.marks import minted, sealed, unsealed

MakeProgram = Callable[..., Program]
CALL = "00c0ffee00c0ffee"
ADAPTIVE = {"thinking": True}


def body(*said: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "any", "max_tokens": 9, "messages": list(said) or [user("hi")], **fields}


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def test_results_come_before_words_and_blocks_are_paragraphs() -> None:
    marked = {"cache_control": {"type": "ephemeral"}}
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": "dark", **marked},
        text("go on", **marked),
        {"type": "tool_result", "tool_use_id": "b", "content": [text("two"), text("lines")], "is_error": True},
        text("please"),
    ]
    used = {"type": "tool_use", "id": "a", "name": "look", "input": {"room": "é"}, **marked}
    request = messages.parse(
        body(
            user([text("hi"), text("there", **marked)]),
            {"role": "assistant", "content": [text("look"), text("ing"), used]},
            user(results),
            {"role": "system", "content": [text("hurry")]},
            system=[text("You are", **marked), text("brief.")],
        )
    )
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"room": "é"}'}}
    assert list(request.messages) == [
        {"role": "system", "content": "You are\n\nbrief."},
        {"role": "user", "content": "hi\n\nthere"},
        {"role": "assistant", "content": "looking", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "dark"},
        {"role": "tool", "tool_call_id": "b", "content": "two\n\nlines"},
        {"role": "user", "content": "go on\n\nplease"},
        {"role": "system", "content": "hurry"},
    ]


def test_reasoning_comes_back_by_its_text_or_by_its_signature() -> None:
    for block in (
        {"type": "thinking", "thinking": "hm", "signature": sealed(CALL, "hm")},
        {"type": "thinking", "thinking": "", "signature": sealed(CALL, "hm")},
        {"type": "redacted_thinking", "data": sealed(CALL, "hm")},
    ):
        said = messages.parse(body(user("hi"), {"role": "assistant", "content": [block, text("yes")]})).messages[1]
        assert (said["reasoning_content"], said["from_call"], said["content"]) == ("hm", CALL, "yes")
    foreign = {"type": "thinking", "thinking": "hm", "signature": "EqQBCgIYAhIM1gbcDa9GJwZA2b3h"}
    said = messages.parse(body(user("hi"), {"role": "assistant", "content": [foreign]})).messages[1]
    assert said == {"role": "assistant", "content": "", "reasoning_content": "hm"}


def test_thinking_is_shown_to_who_turned_it_on() -> None:
    reply = Answer(CALL, {"role": "assistant", "content": "yes", "reasoning_content": "hm"}, "stop")

    def blocks(thinking: Any) -> list[Any]:
        return messages.whole(reply, messages.parse(body(thinking=thinking)), created=1, model="m")["content"]

    shown = {"type": "thinking", "thinking": "hm", "signature": sealed(CALL, "hm")}
    assert blocks(None) == blocks({"type": "disabled"}) == [text("yes")]
    assert blocks({"type": "enabled", "budget_tokens": 1024}) == blocks({"type": "adaptive"}) == [shown, text("yes")]
    (omitted, _) = blocks({"type": "adaptive", "display": "omitted"})
    assert (omitted["thinking"], unsealed(omitted["signature"]).reasoning) == ("", "hm")


def test_a_stream_says_its_events_in_order() -> None:
    arguments = '{"room": "attic"}'
    call = {"id": minted("call", CALL, 0), "type": "function", "function": {"name": "look", "arguments": arguments}}
    message = {"role": "assistant", "content": "look:", "reasoning_content": "hm", "tool_calls": [call]}
    events = list(
        messages.events(Answer(CALL, message, "tool_calls", 7, 5), ModelRequest((), wire=ADAPTIVE), created=1, model="m")
    )
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [event["type"] for event in events] == [
        "message_start", *block[:2], *block[1:], *block, *block, "message_delta", "message_stop"
    ]  # fmt: skip
    assert [event["index"] for event in events if "index" in event] == [0] * 4 + [1] * 3 + [2] * 3
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert deltas == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    assert (events[0]["message"]["usage"]["input_tokens"], events[-2]["usage"]) == (7, {"output_tokens": 5})
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_only_tools_that_the_program_runs_and_has_loaded_are_shown() -> None:
    loaded = {"name": "look", "description": "Look into a room.", "input_schema": LOOK["function"]["parameters"]}
    tools = [loaded, {"type": "web_search_20250305", "name": "web_search"}, {"name": "later", "defer_loading": True}]
    assert messages.parse(body(tools=tools)).tools == (LOOK,)
    reference = {"type": "tool_reference", "tool_name": "later"}
    found = user([{"type": "tool_result", "tool_use_id": "a", "content": [reference]}])
    assert [tool["function"]["name"] for tool in messages.parse(body(found, tools=tools)).tools] == ["look", "later"]
    assert messages.parse(body(tools=tools, tool_choice={"type": "none"})).tools == ()


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({}, "messages", "messages is missing"),
        (body({"role": "tool", "content": "x"}), "messages[0].role", "user, assistant, system"),
        (body(user(3)), "messages[0].content", "a number"),
        (body(user([{"type": "image"}])), "messages[0].content[0]", "only text"),
        (body(user([text("a"), {"type": "image"}])), "messages[0].content[1]", "only text"),
        (body({"role": "assistant", "content": [{"type": "server_tool_use"}]}), "messages[0].content[0]", "never gave"),
        (body(user([{"type": "tool_result"}])), "messages[0].content[0].tool_use_id", "is missing"),
        (body(tools=[{}]), "tools[0].name", "is missing"),
        (body(tool_choice={"type": "tool"}), "tool_choice", "with a name"),
        (body(tool_choice={"type": []}), "tool_choice", "must be auto"),
        (body(output_config={"format": {"type": "json_schema"}}), "output_config.format", "without constraints"),
        (body(max_tokens=0), "max_tokens", "1 or more"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_words(given: Any, param: str, words: str) -> None:
    with pytest.raises(DialectError) as refused:
        messages.parse(given)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert words in refused.value.message
    assert messages.error_body(refused.value)["error"]["type"] == "invalid_request_error"


# Against a server


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_word_is_named(program: MakeProgram, stream: bool) -> None:
    client = MessagesClient(program(["one END two"]))
    client.user("count")
    turn = client.ask(stream, stop_sequences=["STOP", "ND", "END"])
    assert (turn.text, turn.raw.stop_reason, turn.raw.stop_sequence) == ("one ", "stop_sequence", "END")


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_says_why_it_ended(program: MakeProgram, stream: bool) -> None:
    client = MessagesClient(program(lambda m, t: "one two three four"))
    client.user("count")
    assert client.ask(stream).raw.stop_reason == "end_turn"
    client.user("again")
    assert client.ask(stream, max_tokens=2).raw.stop_reason == "max_tokens"


def test_the_sdk_counts_the_tokens_of_the_prompt_it_would_send(program: MakeProgram) -> None:
    there = program(["yes"])
    client = ThinkingClient(there, [LOOK], "be brief")
    client.user("hi")
    tools = [{"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in client.functions]
    counted = client.sdk.messages.count_tokens(model="m", messages=client.history, tools=tools, system="be brief")
    assert client.ask().raw.usage.input_tokens == counted.input_tokens
    assert there.traffic.calls == 1


def test_the_sdks_errors_are_anthropics(program: MakeProgram) -> None:
    there = program(limits=None)
    sdk = MessagesClient(there).sdk
    with pytest.raises(anthropic.BadRequestError, match="messages is empty"):
        sdk.messages.create(model="m", max_tokens=5, messages=[])
    with pytest.raises(anthropic.AuthenticationError, match="Incorrect API key"):
        sdk.with_options(api_key="nobody").messages.create(model="m", max_tokens=5, messages=[user("hi")])
    with pytest.raises(anthropic.NotFoundError):
        sdk.messages.batches.list()
    assert [model.id for model in sdk.models.list()] == ["policy"]


def test_a_program_may_look_whether_anyone_is_there(program: MakeProgram) -> None:
    assert program().request(method="HEAD", path="/", Authorization="").status == 200
