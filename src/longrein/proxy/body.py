"""Reading a wire body field by field, the same way in every dialect.

Always true: a field is of the type it is read as, or a `DialectError` says which field it is, what it was and what it must be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from longrein.contract import Tool
from longrein.proxy.dialect import DialectError

Json = dict[str, Any]
MAX_DEPTH = 64
"""How deep a body may nest; what is deeper breaks templates and comparisons long before it means anything."""
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "encrypted_content": "encrypted_content",
}
"""The kinds of parts that are text, and the field it stands in."""
PIECE = 128
"""Characters in one delta of a stream."""


def checked(body: Any) -> Json:
    """The body, if it is an object that does not nest too deep."""
    if not isinstance(body, dict):
        raise DialectError(400, f"The body is {kind_of(body)}; it must be a JSON object.")
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return body
    raise DialectError(400, f"The body nests deeper than {MAX_DEPTH} levels.")


def typed(body: Json, field: str, wanted: type, where: str = "") -> Any:
    """A field that is absent, null or of the type wanted."""
    value = body.get(field)
    if value is not None and not isinstance(value, wanted):
        raise DialectError(400, f"{where}{field} is {kind_of(value)}; it must be {_KINDS[wanted]}.", param=f"{where}{field}")
    return value


def required(body: Json, field: str, wanted: type, where: str = "") -> Any:
    """A field that is there, and of the type wanted."""
    if (value := typed(body, field, wanted, where)) is None:
        raise DialectError(400, f"{where}{field} is missing; it must be {_KINDS[wanted]}.", param=f"{where}{field}")
    return value


def item(value: Any, where: str) -> Json:
    """An object in a list."""
    if not isinstance(value, dict):
        raise DialectError(400, f"{where} is {kind_of(value)}; it must be an object.", param=where)
    return value


def filled(body: Json, field: str, what: str) -> list[Any]:
    """A list with something in it."""
    found = body.get(field)
    if not isinstance(found, list) or not found:
        words = "empty" if found == [] else "missing" if found is None else kind_of(found)
        raise DialectError(400, f"{field} is {words}; it must be a list of at least one {what}.", param=field)
    return found


def count(body: Json, field: str, least: int = 1, where: str = "") -> int | None:
    """A whole number, if there is one."""
    value = body.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DialectError(
            400, f"{where}{field} is {short(value)}; it must be an integer of {least} or more.", param=f"{where}{field}"
        )
    return value


def words(body: Json, field: str, where: str = "") -> tuple[str, ...]:
    """A word, or a list of words; empty ones mean nothing."""
    given = body.get(field)
    found = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise DialectError(400, f"{where}{field} must be a string or a list of strings.", param=f"{where}{field}")
    return tuple(filter(None, found))


def role(message: Json, where: str, known: tuple[str, ...]) -> str:
    """Who says a message, one of those that are known."""
    if (found := message.get("role")) not in known:
        raise DialectError(
            400, f"{where}.role is {short(found)}; it must be one of {', '.join(known)}.", param=f"{where}.role"
        )
    return found


def text(content: Any, where: str, between: str = "") -> str:
    """Text, whether it came as text or in OpenAI's parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise DialectError(400, f"{where} is {kind_of(content)}; it must be a string or a list of parts.", param=where)
    texts = []
    for index, part in enumerate(content):
        at = f"{where}[{index}]"
        kind = item(part, at).get("type")
        field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None or not isinstance(part.get(field), str):
            raise DialectError(400, f"{at} is of type {short(kind)}; only parts of text can be read.", param=at)
        texts.append(part[field])
    return between.join(texts)


def function(given: Json, where: str, parameters: Json | None) -> Tool:
    """A tool as the model is shown it, with its parameters wherever a dialect has them."""
    made: Json = {"name": required(given, "name", str, f"{where}.")}
    if description := typed(given, "description", str, f"{where}."):
        made["description"] = description
    if parameters is not None:
        made["parameters"] = parameters
    return {"type": "function", "function": made}


def unformatted(field: str, wanted: Any, instead: str = "a tool") -> DialectError:
    """A program wants a reply of a given form, and nothing here constrains what is sampled."""
    return DialectError(
        400,
        f"{field} {short(wanted)} is not supported: replies are sampled without constraints. Describe the format in the "
        f"prompt, or use {instead}.",
        param=field,
    )


def pieces(text: str) -> Iterator[str]:
    """A text in deltas."""
    return (text[at : at + PIECE] for at in range(0, len(text), PIECE))


def kind_of(value: Any) -> str:
    """A value's type in words."""
    return _KINDS.get(type(value), "null")


def short(value: Any) -> str:
    """A value in an error's words."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


_KINDS = {str: "a string", bool: "true or false", dict: "an object", list: "a list", int: "a number", float: "a number"}
