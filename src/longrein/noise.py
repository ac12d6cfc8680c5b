"""Where randomness comes from: every number is a pure function of a key, never of arrival order.

A rollout has a seed, a call has the seed of its path in the tree, a token has its position: the batch around a rollout, the
thread it ran on and the order replies came in change nothing.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

_RANDOM_MODULE = threading.RLock()


def derive(*parts: Any) -> int:
    """A 64-bit seed from any JSON-able parts; dicts are compared by content, not by key order.

    >>> derive(1, {"a": 1, "b": 2}) == derive(1, {"b": 2, "a": 1})
    True
    """
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), by SplitMix64's mixing function."""
    with np.errstate(over="ignore"):
        x = seeds + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


@contextmanager
def random_module_as(stream: random.Random) -> Iterator[None]:
    """Let the `random` module itself, which other libraries draw from, go on from a stream of ours; then put it back."""
    with _RANDOM_MODULE:
        outside = random.getstate()
        random.setstate(stream.getstate())
        try:
            yield
        finally:
            stream.setstate(random.getstate())
            random.setstate(outside)
