"""The OpenAI chat dialect as functions: any body is a request or a clear error, and a stream adds up to the whole reply."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from bodies import ANYTHING, BODY
from conversations import ARGUMENTS, LOOK, MOVE, NAME, TEXT, assistant, system, user
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from longrein.proxy import chat
from longrein.proxy.dialect import Answer, DialectError, ModelRequest, PromptTooLong, TokenLogprob, answer_of
from longrein.rollout import Call, Rollout

PLAIN = ModelRequest(messages=(user("hi"),))


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "any", "messages": [user("hi")], **fields}


# Requests


def test_a_request_has_what_the_program_sent() -> None:
    request = chat.parse(
        body(
            tools=[LOOK, MOVE],
            temperature=0.3,
            max_tokens=9,
            stop="END",
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            seed=4,
            user="someone",
            not_a_field={"at": "all"},
        )
    )
    assert (request.messages, request.tools, request.model) == ((user("hi"),), (LOOK, MOVE), "any")
    assert (request.max_tokens, request.stop, request.tool_choice) == (9, ("END",), "auto")
    assert request.stream
    assert request.include_usage
    assert request.logprobs
    assert request.asked == {"temperature": 0.3, "max_tokens": 9, "stop": "END", "seed": 4, "logprobs": True}


def test_of_two_limits_the_smaller_holds() -> None:
    assert chat.parse(body(max_tokens=9, max_completion_tokens=5)).max_tokens == 5
    assert chat.parse(body(max_completion_tokens=7)).max_tokens == 7
    assert chat.parse(body(max_tokens=None)).max_tokens is None


def test_tool_choice_none_hides_the_tools_and_the_others_show_them() -> None:
    named = {"type": "function", "function": {"name": "look"}}
    assert chat.parse(body(tools=[LOOK], tool_choice="none")).tools == ()
    for choice in ("auto", "required", named):
        request = chat.parse(body(tools=[LOOK], tool_choice=choice))
        assert (request.tools, request.tool_choice) == ((LOOK,), choice)


def test_only_the_tools_of_the_program_are_offered() -> None:
    reset = {"type": "function", "function": {"name": "reset"}}
    assert chat.parse(body()).tools == ()
    assert chat.parse(body(tools=[LOOK])).tools == (LOOK,)
    assert chat.parse(body(tools=[reset])).tools == (reset,)


def test_messages_keep_their_order_and_lose_what_means_nothing() -> None:
    said = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "audio": None,
        "annotations": [],
        "reasoning": "hm",
        "tool_calls": [{"id": "a", "type": "function", "index": 0, "function": {"name": "look", "arguments": {"é": 1}}}],
    }
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    result = {"role": "tool", "tool_call_id": "a", "content": "dark"}
    given = [system("first"), user("hi"), said, result, system("in the middle"), user(parts)]
    assert list(chat.parse(body(messages=given)).messages) == [
        system("first"),
        user("hi"),
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"é": 1}'}}],
        },
        result,
        system("in the middle"),
        user("ab"),
    ]


IMAGE = [{"type": "image_url", "image_url": {"url": "data:"}}]


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ([1], None, "must be a JSON object"),
        ({}, "messages", "messages is missing"),
        (body(messages=[]), "messages", "messages is empty"),
        (body(messages="hi"), "messages", "messages is a string"),
        (body(messages=["hi"]), "messages[0]", "must be an object"),
        (body(messages=[{"role": "god", "content": "hi"}]), "messages[0].role", '"god"'),
        (body(messages=[user(3)]), "messages[0].content", "a number"),
        (body(messages=[user(IMAGE)]), "messages[0].content[0]", "only parts of text"),
        (body(messages=[{**assistant(""), "tool_calls": [{"id": "a"}]}]), "messages[0].tool_calls[0]", "function.name"),
        (body(n=2), "n", "ask n times"),
        (body(response_format={"type": "json_object"}), "response_format", '"json_object" is not supported'),
        (body(response_format={"type": "json_schema", "json_schema": {}}), "response_format", "without constraints"),
        (body(max_tokens=0), "max_tokens", "1 or more"),
        (body(max_completion_tokens="9"), "max_completion_tokens", "integer"),
        (body(stop=[1]), "stop", "list of strings"),
        (body(stream="yes"), "stream", "true or false"),
        (body(stream_options=[]), "stream_options", "an object"),
        (body(tools={}), "tools", "a list"),
        (body(tools=[{"type": "custom", "custom": {}}]), "tools[0]", '"type": "function"'),
        (body(tools=[{"type": "function", "function": {}}]), "tools[0].function.name", "a name"),
        (body(tool_choice="look"), "tool_choice", "none, auto, required"),
        (body(tool_choice={"type": "function", "function": {"name": "fly"}}, tools=[LOOK]), "tool_choice", "fly"),
        (body(functions=[{"name": "look"}]), "functions", "send `tools`"),
        (body(logprobs=True, top_logprobs=5), "top_logprobs", "not supported"),
        (body(modalities=["audio"]), "modalities", "Only text"),
        (body(metadata=json.loads("[" * 80 + "]" * 80)), None, "nests deeper"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_words(given: Any, param: str | None, words: str) -> None:
    with pytest.raises(DialectError) as refused:
        chat.parse(given)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert words in refused.value.message
    error = chat.error_body(refused.value)["error"]
    assert error == {"message": refused.value.message, "type": "invalid_request_error", "param": param, "code": None}


def test_what_means_nothing_here_is_accepted() -> None:
    assert chat.parse(body(n=1, response_format={"type": "text"}, top_logprobs=0, tools=None, stop=[], functions=[]))


@settings(max_examples=300)
@given(given=BODY | ANYTHING)
def test_any_body_is_a_request_or_a_clear_error(given: Any) -> None:
    refused = None
    try:
        request = chat.parse(given)
    except DialectError as error:
        refused = error
    else:
        assert all(isinstance(message["content"], str) for message in request.messages)
        assert all(isinstance(tool["function"]["name"], str) for tool in request.tools)
    if refused is not None:
        assert (refused.status, bool(refused.message)) == (400, True)
        json.dumps(chat.error_body(refused))


def test_a_full_context_is_said_in_the_words_programs_look_for() -> None:
    error = chat.error_body(PromptTooLong(130, 128))["error"]
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert "maximum context length is 128 tokens" in error["message"]


# Replies


def answer(message: dict[str, Any], **fields: Any) -> Answer:
    return Answer("c0", message, "tool_calls" if message.get("tool_calls") else "stop", 7, 5, **fields)


REPLIES = st.builds(
    lambda content, reasoning, calls: {
        **assistant(content, *calls),
        **({"reasoning_content": reasoning} if reasoning else {}),
    },
    TEXT | st.text(max_size=200),
    TEXT,
    st.lists(st.tuples(NAME, ARGUMENTS), max_size=3),
)


@given(message=REPLIES, usage=st.booleans(), logprobs=st.booleans())
def test_the_deltas_of_a_stream_add_up_to_the_whole_reply(message: dict[str, Any], usage: bool, logprobs: bool) -> None:
    request = ModelRequest((user("hi"),), stream=True, include_usage=usage, logprobs=logprobs)
    reply = answer(message, logprobs=(TokenLogprob("é", -0.5),))
    whole = chat.whole(reply, request, created=3, model="policy")
    chunks = list(chat.events(reply, request, created=3, model="policy"))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    ChatCompletion.model_validate(whole)
    if usage:
        last = chunks.pop()
        assert (last["choices"], last["usage"]) == ([], whole["usage"])
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [reply.finish_reason]
    said: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for delta in (choice["delta"] for choice in choices):
        for field in ("content", "reasoning_content"):
            said[field] += delta.get(field) or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(said["tool_calls"]):
                said["tool_calls"].append({**call, "function": dict(call["function"])})
            else:
                said["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    message = whole["choices"][0]["message"]
    assert said["content"] == (message["content"] or "")
    assert said["reasoning_content"] == message.get("reasoning_content", "")
    expected = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", ()))]
    assert said["tool_calls"] == expected
    streamed = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert streamed == ([whole["choices"][0]["logprobs"]] if logprobs else [])


def test_a_stream_says_role_reasoning_content_calls_and_the_end_in_this_order() -> None:
    message = {**assistant("look:", ("look", {"room": "attic"}), ("look", {})), "reasoning_content": "hm"}
    chunks = list(chat.events(answer(message), PLAIN, created=3, model="policy"))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [sorted(delta)[0] if delta else "end" for delta in deltas] == [
        "content", "reasoning_content", "content", *["tool_calls"] * 4, "end"
    ]  # fmt: skip
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [delta["tool_calls"][0]["index"] for delta in deltas[3:7]] == [0, 0, 1, 1]
    assert {chunk["model"] for chunk in chunks} == {"policy"}


def test_a_reply_shows_no_token_and_no_log_probability_unless_asked() -> None:
    ids, logprobs = np.array([54321, 12345], np.int32), np.array([-0.125, -0.0625], np.float32)
    rollout = Rollout(id="r")
    call = rollout.add(Call("c", None, np.array([9, 9, 9], np.int32), ids, logprobs, "stop", reply=assistant("yes")))
    names = {54321: "ye", 12345: "s"}
    silent = answer_of(call, rollout, lambda ids: names[ids[0]])
    asked = answer_of(call, rollout, lambda ids: names[ids[0]], logprobs=True)
    wanted = ModelRequest((user("hi"),), logprobs=True)
    for reply, request in ((silent, PLAIN), (silent, wanted), (asked, PLAIN)):
        wire = [chat.whole(reply, request, created=3, model="m"), *chat.events(reply, request, created=3, model="m")]
        assert not any(secret in json.dumps(wire) for secret in ("54321", "12345", "0.125"))
    shown = chat.whole(asked, wanted, created=3, model="m")
    tokens = shown["choices"][0]["logprobs"]["content"]
    assert [(token["token"], token["logprob"]) for token in tokens] == [("ye", -0.125), ("s", -0.0625)]
    assert shown["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_a_reply_that_was_interrupted_reads_as_cut_short() -> None:
    rollout, nothing = Rollout(id="r"), np.array([], np.int32)
    call = rollout.add(Call("c", None, nothing, nothing, np.array([], np.float32), "aborted", reply=assistant("")))
    assert answer_of(call, rollout).finish_reason == "length"


@pytest.mark.parametrize(
    "part", ["text", "refusal", None, 5, ["text"], {"type": "text"}, {"type": "image_url", "text": "x"}]
)
def test_a_part_that_is_no_text_is_refused_where_it_stands(part: Any) -> None:
    with pytest.raises(DialectError, match=r"messages\[0\]\.content\[1\] is"):
        chat.parse({"messages": [user([{"type": "text", "text": "a"}, part])]})
