"""The OpenAI chat-completions dialect: its JSON to a `ModelRequest`, an `Answer` to its JSON, whole or as stream events.

Always true: whatever the body, `parse` gives a request of the right types or raises a `DialectError`; the deltas of `events`
add up to the message of `whole`; neither ever holds a token id, nor a log-probability that was not asked for.

What is taken, and what is not:
- `tool_choice="none"` hides the tools from the model. `"required"` and a named tool are accepted and recorded; sampling is
  not constrained, so the reply may still be text. The same holds for `parallel_tool_calls=false`.
- `max_tokens` and `max_completion_tokens` can only lower the run's own limit. Other sampling settings are recorded, not used.
- A stop word ends the reply: the program's text stops before it, the record with the token that completed it.
- `n` other than 1, `response_format` other than text, `top_logprobs`, audio, images and the old `functions` are refused.
- `logprobs` speak of every sampled token, markup of reasoning and tool calls included.
- Fields that nobody knows are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from longrein.contract import Message, Tool
from longrein.proxy.body import Json, checked, count, filled, item, pieces, role, short, text, typed, unformatted, words
from longrein.proxy.dialect import Answer, DialectError, ModelRequest

END = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"
ROLES = ("system", "developer", "user", "assistant", "tool")
SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "stop", "seed", "n",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "logprobs", "top_logprobs",
    "reasoning_effort", "tool_choice", "parallel_tool_calls",
)  # fmt: skip


def parse(body: Any) -> ModelRequest:
    """The request in a decoded JSON body."""
    body = checked(body)
    _refuse_unanswerable(body)
    tools = _tools(body)
    choice = _tool_choice(body, tools)
    return ModelRequest(
        messages=_messages(body),
        tools=() if choice == "none" else tools,
        tool_choice=choice,
        model=typed(body, "model", str),
        max_tokens=_smallest(count(body, "max_tokens"), count(body, "max_completion_tokens")),
        stop=words(body, "stop"),
        stream=bool(typed(body, "stream", bool)),
        include_usage=bool(typed(typed(body, "stream_options", dict) or {}, "include_usage", bool, "stream_options.")),
        logprobs=bool(typed(body, "logprobs", bool)),
        asked={field: body[field] for field in SAMPLING_FIELDS if body.get(field) is not None},
    )


def whole(answer: Answer, request: ModelRequest, *, created: int, model: str) -> Json:
    """The response body of a reply that is not streamed."""
    message = answer.message
    content, calls = message.get("content") or "", message.get("tool_calls")
    out: Json = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning := message.get("reasoning_content"):
        out["reasoning_content"] = reasoning
    if calls:
        out["tool_calls"] = calls
    choice = {"index": 0, "message": out, "logprobs": _logprobs(answer, request), "finish_reason": answer.finish_reason}
    head = _head(answer, "chat.completion", created, request.model or model)
    return {**head, "choices": [choice], "usage": _usage(answer)}


def events(answer: Answer, request: ModelRequest, *, created: int, model: str) -> Iterator[Json]:
    """The events of a streamed reply; `END` follows the last one."""
    head = _head(answer, "chat.completion.chunk", created, request.model or model)
    if request.include_usage:
        head["usage"] = None

    def chunk(delta: Json, finish_reason: str | None = None, logprobs: Json | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**head, "choices": [choice]}

    message = answer.message
    calls = message.get("tool_calls") or []
    yield chunk({"role": "assistant", "content": None if calls and not message.get("content") else ""})
    if (logprobs := _logprobs(answer, request)) is not None:
        yield chunk({}, logprobs=logprobs)
    for field in ("reasoning_content", "content"):
        for piece in pieces(message.get(field) or ""):
            yield chunk({field: piece})
    for index, call in enumerate(calls):
        function = {"name": call["function"]["name"], "arguments": ""}
        yield chunk({"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": function}]})
        for piece in pieces(call["function"]["arguments"]):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield chunk({}, finish_reason=answer.finish_reason)
    if request.include_usage:
        yield {**head, "choices": [], "usage": _usage(answer)}


def error_body(error: DialectError) -> Json:
    """An error in OpenAI's shape."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


error_event = error_body
"""An error after the first event of a stream."""


