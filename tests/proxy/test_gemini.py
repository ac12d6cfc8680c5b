"""The Gemini dialect: what its parts mean, and what its addresses say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from clients import GeminiClient
from conversations import LOOK
from google.genai import errors
from programs import Program

from longrein.proxy import gemini
from longrein.proxy.dialect import Answer, DialectError, ModelRequest
from longrein.proxy.marks import minted, sealed, unsealed

MakeProgram = Callable[..., Program]
CALL = "00c0ffee00c0ffee"


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "parts": [{"text": part} if isinstance(part, str) else part for part in parts]}


def model(*parts: Any) -> dict[str, Any]:
    return {**user(*parts), "role": "model"}


def body(*contents: Any, **fields: Any) -> dict[str, Any]:
    return {"contents": list(contents) or [user("hi")], **fields}


def called(name: str = "look", **fields: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": {"room": "attic"}, **fields}}


def responded(response: Any, name: str = "look", **fields: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": response, **fields}}


def test_responses_come_before_words_and_are_text_where_they_hold_one() -> None:
    request = gemini.parse(
        body(
            user("find", "it"),
            model(called(id="a"), called(id="b")),
            user("so?", responded({"output": "dark"}, id="a"), responded({"error": "é", "code": 1}, id="b"), "well?"),
            system_instruction={"parts": [{"text": "You search."}]},
        )
    )
    system, said, reply, one, two, after = request.messages
    assert (system["content"], said["content"], after["content"]) == ("You search.", "find\n\nit", "so?\n\nwell?")
    assert [call["id"] for call in reply["tool_calls"]] == ["a", "b"]
    assert (one["tool_call_id"], one["content"], one["name"]) == ("a", "dark", "look")
    assert (two["tool_call_id"], two["content"]) == ("b", '{"error": "é", "code": 1}')


def test_a_program_that_drops_ids_has_its_responses_in_the_order_of_its_calls() -> None:
    request = gemini.parse(
        body(
            user("go"),
            model(called(), called("move_to"), called()),
            user(responded({"result": "1"}), responded({"result": "2"}), responded({"result": "3"}, "move_to")),
        )
    )
    first, move, second = (call["id"] for call in request.messages[1]["tool_calls"])
    assert [(m["tool_call_id"], m["content"]) for m in request.messages[2:]] == [(first, "1"), (second, "2"), (move, "3")]


def test_a_signature_names_the_call_and_brings_the_reasoning_back() -> None:
    call = {"id": minted("call", CALL, 0), "type": "function", "function": {"name": "look", "arguments": "{}"}}
    message = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}
    whole = gemini.whole(Answer(CALL, message, "tool_calls"), gemini.parse(body()), created=1, model="m")
    (part,) = whole["candidates"][0]["content"]["parts"]
    assert unsealed(part["thoughtSignature"]) == (CALL, "hm")
    said = gemini.parse(body(user("hi"), model(part))).messages[1]
    assert (said["from_call"], said["reasoning_content"]) == (CALL, "hm")
    told = gemini.parse(body(user("hi"), model({"text": "", "thoughtSignature": sealed(CALL, "hm")}))).messages[1]
    assert (told["from_call"], told["reasoning_content"], told["content"]) == (CALL, "hm", "")


def test_schemas_of_openapi_are_shown_as_json_schemas() -> None:
    room = {"type": "STRING", "description": "a room named type"}
    old = {
        "type": "OBJECT",
        "properties": {"type": room, "all": {"type": "ARRAY", "items": {"type": "INTEGER"}}},
        "required": ["type"],
    }
    declared = [
        {"name": "old", "parameters": old},
        {**LOOK["function"], "parametersJsonSchema": LOOK["function"]["parameters"]},
    ]
    shown = gemini.parse(body(tools=[{"function_declarations": declared}, {"googleSearch": {}}])).tools
    assert shown[1] == LOOK
    assert shown[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "type": {"type": "string", "description": "a room named type"},
            "all": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["type"],
    }
    hidden = body(tools=[{"functionDeclarations": declared}], toolConfig={"functionCallingConfig": {"mode": "NONE"}})
    assert gemini.parse(hidden).tools == ()


def test_a_stream_is_the_parts_of_the_whole_and_says_its_end_once() -> None:
    message = {"role": "assistant", "content": "word " * 100, "reasoning_content": "hm " * 100}
    reply = Answer(CALL, message, "length", 7, 5)
    request = ModelRequest((), wire={"thoughts": True})
    events = list(gemini.events(reply, request, created=1, model="m"))
    whole = gemini.whole(reply, request, created=1, model="m")
    texts = {True: "", False: ""}
    for event in events:
        for part in event["candidates"][0]["content"]["parts"]:
            texts[part.get("thought", False)] += part["text"]
    assert texts == {True: message["reasoning_content"], False: message["content"]}
    assert [e["candidates"][0].get("finishReason") for e in events] == [None] * (len(events) - 1) + ["MAX_TOKENS"]
    assert whole["usageMetadata"] == events[-1]["usageMetadata"]


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({}, "contents", "contents is missing"),
        (body({"role": "god"}), "contents[0].role", "user or model"),
        (body(user({"inlineData": {}})), "contents[0].parts[0]", "inlineData"),
        (body(user({})), "contents[0].parts[0]", "nothing"),
        (body(model({"functionCall": {}})), "contents[0].parts[0].functionCall.name", "is missing"),
        (body(user({"functionResponse": 3})), "contents[0].parts[0].functionResponse", "an object"),
        (body(generationConfig={"candidateCount": 2}), "candidateCount", "one reply"),
        (
            body(generationConfig={"responseMimeType": "application/json"}),
            "generationConfig.responseMimeType",
            "without constraints",
        ),
        (body(generation_config={"max_output_tokens": 0}), "generationConfig.maxOutputTokens", "1 or more"),
        (body(cachedContent="x"), "cachedContent", "send the contents"),
        (body(tools=[{"functionDeclarations": [{}]}]), "tools[0].functionDeclarations[0].name", "is missing"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_words(given: Any, param: str, words: str) -> None:
    with pytest.raises(DialectError) as refused:
        gemini.parse(given)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert words in refused.value.message
    assert gemini.error_body(refused.value)["error"]["status"] == "INVALID_ARGUMENT"


# Against a server


def test_the_sdk_counts_tokens_and_finds_the_model(program: MakeProgram) -> None:
    there = program(["yes"], max_length=900)
    client = GeminiClient(there)
    client.user("hi")
    counted = client.sdk.models.count_tokens(model="m", contents=client.history).total_tokens
    assert client.ask().raw.usage_metadata.prompt_token_count == counted
    card = client.sdk.models.get(model="policy")
    assert (card.name, card.input_token_limit) == ("models/policy", 900)
    assert [found.name for found in client.sdk.models.list()] == ["models/policy"]


def test_a_stream_that_is_not_of_events_is_a_list(program: MakeProgram) -> None:
    reply = program(["yes"]).request(body(), path="/v1beta/models/m:streamGenerateContent")
    (chunk,) = reply.json
    assert chunk["candidates"][0]["content"]["parts"] == [{"text": "yes"}]


def test_the_key_may_be_in_a_header_or_in_the_address(program: MakeProgram) -> None:
    there = program(lambda m, t: "yes")
    path = "/v1beta/models/m:generateContent"
    assert there.request(body(), path=path, Authorization="", x_goog_api_key=there.key).status == 200
    assert there.request(body(), path=f"{path}?key={there.key}", Authorization="").status == 200
    assert there.request(body(), path=f"{path}?key=nobody", Authorization="").status == 401


def test_the_sdks_errors_are_googles(program: MakeProgram) -> None:
    client = GeminiClient(program())
    client.user("hi")
    with pytest.raises(errors.ClientError, match="candidateCount must be 1") as refused:
        client.ask(candidate_count=2)
    assert (refused.value.code, refused.value.status) == (400, "INVALID_ARGUMENT")
    with pytest.raises(errors.ClientError, match="no route") as unknown:
        client.sdk.models.embed_content(model="m", contents="hi")
    assert unknown.value.code == 404
