"""`longrein eval` as a person runs it: a model, an endpoint, a program; figures, files, exit codes."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from longrein.check import uses_tools
from longrein.cli import main
from longrein.contract import LongreinError
from longrein.engines.scripted import ScriptedEngine
from longrein.proxy import InterceptionServer
from longrein.recorder import Recorder
from longrein.rendering import rendering_for
from longrein.runs import Run, RunWriter
from longrein.tokenizer import Lexicon

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
        rendering = rendering_for(Lexicon(), "qwen3")
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
    """Answers the first words, and the others once it is told to."""

    stuck = True

    async def sample(self, request: Any) -> Any:
        while self.stuck and not request.messages[-1]["content"].startswith(("Say word0.", "Say word1.")):
            await asyncio.sleep(0.01)
        return await super().sample(request)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_was_played_is_kept_and_the_same_command_goes_on(
    number: int, project: Path, monkeypatch: Any, capsys: Any
) -> None:
    rendering = rendering_for(Lexicon(), "qwen3")
    engine = Stuck(says_even_words, rendering)
    recorder = Recorder(engine, rendering)
    recorder.open("r")
    with InterceptionServer() as server:
        monkeypatch.setenv("OPENAI_API_KEY", server.open("r", recorder=recorder))
        flags = ["--endpoint", server.url + "/v1", "--model", "m", "--env", "echoes.Echo", "--count", "6", "--out", "cut"]
        with subprocess.Popen(
            [sys.executable, "-c", "from longrein.cli import main; main()", "eval", *flags],
            cwd=project, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            try:
                deadline = time.monotonic() + 120
                while not _played(project / "cut") and time.monotonic() < deadline and process.poll() is None:
                    time.sleep(0.05)
                process.send_signal(number)
                shown, told = process.communicate(timeout=120)
            finally:
                process.kill()
        if number == signal.SIGINT:
            assert process.returncode == 130, told
            assert "stopped after 2 of 6 rollouts, which are kept in cut; go on with: longrein eval --endpoint" in told
            assert "Traceback" not in told
            results = json.loads((project / "cut/eval.json").read_text())
            assert (results["complete"], results["overall"]["success"]["value"]) == (False, 0.5)
            assert "50.0%" in shown
        kept = {rollout.id for rollout in Run(project / "cut").rollouts()}
        engine.stuck = False
        assert run(monkeypatch, *flags) == 0
        assert len(list(Run(project / "cut").rollouts())) == 6
        assert "going on with cut: 2 rollouts were played before" in capsys.readouterr().err
        assert run(monkeypatch, *flags, "--temperature", "0.5") == 2
        assert "cut holds an evaluation with another temperature: 1.0, now 0.5" in capsys.readouterr().err
        assert run(monkeypatch, *flags, "--rollouts", "2", "--json") == 0
    results = json.loads(capsys.readouterr().out)
    assert (results["complete"], results["overall"]["rollouts"]) == (True, 12)
    rollouts = list(Run(project / "cut").rollouts())
    assert kept <= {rollout.id for rollout in rollouts}
    assert sorted(rollout.task["word"] for rollout in rollouts) == sorted(f"word{n}" for n in range(6) for _ in (0, 1))
    assert len({rollout.group for rollout in rollouts}) == 6, "rollouts of a task stay together"
    pieces = Run(project / "cut").pieces()
    for rollout in rollouts:
        (call,) = rollout.calls.values()
        text = b"".join(pieces[int(token)] for token in call.context_ids).decode()
        assert f"Say {rollout.task['word']}." in text, "ids mean what they meant"


def test_a_training_run_is_not_evaluated_into(project: Path, monkeypatch: Any, capsys: Any) -> None:
    (project / "trained").mkdir()
    RunWriter(project / "trained").close()
    flags = ["--endpoint", "http://127.0.0.1:1/v1", "--model", "m", "--env", "echoes.Echo", "--out", "trained"]
    assert run(monkeypatch, *flags) == 2
    assert "trained holds a run that is no evaluation" in capsys.readouterr().err


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
