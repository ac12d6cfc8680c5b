"""A training job from settings to a run folder: what `longrein train` does, without its display.

Always true of a run folder: `config.json` is there from the start, `run.sqlite` grows by every rollout as it ends, `metrics.jsonl`
by a line a step, `model/` loads with `from_pretrained`, and `summary.json` comes last and holds the same figures as the closing table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PrinterCallback, TrainerCallback

from longrein import __version__
from longrein.agents import Agent
from longrein.contract import LongreinError, Sampling
from longrein.engines.vllm import VLLMEngine
from longrein.envs.datasets import task_dataset
from longrein.noise import derive
from longrein.rollout import Rollout
from longrein.runs import Run
from longrein.runs.reader import Filter
from longrein.runs.schema import FILE
from longrein.training.config import GRPOEnvConfig
from longrein.training.interrupts import Interrupts, newest_checkpoint
from longrein.training.keeper import RunKeeper
from longrein.training.rows import Rows, rows_of
from longrein.training.settings import Settings, refuse_taken
from longrein.training.trainer import GRPOEnvTrainer
from longrein.training.trials import Collected, EnvironmentCache, collect

logger = logging.getLogger(__name__)

CONFIG = "config.json"
PLAYED_WITH = ("model", "env", "env_config", "harness", "verify", "temperature", "program_share", "sandbox", "seed")
"""The settings that a held-out rollout depends on, besides its task."""


@dataclass(frozen=True, slots=True)
class Heldout:
    """How a policy does on tasks it is not trained on."""

    success: float | None
    """None where there was nothing to play."""
    reward: float | None
    """Of those that have one; None where none has."""
    by_env: dict[str, float]
    failed: int
    """Rollouts that our side broke; they count as not solved."""
    cause: str | None
    """Of the first of them."""


Progress = Callable[[dict[str, Any]], None]


def train(
    settings: Settings, folder: Path, *, rows: tuple[Rows, Rows] | None = None, progress: Progress = lambda event: None
) -> dict[str, Any]:
    """Run a job into `folder` and give its summary. `rows` are those of `rows_of`, where they are made already; `progress` is
    told of every stage and step."""
    started = time.perf_counter()
    refuse_taken(folder, resume=settings.resume)
    rest, heldout_rows = rows or rows_of(settings)
    train_rows = task_dataset(rest)
    with _only_if_used(folder):
        folder.mkdir(parents=True, exist_ok=True)
        progress({"stage": "load", "model": settings.model})
        agent = load_agent(settings)
        trainer = make_trainer(settings, agent, train_rows, folder)
    earlier = _played_before(settings, folder) if settings.resume and (folder / FILE).exists() else {}
    (folder / CONFIG).write_text(json.dumps(dataclasses.asdict(settings), indent=2))
    trainer.add_callback(_Report(folder, progress))
    keeper = RunKeeper(trainer, folder)
    trainer.add_callback(keeper)
    trainer.add_callback(interrupts := Interrupts(trainer))
    with contextlib.closing(keeper):
        progress({"stage": "before", "tasks": len(heldout_rows)})
        trainer.sync_weights()
        with keeper.phase("before", 0):
            agent.played = earlier
            before = evaluate(agent, heldout_rows, seed=settings.seed)
            agent.played = {}
        if heldout_rows and before.failed == len(heldout_rows):
            raise LongreinError(
                f"every one of {before.failed} held-out rollouts failed before any training; the first cause: {before.cause}"
            )
        progress({"stage": "train", "steps": settings.steps, "before": before})
        checkpoint = newest_checkpoint(folder) if settings.resume else None
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except BaseException as error:
            _save_all_the_same(interrupts, error)
            raise
        with interrupts.held():
            trainer.save_model(str(folder / "model"))
        progress({"stage": "after", "tasks": len(heldout_rows)})
        trainer.sync_weights()
        with keeper.phase("after", trainer.state.global_step):
            after = evaluate(agent, heldout_rows, seed=settings.seed)
    agent.engine.close()
    summary = {
        "heldout_success_before": before.success,
        "heldout_success_after": after.success,
        "heldout_reward_before": before.reward,
        "heldout_reward_after": after.reward,
        "by_env": {name: {"before": before.by_env[name], "after": after.by_env[name]} for name in before.by_env},
        "heldout_tasks": len(heldout_rows),
        "heldout_failed": before.failed + after.failed,
        "heldout_failure": before.cause or after.cause,
        "seconds": round(time.perf_counter() - started, 1),
        "seed": settings.seed,
        "steps": trainer.state.global_step,
        "model": settings.model,
        "versions": versions(),
        "rollouts": FILE,
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2))
    return summary


def _played_before(settings: Settings, folder: Path) -> dict[int, Rollout]:
    """The held-out rollouts that a run played before it trained, by seed; none where they would be others now."""
    then, now = json.loads((folder / CONFIG).read_text()), json.loads(json.dumps(dataclasses.asdict(settings)))
    if any(then.get(name) != now[name] for name in PLAYED_WITH):
        return {}
    return {rollout.seed: rollout for rollout in Run(folder).rollouts(Filter(phase="before", failed=False))}


@contextlib.contextmanager
def _only_if_used(folder: Path) -> Iterator[None]:
    """A folder that was made for a run which could not begin is gone again."""
    there = folder.exists()
    try:
        yield
    except BaseException:
        if not there:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _save_all_the_same(interrupts: Interrupts, error: BaseException) -> None:
    try:
        interrupts.save()
    except Exception as unsaved:
        why = "it was stopped" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
        raise LongreinError(f"the run ended ({why}) and could not be saved: {type(unsaved).__name__}: {unsaved}") from error


def load_agent(settings: Settings) -> Agent:
    """The policy, with the engine that samples from it."""
    sampling = Sampling(temperature=settings.temperature)
    agent = Agent.from_pretrained(settings.model, sampling=sampling, seed=settings.seed, engine=engine_of(settings))
    if agent.tokenizer.pad_token_id is None:
        agent.tokenizer.pad_token = agent.tokenizer.eos_token
    return agent


def engine_of(settings: Settings) -> VLLMEngine | None:
    """The servers that sample, or None where the model itself does."""
    if not settings.vllm:
        return None
    way = "disk" if settings.vllm_folder is not None else "memory"
    return VLLMEngine(settings.vllm, weights=way, folder=settings.vllm_folder)


def make_trainer(settings: Settings, agent: Agent, rows: Any, folder: Path) -> GRPOEnvTrainer:
    batch = settings.tasks_per_step * settings.num_generations
    micro = min(settings.micro_batch, batch)
    if batch % micro:
        raise LongreinError(
            f"a step has {batch} rollouts (tasks_per_step x num_generations), which {micro} (micro_batch) does not divide"
        )
    cpu = not torch.cuda.is_available()
    args = GRPOEnvConfig(
        output_dir=str(folder / "checkpoints"),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=batch // micro,
        num_generations=settings.num_generations,
        max_steps=settings.steps,
        learning_rate=settings.rate,
        lr_scheduler_type="linear",
        warmup_steps=min(5, settings.steps // 10),
        max_grad_norm=0.3,  # one update a batch has no clipped ratio to hold it: a rare bad batch must not undo the policy
        beta=settings.beta,
        loss_type=settings.loss_type,
        advantages=settings.advantages,
        temperature=settings.temperature,
        skip_old_pass=True,
        seed=settings.seed,
        report_to=list(settings.report_to),
        logging_steps=1,
        save_strategy="steps" if settings.save_steps else "no",
        save_steps=settings.save_steps or 1,
        save_total_limit=2,  # one is whole while the next is written
        disable_tqdm=True,
        use_cpu=cpu,
        bf16=not cpu,
        gradient_checkpointing=not cpu,
    )
    peft_config = None
    if settings.lora_rank:
        from peft import LoraConfig

        peft_config = LoraConfig(r=settings.lora_rank, lora_alpha=2 * settings.lora_rank, target_modules="all-linear")
    trainer = GRPOEnvTrainer(agent=agent, tokenizer=agent.tokenizer, args=args, train_dataset=rows, peft_config=peft_config)
    trainer.remove_callback(PrinterCallback)
    return trainer


def datasets_of(settings: Settings) -> tuple[Any, list[dict[str, Any]]]:
    """`rows_of`, those to train on as the trainer takes them."""
    rest, kept = rows_of(settings)
    return task_dataset(rest), kept


def evaluate(agent: Agent, rows: list[dict[str, Any]], *, seed: int, repeats: int = 1) -> Heldout:
    """Play the rows once each with the policy as it is; the same seed draws the same noise."""
    if not rows:
        return Heldout(None, None, {}, 0, None)
    agent.seed = derive(seed, "heldout")
    cache: EnvironmentCache = {}
    played = collect(rows, cache, agent.tokenizer, agent, repeats)
    names = sorted({one.env for one in played.played})
    scored = played.final_rewards[~np.isnan(played.final_rewards)]
    return Heldout(
        success=_success(played),
        reward=float(scored.mean()) if len(scored) else None,
        by_env={name: _success(played, name) for name in names},
        failed=(failed := len(played.final_rewards) - len(scored)),
        cause=played.first_failure() if failed else None,
    )


def _success(collected: Collected, env: str | None = None) -> float:
    solved = [
        bool(one.rollout.success) if one.rollout is not None else one.final_reward >= 1
        for one in collected.played
        if env is None or one.env == env
    ]
    return float(np.mean(solved))


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"longrein": __version__} | {name: version(name) for name in ("torch", "transformers", "trl", "renderers")}


class _Report(TrainerCallback):
    """Tells of every step: a line in `metrics.jsonl`, and the caller's display."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self._path = folder / "metrics.jsonl"
        self._progress = progress

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Steps that are done again after a kill are told once."""
        if state.is_world_process_zero and self._path.exists():
            told = [line for line in self._path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            self._path.write_text("".join(line for line in told if json.loads(line)["step"] <= state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs and "reward" in logs:
            event = {"step": state.global_step, "time": time.time(), **logs}
            with self._path.open("a") as file:
                file.write(json.dumps(event) + "\n")
            self._progress({"stage": "step", **event})
