"""Replies read without a tokenizer: as the Qwen3 family's own parser reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from conversations import ARGUMENTS, NAME, PLAIN, assistant
from hypothesis import given
from hypothesis import strategies as st

from longrein.proxy.text import parse_text

CALL = '<tool_call>\n{"name": "look", "arguments": {"room": "attic"}}\n</tool_call>'


@given(
    thought=st.sampled_from(["", "<think>\nhm\n</think>\n\n", "<think></think>", "<think>\nopen"]),
    said=PLAIN,
    calls=st.lists(st.tuples(NAME, ARGUMENTS), max_size=2),
    rest=st.sampled_from(
        ["", "<tool_call>\n{'name'}\n</tool_call>", '<tool_call>{"name": "x", "arguments": [1]}</tool_call>']
    ),
)
def test_it_reads_what_the_familys_own_parser_reads(
    rendering: Callable[[str], Any], thought: str, said: str, calls: list[Any], rest: str
) -> None:
    found = rendering("qwen3")
    written = [f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls]
    text = thought + "\n".join([said, *written, rest])
    theirs = found.parse(found.encode_reply(text))
    if "reasoning_content" in theirs:  # reasoning that is still open comes with its spaces
        theirs["reasoning_content"] = theirs["reasoning_content"].strip()
    assert parse_text(text) == theirs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", assistant("hello")),
        ("", assistant("")),
        ("hm\n</think>\n\nhello", {**assistant("hello"), "reasoning_content": "hm"}),
        ("<think>\nstill", {**assistant(""), "reasoning_content": "still"}),
        ('<tool_call>{"name": "look"', assistant('<tool_call>{"name": "look"')),
        ('<tool_call>{"name": ""}</tool_call>', assistant('<tool_call>{"name": ""}</tool_call>')),
    ],
)
def test_replies_and_what_they_say(text: str, message: Any) -> None:
    assert parse_text(text) == message


def test_several_calls_are_read_in_order() -> None:
    message = parse_text(f"I look.\n{CALL}\n{CALL.replace('attic', 'barn')}")
    assert message["content"] == "I look."
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"room": "attic"}', '{"room": "barn"}']
