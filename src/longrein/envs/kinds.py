"""What kind of value a setting takes, read from its annotation.

Always true: only kinds that JSON and TOML have are judged; a value whose annotation says anything else fits, and is for its class to
refuse.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

_PLAIN = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", types.NoneType: "None"}


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind.

    >>> fits(3, float), fits("3", int | None), fits(["a", 1], list[str])
    (True, False, False)
    """
    inside = typing.get_args(kind)
    if _one_of_several(kind):
        return any(fits(value, one) for one in inside)
    if typing.get_origin(kind) is Literal:
        return value in inside
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    if kind in _PLAIN:
        return isinstance(value, kind)
    if (outer := _outer(kind)) is None:
        return True
    if outer is Mapping:
        return isinstance(value, Mapping)
    return isinstance(value, list | tuple) and (not inside or all(fits(one, inside[0]) for one in value))


def in_words(kind: Any) -> str:
    """The kind as a sentence names it.

    >>> in_words(list[str] | None)
    'a list of texts or None'
    """
    inside = typing.get_args(kind)
    if _one_of_several(kind):
        return " or ".join(in_words(one) for one in inside)
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, inside))}"
    if (outer := _outer(kind)) is not None:
        of = {str: " of texts", int: " of whole numbers", float: " of numbers"}
        return "a table" if outer is Mapping else f"a list{of.get(inside[0], '') if inside else ''}"
    return _PLAIN.get(kind, str(kind))


def _one_of_several(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _outer(kind: Any) -> Any:
    """`Mapping` or `Sequence` where the kind is one that JSON has as a table or a list."""
    plain = typing.get_origin(kind) or kind
    return Mapping if plain in (dict, Mapping) else Sequence if plain in (list, tuple, Sequence) else None
