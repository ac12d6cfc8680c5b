"""Conversations compared: a message in the form in which harmless changes make no difference, and digests of conversations.

Always true: two conversations have one digest when their tools and their messages are the same in that form. Every message of
every request is compared with what was there before; only one that was not is put into the form, so that a request costs what
it adds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from longrein.contract import Message, Tool

Defaults = dict[str, dict[str, str]]
"""By tool and argument: the value, as canonical JSON, that its schema says an absent one has."""
ALTERNATIVES = 32
"""How many different messages after one conversation are remembered."""


@dataclass(slots=True, eq=False)
class _Seen:
    """A conversation that was digested before, by its last message."""

    digest: bytes
    message: Message | None = None
    tools: tuple[Tool, ...] = ()
    """Of the conversation, where it has no message yet."""
    defaults: Defaults = field(default_factory=dict)
    """What those tools take an argument to be that is not given."""
    longer: list[_Seen] = field(default_factory=list)


class Digests:
    """The digests of one rollout's conversations.

    >>> digests, hi = Digests(), {"role": "user", "content": "hi"}
    >>> digests.of([hi])[-1] == digests.of([{"role": "user", "content": [{"type": "text", "text": "hi"}]}])[-1]
    True
    """

    def __init__(self) -> None:
        self._roots: dict[bytes, _Seen] = {}
        self._made: set[bytes] = set()
        self._aliases: dict[bytes, bytes] = {}
        self._last: tuple[Sequence[Message], Sequence[Tool], list[bytes]] | None = None

    def of(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, again: bool = False) -> list[bytes]:
        """Digest k speaks of the tools and the first k messages. `again` keeps them for whoever asks for these very objects next."""
        last, self._last = self._last, None
        if last is not None and last[0] is messages and last[1] is tools:
            return last[2]
        seen = root = self._root(tools)
        digests = [seen.digest]
        for message in messages:
            for longer in seen.longer:
                if longer.message == message:
                    seen = longer
                    break
            else:
                seen = self._see(seen, message, root.defaults)
            digests.append(seen.digest)
        if again:
            self._last = messages, tools, digests
        return digests

    def extended(self, digest: bytes, message: Message, tools: Sequence[Tool]) -> bytes:
        """The digest of a conversation with one more message, which is not remembered."""
        return extend(digest, message, self._root(tools).defaults)

    def alias(self, other: bytes, digest: bytes) -> None:
        """From now on the conversation of `other`, and all that continue it, count as those of `digest`."""
        self._aliases.setdefault(other, digest)
        if other in self._made:  # what was made from it is made anew
            self._roots.clear()
            self._made.clear()
            self._last = None

    def shared_tools(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """A copy of the tools, the same for all requests that have them."""
        return self._root(tools).tools

    def _root(self, tools: Sequence[Tool]) -> _Seen:
        try:
            key = orjson.dumps(list(tools))
        except TypeError:  # not text, or not JSON: compared in the slow way
            key = _json(list(tools))
        if key not in self._roots:
            own = tuple(copied(list(tools)))
            self._roots[key] = _Seen(digest_of(_json(list(tools))), tools=own, defaults=_defaults(own))
        return self._roots[key]

    def _see(self, shorter: _Seen, message: Message, defaults: Defaults) -> _Seen:
        digest = extend(shorter.digest, message, defaults)
        self._made.add(digest)
        seen = _Seen(self._aliases.get(digest, digest), copied(message))
        if _says_what_it_is(message):
            shorter.longer = [seen, *shorter.longer[: ALTERNATIVES - 1]]
        return seen


def extend(digest: bytes, message: Message, defaults: Defaults | None = None) -> bytes:
    """The digest of a conversation with one more message."""
    return digest_of(digest, canonical(message, defaults).encode("utf-8", "surrogatepass"))


def canonical(message: Message, defaults: Defaults | None = None) -> str:
    """A message as it is compared: what programs change without meaning to (spacing and key order in tool arguments,
    arguments that are as their `defaults`, text or parts, empty or absent content, ids, reasoning, cache marks) makes no
    difference."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_canonical_part(part) for part in content)
    content = content or ""
    if message.get("role") == "assistant" and isinstance(content, str):
        content = content.strip()
    functions = [call.get("function") or call for call in message.get("tool_calls") or ()]
    calls = [
        [name := function.get("name"), _canonical_arguments(function.get("arguments"), (defaults or {}).get(str(name)))]
        for function in functions
    ]
    said = [message.get("role"), content, calls]
    try:
        return orjson.dumps(said, option=orjson.OPT_SORT_KEYS).decode()
    except TypeError:  # not text, or not JSON: written in the slow way
        return json.dumps(said, sort_keys=True, ensure_ascii=False, default=str)


def copied(value: Any) -> Any:
    """A copy of JSON-like data that shares nothing which can change."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    return value


def _says_what_it_is(value: Any) -> bool:
    """Whether nothing but the same is equal to it: 1 equals True and 1.0, which are written otherwise."""
    if isinstance(value, dict):
        return all(map(_says_what_it_is, value.values()))
    if isinstance(value, list):
        return all(map(_says_what_it_is, value))
    return value is None or isinstance(value, str)


def _canonical_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if "text" in part:
        return part["text"] or ""
    return json.dumps({k: v for k, v in part.items() if k != "cache_control"}, sort_keys=True, default=str)


def _canonical_arguments(arguments: Any, defaults: dict[str, str] | None) -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, default=str)
    try:
        read = json.loads(text or "{}", parse_int=_number, parse_float=_number)
        if defaults and isinstance(read, dict):
            read = {name: value for name, value in read.items() if _canonical_json(value) != defaults.get(name)}
        return json.dumps(read, sort_keys=True, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def _defaults(tools: Sequence[Tool]) -> Defaults:
    found: Defaults = {}
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            continue
        schema = function.get("parameters")
        properties = schema.get("properties") if isinstance(schema, dict) else None
        for name, property in properties.items() if isinstance(properties, dict) else ():
            if isinstance(property, dict) and "default" in property:
                read = json.loads(json.dumps(property["default"], default=str), parse_int=_number, parse_float=_number)
                found.setdefault(str(function.get("name")), {})[name] = _canonical_json(read)
    return found


def _number(digits: str) -> float:
    """A number as a program in JavaScript would send it back: 1.0 is 1, and integers end at 2**53."""
    return float(digits) + 0.0


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")


def digest_of(*parts: bytes) -> bytes:
    """Of bytes, told apart also by where one part ends."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
