"""The Gemini dialect: its JSON to a `ModelRequest`, an `Answer` to its JSON, whole or as stream events.

Always true: whatever the body, `parse` gives a request of the right types or raises a `DialectError`; the parts of the events
are the parts of `whole`, cut in pieces. Every function call has an id.

What is taken, and what is not:
- Thoughts are given to a program that set `includeThoughts`. A call's `thoughtSignature` names the model call and holds its
  reasoning, so it comes back with the history though programs drop the thoughts themselves.
- The response of a function is read as text where it is an object of one text (`output` or `result`), else as JSON.
- Tools that only the provider can run (`googleSearch`, ...) are not shown to the model. OpenAPI schemas are shown as JSON schemas.
- `maxOutputTokens` can only lower the run's own limit. Other sampling settings are recorded, not used.
- The mode NONE of function calling hides the tools; others are accepted and recorded, and sampling is not constrained.
- More than one candidate, cached content, data that is not text, and a response format other than text are refused.
- Field names are taken in camelCase and in snake_case. Fields that nobody knows are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from longrein.contract import Message, Tool
from longrein.proxy.body import (
    Json,
    checked,
    count,
    filled,
    function,
    item,
    pieces,
    required,
    short,
    typed,
    unformatted,
    words,
)
from longrein.proxy.dialect import Answer, DialectError, ModelRequest, PromptTooLong
from longrein.proxy.marks import minted, origin, sealed, unsealed
from longrein.tool_calls import arguments_of

END = b""
WAITING = b"\n"
"""Google's Python SDK takes a comment for a reply."""
ERROR_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
}


def parse(body: Any) -> ModelRequest:
    """The request in a decoded JSON body; the model and whether to stream are in the address."""
    body = _camel(checked(body))
    if isinstance(inner := body.get("generateContentRequest"), dict):  # how tokens are counted
        body = _camel(inner)
    config = _camel(typed(body, "generationConfig", dict) or {})
    where = "generationConfig."
    _refuse_unanswerable(body, config)
    mode, choice = _tool_choice(body)
    thinking = _camel(typed(config, "thinkingConfig", dict, where) or {})
    tools = tuple(_tools(body))
    return ModelRequest(
        messages=(*_system(body), *_messages(body)),
        tools=() if mode == "NONE" else tools,
        tool_choice=choice,
        model=typed(body, "model", str),
        max_tokens=count(config, "maxOutputTokens", where=where),
        stop=words(config, "stopSequences", where),
        asked={**config, **({"toolConfig": body["toolConfig"]} if body.get("toolConfig") else {})},
        wire={"thoughts": bool(typed(thinking, "includeThoughts", bool, f"{where}thinkingConfig."))},
    )


def whole(answer: Answer, request: ModelRequest, *, created: int, model: str) -> Any:
    """The response body of a reply that is not streamed; a list of one for who asked for a stream that is not of events."""
    body = _response(answer, request, model, _parts(answer, request), last=True)
    return [body] if request.wire.get("list") else body


def events(answer: Answer, request: ModelRequest, *, created: int, model: str) -> Iterator[Json]:
    """The events of a streamed reply."""
    cut = [piece for part in _parts(answer, request) for piece in _pieces(part)]
    for part in cut[:-1]:
        yield _response(answer, request, model, [part], last=False)
    yield _response(answer, request, model, cut[-1:], last=True)


def token_count(tokens: int) -> Json:
    """The answer to a request to count the tokens of a prompt."""
    return {"totalTokens": tokens}


def model_card(name: str, length: int | None) -> Json:
    """A model, as a program that looks for one finds it."""
    methods = ["generateContent", "streamGenerateContent", "countTokens"]
    card = {"name": f"models/{name}", "version": "1", "displayName": name, "supportedGenerationMethods": methods}
    return card if length is None else {**card, "inputTokenLimit": length, "outputTokenLimit": length}


def error_body(error: DialectError) -> Json:
    """An error in Google's shape."""
    message = error.message
    if isinstance(error, PromptTooLong):
        message = f"The input token count ({error.tokens}) exceeds the maximum number of tokens allowed ({error.limit})."
    status = ERROR_STATUSES.get(error.status, "INTERNAL")
    return {"error": {"code": error.status, "message": message, "status": status}}


