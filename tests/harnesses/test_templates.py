"""Placeholders: filled where they are ours, left where they are not."""

from __future__ import annotations

import pytest

from longrein.contract import LongreinError
from longrein.harnesses.templates import fill

VALUES = {"key": "k-1", "base_url": "http://127.0.0.1:1/v1"}


def test_the_session_and_the_task_fill_them() -> None:
    assert fill("{base_url}?k={key} {name}", {"name": "it's {key}"}, VALUES, "command") == (
        "http://127.0.0.1:1/v1?k=k-1 it's {key}"
    )


def test_values_that_are_no_text_go_in_as_json() -> None:
    assert fill("{n} {l} {o}", {"n": 3, "l": ["ä", 1], "o": {"a": None}}, VALUES, "command") == '3 ["ä", 1] {"a": null}'


def test_the_whole_task_is_a_placeholder_too() -> None:
    assert fill("{task}", "write a poem", VALUES, "command") == "write a poem"
    assert fill("{task}", {"a": 1}, VALUES, "command") == '{"a": 1}'
    assert fill("{task}", {"task": "do it"}, VALUES, "command") == "do it"


def test_the_session_wins_over_the_task() -> None:
    assert fill("{key}", {"key": "theirs"}, VALUES, "command") == "k-1"


@pytest.mark.parametrize(
    "text", ["${key}", "{{key}}", "{ key }", '{"key": {"a": 1}}', "{}", "{0}", "a{b", "awk '{ print }'"]
)
def test_other_braces_stay(text: str) -> None:
    assert fill(text, {}, VALUES, "command") == text


def test_a_brace_around_a_placeholder_is_no_matter() -> None:
    assert fill('{"rooms": {rooms}}', {"rooms": [1]}, VALUES, "files") == '{"rooms": [1]}'


def test_an_unknown_name_is_refused_by_name_or_left_in_a_file() -> None:
    with pytest.raises(LongreinError, match=r"command\[2\] has the placeholder \{rooms\}.*key, base_url, x, task"):
        fill("{rooms}", {"x": 1}, VALUES, "command[2]")
    assert fill("{rooms} {key}", {"x": 1}, VALUES, "files", strict=False) == "{rooms} k-1"
