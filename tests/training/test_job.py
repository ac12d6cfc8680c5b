"""Rows are held out apart from those that are trained on, however few different tasks there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longrein import LongreinError
from longrein.training.job import Settings, datasets_of
from longrein.training.rows import _apart


def rows(*numbers: int) -> list[dict[str, Any]]:
    return [{"n": number} for number in numbers]


def test_the_first_rows_are_held_out_and_never_trained_on() -> None:
    rest, kept = _apart(rows(1, 2, 3, 1, 4, 5, 6), 2)
    assert kept == rows(1, 2)
    assert rest == rows(3, 4, 5, 6)


def test_of_a_few_different_tasks_a_third_is_held_out() -> None:
    rest, kept = _apart(rows(*([1, 2, 3] * 5)), 8)
    assert kept == rows(1)
    assert {row["n"] for row in rest} == {2, 3}
    with pytest.raises(LongreinError, match="none is left to train on"):
        _apart(rows(1, 1), 1)
    assert _apart(rows(1, 1), 0) == (rows(1, 1), [])


def test_one_hunt_in_so_many_is_played_by_the_program() -> None:
    train, heldout = datasets_of(Settings(model="", steps=4, heldout=16, program_share=0.25))
    assert [row["env_class_path"] for row in heldout[:4]] == [
        "longrein.envs.HarnessEnv",
        *["longrein.envs.TreasureHunt"] * 3,
    ]
    assert sum(row["env_class_path"].endswith("HarnessEnv") for row in train) == pytest.approx(len(train) / 4, abs=1)
    with pytest.raises(LongreinError, match="program_share is for hunts by tool calls"):
        datasets_of(Settings(model="", env="longrein.envs.Calculator", program_share=0.25))


def test_the_sandbox_asked_for_is_that_of_programs_which_name_none(tmp_path: Path) -> None:
    settings = Settings(model="", steps=4, heldout=8, program_share=0.25, sandbox="none")
    for row in datasets_of(settings)[1]:
        assert row["env_config"].get("sandbox") == ("none" if row["env_class_path"].endswith("HarnessEnv") else None)
    config = {"command": ["true"], "verify": ["true"], "sandbox": {"memory_mb": 9}}
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n".join(json.dumps({"n": n}) for n in range(5)))
    settings = Settings(model="", env="longrein.envs.HarnessEnv", env_config=config, tasks=str(tasks), sandbox="none")
    assert datasets_of(settings)[0][0]["env_config"]["sandbox"] == {"memory_mb": 9}
