"""Digests are told by comparing, and only what is new is put into its form: counted, not timed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from conversations import LOOK, MOVE, TEXT, TOOLS, assistant, result, system, user
from hypothesis import given
from hypothesis import strategies as st

import longrein.digests
from longrein.contract import Message
from longrein.digests import Digests, extend

MESSAGES = st.lists(
    TEXT.map(user)
    | TEXT.map(system)
    | TEXT.map(assistant)
    | TEXT.map(result)
    | st.sampled_from([1, True, 1.0, 0, False, None]).map(lambda n: user([{"type": "image", "detail": n}]))
    | st.sampled_from([1, True, 1.0]).map(lambda n: assistant("", ("look", {"n": n}))),
    min_size=1,
    max_size=5,
)


def digests_of(messages: list[Message], tools: Any) -> list[bytes]:
    """As they are defined: each from the one before."""
    digests = [Digests().of([], tools)[0]]
    for message in messages:
        digests.append(extend(digests[-1], message))
    return digests


@given(requests=st.lists(st.tuples(MESSAGES, TOOLS), min_size=1, max_size=4), data=st.data())
def test_what_was_seen_before_changes_no_digest(requests: list[tuple[list[Message], Any]], data: st.DataObject) -> None:
    digests = Digests()
    for messages, tools in requests:
        for length in data.draw(st.permutations(range(len(messages) + 1))):
            given = copy.deepcopy(messages[:length])
            assert digests.of(given, tools) == digests_of(messages, tools)[: length + 1]
            for message in given:  # whoever asked may do as they like with their own messages
                message["content"] = "changed"


def test_a_turn_costs_what_it_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Message] = []
    canonical = longrein.digests.canonical
    monkeypatch.setattr(
        "longrein.digests.canonical", lambda message, defaults=None: read.append(message) or canonical(message, defaults)
    )
    digests, messages = Digests(), [system("be brief"), user("hello")]
    for turn in range(50):
        read.clear()
        digests.of(copy.deepcopy(messages), [LOOK, MOVE])
        assert read == messages[-2:]
        messages += [assistant(f"reply {turn}", ("look", {"turn": turn})), result(f"seen {turn}")]


def test_an_alias_reaches_what_was_digested_before() -> None:
    digests, told = Digests(), [user("hi"), assistant("<tool_call>x</tool_call>"), user("go on")]
    before = digests.of(told)
    parsed = [user("hi"), assistant("", ("look", {})), user("go on")]
    wanted = digests.of(parsed)
    assert before != wanted
    digests.alias(before[2], wanted[2])
    assert digests.of(told) == wanted


def test_tools_are_kept_once() -> None:
    digests = Digests()
    first = digests.shared_tools([copy.deepcopy(LOOK)])
    assert digests.shared_tools([copy.deepcopy(LOOK)]) is first
    assert first == (LOOK,)
    assert digests.shared_tools([MOVE]) == (MOVE,)
    number = [{**MOVE, "strict": 1}]
    assert digests.of([], number) != digests.of([], [{**MOVE, "strict": True}])


def test_an_argument_that_is_as_its_default_may_be_said_or_not() -> None:
    schema = {"type": "object", "properties": {"room": {"type": "string"}, "all": {"default": False}, "n": {"default": 2}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    said = assistant("", ("look", {"room": "attic"}))
    filled = [assistant("", ("look", {"all": False, "room": "attic"})), assistant("", ("look", {"room": "attic", "n": 2.0}))]
    others = [
        assistant("", ("look", {"room": "attic", "all": True})),
        assistant("", ("look", {"room": "attic", "n": False})),
    ]
    digests = Digests()
    own = digests.of([said], [tool])[-1]
    assert [digests.of([message], [tool])[-1] for message in filled] == [own, own]
    assert own not in [digests.of([message], [tool])[-1] for message in others]
    assert own == digests.extended(digests.of([], [tool])[-1], filled[0], [tool])
    assert digests.of([said])[-1] != digests.of([filled[0]])[-1]  # where no schema says so, it is another argument
