"""Two processes on the CPU (gloo, loopback): the same training as one, one error for all, and no collective that times out."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import launched
import parts
import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

from longrein.training.logprobs import trajectory_logps

HERE = Path(__file__).parent


def launch(job: str, folder: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
        "--num_cpu_threads_per_process", "1", "--main_process_ip", "127.0.0.1", "--main_process_port", str(port),
        "--mixed_precision", "no", "--dynamo_backend", "no", str(HERE / "launched.py"), job, str(folder),
    ]  # fmt: skip
    # `--cpu` would start one process; the launcher of several is the one that is called multi_gpu
    cpu = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    environment = {**os.environ, **cpu, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


def test_two_processes_train_as_one(tmp_path):
    folder = tmp_path / "two"
    folder.mkdir()
    done = launch("equal", folder, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    one = launched.equal(tmp_path / "one", 1)
    ranks = [torch.load(folder / f"result_{rank}.pt") for rank in range(2)]
    for loss in launched.LOSSES:
        for rank in ranks:
            assert rank[loss]["reward"] == pytest.approx(one[loss]["reward"], abs=1e-5)
            for name, value in one[loss]["weights"].items():
                torch.testing.assert_close(rank[loss]["weights"][name], value, rtol=1e-5, atol=1e-5)
        assert ranks[0][loss]["loss"] == pytest.approx(one[loss]["loss"], abs=1e-5)
    assert ranks[0]["eval"] == pytest.approx(one["eval"], abs=1e-5)
    for result in (one, *ranks):
        for name, value in result["straight"].items():
            assert torch.equal(result["resumed"][name], value), name


def test_a_sharded_policy_is_forwarded_padded_and_has_the_gradient_of_a_whole_one(tmp_path):
    done = launch("sharded", tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [torch.load(tmp_path / f"result_{rank}.pt") for rank in range(2)]
    model = parts.policy()
    add_fused_lm_head(model)
    ids = results[0]["ids"]
    scored = torch.ones_like(ids)
    (trajectory_logps(model, ids, scored, scored, packing=None).logps * torch.linspace(0, 1, 12)).sum().backward()
    for result in results:
        assert result["way"] == ("padded", "its parameters are sharded, and only a pass of the whole model gathers them")
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                result["gradient"][name], parameter.grad / 2, rtol=1e-4, atol=1e-5
            )  # a mean over ranks


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("stopped")
    return launch("slow_then_raising", folder, timeout=600), folder


def test_trials_may_take_longer_than_a_collective(stopped):
    done, folder = stopped
    for rank in range(2):
        assert (folder / f"slow_{rank}.pt").exists(), done.stderr[-3000:]
        result = torch.load(folder / f"slow_{rank}.pt")
        assert result["steps"] == 1
        assert result["seconds"] > 12


def test_an_environment_that_raises_ends_every_rank_with_its_error(stopped):
    done, folder = stopped
    assert done.returncode != 0
    assert "the game server is gone" in done.stderr
    assert (folder / "error_0.txt").read_text() == "RuntimeError: the game server is gone"
    assert (folder / "error_1.txt").read_text() == (
        "LongreinError: the main process stopped: RuntimeError: the game server is gone"
    )
