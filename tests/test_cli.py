"""`longrein train` as a person runs it: a run folder, a table, and one sentence for a mistake."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from longrein.cli import main
from longrein.contract import LongreinError
from longrein.runs import Run


def longrein(*arguments: str, cwd: Path, timeout: float = 480) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", "from longrein.cli import main; main()", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def run(folder: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A short training run of the small policy."""
    project = tmp_path_factory.mktemp("project")
    flags = ["--steps", "2", "--tasks-per-step", "2", "--num-generations", "4", "--heldout", "8", "--micro-batch", "8"]
    return longrein("train", "--model", str(folder("tiny")), *flags, cwd=project), project


def test_a_run_ends_in_a_table_and_the_same_figures_on_disk(run: Any) -> None:
    result, project = run
    assert result.returncode == 0, result.stderr
    assert "before" in result.stdout
    assert "after" in result.stdout
    summary = json.loads((project / "runs/latest/summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["seed"] == 0
    assert 0 <= summary["heldout_success_before"] <= 1
    assert summary["seconds"] > 0
    assert f"{summary['heldout_success_after']:.1%}" in result.stdout


def test_a_run_shows_each_step_and_writes_its_metrics(run: Any) -> None:
    result, project = run
    assert "step 2" in result.stdout
    assert "tokens/s" in result.stdout
    lines = [json.loads(line) for line in (project / "runs/latest/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert {"reward", "success", "loss", "turns/mean", "failed", "branches", "time/rollout"} <= set(lines[0])


BROKEN = """
from longrein import Environment, Episode, Step

class Breaks(Episode):
    def start(self):
        return [{"role": "user", "content": "Open."}]

    def step(self, reply):
        raise RuntimeError("the door is stuck")

class Broken(Environment):
    episode_class = Breaks

    @classmethod
    def tasks(cls, count, *, seed=0, env_config=None):
        return [{"n": n} for n in range(count)]
"""


def test_an_environment_that_always_fails_ends_the_run_before_it_trains(folder: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    flags = ["--env", "broken.Broken", "--env-config", '{"max_tokens": 64}', "--steps", "2", "--heldout", "2"]
    result = longrein("train", "--model", str(folder("tiny")), *flags, "--num-generations", "2", cwd=tmp_path)
    assert result.returncode == 2
    assert "every one of 2 held-out rollouts failed before any training" in result.stderr
    assert "the door is stuck" in result.stderr
    assert not list(tmp_path.rglob("summary.json"))


def test_a_smoke_run_in_which_a_rollout_fails_says_why_with_exit_code_1(folder: Any, tmp_path: Path) -> None:
    sometimes = "if self.task['n'] % 2: return Step(done=True)\n        raise"
    (tmp_path / "broken.py").write_text(BROKEN.replace("raise", sometimes))
    flags = ["--env", "broken.Broken", "--env-config", '{"max_tokens": 64, "max_reply_tokens": 4}', "--json"]
    smoke = longrein("train", "--smoke", "--model", str(folder("tiny")), *flags, cwd=tmp_path)
    assert smoke.returncode == 1, smoke.stderr
    assert re.fullmatch(
        r"longrein: \d+ of 32 rollouts failed; the first cause: RuntimeError: the door is stuck",
        smoke.stderr.splitlines()[-1],
    )
    assert json.loads(smoke.stdout)["steps"] == 3, "it is trained and told all the same"


def test_the_trained_model_loads(run: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = run[1] / "runs/latest/model"
    assert AutoModelForCausalLM.from_pretrained(model).num_parameters() > 1_000_000
    assert AutoTokenizer.from_pretrained(model).chat_template


def test_ctrl_c_saves_and_says_how_to_go_on(folder: Any, tmp_path: Path) -> None:
    flags = ["--steps", "30", "--tasks-per-step", "2", "--num-generations", "4", "--heldout", "8", "--micro-batch", "8"]
    command = [sys.executable, "-u", "-c", "from longrein.cli import main; main()", "train", "--model", str(folder("tiny"))]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MARK": (mark := f"mark-{uuid.uuid4().hex}")}
    with subprocess.Popen(
        [*command, *flags, "--program-share", "0.5", "--out", "run"],
        cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 2"):
                process.send_signal(signal.SIGINT)
                break
        _, told = process.communicate(timeout=180)
    assert process.returncode == 130, told
    assert "stopped; go on with: longrein train --resume run" in told
    assert not _alive(mark), "nothing that it started goes on"
    assert os.readlink(tmp_path / "latest") == "run"
    config = json.loads((tmp_path / "run/config.json").read_text())
    (tmp_path / "run/config.json").write_text(json.dumps({**config, "steps": 5}))
    result = longrein("train", "--resume", "run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 5
    phases = Run(tmp_path / "run").rows("SELECT phase, count(*) FROM rollouts GROUP BY phase ORDER BY phase", raw=True)
    assert (phases[0], phases[1]) == (("after", 8), ("before", 8)), "what was played before is not played again"
    assert (
        f"{json.loads((tmp_path / 'run/summary.json').read_text())['heldout_success_before']:.0%} of held-out"
        in result.stdout
    )
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))


def _alive(mark: str) -> list[str]:
    """Processes that were started with the mark in their environment, or by one that was."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if mark.encode() in (place / "environ").read_bytes():
                found.append((place / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stps", "3"], "there is no option --stps. Did you mean --steps? (see `longrein train --help`)"),
        (["--steps", "ten"], "Invalid value for '--steps'"),
        (["--env", "longrein.envs.TreasureHnut"], "has no 'TreasureHnut'. Did you mean 'longrein.envs.TreasureHunt'?"),
        (
            ["--env", "longrein.env.Calculator"],
            "cannot be imported: No module named 'longrein.env'. Did you mean 'longrein.envs.Calc",
        ),
        (["--harness", "codexx"], "there is no program 'codexx' that longrein knows. Did you mean 'codex'?"),
        (["--tasks", "tasks.txt"], "the file 'tasks.txt' must end in .jsonl or .parquet"),
        (["--model", "nowhere/model"], "causal model's name on the hub (We couldn't connect to"),
        (["--env", "longrein.envs.Nowhere"], "the module 'longrein.envs' has no 'Nowhere'"),
        (["--env-config", "{"], "--env-config is not JSON"),
        (["--env-config", '{"max_turn": 1}'], "has no setting 'max_turn'. Did you mean 'max_turns'?"),
        (["--tasks", "nowhere.jsonl"], "there is no file 'nowhere.jsonl'"),
        (["--micro-batch", "5", "--tasks-per-step", "2"], "which 5 (micro_batch) does not divide"),
        (["--model", "/nowhere"], "the model '/nowhere' cannot be loaded: it must be a folder"),
        (["--model", "./nowhere"], "name on the hub (there is no folder at that path)"),
        (["--model", "runs/latest/model"], "name on the hub (there is no folder at that path)"),
        (["--sandbox", "docker"], "--sandbox is 'docker'; it must be one of auto, bubblewrap, none"),
        (["--advantages", "best"], "advantages is 'best'; it must be one of"),
        (["--report-to", "wandbb"], "has no setting 'wandbb'. Did you mean 'wandb'?"),
        (["nowhere.toml"], "there is no run file 'nowhere.toml'"),
        (["--resume", "nowhere"], "nowhere holds no checkpoint to go on from"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(
    arguments: list[str], message: str, folder: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.txt").write_text("")
    monkeypatch.setattr(sys, "argv", ["longrein", "train", "--model", str(folder("tiny")), "--heldout", "2", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    told = capsys.readouterr().err
    assert stopped.value.code == 2
    assert message in told
    assert "Traceback" not in told
    assert told.splitlines()[-1].startswith("longrein: "), "one line"
    assert not any(tmp_path.glob("runs/*")), "a run that could not begin leaves nothing"


def test_a_folder_that_cannot_be_used_is_named(folder: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    monkeypatch.setattr(sys, "argv", ["longrein", "train", "--model", str(folder("tiny")), "--out", "taken/run"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    assert "longrein: 'taken/run' cannot be used: Not a directory (run with --debug" in capsys.readouterr().err


def test_debug_shows_the_traceback_wherever_it_stands(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (["--debug", "train", "nowhere.toml"], ["train", "nowhere.toml", "--debug"]):
        monkeypatch.setattr(sys, "argv", ["longrein", *arguments])
        with pytest.raises(LongreinError, match="there is no run file"):
            main()


def test_what_breaks_is_told_in_one_sentence_with_exit_code_1(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def broken(*arguments: Any, **options: Any) -> None:
        raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")

    monkeypatch.setattr("longrein.runs.Run", broken)
    monkeypatch.setattr(sys, "argv", ["longrein", "view", "nowhere"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    assert capsys.readouterr().err.startswith(
        "longrein: ModuleNotFoundError: No module named 'torchvision' (run with --debug"
    )


def test_every_command_has_help_with_an_example(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("train", "eval", "check", "view", "export", "serve", "serve-vllm", "init"):
        monkeypatch.setattr(sys, "argv", ["longrein", name, "--help"])
        with pytest.raises(SystemExit):
            main()
        assert f"`longrein {name} " in capsys.readouterr().out


def test_help_answers_quickly() -> None:
    """Processor time, the best of five: the machine may be busy."""
    code = "import sys; sys.argv = ['longrein', '--help']; from longrein.cli import main; main()"
    used = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=480)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(used) < 0.6, "0.3 s on a quiet machine"
