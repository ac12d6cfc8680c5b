"""Tool calls between what a model writes and what programs read.

Always true: a call that `readable` gives can be sent in any dialect and comes back as the same call. What it does not give, a program
could not read: it stays in the text, as the model wrote it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from longrein.contract import Message

MAX_DEPTH = 32
"""How deep arguments may nest: a program's next request has them some levels down in a body, which is refused below 64."""
_OWN_ID = re.compile(r"call_(?:[0-9a-f]{16}|turn\d+)_\d+_(.+)")


def readable(name: Any, arguments: Any) -> dict[str, str] | None:
    """A call's function as messages have it, its arguments a JSON object in text; None where no program could read it.

    >>> readable("look", {"room": "attic"}), readable("look", ["attic"]), readable("", {})
    ({'name': 'look', 'arguments': '{"room": "attic"}'}, None, None)
    """
    if not name or not isinstance(name, str):
        return None
    try:
        read = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        read = {} if read is None else read
        text = json.dumps(read, ensure_ascii=False, allow_nan=False)
        (name + text).encode()  # half of a surrogate pair is JSON, but not text
    except (ValueError, RecursionError):
        return None
    return {"name": name, "arguments": text} if isinstance(read, dict) and not _deeper(read, MAX_DEPTH) else None


def call_id(of_call: str, index: int, own: str | None = None) -> str:
    """The id of a model call's tool call, with the `own` one that the model gave it, where its format has such."""
    kept = own if own is not None and re.fullmatch(r"[\w.:-]{1,64}", own, re.ASCII) else None
    return f"call_{of_call}_{index}" + (f"_{kept}" if kept else "")


def own_id(call_id: str) -> str:
    """The id that the model gave a call, as it stands in the model's tokens; any other id is itself.

    >>> own_id("call_00c0ffee00c0ffee_0_functions.look:0"), own_id("call_00c0ffee00c0ffee_0")
    ('functions.look:0', 'call_00c0ffee00c0ffee_0')
    """
    found = _OWN_ID.fullmatch(call_id)
    return found[1] if found else call_id


def with_short_ids(message: Message) -> Message:
    """A message whose calls have ids of nine letters and digits, as Mistral's templates want them, made of those they have."""
    message = dict(message)
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{**call, "id": _short(call.get("id") or str(n))} for n, call in enumerate(calls)]
    if message.get("role") == "tool":
        message["tool_call_id"] = _short(message.get("tool_call_id") or "0")
    return message


def with_object_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object, where they are one."""
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}


def arguments_of(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call's arguments as an object; whoever answered may have written them otherwise."""
    arguments = call["function"]["arguments"]
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        read = None
    return read if isinstance(read, dict) else {"arguments": arguments}


def named_results(reply: Message, messages: Sequence[Message]) -> list[Message]:
    """Messages, the results of the reply's calls with the name of the tool that gave them."""
    names = {call.get("id"): call["function"]["name"] for call in reply.get("tool_calls") or ()}
    return [
        {**m, "name": names[m.get("tool_call_id")]}
        if m.get("role") == "tool" and not m.get("name") and m.get("tool_call_id") in names
        else m
        for m in messages
    ]


class MistralToolParser:
    """Reads `[TOOL_CALLS][{"name", "arguments", "id"}, ...]` for the `renderers` library."""

    name = "longrein-mistral"
    MARK = "[TOOL_CALLS]"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._mark = tokenizer.convert_tokens_to_ids(self.MARK)

    def extract(self, ids: list[int]) -> tuple[list[int], list[Any]]:
        """What stands before the calls, and the calls."""
        from renderers.base import ParsedToolCall, ToolCallParseStatus

        if self._mark not in ids:
            return ids, []
        start = ids.index(self._mark)
        text = self._tokenizer.decode(ids[start + 1 :], skip_special_tokens=False)
        broken = ParsedToolCall(text, token_span=(start, len(ids)), status=ToolCallParseStatus.INVALID_JSON)
        try:
            calls = json.loads(text)
        except ValueError:
            return ids[:start], [broken]
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            return ids[:start], [broken]
        return ids[:start], [
            ParsedToolCall(
                json.dumps(call, ensure_ascii=False),
                name=call.get("name"),
                arguments=call.get("arguments"),
                id=call.get("id"),
            )
            for call in calls
        ]


def _short(call_id: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9]{9}", call_id):
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_deeper(one, levels - 1) for one in inner)
