"""What kind of value a setting takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from longrein.envs.kinds import fits, in_words


@pytest.mark.parametrize(
    ("kind", "right", "wrong", "words"),
    [
        (int, [0, -3], ["3", 3.0, True, None], "a whole number"),
        (float, [0, 0.5], ["3", True, None], "a number"),
        (str, [""], [3, None, ["a"]], "a text"),
        (bool, [True], [1, "true"], "true or false"),
        (str | None, ["a", None], [3], "a text or None"),
        (Literal["a", "b"], ["a"], ["c", None, ["a"]], "one of a, b"),
        (Sequence[str], [["a"], ("a",), []], ["a", [3], {"a": 1}], "a list of texts"),
        (list, [["a", 3]], ["a"], "a list"),
        (dict[str, Any], [{}, {"a": 3}], [[], "a"], "a table"),
        (str | Mapping[str, Any], ["a", {"b": 1}], [3], "a text or a table"),
        (Path, ["anything", 3], [], str(Path)),
        (Any, ["anything", 3, None], [], str(Any)),
    ],
)
def test_a_value_fits_its_kind_or_does_not(kind: Any, right: list[Any], wrong: list[Any], words: str) -> None:
    assert all(fits(value, kind) for value in right)
    assert not any(fits(value, kind) for value in wrong)
    assert in_words(kind) == words
