"""The small environments of these tests keep counts; every test starts them afresh."""

from __future__ import annotations

import pytest
from worlds import MoodyEpisode, Recording


@pytest.fixture(autouse=True)
def fresh_worlds() -> None:
    Recording.built.clear()
    Recording.trials.clear()
    MoodyEpisode.played = 0
