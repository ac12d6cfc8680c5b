"""The small environments of these tests keep counts; every test starts them afresh. Records are those of the runs' tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from worlds import MoodyEpisode, Recording

sys.path.append(str(Path(__file__).parent.parent / "runs"))


@pytest.fixture(autouse=True)
def fresh_worlds() -> None:
    Recording.built.clear()
    Recording.trials.clear()
    MoodyEpisode.played = 0
