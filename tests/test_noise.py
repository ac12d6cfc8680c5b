"""Randomness is a pure function of its key."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from longrein.noise import derive, uniforms

WORD = st.integers(0, 2**64 - 1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, st.randoms())
def test_derive_sees_content_and_not_key_order(value: object, random: object) -> None:
    assert derive(1, shuffled(value, random)) == derive(1, value)
    assert derive(2, value) != derive(1, value)
    assert 0 <= derive(value) < 2**64


def test_derive_takes_half_a_surrogate_pair() -> None:
    assert derive("\ud800") != derive("\ud801")


@given(st.lists(st.tuples(WORD, st.integers(0, 10_000)), min_size=1, max_size=20))
def test_a_number_depends_on_its_own_key_alone(keys: list[tuple[int, int]]) -> None:
    seeds, positions = (np.array(column, np.uint64) for column in zip(*keys, strict=True))
    together = uniforms(seeds, positions)
    assert ((together >= 0) & (together < 1)).all()
    for index in range(len(keys)):
        alone = uniforms(seeds[index : index + 1], positions[index : index + 1])
        assert alone[0] == together[index]


def test_numbers_are_uniform_along_positions_and_along_seeds() -> None:
    count = 20_000
    for seeds, positions in ((np.full(count, 7), np.arange(count)), (np.arange(count), np.zeros(count))):
        numbers = uniforms(seeds.astype(np.uint64), positions.astype(np.uint64))
        histogram = np.histogram(numbers, bins=20, range=(0, 1))[0]
        assert ((histogram - count / 20) ** 2 / (count / 20)).sum() < 50  # chi-square with 19 degrees of freedom
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def shuffled(value: object, random: object) -> object:
    """The same JSON with its keys in another order."""
    if isinstance(value, dict):
        keys = list(value)
        random.shuffle(keys)  # type: ignore[attr-defined]
        return {key: shuffled(value[key], random) for key in keys}
    return [shuffled(item, random) for item in value] if isinstance(value, list) else value
