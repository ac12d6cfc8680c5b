"""A run that is stopped by a real signal, wherever it comes, goes on as if it had not been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import parts
import pytest
import torch
from transformers import AutoModelForCausalLM

from longrein.contract import LongreinError
from longrein.envs.environment import Environment
from longrein.training.interrupts import newest_checkpoint
from longrein.training.job import train
from longrein.training.settings import Settings
from longrein.training.trainer import GRPOEnvTrainer

Weights = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def settings(folder: Callable[[str], Path]) -> Settings:
    small = {"max_turns": 2, "min_hops": 1, "max_hops": 1, "max_tokens": 192, "max_reply_tokens": 12}
    sizes = {"tasks_per_step": 2, "num_generations": 2, "micro_batch": 2, "heldout": 0, "save_steps": 0}
    return Settings(model=str(folder("tiny")), env_config=small, steps=3, learning_rate=1e-3, **sizes)


@pytest.fixture(scope="module")
def straight(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """The weights of a run that nothing stopped."""
    run = tmp_path_factory.mktemp("straight") / "run"
    train(settings, run)
    return weights(run)


def weights(run: Path) -> Weights:
    return parts.weights(AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32))


def interrupting(monkeypatch: Any, owner: Any, name: str, call: int, number: int = signal.SIGINT) -> None:
    """The signal comes within the `call`-th call of a method, before it has done its work."""
    original, calls = getattr(owner, name), iter(range(1, 1000))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


@pytest.mark.parametrize(
    ("owner", "name", "call", "number", "done"),
    [
        (GRPOEnvTrainer, "compute_loss", 4, signal.SIGINT, 1),
        (Environment, "play", 2, signal.SIGTERM, 1),
        (torch.optim.AdamW, "step", 2, signal.SIGINT, 2),
        (GRPOEnvTrainer, "log", 2, signal.SIGINT, 2),
    ],
    ids=["between two passes of a step", "while rollouts are played", "in the optimizer's step", "in the log"],
)
def test_a_run_goes_on_as_if_it_had_not_been_stopped(
    owner: Any, name: str, call: int, number: int, done: int, settings: Settings, straight: Weights, tmp_path: Path, monkeypatch: Any
) -> None:  # fmt: skip
    run = tmp_path / "run"
    with monkeypatch.context() as patched:
        interrupting(patched, owner, name, call, number)
        with pytest.raises(KeyboardInterrupt):
            train(settings, run)
    found = newest_checkpoint(run)
    assert found is not None
    assert found.name == f"checkpoint-{done}"
    train(replace(settings, resume=True), run)
    for key, value in weights(run).items():
        assert torch.equal(value, straight[key]), key
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_ctrl_c_waits_for_a_checkpoint_that_is_being_saved(settings: Settings, tmp_path: Path, monkeypatch: Any) -> None:
    interrupting(monkeypatch, GRPOEnvTrainer, "_save_rng_state", 1)
    with pytest.raises(KeyboardInterrupt):
        train(replace(settings, save_steps=1), tmp_path / "run")
    found = newest_checkpoint(tmp_path / "run")
    assert found is not None
    assert found.name == "checkpoint-1"
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"} <= {
        path.name for path in found.iterdir()
    }


def test_what_breaks_is_saved_too(settings: Settings, tmp_path: Path, monkeypatch: Any) -> None:
    original, calls = GRPOEnvTrainer.compute_loss, iter(range(100))

    def broken(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("the device is gone")
        return original(*args, **kwargs)

    monkeypatch.setattr(GRPOEnvTrainer, "compute_loss", broken)
    with pytest.raises(RuntimeError, match="the device is gone"):
        train(settings, tmp_path / "run")
    assert newest_checkpoint(tmp_path / "run") is not None


KILLED = """
import os, signal, sys
from pathlib import Path
from longrein.training.job import train
from longrein.training.settings import Settings
from longrein.training.trainer import GRPOEnvTrainer
original, calls = GRPOEnvTrainer._save_rng_state, iter(range(100))
def killing(*args):
    if next(calls) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args)
GRPOEnvTrainer._save_rng_state = killing
import json
train(Settings(**json.loads(sys.argv[1])), Path(sys.argv[2]))
"""


def test_a_checkpoint_that_was_cut_off_by_kill_9_is_none(settings: Settings, straight: Weights, tmp_path: Path) -> None:
    saving = replace(settings, save_steps=1)
    given = {name: getattr(saving, name) for name in ("model", "env_config", "steps", "learning_rate", "tasks_per_step")}
    given |= {name: getattr(saving, name) for name in ("num_generations", "micro_batch", "heldout", "save_steps")}
    run = tmp_path / "run"
    command = [sys.executable, "-c", KILLED, json.dumps(given), str(run)]
    assert subprocess.run(command, capture_output=True, timeout=480).returncode == -signal.SIGKILL
    assert (run / "checkpoints/checkpoint-2").exists()
    found = newest_checkpoint(run)
    assert found is not None
    assert found.name == "checkpoint-1"
    train(replace(saving, resume=True), run)
    assert all(torch.equal(value, straight[key]) for key, value in weights(run).items())


def test_a_folder_that_holds_a_run_is_not_trained_into(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "run.sqlite").write_bytes(b"")
    with pytest.raises(LongreinError, match="holds a run already; go on with it"):
        train(settings, tmp_path)
