"""`longrein init`: the project it writes passes its own tests and trains, as it stands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from longrein.cli import main


def in_folder(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=480)


def init(monkeypatch: Any, folder: Path, name: str) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["longrein", "init", name])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code, stopped.value.code


def test_a_new_project_passes_its_tests_and_trains(folder: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    init(monkeypatch, tmp_path, "word-game")
    assert "now: cd word-game && pytest && longrein train run.toml" in capsys.readouterr().out
    project = tmp_path / "word-game"
    tested = in_folder(project, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert tested.returncode == 0, tested.stdout
    assert "4 passed" in tested.stdout
    small = ["--steps", "2", "--tasks-per-step", "2", "--num-generations", "4", "--micro-batch", "8", "--heldout", "4"]
    longrein = [sys.executable, "-c", "from longrein.cli import main; main()"]
    trained = in_folder(project, *longrein, "train", "run.toml", "--model", str(folder("tiny")), *small, "--json")
    assert trained.returncode == 0, trained.stderr
    summary = json.loads(trained.stdout)
    assert (summary["steps"], list(summary["by_env"])) == (2, ["FirstWord"])
    assert "step 2" in trained.stderr
    config = json.loads((project / "runs/latest/config.json").read_text())
    assert (config["env"], config["steps"], config["env_config"]) == ("word_game.FirstWord", 2, {"partial_reward": 0.2})


def test_every_line_of_the_projects_run_file_is_a_setting(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    from longrein.training.settings import read_run_file

    init(monkeypatch, tmp_path, "mine")
    init(monkeypatch, tmp_path, "My Game")
    assert tomllib.loads((tmp_path / "My Game/pyproject.toml").read_text())["project"]["name"] == "My-Game"
    assert read_run_file(tmp_path / "My Game/run.toml")["env"] == "my_game.FirstWord"
    assert "now: cd 'My Game' && pytest && longrein train run.toml" in capsys.readouterr().out
    said = read_run_file(tmp_path / "mine/run.toml")
    assert said["env"] == "mine.FirstWord"
    assert Path(said["tasks"]) == tmp_path / "mine/tasks.jsonl"
    for path in (tmp_path / "mine").rglob("*"):
        assert path.is_dir() or not {"MODULE", "NAME"} & set(path.read_text().replace('"', " ").replace(".", " ").split())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("full", "'full' is there already and not an empty folder"),
        ("json", "there is a Python module 'json' already"),
        ("1st", "it must begin with a letter"),
    ],
)
def test_a_name_that_cannot_be(tmp_path: Path, monkeypatch: Any, capsys: Any, name: str, message: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["longrein", "init", name])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "full/file").read_text() == ""
