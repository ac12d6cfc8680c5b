"""One table of settings: every flag is a setting of a run file, and a mistake is told with the name it should have been."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import typer.main

from longrein.cli import app
from longrein.training.settings import SettingError, Settings, read_run_file, setting_types, settings_from


def test_every_setting_is_a_flag_with_help_and_the_same_default() -> None:
    train = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    flags = {one.name: one for one in train.params}
    for one in dataclasses.fields(Settings):
        if not one.metadata:
            continue
        flag: Any = flags[one.name]
        assert flag.opts == ["--" + one.name.replace("_", "-")]
        assert flag.help == one.metadata["help"]
        if not isinstance(getattr(Settings(), one.name), dict | tuple):
            assert flag.default == one.default
    assert set(flags) - set(setting_types()) == {"run_file", "config", "resume", "smoke", "as_json"}


def test_flags_win_over_the_run_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'steps = 7\nlearning_rate = 1\nreport_to = ["wandb"]\nenv = "mine.Env"\n[env_config]\nmax_turns = 3\ncredit = "last"\n'
    )
    settings = settings_from(read_run_file(file), {"steps": 9, "env_config": {"max_turns": 5}})
    assert (settings.steps, settings.env, settings.rate) == (9, "mine.Env", 1.0)
    assert settings.report_to == ("wandb",)
    assert settings.env_config == {"max_turns": 5, "credit": "last"}
    assert settings.seed == Settings().seed


def test_paths_of_a_run_file_are_found_beside_it(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    file = tmp_path / "run.toml"
    file.write_text('tasks = "tasks.jsonl"\nmodel = "owner/name"')
    said = read_run_file(file)
    assert said["tasks"] == str(tmp_path / "tasks.jsonl")
    assert said["model"] == "owner/name"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step = 7", "has no setting 'step'. Did you mean 'steps'?"),
        ("learning-rate = 7", "has no setting 'learning-rate'. Did you mean 'learning_rate'?"),
        ("resume = true", "has no setting 'resume'"),
        ("zzz = 7", "has no setting 'zzz'. It knows model, env"),
        ("steps = 'ten'", "steps is 'ten'; it must be a whole number of 1 or more"),
        ("steps = 2.5", "steps is 2.5; it must be a whole number"),
        ("steps = true", "steps is True; it must be a whole number"),
        ("steps = 0", "steps is 0; it must be a whole number of 1 or more"),
        ("beta = nan", "beta is nan; it must be a number of 0 or more"),
        ("program_share = 2", "program_share is 2.0; it must be a number from 0 to 1"),
        ("tasks = 3", "tasks is 3; it must be a text"),
        ("report_to = 'wandb'", "report_to is 'wandb'; it must be a list of texts"),
        ("env_config = 'x'", "env_config is 'x'; it must be a table of settings"),
        ("steps = ", "is not TOML"),
    ],
)
def test_a_mistake_in_a_run_file_is_told_by_name(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(SettingError) as told:
        read_run_file(file)
    assert message in str(told.value)
    assert "run.toml" in str(told.value)


def test_a_run_file_that_is_not_there() -> None:
    with pytest.raises(SettingError, match="there is no run file 'nowhere.toml'"):
        read_run_file(Path("nowhere.toml"))


def test_a_program_by_its_name_is_the_environment() -> None:
    with pytest.raises(SettingError, match="say which tasks it gets"):
        settings_from({}, {"harness": "codex"})
    with pytest.raises(SettingError, match="verify is said and harness is not"):
        settings_from({}, {"verify": "mine.verify"})
    given = settings_from({}, {"harness": "codex", "verify": "mine.verify", "tasks": "tasks.jsonl"})
    assert given.env == "longrein.envs.HarnessEnv"
    assert given.env_config == {"program": "codex", "command": [], "verify": "mine.verify"}
    repo = settings_from({}, {"harness": "pi", "env": "longrein.envs.RepoEnv", "env_config": {"max_turns": 3}})
    from longrein.envs import RepoEnv

    config = RepoEnv.check_config(repo.env_config)
    assert (repo.env, config.max_turns) == ("longrein.envs.RepoEnv", 3)
    saved = {name: getattr(repo, name) for name in setting_types()}
    assert settings_from(saved, {}) == repo, "a run that goes on has the settings it had"
