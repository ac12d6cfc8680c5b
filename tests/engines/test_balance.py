"""Which replica answers: affinity, and its limit."""

from __future__ import annotations

import pytest

from longrein.engines import balance
from longrein.engines.balance import SLACK, Balance


def test_a_conversation_stays_where_it_is_until_that_replica_has_far_more_to_do() -> None:
    chooser = Balance()
    assert chooser.choose("a", [1, 0, 2], [0, 1, 2]) == 1
    assert chooser.choose("a", [0, SLACK, 0], [0, 1, 2]) == 1
    assert chooser.choose("a", [0, SLACK + 1, 5], [0, 1, 2]) == 0
    assert chooser.choose("a", [SLACK, 0, 0], [0, 1, 2]) == 0  # its home is the new one now


def test_a_conversation_leaves_a_replica_that_is_away() -> None:
    chooser = Balance()
    assert chooser.choose("a", [0, 1], [0, 1]) == 0
    assert chooser.choose("a", [0, 1], [1]) == 1


def test_a_call_of_no_conversation_goes_to_the_least_loaded() -> None:
    chooser = Balance()
    assert [chooser.choose("", loads, [0, 1]) for loads in ([0, 1], [1, 0], [2, 1])] == [0, 1, 1]


def test_old_conversations_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "REMEMBERED", 2)
    chooser = Balance()
    for name, loads in (("a", [0, 1]), ("b", [1, 0]), ("a", [0, 0]), ("c", [0, 1])):
        chooser.choose(name, loads, [0, 1])
    assert chooser.choose("a", [1, 0], [0, 1]) == 0
    assert chooser.choose("b", [0, 1], [0, 1]) == 0
