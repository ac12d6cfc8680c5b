"""The OpenAI Responses dialect: its JSON to a `ModelRequest`, an `Answer` to its JSON, whole or as stream events.

Always true: whatever the body, `parse` gives a request of the right types or raises a `DialectError`; the events add up to the
response of `whole`, which the last of them holds. The items of one reply (reasoning, text, calls) are one assistant message
again when a program sends them back, in whatever order it puts the results of its calls between them.

What is taken, and what is not:
- A custom (freeform) tool is shown to the model as a function of one string, `input`, with its grammar in the description; its
  calls go back as custom tool calls. The tools of a namespace are shown as `namespace__tool`.
- Tools that only the provider can run (`web_search`, `code_interpreter`, ...) are not shown to the model.
- Reasoning goes out as an item with its text, and as `encrypted_content` where that is asked for; either comes back as reasoning.
- A message between agents (`agent_message`) is read as the user's; the "encrypted" part of it is what the policy itself wrote.
- `previous_response_id` continues an answer of the same rollout, unless it had `store` false. `instructions` do not carry over.
- `max_output_tokens` can only lower the run's own limit. Other sampling settings are recorded, not used.
- `tool_choice`, `parallel_tool_calls`: as in the chat dialect. `text.format` other than text, `background`, `conversation`, images
  and files are refused. Fields that nobody knows are ignored.
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
    pieces,
    required,
    role,
    short,
    text,
    typed,
    unformatted,
)
from longrein.proxy.dialect import Answer, DialectError, ModelRequest, PromptTooLong
from longrein.proxy.marks import minted, origin, sealed, unsealed
from longrein.tool_calls import arguments_of

END = b""
WAITING = b": waiting\n\n"
ROLES = ("system", "developer", "user", "assistant")
SAMPLING_FIELDS = (
    "temperature", "top_p", "max_output_tokens", "reasoning", "tool_choice", "parallel_tool_calls", "top_logprobs", "text",
    "truncation", "max_tool_calls",
)  # fmt: skip
ECHOED = (
    "instructions", "tools", "tool_choice", "parallel_tool_calls", "previous_response_id", "temperature", "top_p", "reasoning",
    "text", "max_output_tokens", "truncation", "metadata", "store",
)  # fmt: skip
"""What a response repeats of its request."""
WHOLE_ARGUMENTS = "_json"
"""Ends the id of a custom tool call whose arguments were not one `input`: the program got all of them, as JSON."""


def parse(body: Any) -> ModelRequest:
    """The request in a decoded JSON body."""
    body = checked(body)
    _refuse_unanswerable(body)
    tools, names = _tools(body)
    choice = _tool_choice(body)
    instructions = typed(body, "instructions", str)
    system: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    store = typed(body, "store", bool)
    return ModelRequest(
        messages=(*system, *_messages(body, names)),
        tools=() if choice == "none" else tuple(tools),
        tool_choice=choice,
        model=typed(body, "model", str),
        max_tokens=count(body, "max_output_tokens"),
        stream=bool(typed(body, "stream", bool)),
        asked={field: body[field] for field in SAMPLING_FIELDS if body.get(field) is not None},
        previous=_previous(body),
        instructions=len(system),
        store=store is not False,
        wire={
            "names": names,
            "sealed": "reasoning.encrypted_content" in (typed(body, "include", list) or []),
            "echo": {field: body[field] for field in ECHOED if body.get(field) is not None},
        },
    )


def whole(answer: Answer, request: ModelRequest, *, created: int, model: str) -> Json:
    """The response body of a reply that is not streamed."""
    cut = answer.finish_reason == "length"
    return {
        **_head(answer, request, created, model),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(answer, request),
        "usage": _usage(answer),
    }


def events(answer: Answer, request: ModelRequest, *, created: int, model: str) -> Iterator[Json]:
    """The events of a streamed reply, numbered in their order."""
    for number, event in enumerate(_events(answer, request, created, model)):
        yield {**event, "sequence_number": number}


def error_body(error: DialectError) -> Json:
    """An error in OpenAI's shape."""
    param = "input" if isinstance(error, PromptTooLong) else error.param
    return {"error": {"message": error.message, "type": error.type, "param": param, "code": error.code}}


def error_event(error: DialectError) -> Json:
    """An error after the first event of a stream."""
    return {"type": "error", "message": error.message, "param": error.param, "code": error.code, "sequence_number": 0}


def deleted(response_id: str) -> Json:
    """What a program hears when it deletes a stored response."""
    return {"id": response_id, "object": "response.deleted", "deleted": True}


# Replies


def _head(answer: Answer, request: ModelRequest, created: int, model: str) -> Json:
    return {
        "id": minted("resp", answer.id),
        "object": "response",
        "created_at": created,
        "error": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        **request.wire.get("echo", {}),
        "model": request.model or model,
    }


