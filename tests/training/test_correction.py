"""The weight of a token, in small numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longrein.training.correction import correction, mismatch_metrics


def test_a_token_weighs_what_the_trainer_holds_of_it_over_what_the_sampler_held_up_to_the_cap() -> None:
    policy = torch.tensor([[-1.0, -2.0, -0.5, -3.0, -9.0]], dtype=torch.float64)
    recorded = torch.tensor([[-1.0, -1.5, -3.0, math.nan, 0.0]], dtype=torch.float64)
    trained = torch.tensor([[1, 1, 1, 1, 0]])
    found = correction(policy, recorded, trained, cap=2.0)
    assert found.weights[0].tolist() == pytest.approx([1.0, math.exp(-0.5), 2.0, 1.0, 1.0], abs=1e-12)
    metrics = mismatch_metrics(found)
    assert metrics == pytest.approx(
        {
            "sampler/logp_diff_mean": (0.0 + 0.5 + 2.5) / 3,
            "sampler/logp_diff_max": 2.5,
            "sampler/ratio_mean": (1.0 + math.exp(-0.5) + 2.0) / 3,
            "sampler/ratio_capped": 1 / 3,
        },
        abs=1e-12,
    )


def test_the_metrics_of_several_ranks_are_over_all_their_tokens() -> None:
    one = correction(torch.zeros(1, 3), torch.full((1, 3), -0.3), torch.ones(1, 3), cap=2.0)
    two = correction(torch.zeros(1, 1), torch.full((1, 1), 0.1), torch.ones(1, 1), cap=2.0)

    def gather(value: torch.Tensor) -> torch.Tensor:
        other = two.sums if value.numel() == 4 else two.largest
        return torch.cat([value, other.reshape(1, *value.shape[1:])])

    metrics = mismatch_metrics(one, gather)
    assert metrics["sampler/logp_diff_mean"] == pytest.approx((3 * 0.3 + 0.1) / 4)
    assert metrics["sampler/logp_diff_max"] == pytest.approx(0.3)


def test_nothing_to_train_is_no_mismatch() -> None:
    found = correction(torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 3), cap=2.0)
    assert found.weights.eq(1).all()
    assert set(mismatch_metrics(found).values()) == {0.0}


@given(st.lists(st.floats(-30, 0), min_size=1, max_size=8), st.floats(1, 10))
def test_a_capped_weight_never_makes_an_estimate_larger_than_the_exact_one(logps: list[float], cap: float) -> None:
    """In expectation over the sampler the weights are at most 1, and 1 where nothing is capped."""
    q = torch.log_softmax(torch.tensor(logps, dtype=torch.float64), 0)
    p = torch.log_softmax(torch.tensor(logps[::-1], dtype=torch.float64), 0)
    found = correction(p[None], q[None], torch.ones(1, len(logps)), cap)
    mean = float((q.exp() * found.weights[0]).sum())
    assert mean <= 1 + 1e-9
    if not (p - q).exp().gt(cap).any():
        assert mean == pytest.approx(1, abs=1e-9)
