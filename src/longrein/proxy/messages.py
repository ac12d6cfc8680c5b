"""The Anthropic Messages dialect: its JSON to a `ModelRequest`, an `Answer` to its JSON, whole or as stream events.

Always true: whatever the body, `parse` gives a request of the right types or raises a `DialectError`; the events add up to the
message of `whole`. Every result of a tool is a message of its own, before the words that the same turn brings.

What is taken, and what is not:
- Thinking blocks are given to a program that turned `thinking` on, empty where it asked for them so. Their signature names the
  call and holds the reasoning, so either brings it back.
- Text blocks of one message are paragraphs, the system's too. `cache_control` marks and citations mean nothing here.
- Tools that only the provider can run (`web_search`, ...) are not shown to the model, nor those with `defer_loading` that no
  `tool_reference` has named yet.
- `max_tokens` can only lower the run's own limit. Other sampling settings are recorded, not used.
- `tool_choice` of type none hides the tools; the others are accepted and recorded, and sampling is not constrained.
- A last message of the assistant's is a turn that was said, not the beginning of the reply.
- Images, documents and an `output_config.format` are refused. Fields that nobody knows are ignored.
"""

from __future__ import annotations

import json
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
    kind_of,
    pieces,
    required,
    role,
    short,
    typed,
    unformatted,
    words,
)
from longrein.proxy.dialect import Answer, DialectError, ModelRequest, PromptTooLong
from longrein.proxy.marks import minted, origin, sealed, unsealed
from longrein.tool_calls import arguments_of

END = b""
WAITING = b'event: ping\ndata: {"type": "ping"}\n\n'
ROLES = ("user", "assistant", "system")
SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "max_tokens", "stop_sequences", "thinking", "tool_choice", "output_config",
)  # fmt: skip
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    413: "request_too_large",
}


def parse(body: Any) -> ModelRequest:
    """The request in a decoded JSON body."""
    body = checked(body)
    if (form := (typed(body, "output_config", dict) or {}).get("format")) is not None:
        raise unformatted("output_config.format", form)
    named: set[str] = set()
    messages = [*_system(body), *_messages(body, named)]
    choice = _tool_choice(body)
    thinking = typed(body, "thinking", dict) or {}
    return ModelRequest(
        messages=tuple(messages),
        tools=() if choice == "none" else tuple(_tools(body, named)),
        tool_choice=choice,
        model=typed(body, "model", str),
        max_tokens=count(body, "max_tokens"),
        stop=words(body, "stop_sequences"),
        stream=bool(typed(body, "stream", bool)),
        asked={field: body[field] for field in SAMPLING_FIELDS if body.get(field) is not None},
        wire={
            "thinking": thinking.get("type") not in (None, "disabled"),
            "omitted": thinking.get("display") == "omitted",
        },
    )


def whole(answer: Answer, request: ModelRequest, *, created: int, model: str) -> Json:
    """The response body of a reply that is not streamed."""
    reason, word = _stop_reason(answer)
    return {
        "id": minted("msg", answer.id),
        "type": "message",
        "role": "assistant",
        "model": request.model or model,
        "content": _blocks(answer, request),
        "stop_reason": reason,
        "stop_sequence": word,
        "usage": _usage(answer),
    }


def events(answer: Answer, request: ModelRequest, *, created: int, model: str) -> Iterator[Json]:
    """The events of a streamed reply."""
    message = whole(answer, request, created=created, model=model)
    start = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": {**message["usage"], "output_tokens": 0}}
    yield {"type": "message_start", "message": {**message, **start}}
    for index, block in enumerate(message["content"]):
        for event in _block_events(block):
            yield {**event, "index": index}
    end = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    yield {"type": "message_delta", "delta": end, "usage": {"output_tokens": answer.completion_tokens}}
    yield {"type": "message_stop"}


def token_count(tokens: int) -> Json:
    """The answer to a request to count the tokens of a prompt."""
    return {"input_tokens": tokens}


def error_body(error: DialectError) -> Json:
    """An error in Anthropic's shape."""
    message = error.message
    if isinstance(error, PromptTooLong):
        message = f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
    return {"type": "error", "error": {"type": ERROR_TYPES.get(error.status, "api_error"), "message": message}}


error_event = error_body
"""An error after the first event of a stream."""


# Replies


def _blocks(answer: Answer, request: ModelRequest) -> list[Json]:
    message = answer.message
    blocks: list[Json] = []
    if (thought := message.get("reasoning_content")) and request.wire.get("thinking"):
        shown = "" if request.wire.get("omitted") else thought
        blocks.append({"type": "thinking", "thinking": shown, "signature": sealed(answer.id, thought)})
    if content := message.get("content"):
        blocks.append({"type": "text", "text": content})
    for call in message.get("tool_calls") or ():
        name = call["function"]["name"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments_of(call)})
    return blocks


