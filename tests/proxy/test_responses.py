"""The OpenAI Responses dialect: what its items mean, and what its server remembers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from conversations import LOOK, user
from openai.types.responses import Response
from programs import Program

from longrein.proxy import responses
from longrein.proxy.dialect import Answer, DialectError, ModelRequest
from longrein.proxy.marks import minted, sealed

MakeProgram = Callable[..., Program]
CALL = "00c0ffee00c0ffee"
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}


def body(*items: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "any", "input": list(items) or "hi", **fields}


def call(index: int, name: str = "look", **fields: Any) -> dict[str, Any]:
    return {
        "type": "function_call",
        "call_id": minted("call", CALL, index),
        "name": name,
        "arguments": '{"room": "attic"}',
        **fields,
    }


def output(index: int, text: Any = "dark") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": minted("call", CALL, index), "output": text}


def answer(*calls: tuple[str, str], content: str = "", reasoning: str = "", finish: str = "tool_calls") -> Answer:
    made = [
        {"id": minted("call", CALL, i), "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": made}
    return Answer(CALL, message, finish, 7, 5)


def test_the_items_of_one_reply_are_one_message_however_results_stand_between() -> None:
    text = [{"type": "output_text", "text": "looking", "annotations": []}]
    reply = [
        {"type": "reasoning", "id": minted("rs", CALL), "summary": [], "encrypted_content": sealed(CALL, "hm")},
        {"type": "message", "id": minted("msg", CALL), "role": "assistant", "content": text},
    ]
    one = responses.parse(body(user("go"), *reply, call(0), call(1), output(0), output(1)))
    other = responses.parse(body(user("go"), *reply, call(0), output(0), call(1), output(1)))
    assert one.messages == other.messages
    said = one.messages[1]
    assert (said["content"], said["reasoning_content"], said["from_call"]) == ("looking", "hm", CALL)
    assert [c["id"] for c in said["tool_calls"]] == [minted("call", CALL, 0), minted("call", CALL, 1)]
    assert [m["role"] for m in one.messages] == ["user", "assistant", "tool", "tool"]


def test_items_of_others_are_told_apart_by_what_stands_between() -> None:
    said = {"role": "assistant", "content": "one"}
    ours = {"type": "function_call", "call_id": "x", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "x", "output": [{"type": "input_text", "text": "dark"}]}
    request = responses.parse(body(user("go"), said, ours, result, ours, result, said, said))
    assert [(m["role"], m["content"], len(m.get("tool_calls", ()))) for m in request.messages] == [
        ("user", "go", 0),
        ("assistant", "one", 1),
        ("tool", "dark", 0),
        ("assistant", "", 1),
        ("tool", "dark", 0),
        ("assistant", "one", 0),
        ("assistant", "one", 0),
    ]


def test_a_message_of_another_agent_is_read_as_the_users() -> None:
    parts = [{"type": "input_text", "text": "Payload:\n"}, {"type": "encrypted_content", "encrypted_content": "Look."}]
    item = {"type": "agent_message", "id": "amsg_1", "author": "/root", "recipient": "/root/look", "content": parts}
    assert responses.parse({"input": [item]}).messages == ({"role": "user", "content": "Payload:\nLook."},)


def test_a_custom_tool_is_shown_as_a_function_and_called_as_what_it_is() -> None:
    request = responses.parse(body(tools=[PATCH, {"type": "web_search"}]))
    (shown,) = request.tools
    assert shown["function"]["name"] == "apply_patch"
    assert 'start: "*** Begin Patch"' in shown["function"]["description"]
    assert shown["function"]["parameters"]["required"] == ["input"]
    reply = answer(("apply_patch", '{"input": "*** Begin\\nné"}'))
    (item,) = responses.whole(reply, request, created=1, model="m")["output"]
    assert (item["type"], item["input"], item["call_id"]) == (
        "custom_tool_call", "*** Begin\nné", minted("call", CALL, 0)
    )  # fmt: skip
    kinds = [e["type"] for e in responses.events(reply, request, created=1, model="m")]
    assert kinds[3:5] == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]


@pytest.mark.parametrize(
    "arguments", ['{"input": "x"}', '{"patch": "x"}', '{"input": 1}', '{"input": "x", "more": 1}', "{}"]
)
def test_a_custom_call_comes_back_as_it_was_written(arguments: str) -> None:
    request = responses.parse(body(tools=[PATCH]))
    (item,) = responses.whole(answer(("apply_patch", arguments)), request, created=1, model="m")["output"]
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    _, said, heard = responses.parse(body(user("go"), item, result, tools=[PATCH])).messages
    assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == json.loads(arguments)
    assert said["tool_calls"][0]["id"] == heard["tool_call_id"] == minted("call", CALL, 0)


def test_the_tools_of_a_namespace_are_called_in_it() -> None:
    agents = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]}
    request = responses.parse(body(tools=[agents, {"type": "function", **LOOK["function"], "strict": False}]))
    assert [tool["function"]["name"] for tool in request.tools] == ["agents__spawn", "look"]
    assert request.tools[1] == LOOK
    (item,) = responses.whole(answer(("agents__spawn", "{}")), request, created=1, model="m")["output"]
    assert (item["name"], item["namespace"]) == ("spawn", "agents")
    _, said = responses.parse(body(user("go"), item, tools=[agents])).messages
    assert said["tool_calls"][0]["function"]["name"] == "agents__spawn"


def test_a_stream_says_its_events_in_order_and_ends_with_the_whole_response() -> None:
    request = ModelRequest((user("hi"),))
    reply = answer(("look", "{}"), content="look:", reasoning="hm")
    events = list(responses.events(reply, request, created=1, model="policy"))
    text = ["response.output_item.added", "response.content_part.added"]
    end = ["response.content_part.done", "response.output_item.done"]
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        *text, "response.reasoning_text.delta", "response.reasoning_text.done", *end,
        *text, "response.output_text.delta", "response.output_text.done", *end,
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"] == responses.whole(reply, request, created=1, model="policy")
    cut = list(responses.events(answer(content="lo", finish="length"), request, created=1, model="m"))[-1]
    assert (cut["type"], cut["response"]["incomplete_details"]) == (
        "response.incomplete", {"reason": "max_output_tokens"}
    )  # fmt: skip
    Response.model_validate(cut["response"])


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({}, "input", "input is missing"),
        (body(input=[]), "input", "input is empty"),
        (body("hi"), "input[0]", "must be an object"),
        (body({"role": "god", "content": "x"}), "input[0].role", '"god"'),
        (body(user([{"type": "input_image", "image_url": "data:"}])), "input[0].content[0]", "only parts of text"),
        (body({"type": "item_reference", "id": "x"}), "input[0]", "send the item itself"),
        (body({"type": "computer_call"}), "input[0]", "never gave"),
        (body({"type": "function_call", "name": "x"}), "input[0].call_id", "is missing"),
        (body(text={"format": {"type": "json_schema"}}), "text.format", "without constraints"),
        (body(background=True), "background", "not supported"),
        (body(conversation="c"), "conversation", "send the items"),
        (body(tools=[{}]), "tools[0].type", "must be a string"),
        (body(tools=[{"type": "function"}]), "tools[0].name", "is missing"),
        (body(tool_choice=3), "tool_choice", "none, auto, required"),
        (body(max_output_tokens=0), "max_output_tokens", "1 or more"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_words(given: Any, param: str, words: str) -> None:
    with pytest.raises(DialectError) as refused:
        responses.parse(given)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert words in refused.value.message


# What the server remembers


def test_instructions_are_of_one_call_and_the_conversation_goes_on_by_its_id(program: MakeProgram) -> None:
    there = program(["one", "two", "three"])
    first = there.sdk.responses.create(model="m", input="hi", instructions="be brief")
    second = there.sdk.responses.create(model="m", input="and?", instructions="be brief", previous_response_id=first.id)
    other = there.sdk.responses.create(model="m", input="and?", instructions="be long", previous_response_id=first.id)
    assert (second.output_text, second.previous_response_id, second.instructions) == ("two", first.id, "be brief")
    one, two, three = there.calls
    assert (two.parent, three.parent) == (one.id, None)
    assert [m["content"] for m in three.messages] == ["be long", "hi", "one", "and?"]
    assert other.output_text == "two"


def test_what_is_stored_can_be_read_and_deleted_and_what_is_not_is_not_there(program: MakeProgram) -> None:
    there, stranger = program(lambda m, t: "yes"), program(lambda m, t: "yes")
    kept = there.sdk.responses.create(model="m", input="hi")
    assert there.sdk.responses.retrieve(kept.id).output_text == "yes"
    lost = there.sdk.responses.create(model="m", input="hi", store=False)
    for sdk, previous in ((there.sdk, lost.id), (there.sdk, "resp_x"), (stranger.sdk, kept.id)):
        with pytest.raises(openai.BadRequestError) as refused:
            sdk.responses.create(model="m", input="and?", previous_response_id=previous)
        assert refused.value.code == "previous_response_not_found"
        with pytest.raises(openai.NotFoundError):
            sdk.responses.retrieve(previous)
    there.sdk.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        there.sdk.responses.retrieve(kept.id)


def test_of_two_alike_texts_the_one_whose_id_is_echoed_is_continued(program: MakeProgram) -> None:
    there = program(lambda m, t: "yes")
    made = [there.sdk.responses.create(model="m", input="hi", store=False) for _ in range(2)]
    for response in made:
        items = [item.model_dump(exclude_none=True) for item in response.output]
        there.sdk.responses.create(model="m", input=[user("hi"), *items, user("and?")], store=False)
    one, two, after_one, after_two = there.calls
    assert (after_one.parent, after_two.parent) == (one.id, two.id)


def test_a_pulled_rollout_remembers_too(pulled: MakeProgram) -> None:
    import threading

    there = pulled()

    def serve() -> None:
        while (intercept := there.server.next_request(there.rollout_id)) is not None:
            there.server.deliver(there.rollout_id, intercept, f"{len(intercept['messages'])} heard")

    thread = threading.Thread(target=serve)
    thread.start()
    first = there.sdk.responses.create(model="m", input="hi")
    second = there.sdk.responses.create(model="m", input="hi", previous_response_id=first.id)
    assert (first.output_text, second.output_text) == ("1 heard", "3 heard")
    there.server.end(there.rollout_id)
    thread.join(timeout=60)
