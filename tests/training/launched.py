"""What `test_distributed.py` runs on every rank: `accelerate launch launched.py JOB FOLDER`."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import parts
import torch
from accelerate import PartialState
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import fully_shard
from trl.trainer.utils import add_fused_lm_head
from worlds import Raising, Slow, Talk, Uneven, row

from longrein.envs import task_dataset
from longrein.training import processes as collective
from longrein.training.logprobs import trajectory_logps
from longrein.training.way import way_for

LOSSES = ("dapo", "grpo", "dr_grpo")


def rows() -> list[dict[str, Any]]:
    """Generation batches of three tasks: one whose rollouts fork, one whose group is split over two ranks, one more."""
    return [row(Uneven) if n % 3 == 0 else row(Talk, word=f"w{n}") for n in range(6)]


def settings(processes: int) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": 12 // processes,
        "per_device_eval_batch_size": 4 // processes,
        "num_generations": 4,
        "max_steps": 3,
        "optim": "sgd",
        "learning_rate": 0.5,
        "beta": 0.1,
        "token_budget": 60,  # several passes a step, and not as many on every rank
    }


def equal(folder: Path, processes: int) -> dict[str, Any]:
    """Train with every loss, evaluate, and train on from a checkpoint in the middle of a generation cycle."""
    result: dict[str, Any] = {}
    for loss in LOSSES:
        trainer = parts.trainer(folder / loss, rows(), loss_type=loss, **settings(processes))
        trainer.train()
        result[loss] = {
            "weights": parts.weights(trainer.accelerator.unwrap_model(trainer.model)),
            "loss": parts.logged(trainer, "loss"),
            "reward": parts.logged(trainer, "reward"),
        }
    held_out = task_dataset([row(Talk, word=f"e{n}") for n in range(4)])
    evaluated = parts.trainer(folder / "eval", rows(), options={"eval_dataset": held_out}, **settings(processes)).evaluate()
    result["eval"] = {"reward": evaluated["eval_reward"], "loss": evaluated["eval_loss"]}

    cycle = {**settings(processes), "num_iterations": 2, "save_strategy": "steps", "save_steps": 1}
    for name, start in (("straight", None), ("resumed", str(folder / "straight" / "checkpoint-1"))):
        trainer = parts.trainer(folder / name, rows(), **cycle)
        trainer.train(resume_from_checkpoint=start)
        result[name] = parts.weights(trainer.accelerator.unwrap_model(trainer.model))
    return result


def sharded(folder: Path, processes: int) -> dict[str, Any]:
    """The gradient of a policy whose parameters are sharded (FSDP2), each rank's rows its own, and how its rows are forwarded."""
    state = PartialState(cpu=True)
    model = parts.policy()
    add_fused_lm_head(model)
    ids = torch.arange(5, 53).reshape(4, 12) % 40  # of both ranks
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    mine = ids.chunk(processes)[state.process_index]
    scored = torch.ones_like(mine)
    logps = trajectory_logps(model, mine, scored, scored, packing=None).logps
    (logps * torch.linspace(0, 1, 12)).sum().backward()
    sharded_gradients: dict[str, Any] = {name: parameter.grad for name, parameter in model.named_parameters()}
    whole = {name: gradient.full_tensor() for name, gradient in sharded_gradients.items()}
    return {"ids": ids, "way": tuple(way_for(model)), "gradient": whole}


def slow_then_raising(folder: Path, processes: int) -> None:
    """A trial that takes longer than a collective may, and then one that raises."""
    collective.HEARTBEAT_SECONDS = 1.0
    tasks = [row(Slow, {"seconds": 12}, n=n) for n in range(3)]
    trainer = parts.trainer(folder, tasks, **{**settings(processes), "max_steps": 1})
    prepare = trainer._prepare_inputs

    def impatient(
        generation_batch: Any,
    ) -> Any:  # for the trial only: elsewhere a slow machine may let a rank wait for the other
        trainer.accelerator.wait_for_everyone()
        _set_pg_timeout(timedelta(seconds=8))
        try:
            return prepare(generation_batch)
        finally:
            _set_pg_timeout(timedelta(minutes=5))

    trainer._prepare_inputs = impatient
    trainer.train()
    result = {"seconds": parts.logged(trainer, "time/rollout")[0], "steps": trainer.state.global_step}
    torch.save(result, folder / f"slow_{os.environ['RANK']}.pt")
    parts.trainer(folder, [row(Raising), row(Talk)] * 3, **settings(processes)).train()


if __name__ == "__main__":
    job, folder = sys.argv[1], Path(sys.argv[2])
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        result = {"equal": equal, "sharded": sharded, "slow_then_raising": slow_then_raising}[job](folder, processes)
    except Exception as error:
        (folder / f"error_{rank}.txt").write_text(f"{type(error).__name__}: {error}")
        deadline = time.monotonic() + 60  # the launcher ends the other ranks with the first: they too are to say their error
        while len(list(folder.glob("error_*.txt"))) < processes and time.monotonic() < deadline:
            time.sleep(0.01)
        raise
    torch.save(result, folder / f"result_{rank}.pt")
