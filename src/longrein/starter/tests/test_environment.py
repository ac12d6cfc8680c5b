"""The environment by itself: no model is needed to know that it gives the rewards it should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from MODULE import FirstWord

from longrein.envs import EnvConfigError

TASK = {"words": ["tower", "barn", "hall"]}


def play(*replies: str) -> tuple[float, bool]:
    """The reward and whether the episode is over, after these replies."""
    episode = FirstWord(tokenizer=None).episode(TASK)
    assert "tower, barn, hall" in episode.start()[0]["content"]
    reward, done = 0.0, False
    for reply in replies:
        step = episode.step({"role": "assistant", "content": reply})
        reward, done = reward + step.reward, step.done
    return reward, done


def test_the_first_word_is_worth_all_and_another_a_little() -> None:
    assert play("Barn") == (1.0, True)
    assert play("tower") == (0.2, True)


def test_a_reply_that_is_no_word_can_be_mended() -> None:
    assert play("I do not know") == (0.0, False)
    assert play("tower, barn, hall", "barn") == (1.0, True)


def test_the_dataset_fits_the_environment() -> None:
    lines = (Path(__file__).parent.parent / "tasks.jsonl").read_text().splitlines()
    for task in map(json.loads, lines):
        assert FirstWord(tokenizer=None).episode(task).start()
    assert FirstWord.tasks(5, seed=1) == FirstWord.tasks(5, seed=1)


def test_a_setting_that_is_misspelled_is_refused() -> None:
    with pytest.raises(EnvConfigError, match="Did you mean 'partial_reward'"):
        FirstWord.check_config({"partial_rewards": 1.0})