def _head(answer: Answer, kind: str, created: int, model: str) -> Json:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": created, "model": model}


def _usage(answer: Answer) -> Json:
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _logprobs(answer: Answer, request: ModelRequest) -> Json | None:
    if answer.logprobs is None or not request.logprobs:
        return None
    tokens = [
        {"token": t.token, "logprob": t.logprob, "bytes": list(t.token.encode("utf-8", "replace")), "top_logprobs": []}
        for t in answer.logprobs
    ]
    return {"content": tokens, "refusal": None}


def _refuse_unanswerable(body: Json) -> None:
    if body.get("n") not in (None, 1) or isinstance(body.get("n"), bool):
        raise DialectError(400, f"n is {short(body['n'])}; one reply a request is given here: ask n times.", param="n")
    wanted = body.get("response_format")
    if wanted is not None and not (isinstance(wanted, dict) and wanted.get("type") == "text"):
        raise unformatted("response_format", wanted.get("type") if isinstance(wanted, dict) else wanted)
    if count(body, "top_logprobs", least=0):
        raise DialectError(
            400, "top_logprobs is not supported: only the sampled token's log-probability is kept.", param="top_logprobs"
        )
    for old in ("functions", "function_call"):
        if body.get(old):
            raise DialectError(400, f"{old} is not supported; send `tools` and `tool_choice`.", param=old)
    if isinstance(modalities := body.get("modalities"), list) and modalities != ["text"]:
        raise DialectError(400, "Only text can be answered.", param="modalities")


def _messages(body: Json) -> tuple[Message, ...]:
    given = enumerate(filled(body, "messages", "message"))
    return tuple(
        message if _is_plain(message) else _message(item(message, f"messages[{index}]"), f"messages[{index}]")
        for index, message in given
    )


def _is_plain(given: Any) -> bool:
    """Whether a message is a role and its text, as most of a long conversation are: `_message` would change nothing."""
    return isinstance(given, dict) and len(given) == 2 and type(given.get("content")) is str and given.get("role") in ROLES


def _message(given: Json, where: str) -> Message:
    """A message with the fields that mean something to a model, and nothing else."""
    said_by = role(given, where, ROLES)
    message: Message = {"role": said_by, "content": text(given.get("content"), f"{where}.content")}
    if given.get("content") is None and isinstance(refusal := given.get("refusal"), str):
        message["content"] = refusal
    for field in ("name", "tool_call_id"):
        if (value := typed(given, field, str, f"{where}.")) is not None:
            message[field] = value
    if said_by == "assistant":
        reasoning = typed(given, "reasoning_content", str, f"{where}.")
        reasoning = reasoning if reasoning is not None else typed(given, "reasoning", str, f"{where}.")
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls := typed(given, "tool_calls", list, f"{where}."):
            message["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return message


def _call(call: Any, where: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DialectError(400, f"{where} must be an object with `function.name`.", param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str | None):
        raise DialectError(400, f"{where}.function.arguments must be a string of JSON.", param=f"{where}.function.arguments")
    call_id = typed(call, "id", str, f"{where}.")
    return {
        **({} if call_id is None else {"id": call_id}),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments or "{}"},
    }


def _tools(body: Json) -> tuple[Tool, ...]:
    tools = typed(body, "tools", list) or []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise DialectError(400, f'{where} must be {{"type": "function", "function": {{...}}}}.', param=where)
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise DialectError(400, f"{where}.function.name must be a name.", param=f"{where}.function.name")
        typed(function, "description", str, f"{where}.function.")
        typed(function, "parameters", dict, f"{where}.function.")
    return tuple(tools)


def _tool_choice(body: Json, tools: tuple[Tool, ...]) -> str | Json:
    choice = body.get("tool_choice")
    if choice is None:
        return "auto"
    if choice in ("none", "auto", "required"):
        return choice
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return choice
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name is None or name not in [tool["function"]["name"] for tool in tools]:
        raise DialectError(
            400,
            f"tool_choice is {short(choice)}; it must be none, auto, required or a tool in `tools`.",
            param="tool_choice",
        )
    return choice


def _smallest(*counts: int | None) -> int | None:
    return min((count for count in counts if count is not None), default=None)
