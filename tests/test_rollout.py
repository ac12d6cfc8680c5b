"""The record: each sampled token is trained once or has a reason, and token rewards add up."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein.contract import LongreinError
from longrein.rollout import CREDITS, Call, Credit, Rollout, padded

REWARD = st.floats(-10, 10, width=32)


def call(id: str, parent: str | None = None, context: Any = (1,), drawn: Any = (2,), **fields: Any) -> Call:
    """A call whose log-probabilities are its token ids, negated."""
    return Call(
        id=id,
        parent=parent,
        context_ids=np.array(context, np.int32),
        completion_ids=np.array(drawn, np.int32),
        logprobs=-np.array(drawn, np.float32),
        finish_reason="stop",
        **fields,
    )


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    """A random tree. Every token id in it occurs once, so that a token can be followed through rows."""
    rollout = Rollout(id="r", reward=draw(st.none() | REWARD), failed=draw(st.sampled_from([None] * 7 + ["engine"])))
    fresh = iter(range(1, 10_000))
    for index in range(draw(st.integers(1, 8))):
        rollout.add(
            call(
                f"c{index}",
                parent=draw(st.sampled_from([None, *rollout.calls])),
                context=[next(fresh) for _ in range(draw(st.integers(1, 3)))],
                drawn=[next(fresh) for _ in range(draw(st.integers(0, 4)))],
                delivered=draw(st.sampled_from([True, True, True, False])),
                reward=draw(st.none() | REWARD),
                excluded=draw(st.sampled_from([None, None, None, "stale", "auxiliary"])),
            )
        )
    return rollout


@given(rollouts(), st.sampled_from(CREDITS))
def test_each_sampled_token_is_trained_in_exactly_one_row_or_has_a_reason(rollout: Rollout, credit: Credit) -> None:
    trained = [token for row in rollout.rows(credit) for token in row.token_ids[row.agent_mask].tolist()]
    assert len(trained) == len(set(trained)) == rollout.agent_tokens
    for recorded in rollout.calls.values():
        for token in recorded.completion_ids.tolist():
            assert (token in trained) == (rollout.reason(recorded) is None)


@given(rollouts())
def test_branches_train_what_rows_train(rollout: Rollout) -> None:
    leaves = [recorded for recorded in rollout.calls if not rollout.children(recorded)]
    branches = rollout.branches()
    assert [branch.calls[-1] for branch in branches] == leaves
    in_branches = sorted(token for branch in branches for token in branch.token_ids[branch.agent_mask].tolist())
    assert in_branches == sorted(token for row in rollout.rows() for token in row.token_ids[row.agent_mask].tolist())


@given(rollouts())
def test_a_row_is_what_the_model_read_and_wrote(rollout: Rollout) -> None:
    for row in [*rollout.branches(), *rollout.rows()]:
        assert row.token_ids.tolist() == rollout.tokens(row.calls[-1]).tolist()
        assert [recorded.id for recorded in rollout.path(row.calls[-1])] == list(row.calls)
        assert not (row.agent_mask & ~row.sampled).any()
        assert (row.logprobs == np.where(row.sampled, -row.token_ids, 0)).all()
        lengths = {len(values) for values in (row.sampled, row.agent_mask, row.logprobs, row.rewards)}
        assert lengths == {len(row.token_ids)}


@given(rollouts(), st.sampled_from(CREDITS))
def test_token_rewards_add_up_to_the_reward_of_the_rollout(rollout: Rollout, credit: Credit) -> None:
    rows = rollout.rows(credit)
    total = math.fsum(float(reward) for row in rows for reward in row.rewards)
    expected = rollout.reward if rollout.reward is not None and rollout.agent_tokens else 0.0
    assert total == pytest.approx(expected, abs=1e-4)
    assert not any(row.rewards[~row.agent_mask].any() for row in rows)


@given(rollouts())
def test_rows_end_in_a_trained_call_unless_nothing_is_trained(rollout: Rollout) -> None:
    rows = rollout.rows()
    if rollout.agent_tokens:
        assert all(rollout.reason(rollout.calls[row.calls[-1]]) is None and row.agent_mask.any() for row in rows)
    else:
        assert len(rows) == 1


def test_credit_puts_the_reward_of_a_turn_where_it_says() -> None:
    rollout = Rollout(id="r", reward=3.0)
    rollout.add(call("a", drawn=[5, 6], reward=1.0))
    rollout.add(call("b", "a", drawn=[7, 8], reward=1.5))
    by_credit = {credit: rollout.rows(credit)[0].rewards.tolist() for credit in CREDITS}
    assert by_credit == {
        "spread": [0, 0.5, 0.5, 0, 1.0, 1.0],  # the last turn also takes the 0.5 that no turn earned
        "last": [0, 0, 1.0, 0, 0, 2.0],
        "terminal": [0, 0, 0, 0, 0, 3.0],
    }


def test_the_reward_of_an_untrained_turn_goes_to_the_last_trained_one() -> None:
    rollout = Rollout(id="r", reward=2.0)
    rollout.add(call("a", drawn=[5]))
    rollout.add(call("b", "a", drawn=[6], reward=2.0, delivered=False))
    (row,) = rollout.rows("last")
    assert row.calls == ("a",)
    assert row.rewards.tolist() == [0, 2.0]


def test_reasons() -> None:
    rollout = Rollout(id="r")
    assert rollout.reason(rollout.add(call("a"))) is None
    assert rollout.reason(rollout.add(call("b", delivered=False))) == "undelivered"
    assert rollout.reason(rollout.add(call("c", excluded="stale", delivered=False))) == "stale"
    rollout.failed = "EngineError: away"
    assert {rollout.reason(recorded) for recorded in rollout.calls.values()} == {"failed"}


def test_prompt_conversation_and_children() -> None:
    rollout = Rollout(id="r")
    ask, answer, more = (
        {"role": role, "content": text} for role, text in [("user", "1"), ("assistant", "2"), ("user", "3")]
    )
    rollout.add(call("a", None, [1, 2], [3], messages=(ask,), reply=answer))
    rollout.add(call("b", "a", [4], [5, 6], messages=(more,), reply=answer))
    assert rollout.prompt("b").tolist() == [1, 2, 3, 4]
    assert rollout.tokens("b").tolist() == [1, 2, 3, 4, 5, 6]
    assert rollout.conversation("b") == [ask, answer, more, answer]
    assert rollout.children(None) == ["a"]
    assert rollout.children("a") == ["b"]
    assert rollout.children("b") == []


def test_truncated_says_whether_tokens_ran_out() -> None:
    rollout = Rollout(id="r")
    assert not rollout.truncated
    rollout.add(call("a"))
    assert not rollout.truncated
    rollout.limit = "tokens"
    assert rollout.truncated


def test_a_rollout_made_from_calls_knows_its_tree() -> None:
    first, second = call("a"), call("b", "a", [3], [4])
    rollout = Rollout(id="r", calls={"a": first, "b": second})
    assert rollout.children("a") == ["b"]
    assert len(rollout.branches()) == 1


@given(st.lists(rollouts(), max_size=3), st.sampled_from(CREDITS))
def test_padded_arrays_hold_the_rows(trees: list[Rollout], credit: Credit) -> None:
    trial = padded(trees, pad_id=77, credit=credit)
    rows = [(index, row) for index, tree in enumerate(trees) for row in tree.rows(credit)]
    width = max((len(row.token_ids) for _, row in rows), default=0)
    for key in ("token_ids", "attn_mask", "agent_mask", "rewards", "logprobs"):
        assert trial[f"padded_{key}"].shape == (len(rows), width)
    assert trial["row_rollout"].tolist() == [index for index, _ in rows]
    for at, (_, row) in enumerate(rows):
        length = len(row.token_ids)
        assert trial["padded_token_ids"][at].tolist() == row.token_ids.tolist() + [77] * (width - length)
        assert trial["padded_attn_mask"][at].tolist() == [1] * length + [0] * (width - length)
        assert trial["padded_agent_mask"][at, :length].tolist() == row.agent_mask.tolist()
        assert trial["padded_logprobs"][at, :length].tolist() == (row.logprobs * row.agent_mask).tolist()
        assert trial["padded_rewards"][at, :length].tolist() == row.rewards.tolist()
        for key in ("agent_mask", "rewards", "logprobs"):
            assert not trial[f"padded_{key}"][at, length:].any()
    assert trial["rollouts"] == trees
    for reward, tree in zip(trial["final_rewards"].tolist(), trees, strict=True):
        assert math.isnan(reward) if tree.reward is None else reward == tree.reward


def test_a_rollout_without_calls_is_one_row_that_trains_nothing() -> None:
    trial = padded([Rollout(id="r", failed="no sandbox")], pad_id=9)
    assert trial["padded_token_ids"].tolist() == [[9]]
    assert trial["padded_attn_mask"].tolist() == [[1]]
    assert trial["padded_agent_mask"].tolist() == [[0]]
    assert np.isnan(trial["final_rewards"]).all()


def test_add_refuses_what_would_break_the_tree() -> None:
    rollout = Rollout(id="r")
    rollout.add(call("a"))
    with pytest.raises(LongreinError, match="already in rollout r"):
        rollout.add(call("a"))
    with pytest.raises(LongreinError, match="parent nobody"):
        rollout.add(call("b", "nobody"))
    with pytest.raises(LongreinError, match="1 sampled tokens and 2 log-probabilities"):
        rollout.add(Call("b", None, np.array([1]), np.array([2]), np.zeros(2, np.float32), "stop"))
    with pytest.raises(LongreinError, match="1 sampled tokens and 3 log-probabilities"):
        rollout.add(call("b", sampler_logprobs=np.zeros(3, np.float32)))
    with pytest.raises(LongreinError, match="1 sampled tokens and 2 policy versions"):
        rollout.add(call("b", versions=np.zeros(2, np.int32)))
    assert list(rollout.calls) == ["a"]


def test_update_changes_what_is_said_of_a_call_and_never_its_tokens() -> None:
    rollout = Rollout(id="r")
    before = rollout.add(call("a"))
    after = rollout.update("a", delivered=False, reward=1.0, excluded="stale")
    assert (before.delivered, after.delivered, rollout.calls["a"]) == (True, False, after)
    with pytest.raises(LongreinError, match="completion_ids, logprobs cannot change"):
        rollout.update("a", completion_ids=np.array([9]), logprobs=np.array([0.0]))
    with pytest.raises(LongreinError, match="call b is not in rollout r"):
        rollout.update("b", reward=1.0)


def test_an_unknown_credit_is_refused() -> None:
    rollout = Rollout(id="r", reward=1.0)
    rollout.add(call("a"))
    with pytest.raises(LongreinError, match="credit is 'sum'"):
        rollout.rows("sum")  # type: ignore[arg-type]


def test_a_stale_row_is_left_out_whole_and_what_others_train_of_it_stays() -> None:
    rollout = Rollout(id="r", reward=1.0)
    for call_id, parent, version in (("a", None, 3), ("b", "a", 3), ("c", "a", 1), ("d", "c", 3)):
        rollout.add(call(call_id, parent, policy_version=version))
    assert [row.calls for row in rollout.rows()] == [("a", "b"), ("a", "c", "d")]
    assert rollout.drop_stale(oldest=1) == [False, False]
    assert rollout.drop_stale(oldest=2) == [False, True]
    assert {call_id: one.excluded for call_id, one in rollout.calls.items()} == {
        "a": None,
        "b": None,
        "c": "stale",
        "d": "stale",
    }
    assert [row.calls for row in rollout.rows()] == [("a", "b")]
