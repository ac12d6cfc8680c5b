"""Reading a wire body field by field, the same way in every dialect.

Always true: a field is of the type it is read as, or a `DialectError` says which field it is, what it was and what it must be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from longrein.proxy.dialect import DialectError

Json = dict[str, Any]
MAX_DEPTH = 64
"""How deep a body may nest; what is deeper breaks templates and comparisons long before it means anything."""
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