def _output(answer: Answer, request: ModelRequest) -> list[Json]:
    """The reply as items: its reasoning, its text, its calls."""
    message, call_id = answer.message, answer.id
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    items: list[Json] = []
    if reasoning := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"type": "reasoning", "id": minted("rs", call_id), "summary": [], "content": content})
        if request.wire.get("sealed"):
            items[-1]["encrypted_content"] = sealed(call_id, reasoning)
    calls = message.get("tool_calls") or []
    if message.get("content") or not calls:
        part = {"type": "output_text", "text": message.get("content") or "", "annotations": [], "logprobs": []}
        items.append(
            {"type": "message", "id": minted("msg", call_id), "role": "assistant", "status": status, "content": [part]}
        )
    for index, call in enumerate(calls):
        items.append(_call_item(call, minted("fc", call_id, index), request.wire.get("names", {})))
    return items


def _call_item(call: Json, item_id: str, names: dict[str, Json]) -> Json:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    told = names.get(name, {"name": name})
    where = {"namespace": told["namespace"]} if told.get("namespace") else {}
    head = {"id": item_id, "call_id": call["id"], "name": told["name"], "status": "completed", **where}
    if not told.get("custom"):
        return {"type": "function_call", **head, "arguments": arguments}
    given = arguments_of(call)
    if set(given) == {"input"} and isinstance(given["input"], str):
        return {"type": "custom_tool_call", **head, "input": given["input"]}
    return {"type": "custom_tool_call", **head, "call_id": call["id"] + WHOLE_ARGUMENTS, "input": arguments}