def _block_events(block: Json) -> Iterator[Json]:
    empty: Json = {"thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}, "tool_use": {"input": {}}}[
        block["type"]
    ]
    yield {"type": "content_block_start", "content_block": {**block, **empty}}
    if block["type"] == "tool_use":
        written = json.dumps(block["input"], ensure_ascii=False)
        deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(written)]
    else:
        field = block["type"]
        deltas = [{"type": f"{field}_delta", field: piece} for piece in pieces(block[field])]
    if "signature" in block:
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
    for delta in deltas:
        yield {"type": "content_block_delta", "delta": delta}
    yield {"type": "content_block_stop"}


def _stop_reason(answer: Answer) -> tuple[str, str | None]:
    if answer.finish_reason == "stop" and answer.stop_word is not None:
        return "stop_sequence", answer.stop_word
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[answer.finish_reason], None


def _usage(answer: Answer) -> Json:
    return {
        "input_tokens": answer.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": answer.completion_tokens,
    }


# Requests


def _system(body: Json) -> list[Message]:
    text = _text(body.get("system"), "system")
    return [{"role": "system", "content": text}] if text else []


def _messages(body: Json, named: set[str]) -> Iterator[Message]:
    for index, given in enumerate(filled(body, "messages", "message")):
        where = f"messages[{index}]"
        message = item(given, where)
        said_by = role(message, where, ROLES)
        blocks = _as_blocks(message.get("content"), f"{where}.content")
        yield from [_said(blocks)] if said_by == "assistant" else _heard(said_by, blocks, named)


def _as_blocks(content: Any, where: str) -> list[tuple[Json, str]]:
    """Content as blocks, each with its place."""
    if content is None or isinstance(content, str):
        return [({"type": "text", "text": content or ""}, where)]
    if not isinstance(content, list):
        raise DialectError(400, f"{where} is {kind_of(content)}; it must be a string or a list of blocks.", param=where)
    return [(item(block, f"{where}[{index}]"), f"{where}[{index}]") for index, block in enumerate(content)]


def _said(blocks: list[tuple[Json, str]]) -> Message:
    """A reply as the program quotes it."""
    message: Message = {"role": "assistant", "content": ""}
    thoughts, calls = [], []
    for block, where in blocks:
        kind = block.get("type")
        if kind == "text":
            message["content"] += required(block, "text", str, f"{where}.")
        elif kind in ("thinking", "redacted_thinking"):
            call_id, reasoning = unsealed(block.get("signature") or block.get("data"))
            thoughts.append(typed(block, "thinking", str, f"{where}.") or reasoning)
            if call_id is not None:
                message["from_call"] = call_id
        elif kind == "tool_use":
            arguments = json.dumps(typed(block, "input", dict, f"{where}.") or {}, ensure_ascii=False)
            called = {"name": required(block, "name", str, f"{where}."), "arguments": arguments}
            call_id = required(block, "id", str, f"{where}.")
            calls.append({"id": call_id, "type": "function", "function": called})
            if (source := origin(call_id)) is not None:
                message["from_call"] = source
        else:
            raise DialectError(400, f"{where} is of type {short(kind)}, which this server never gave.", param=where)
    if thought := "\n\n".join(filter(None, thoughts)):
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _heard(said_by: str, blocks: list[tuple[Json, str]], named: set[str]) -> Iterator[Message]:
    """What the program says: the results of tools, then its words."""
    texts = []
    for block, where in blocks:
        if block.get("type") == "tool_result" and said_by == "user":
            call_id = required(block, "tool_use_id", str, f"{where}.")
            yield {
                "role": "tool",
                "tool_call_id": call_id,
                "content": _text(block.get("content"), f"{where}.content", named),
            }
        else:
            texts.append(_block_text(block, where, named))
    if texts or not blocks:
        yield {"role": said_by, "content": "\n\n".join(texts)}


def _text(content: Any, where: str, named: set[str] | None = None) -> str:
    """Text, whether it came as text or in blocks."""
    return "\n\n".join(_block_text(block, at, named) for block, at in _as_blocks(content, where))


def _block_text(block: Json, where: str, named: set[str] | None) -> str:
    if block.get("type") == "tool_reference" and named is not None:
        named.add(required(block, "tool_name", str, f"{where}."))
        return f"The tool {block['tool_name']} can be called now."
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise DialectError(400, f"{where} is of type {short(block.get('type'))}; only text can be read.", param=where)
    return block["text"]


def _tools(body: Json, named: set[str]) -> Iterator[Tool]:
    for index, given in enumerate(typed(body, "tools", list) or []):
        where = f"tools[{index}]"
        tool = item(given, where)
        if typed(tool, "type", str, f"{where}.") not in (None, "custom"):
            continue
        shown = function(tool, where, typed(tool, "input_schema", dict, f"{where}."))
        if not typed(tool, "defer_loading", bool, f"{where}.") or tool["name"] in named:
            yield shown


def _tool_choice(body: Json) -> str | Json:
    choice = typed(body, "tool_choice", dict)
    if choice is None:
        return "auto"
    simple = {"auto": "auto", "any": "required", "none": "none"}
    if isinstance(kind := choice.get("type"), str) and kind in simple:
        return simple[kind]
    if kind == "tool" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    raise DialectError(
        400, f"tool_choice is {short(choice)}; its type must be auto, any, tool (with a name) or none.", param="tool_choice"
    )
