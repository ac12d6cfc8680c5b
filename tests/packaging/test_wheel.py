"""`python -m build` gives a wheel that installs and works in an empty environment, with the training extra and without.

In the default tests the environments hold links to what the wheel asks for; `make test-install` installs all of it from the index.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from empty import Empty, installed, linked
from missing import missing

from longrein.engines.scripted import ScriptedEngine
from longrein.proxy import InterceptionServer
from longrein.recorder import Recorder
from longrein.rendering import rendering_for
from longrein.tokenizer import Lexicon

ROOT = Path(__file__).parent.parent.parent
WAYS = ["linked", pytest.param("installed", marks=pytest.mark.installs)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel, which `build` makes from the source distribution beside it."""
    if find_spec("build") is None:
        missing("build is not installed; `make test` installs it")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert made.returncode == 0, made.stdout + made.stderr
    return out


@pytest.fixture(scope="module", params=WAYS)
def environment(request: Any, built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Empty]]:
    """The wheel in an environment of its own, by the name of an extra."""
    (wheel,) = built.glob("*.whl")
    made: dict[str, Empty] = {}

    def make(extra: str) -> Empty:
        if extra not in made:
            folder = tmp_path_factory.mktemp(extra or "light")
            (folder / "home").mkdir()
            {"linked": linked, "installed": installed}[request.param](folder / "venv", wheel, extra)
            made[extra] = Empty(folder / "venv", folder / "home")
        return made[extra]

    return make


def test_the_wheel_is_the_package_and_nothing_else(built: Path) -> None:
    source = ROOT / "src"
    files = {str(path.relative_to(source)) for path in (source / "longrein").rglob("*") if path.is_file()}
    (wheel,) = built.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == {name for name in files if "__pycache__" not in name}
    needed = {"py.typed", "viewer/static/page.js", "starter/run.toml", "harnesses/scripts/library_agents.py"}
    assert {f"longrein/{name}" for name in {*needed, "engines/inside_vllm/longrein_vllm.py"}} <= held


def test_the_source_distribution_can_be_tested(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        held = {name.partition("/")[2] for name in file.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "Makefile", "src/longrein/py.typed", "tests/conftest.py"} <= held
    assert not [name for name in held if name.startswith((".ci", ".venv", ".cache", "runs/"))]


@pytest.fixture
def light(environment: Callable[[str], Empty]) -> Empty:
    return environment("")


def test_without_the_training_extra_there_is_no_torch(light: Empty) -> None:
    code = """
import importlib.util, longrein, pathlib, sys
print(pathlib.Path(longrein.__file__).is_relative_to(sys.prefix), [n for n in ("torch", "transformers", "trl", "datasets")
      if importlib.util.find_spec(n)], (pathlib.Path(longrein.__file__).parent / "py.typed").exists())
"""
    assert light.run("python", "-c", code).stdout.split() == ["True", "[]", "True"]


def test_without_it_programs_are_listed_and_checked(light: Empty) -> None:
    assert "train" in light.run("longrein", "--help").stdout
    listed = light.run("longrein", "harness", "list", "--json").stdout.splitlines()
    assert "codex" in [json.loads(line)["program"] for line in listed]
    checked = light.run("longrein", "check", "react", "--sandbox", "none", "--json")  # links lead out of a sandbox
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["exact"] is True


@pytest.mark.parametrize("command", [["train"], ["eval", "--model", "tiny"], ["serve", "tiny"]])
def test_without_it_training_says_what_to_install(command: list[str], light: Empty) -> None:
    told = light.run("longrein", *command)
    assert told.returncode == 2
    assert told.stderr.endswith("is not installed; this needs `pip install 'longrein[train]'`\n")


def test_without_it_an_endpoint_is_evaluated_looked_at_exported_and_replayed(light: Empty) -> None:
    (light.home / "tasks.jsonl").write_text('{"rooms": ["attic", "barn"]}\n{"rooms": ["shed"]}\n')
    rendering = rendering_for(Lexicon(), "qwen3")
    recorder = Recorder(ScriptedEngine(lambda messages, tools: "I do not know.", rendering), rendering)
    recorder.open("r")
    with InterceptionServer() as server:
        (light.home / "key").write_text(server.open("r", recorder=recorder))
        code = "import os, sys; from longrein.cli import main; os.environ['K'] = open('key').read(); main()"
        to = ["--endpoint", f"{server.url}/v1", "--key-env", "K", "--model", "m", "--tasks", "tasks.jsonl", "--out", "ev"]
        played = light.run("python", "-c", code, "eval", *to, "--json")
    assert played.returncode == 0, played.stderr
    assert json.loads(played.stdout)["overall"]["rollouts"] == 2
    exported = light.run("longrein", "export", "ev", "--phase", "eval", "--json")
    assert json.loads(exported.stdout)["examples"] == 2
    assert "parquet needs pyarrow" in light.run("longrein", "export", "ev", "--phase", "eval", "--to", "x.parquet").stderr
    written = light.run("longrein", "view", "ev", "--export", "ev.html", "--json")
    assert json.loads(written.stdout)["rollouts"] == 2
    assert "I do not know." in (light.home / "ev.html").read_text()
    again = light.run("python", "-c", REPLAY)
    assert again.stdout.split() == ["True", "2"], again.stderr


REPLAY = """
from longrein import Agent
from longrein.engines.endpoint import Words
from longrein.engines.replay import ReplayEngine
from longrein.envs import TreasureHunt
from longrein.runs import Run
run = Run("ev")
played = list(run.rollouts())
words = Words(run.pieces())
agent = Agent(None, words, engine=ReplayEngine(played), rendering=words)
again = TreasureHunt(tokenizer=words).run_trial([one.task for one in played], agent)["rollouts"]
same = [[list(call.completion_ids) for call in one.calls.values()] for one in (*played, *again)]
print(same[: len(played)] == same[len(played) :], len(again))
"""


def test_without_it_the_page_is_served(light: Empty) -> None:
    code = "from longrein.runs import RunWriter; RunWriter('empty-run').close()"
    assert light.run("python", "-c", code).returncode == 0
    command = [str(light.place / "bin/longrein"), "view", "empty-run", "--no-browse", "--json"]
    with subprocess.Popen(command, cwd=light.home, text=True, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            for path in ("", "page.js", "page.css", "api/overview"):
                assert urllib.request.urlopen(url + path, timeout=60).status == 200
        finally:
            process.terminate()


def test_with_the_training_extra_a_new_project_trains(environment: Callable[[str], Empty], folder: Any) -> None:
    full = environment("train")
    assert full.run("longrein", "init", "word-game").returncode == 0
    small = ["--steps", "1", "--tasks-per-step", "2", "--num-generations", "2", "--micro-batch", "4", "--heldout", "2"]
    trained = full.run(
        "longrein", "train", "word-game/run.toml", "--model", str(folder("tiny")), *small, "--out", "run", "--json"
    )
    assert trained.returncode == 0, trained.stderr
    assert json.loads(trained.stdout)["steps"] == 1
    assert json.loads(full.run("longrein", "export", "run", "--to", "run.parquet", "--json").stdout)["examples"] == 4