error_event = error_body
"""An error after the first event of a stream."""


# Replies


def _response(answer: Answer, request: ModelRequest, model: str, parts: list[Json], last: bool) -> Json:
    candidate: Json = {"content": {"role": "model", "parts": parts}, "index": 0}
    if last:
        candidate["finishReason"] = "MAX_TOKENS" if answer.finish_reason == "length" else "STOP"
    return {
        "candidates": [candidate],
        "usageMetadata": {
            "promptTokenCount": answer.prompt_tokens,
            "candidatesTokenCount": answer.completion_tokens,
            "totalTokenCount": answer.prompt_tokens + answer.completion_tokens,
        },
        "modelVersion": request.model or model,
        "responseId": minted("resp", answer.id),
    }


def _parts(answer: Answer, request: ModelRequest) -> list[Json]:
    message = answer.message
    thought = message.get("reasoning_content") or ""
    parts: list[Json] = [{"text": thought, "thought": True}] if thought and request.wire.get("thoughts") else []
    calls = message.get("tool_calls") or []
    if (content := message.get("content")) or not calls:
        parts.append({"text": content or ""})
    for index, call in enumerate(calls):
        part: Json = {
            "functionCall": {"id": call["id"], "name": call["function"]["name"], "args": arguments_of(call)},
        }
        if index == 0:
            part["thoughtSignature"] = sealed(answer.id, thought)
        parts.append(part)
    return parts


def _pieces(part: Json) -> list[Json]:
    return [{**part, "text": piece} for piece in pieces(part["text"])] or [part] if "text" in part else [part]


# Requests


def _camel(given: Json) -> Json:
    """An object with its own fields' names as Google's documents write them."""
    return {re.sub(r"(?<=[a-z0-9])_([a-z])", lambda found: found[1].upper(), name): v for name, v in given.items()}


def _refuse_unanswerable(body: Json, config: Json) -> None:
    if config.get("candidateCount") not in (None, 1) or isinstance(config.get("candidateCount"), bool):
        raise DialectError(400, "candidateCount must be 1: one reply a request is given here.", param="candidateCount")
    form = config.get("responseMimeType")
    if form not in (None, "", "text/plain") or config.get("responseSchema") or config.get("responseJsonSchema"):
        raise unformatted("generationConfig.responseMimeType", form, "a function")
    if body.get("cachedContent"):
        raise DialectError(400, "cachedContent is not supported; send the contents.", param="cachedContent")


def _system(body: Json) -> list[Message]:
    system = body.get("systemInstruction")
    if system is None or isinstance(system, str):
        text = system or ""
    else:
        texts = [
            _part_text(part, where) for part, where in _content_parts(item(system, "systemInstruction"), "systemInstruction")
        ]
        text = "\n\n".join(texts)
    return [{"role": "system", "content": text}] if text else []


def _messages(body: Json) -> Iterator[Message]:
    waiting: list[tuple[str, str]] = []
    """The calls of the last reply that no response has answered yet: their ids and names."""
    for index, given in enumerate(filled(body, "contents", "content")):
        where = f"contents[{index}]"
        content = item(given, where)
        role = content.get("role") or "user"
        if role not in ("user", "model", "function"):
            raise DialectError(400, f"{where}.role is {short(role)}; it must be user or model.", param=f"{where}.role")
        parts = _content_parts(content, where)
        if role == "model":
            reply = _said(parts, index)
            waiting = [(call["id"], call["function"]["name"]) for call in reply.get("tool_calls", ())]
            yield reply
        else:
            yield from _heard(parts, waiting)


def _content_parts(content: Json, where: str) -> list[tuple[Json, str]]:
    parts = typed(content, "parts", list, f"{where}.") or []
    return [(_camel(item(part, f"{where}.parts[{i}]")), f"{where}.parts[{i}]") for i, part in enumerate(parts)]


def _part_text(part: Json, where: str) -> str:
    if not isinstance(part.get("text"), str):
        kinds = ", ".join(part) or "nothing"
        raise DialectError(400, f"{where} has {kinds}; only text and functions can be read.", param=where)
    return part["text"]