def _events(answer: Answer, request: ModelRequest, created: int, model: str) -> Iterator[Json]:
    response = whole(answer, request, created=created, model=model)
    started = {**response, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield {"type": "response.created", "response": started}
    yield {"type": "response.in_progress", "response": started}
    for index, done in enumerate(response["output"]):
        yield from _item_events(done, index)
    yield {"type": f"response.{response['status']}", "response": response}


def _item_events(done: Json, index: int) -> Iterator[Json]:
    place = {"item_id": done["id"], "output_index": index}
    if done["type"] in ("message", "reasoning"):
        part = done["content"][0]
        name = f"response.{part['type']}"
        logprobs = {"logprobs": []} if part["type"] == "output_text" else {}
        yield {"type": "response.output_item.added", "output_index": index, "item": _begun(done, content=[])}
        at = {**place, "content_index": 0}
        yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
        for piece in pieces(part["text"]):
            yield {"type": f"{name}.delta", **at, "delta": piece, **logprobs}
        yield {"type": f"{name}.done", **at, "text": part["text"], **logprobs}
        yield {"type": "response.content_part.done", **at, "part": part}
    else:
        field, name = (
            ("arguments", "response.function_call_arguments")
            if done["type"] == "function_call"
            else ("input", "response.custom_tool_call_input")
        )
        yield {"type": "response.output_item.added", "output_index": index, "item": _begun(done, **{field: ""})}
        for piece in pieces(done[field]):
            yield {"type": f"{name}.delta", **place, "delta": piece}
        yield {"type": f"{name}.done", **place, field: done[field]}
    yield {"type": "response.output_item.done", "output_index": index, "item": done}


def _begun(done: Json, **empty: Any) -> Json:
    return {**done, **({"status": "in_progress"} if "status" in done else {}), **empty}


def _usage(answer: Answer) -> Json:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


# Requests


def _refuse_unanswerable(body: Json) -> None:
    wanted = typed(typed(body, "text", dict) or {}, "format", dict, "text.")
    if wanted is not None and wanted.get("type") != "text":
        raise unformatted("text.format", wanted.get("type"))
    if typed(body, "background", bool):
        raise DialectError(400, "background is not supported: a reply is given on the connection.", param="background")
    for field in ("conversation", "prompt"):
        if body.get(field) is not None:
            raise DialectError(400, f"{field} is not supported; send the items in `input`.", param=field)
    if count(body, "top_logprobs", least=0):
        raise DialectError(400, "top_logprobs is not supported.", param="top_logprobs")


def _previous(body: Json) -> str | None:
    previous = typed(body, "previous_response_id", str)
    return None if previous is None else origin(previous) or previous


def _messages(body: Json, names: dict[str, Json]) -> list[Message]:
    if isinstance(alone := body.get("input"), str):
        return [{"role": "user", "content": alone}]
    items = filled(body, "input", "item")
    shown = {(told.get("namespace"), told["name"]): name for name, told in names.items()}
    messages: list[Message] = []
    for index, given in enumerate(items):
        where = f"input[{index}]"
        _add(messages, item(given, where), where, shown)
    if not messages:
        raise DialectError(400, "input has no message and no result of a tool.", param="input")
    return messages


def _add(messages: list[Message], given: Json, where: str, shown: dict[tuple[Any, Any], str]) -> None:
    """One item more: a message of its own, or a part of the reply that it came from."""
    kind = given.get("type") or "message"
    if kind == "message":
        said_by = role(given, where, ROLES)
        said = text(given.get("content"), f"{where}.content", "" if said_by == "assistant" else "\n\n")
        if said_by != "assistant":
            messages.append({"role": said_by, "content": said})
            return
        reply = _reply(messages, origin(given.get("id")), apart=("content", "tool_calls"))
        reply["content"] += said
    elif kind == "agent_message":
        messages.append({"role": "user", "content": text(given.get("content"), f"{where}.content")})
    elif kind == "reasoning":
        call_id, reasoning = unsealed(given.get("encrypted_content"))
        reply = _reply(messages, call_id or origin(given.get("id")), apart=("content", "tool_calls", "reasoning_content"))
        if reasoning := reasoning or _reasoning(given, where):
            reply["reasoning_content"] = reasoning
    elif kind in ("function_call", "custom_tool_call"):
        call = _call(given, where, shown)
        reply = _reply(messages, origin(call["id"]))
        reply.setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        call_id = required(given, "call_id", str, f"{where}.").removesuffix(WHOLE_ARGUMENTS)
        messages.append(
            {"role": "tool", "tool_call_id": call_id, "content": text(given.get("output"), f"{where}.output", "\n\n")}
        )
    elif kind == "item_reference":
        raise DialectError(400, f"{where} is a reference; send the item itself, or `previous_response_id`.", param=where)
    else:
        raise DialectError(400, f"{where} is of type {short(kind)}, which this server never gave.", param=where)


def _reply(messages: list[Message], call_id: str | None, apart: tuple[str, ...] = ()) -> Message:
    """The assistant message that an item belongs to, or a new one.

    It is the last one, if both came from one call; where nothing tells, if nothing stands between them and the item is not
    what a reply starts with (`apart` are the fields after which it cannot come).
    """
    last = next((m for m in reversed(messages) if m["role"] != "tool"), None)
    if last is not None and last["role"] == "assistant":
        known = last.get("from_call")
        if call_id is not None and call_id == known:
            return last
        strangers = call_id is None or known is None
        if strangers and last is messages[-1] and not any(last.get(field) for field in apart):
            if call_id is not None:
                last["from_call"] = call_id
            return last
    reply: Message = {"role": "assistant", "content": ""}
    if call_id is not None:
        reply["from_call"] = call_id
    messages.append(reply)
    return reply


def _reasoning(given: Json, where: str) -> str:
    """The text of a reasoning item, or its summary."""
    for field in ("content", "summary"):
        parts = typed(given, field, list, f"{where}.") or []
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        if found := "\n\n".join(text for text in texts if isinstance(text, str)):
            return found
    return ""


def _call(given: Json, where: str, shown: dict[tuple[Any, Any], str]) -> Json:
    name, call_id = required(given, "name", str, f"{where}."), required(given, "call_id", str, f"{where}.")
    space = typed(given, "namespace", str, f"{where}.")
    name = shown.get((space, name)) or (f"{space}__{name}" if space else name)
    if given["type"] == "function_call":
        arguments = typed(given, "arguments", str, f"{where}.") or "{}"
    else:
        written = typed(given, "input", str, f"{where}.") or ""
        arguments = written if call_id.endswith(WHOLE_ARGUMENTS) else json.dumps({"input": written}, ensure_ascii=False)
    call_id = call_id.removesuffix(WHOLE_ARGUMENTS)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tools(body: Json) -> tuple[list[Tool], dict[str, Json]]:
    """The tools as the model is shown them, and by those names what the program calls them."""
    tools: list[Tool] = []
    names: dict[str, Json] = {}
    for index, given in enumerate(typed(body, "tools", list) or []):
        where = f"tools[{index}]"
        tool = item(given, where)
        if tool.get("type") == "namespace":
            space = required(tool, "name", str, f"{where}.")
            inner = typed(tool, "tools", list, f"{where}.") or []
            found = [(item(t, f"{where}.tools[{i}]"), f"{where}.tools[{i}]") for i, t in enumerate(inner)]
        else:
            space, found = None, [(tool, where)]
        for tool, at in found:
            if tool.get("type") in ("function", "custom"):
                name = required(tool, "name", str, f"{at}.")
                shown = f"{space}__{name}" if space else name
                names[shown] = {"name": name, "namespace": space, "custom": tool["type"] == "custom"}
                tools.append(_shown(tool, shown, at))
            elif not isinstance(tool.get("type"), str):
                raise DialectError(400, f"{at}.type is {short(tool.get('type'))}; it must be a string.", param=f"{at}.type")
    return tools, names


def _shown(tool: Json, name: str, where: str) -> Tool:
    """A tool as the model is shown it: a custom one as a function of one text."""
    tool = {**tool, "name": name}
    if tool["type"] == "function":
        return function(tool, where, typed(tool, "parameters", dict, f"{where}."))
    form = typed(tool, "format", dict, f"{where}.") or {}
    if isinstance(grammar := form.get("definition"), str):
        description = typed(tool, "description", str, f"{where}.") or ""
        tool["description"] = f"{description}\n\nThe input follows this {form.get('syntax') or ''} grammar:\n{grammar}"
    return function(tool, where, {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]})


def _tool_choice(body: Json) -> str | Json:
    choice = body.get("tool_choice")
    if choice is None:
        return "auto"
    if choice in ("none", "auto", "required") or (isinstance(choice, dict) and isinstance(choice.get("type"), str)):
        return choice
    raise DialectError(
        400, f"tool_choice is {short(choice)}; it must be none, auto, required or an object.", param="tool_choice"
    )
