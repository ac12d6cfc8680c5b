"""The rows that benchmarks are made of: the same from the same seed, uneven, and each sampled token in one row only."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.workloads import SIZES, rows_of


@pytest.mark.parametrize("name", SIZES["cpu"])
def test_a_sampled_token_is_trained_in_one_row(name):
    rows = rows_of(name, "cpu", 32_000)
    trained = [(row.rollout, row.ids[: t + 1].tobytes()) for row in rows for t in np.flatnonzero(row.mask)]
    assert len(trained) == len(set(trained)) > 100
    assert all(row.mask[0] == 0 and row.mask.any() and len(row.mask) == len(row.ids) for row in rows)


@pytest.mark.parametrize("device", SIZES)
def test_rows_come_from_the_seed(device):
    for name in SIZES[device]:
        one, again, other = (rows_of(name, device, 32_000, seed=seed) for seed in (0, 0, 1))
        assert all(np.array_equal(a.ids, b.ids) and np.array_equal(a.mask, b.mask) for a, b in zip(one, again, strict=True))
        assert not np.array_equal(one[0].ids, other[0].ids)
        lengths = [len(row.ids) for row in one]
        assert max(lengths) <= 20_000
        assert max(lengths) > 1.1 * np.mean(lengths)