def _said(parts: list[tuple[Json, str]], position: int) -> Message:
    """A reply as the program quotes it."""
    message: Message = {"role": "assistant", "content": ""}
    thoughts, calls = [], []
    reasoning = ""
    for part, where in parts:
        signed = unsealed(part.get("thoughtSignature"))
        if signed.call_id is not None:
            message["from_call"], reasoning = signed
        if part.get("functionCall") is not None:
            call = _camel(typed(part, "functionCall", dict, f"{where}."))
            at = f"{where}.functionCall."
            arguments = json.dumps(typed(call, "args", dict, at) or {}, ensure_ascii=False)
            called = {"name": required(call, "name", str, at), "arguments": arguments}
            # A program that drops ids gets them back in the order of the calls.
            call_id = typed(call, "id", str, at) or f"call_{position}_{len(calls)}"
            if (source := origin(call_id)) is not None:
                message["from_call"] = source
            calls.append({"id": call_id, "type": "function", "function": called})
        elif part.get("thought") is True:
            thoughts.append(_part_text(part, where))
        elif "text" in part or "thoughtSignature" not in part:
            message["content"] += _part_text(part, where)
    if thought := "".join(thoughts) or reasoning:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _heard(parts: list[tuple[Json, str]], waiting: list[tuple[str, str]]) -> Iterator[Message]:
    """What the program says: the responses of functions, then its words."""
    texts = []
    for part, where in parts:
        if part.get("functionResponse") is None:
            texts.append(_part_text(part, where))
            continue
        at = f"{where}.functionResponse."
        response = _camel(typed(part, "functionResponse", dict, f"{where}."))
        name = required(response, "name", str, at)
        call_id = typed(response, "id", str, at) or next((i for i, n in waiting if n == name), None)
        found = next((pair for pair in waiting if pair[0] == call_id), None)
        if found is not None:
            waiting.remove(found)
        result = _result(typed(response, "response", dict, at) or {})
        yield {"role": "tool", "tool_call_id": call_id or name, "name": name, "content": result}
    if texts or not parts:
        yield {"role": "user", "content": "\n\n".join(texts)}


def _result(response: Json) -> str:
    if len(response) == 1 and isinstance(text := response.get("output", response.get("result")), str):
        return text
    return json.dumps(response, ensure_ascii=False)


def _tools(body: Json) -> Iterator[Tool]:
    for index, given in enumerate(typed(body, "tools", list) or []):
        tool = _camel(item(given, f"tools[{index}]"))
        declared = typed(tool, "functionDeclarations", list, f"tools[{index}].") or []
        for place, declaration in enumerate(declared):
            where = f"tools[{index}].functionDeclarations[{place}]"
            declaration = _camel(item(declaration, where))
            schema = typed(declaration, "parametersJsonSchema", dict, f"{where}.")
            if schema is None and (old := typed(declaration, "parameters", dict, f"{where}.")) is not None:
                schema = _json_schema(old)
            yield function(declaration, where, schema)


def _json_schema(schema: Any) -> Any:
    """An OpenAPI schema with the type names of JSON schema."""
    if isinstance(schema, list):
        return [_json_schema(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for field, value in schema.items():
        if field == "type" and isinstance(value, str):
            made[field] = value.lower()
        elif field in ("properties", "$defs", "defs") and isinstance(value, dict):
            made[field] = {name: _json_schema(inner) for name, inner in value.items()}
        elif field in ("items", "anyOf", "any_of", "prefixItems", "additionalProperties"):
            made["anyOf" if field == "any_of" else field] = _json_schema(value)
        else:
            made[field] = value
    return made


def _tool_choice(body: Json) -> tuple[str, str | Json]:
    config = _camel(typed(body, "toolConfig", dict) or {})
    calling = _camel(typed(config, "functionCallingConfig", dict, "toolConfig.") or {})
    mode = typed(calling, "mode", str, "toolConfig.functionCallingConfig.") or "AUTO"
    choices = {"NONE": "none", "ANY": "required"}
    return mode.upper(), choices.get(mode.upper(), "auto")
