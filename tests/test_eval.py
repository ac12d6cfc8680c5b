"""`longrein eval` as a person runs it: a model, an endpoint, a program; figures, files, exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from longrein.check import Bytes, uses_tools
from longrein.cli import main
from longrein.contract import LongreinError
from longrein.engines.scripted import ScriptedEngine
from longrein.proxy import InterceptionServer
from longrein.recorder import Recorder
from longrein.rendering import rendering_for
from longrein.runs import Run

ENVIRONMENT = """
from longrein import Environment, Episode, Step

class EchoEpisode(Episode):
    def start(self):
        return [{"role": "user", "content": f"Say {self.task['word']}."}]

    def step(self, reply):
        return Step(reward=float(reply["content"] == self.task["word"]), done=True)

class Echo(Environment):
    episode_class = EchoEpisode

    @classmethod
    def tasks(cls, count, *, seed=0, env_config=None):
        return [{"word": f"word{n}"} for n in range(count)]

def judge(task, outcome):
    return 1.0
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: Any) -> Path:
    (tmp_path / "echoes.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("echoes", None)
    return tmp_path


@pytest.fixture
def endpoint(monkeypatch: Any) -> Iterator[Callable[[Any], str]]:
    """The proxy itself is an OpenAI-compatible endpoint: over a script, with a key."""
    servers = []

    def start(script: Any) -> str:
        rendering = rendering_for(Bytes(), "qwen3")
        recorder = Recorder(ScriptedEngine(script, rendering), rendering)
        recorder.open("r")
        servers.append(server := InterceptionServer().start())
        monkeypatch.setenv("ECHO_KEY", server.open("r", recorder=recorder))
        return server.url + "/v1"

    yield start
    for server in servers:
        server.stop()


def run(monkeypatch: Any, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["longrein", "eval", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def says_even_words(messages: Any, tools: Any) -> str:
    word = messages[-1]["content"].removeprefix("Say ").rstrip(".")
    return word if int(word.removeprefix("word")) % 2 == 0 else "no"


def test_an_endpoint_over_an_environment_and_two_runs_compared(
    project: Path, endpoint: Any, monkeypatch: Any, capsys: Any
) -> None:
    to = ["--endpoint", endpoint(says_even_words), "--model", "m", "--key-env", "ECHO_KEY", "--env", "echoes.Echo"]
    assert run(monkeypatch, *to, "--count", "10", "--rollouts", "2", "--json", "--out", "a") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["complete"]
    assert told["overall"]["success"]["value"] == 0.5
    assert told["overall"]["rollouts"] == 20
    assert told["overall"]["pass_at_k"]["2"]["value"] == 0.5
    assert json.loads((project / "a/eval.json").read_text())["tasks"] == told["tasks"]
    rollouts = list(Run(project / "a").rollouts())
    assert len(rollouts) == 20
    assert {rollout.env for rollout in rollouts} == {"Echo"}
    pieces = Run(project / "a").pieces()
    first = next(iter(rollouts[0].calls.values()))
    assert b"Say word" in b"".join(pieces[int(token)] for token in first.context_ids)

    to[1] = endpoint(lambda messages, tools: messages[-1]["content"].removeprefix("Say ").rstrip("."))
    assert run(monkeypatch, *to, "--count", "12", "--out", "b") == 0
    assert "100.0%" in capsys.readouterr().out
    assert run(monkeypatch, "--compare", "a/eval.json", "b", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["tasks"], told["only_b"], told["figures"][0]["better"], told["figures"][0]["worse"]) == (10, 2, 5, 0)
    assert run(monkeypatch, "--compare", "a", "b") == 0
    assert "50.0%" in capsys.readouterr().out


def test_failures_have_an_exit_code_of_their_own(project: Path, endpoint: Any, monkeypatch: Any, capsys: Any) -> None:
    (project / "echoes.py").write_text(
        ENVIRONMENT.replace("        return Step(", "        1 / int(reply['content'] != 'no')\n        return Step(")
    )
    to = ["--endpoint", endpoint(says_even_words), "--model", "m", "--key-env", "ECHO_KEY", "--env", "echoes.Echo"]
    assert run(monkeypatch, *to, "--count", "4", "--out", "some") == 3
    assert "2 rollouts failed" in capsys.readouterr().out
    assert json.loads((project / "some/eval.json").read_text())["overall"]["success"]["value"] == 1.0, (
        "of those that were scored"
    )
    monkeypatch.setenv("ECHO_KEY", "wrong")
    assert run(monkeypatch, *to, "--count", "2", "--out", "all") == 1
    assert "every rollout failed; the first cause: EndpointError" in capsys.readouterr().err


def test_a_program_through_an_endpoint(project: Path, endpoint: Any, monkeypatch: Any, capsys: Any) -> None:
    (project / "tasks.jsonl").write_text('{"rooms": ["attic", "barn"]}\n')
    command = ["{python}", "-m", "longrein.harnesses.react", "--rooms", "{rooms}"]
    config = json.dumps({"command": command, "verify": "echoes.judge"})
    env = ["--env", "longrein.envs.HarnessEnv", "--env-config", config, "--tasks", "tasks.jsonl", "--sandbox", "none"]
    to = ["--endpoint", endpoint(uses_tools), "--model", "m", "--key-env", "ECHO_KEY"]
    assert run(monkeypatch, *to, *env, "--rollouts", "2", "--out", "p", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["overall"]["success"]["value"] == 1.0
    assert told["overall"]["turns"] > 1


def test_a_model_from_a_run_file(project: Path, folder: Any, monkeypatch: Any, capsys: Any) -> None:
    (project / "run.toml").write_text(
        'env = "echoes.Echo"\nsteps = 3\n[env_config]\nmax_reply_tokens = 4\nmax_tokens = 64\n'
    )
    assert run(monkeypatch, "run.toml", "--model", str(folder("tiny")), "--count", "3") == 0
    assert "success" in capsys.readouterr().out
    (results,) = project.glob("runs/*-eval/eval.json")
    assert json.loads(results.read_text())["overall"]
    assert not (project / "runs/latest").exists(), "that is the newest run that trained"


class Stuck(ScriptedEngine):
    """Answers the first words and never the others."""

    async def sample(self, request: Any) -> Any:
        if not request.messages[-1]["content"].startswith(("Say word0.", "Say word1.")):
            await asyncio.Event().wait()
        return await super().sample(request)


def test_ctrl_c_keeps_the_figures_of_what_was_played(project: Path) -> None:
    rendering = rendering_for(Bytes(), "qwen3")
    recorder = Recorder(Stuck(says_even_words, rendering), rendering)
    recorder.open("r")
    with InterceptionServer() as server:
        env = {**os.environ, "OPENAI_API_KEY": server.open("r", recorder=recorder)}
        command = [sys.executable, "-c", "from longrein.cli import main; main()", "eval", "--endpoint", server.url + "/v1"]
        with subprocess.Popen(
            [*command, "--model", "m", "--env", "echoes.Echo", "--count", "6", "--out", "cut"],
            cwd=project, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            try:
                deadline = time.monotonic() + 120
                while not _played(project / "cut") and time.monotonic() < deadline and process.poll() is None:
                    time.sleep(0.05)
                process.send_signal(signal.SIGINT)
                shown, told = process.communicate(timeout=120)
            finally:
                process.kill()
    assert process.returncode == 130, told
    assert "stopped after 2 of 6 rollouts; their figures are in" in told.replace("\n", " ")
    assert "Traceback" not in told
    results = json.loads((project / "cut/eval.json").read_text())
    assert (results["complete"], results["overall"]["success"]["value"]) == (False, 0.5)
    assert "50.0%" in shown


def _played(folder: Path) -> bool:
    try:
        return len(list(Run(folder).rollouts())) == 2
    except (LongreinError, sqlite3.Error):  # not there yet
        return False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--endpoint", "http://127.0.0.1:1/v1"], "no --model is said"),
        (["--endpoint", "nowhere", "--model", "m"], "the endpoint is 'nowhere'; it must be a url"),
        (["--compare", "nowhere", "b"], "nowhere holds no results of `longrein eval`"),
        (["nowhere.toml"], "there is no run file 'nowhere.toml'"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(
    project: Path, arguments: list[str], message: str, monkeypatch: Any, capsys: Any
) -> None:
    assert run(monkeypatch, *arguments) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told
