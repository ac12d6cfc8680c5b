"""`GRPOEnvTrainer`: TRL's GRPO trainer fed by environments.

Always true: trials run on the main process and every rank gets their arrays, or their error; a generation batch holds the
rollouts of `len(batch) / num_generations` tasks in the order of the batch.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from accelerate.utils import gather_object, is_peft_model
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig

from longrein.agents import Agent, as_agent
from longrein.contract import LongreinError
from longrein.envs.datasets import COLUMNS, checked_row
from longrein.noise import derive
from longrein.training.advantages import Batch, advantages, flat_groups
from longrein.training.checks import check_agent, check_dataset, check_engine, refuse_arguments
from longrein.training.config import GRPOEnvConfig, check_config, env_config_of
from longrein.training.correction import correction, mismatch_metrics
from longrein.training.logprobs import carry_packed_passes
from longrein.training.loss import TrajectoryLoss
from longrein.training.planning import balanced, split_by_rollout
from longrein.training.processes import on_main_process
from longrein.training.sync import samples_elsewhere, send
from longrein.training.trials import Collected, EnvironmentCache, collect, tasks_of
from longrein.training.trl_compat import (
    attach_reference,
    disable_gradient_checkpointing,
    environment_reward,
    reference_adapter,
    without_reference,
)

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from peft import PeftConfig
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

STATE_FILE = "longrein_state_{rank}.pt"
REFERENCE_FILE = "longrein_reference.pt"
MAX_FAILED_BATCHES = 3
"""After so many generation batches in a row in which every rollout failed, the run stops: nothing can be learned."""


class Progress(NamedTuple):
    """How far a run is."""

    global_step: int
    step: int
    """Micro-batches, as TRL counts them."""
    tokens_seen: int


class GRPOEnvTrainer(TrajectoryLoss):
    """Trains an agent's policy by GRPO on rows `{env_class_path, env_config, task_data}`.

    >>> agent = Agent.from_pretrained("Qwen/Qwen3-0.6B")                                         # doctest: +SKIP
    >>> trainer = GRPOEnvTrainer(
    ...     agent=agent, tokenizer=agent.tokenizer, train_dataset=TreasureHunt.get_train_dataset(),
    ...     args=GRPOEnvConfig("out", advantages="group"))                                       # doctest: +SKIP
    >>> trainer.train()                                                                          # doctest: +SKIP

    `model` defaults to the agent's policy model, and is only needed for an agent without one (a scripted one).
    """

    args: GRPOEnvConfig
    model: Any
    ref_model: Any
    train_dataset: Any
    num_generations: int
    num_generations_eval: int
    scale_rewards: Literal["group", "batch", "none"]
    _buffered_inputs: Any

    def __init__(
        self,
        model: PreTrainedModel | Any = None,
        *,
        agent: Agent | Any,
        tokenizer: PreTrainedTokenizerBase,
        args: GRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: PeftConfig | None = None,
        **refused: Any,
    ) -> None:
        refuse_arguments(refused)
        model = check_agent(agent, tokenizer, model)
        self.tokenizer = tokenizer
        self.agent = agent
        self.env_cache: EnvironmentCache = {}
        args = env_config_of(args or GRPOConfig("longrein-run"))
        self._sampler = as_agent(agent, tokenizer)  # the same agent, or the text agent with an engine around it
        check_config(args, self._sampler)
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        for dataset, generations in ((train_dataset, args.num_generations), (eval_dataset, None)):
            check_dataset(dataset, args, generations, context)
        adapters = peft_config is not None or is_peft_model(model)
        own_reference = args.beta != 0.0 and not adapters
        reference = copy.deepcopy(model) if own_reference else None
        padding_side = tokenizer.padding_side
        common = {
            "model": model,
            "reward_funcs": [environment_reward],
            "args": args,
            "train_dataset": train_dataset,
            "eval_dataset": eval_dataset,
            "processing_class": tokenizer,
            "callbacks": callbacks,
            "optimizers": optimizers,
            "peft_config": peft_config,
        }
        if reference is not None:
            with without_reference(args):
                super().__init__(**common)
            attach_reference(self, reference)
        else:
            super().__init__(**common)
        tokenizer.padding_side = padding_side
        for carrier in (self.model, self.ref_model) if args.packing != "off" else ():
            if carrier is not None:
                carrier = self.accelerator.unwrap_model(carrier)
                carry_packed_passes(carrier.get_base_model() if is_peft_model(carrier) else carrier)
        check_engine(self._sampler.engine, self)
        self._samples_elsewhere = samples_elsewhere(self._sampler.engine, self.model)
        self._sent_version: int | None = None
        self._corrects_sampler = (
            self._samples_elsewhere and args.sampler_ratio_cap is not None and args.old_logps == "policy"
        )
        self._eval_batches = 0
        self._eval_name = ""
        self._failed_batches = {"train": 0, "eval": 0}
        self._rollout_seconds = 0.0
        self._last_update = Progress(-1, 0, 0)
        self.last_batch: Collected | None = None
        """The last generation batch as it was played, on the main process: for callbacks and for people."""
        self.on_collect: Callable[[str, int], None] | None = None
        """Told, before rollouts are played, for what (`train`, `eval`) and for which step."""
        self.on_batch: Callable[[Collected, dict[str, Any]], None] | None = None
        """Told of each generation batch and its arrays, on the main process, before it is trained on."""

    @property
    def _textual_logs(self) -> dict[str, Any]:
        """Sample conversations, rewards and advantages of the last generation batch."""
        return self._logs

    # ---- from tasks to tensors

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = list(COLUMNS)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        if not self.model.training:
            return self._generate_and_score_completions(generation_batch)
        micro_batches = self.args.steps_per_generation or 1
        if self._step % (micro_batches * self.num_iterations) == 0 or self._buffered_inputs is None:
            whole = self._generate_and_score_completions(generation_batch)
            order = torch.Generator().manual_seed(derive(self.args.seed, "order", self._step) >> 1)
            windows = max(1, micro_batches // self.args.gradient_accumulation_steps)
            self._buffered_inputs = split_by_rollout(whole, micro_batches, order, windows=windows)
        return self._buffered_inputs[self._step % micro_batches]

    def sync_weights(self) -> None:
        """Have the engine sample from the weights as they are now, where it has a copy of its own. Every rank calls this."""
        if self._samples_elsewhere and self._sent_version != self.state.global_step:
            send(self._sampler.engine, self.model, self.accelerator, self.state.global_step)
            self._sent_version = self.state.global_step

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        mode = "train" if self.model.training else "eval"
        self.sync_weights()
        by_rank = gather_object([inputs])
        rows = [row for of_rank in by_rank for row in of_rank]
        started = time.perf_counter()
        arrays, metrics = on_main_process(self.accelerator, lambda: self._collect(rows, mode))
        self._rollout_seconds = time.perf_counter() - started
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)
        self._metrics[mode]["time/rollout"].append(self._rollout_seconds)
        if mode == "train":
            self.state.num_input_tokens_seen += int(arrays["padded_attn_mask"].sum())
        self._metrics[mode]["num_tokens"] = [self.state.num_input_tokens_seen]
        return self._score(self._local(arrays, [len(of_rank) for of_rank in by_rank]), mode)

    def _collect(self, rows: list[dict[str, Any]], mode: str) -> tuple[dict[str, Any], dict[str, float]]:
        """The trials of a generation batch, on the main process: arrays for all ranks, and metrics."""
        generations = self.num_generations if mode == "train" else self.num_generations_eval
        step = self._step if mode == "train" else self._eval_batches
        self._eval_batches += mode == "eval"
        self._sampler.seed = derive(self.args.seed, mode, step)
        self._sampler.engine.policy_version = self.state.global_step
        if self.on_collect is not None:
            self.on_collect(mode, self.state.global_step + (mode == "train"))
        tasks = tasks_of(rows, generations)
        collected = collect(tasks, self.env_cache, self.tokenizer, self.agent, generations)
        flat = flat_groups(collected.final_rewards, collected.group)
        metrics = {"frac_reward_zero_std": len(flat) / max(1, len(tasks))}
        for attempt in range(self.args.resample_flat_groups if mode == "train" else 0):
            if not flat:
                break
            fresh = self._fresh_tasks(len(flat), attempt)
            self._sampler.seed = derive(self.args.seed, mode, step, attempt)  # a task drawn again is played anew
            again = collect(fresh, self.env_cache, self.tokenizer, self.agent, generations)
            still = set(flat_groups(again.final_rewards, again.group))
            better = {old: new for old, new in zip(flat, range(len(fresh)), strict=True) if new not in still}
            collected = collected.with_groups(again, better)
            flat = [group for group in flat if group not in better]
        if self.args.resample_flat_groups:
            metrics["frac_reward_zero_std_after_resampling"] = len(flat) / max(1, len(tasks))
        if self.args.max_staleness is not None:
            collected, metrics["stale"] = collected.without_stale(self.state.global_step - self.args.max_staleness)
        metrics |= collected.metrics()
        self._stop_if_nothing_works(collected, mode)
        arrays = collected.arrays()
        if self.args.old_logps == "recorded" and np.isnan(arrays["padded_logprobs"]).any():
            raise LongreinError("old_logps='recorded', and an environment's run_trial returned no padded_logprobs")
        if self.args.old_logps == "recorded" and (other := collected.versions() - {self.state.global_step}):
            raise LongreinError(
                f"old_logps='recorded' needs rollouts sampled under the weights of this step ({self.state.global_step}); some are "
                f"of {', '.join(map(str, sorted(other)))}. Use old_logps='policy'"
            )
        arrays["group"] = collected.group
        arrays["advantages"] = advantages(
            self.args.advantages,
            Batch(
                agent_mask=arrays["padded_agent_mask"],
                rewards=arrays["padded_rewards"],
                row_rollout=arrays["row_rollout"],
                final_rewards=collected.final_rewards,
                group=collected.group,
                discount=self.args.discount,
                scale=self.scale_rewards,
            ),
        )
        self._keep_texts(collected, arrays)
        if self.args.mask_truncated_completions:  # they count in their group's mean, and are not trained
            for name in ("padded_agent_mask", "advantages"):
                arrays[name][collected.truncated[arrays["row_rollout"]]] = 0
        self.last_batch = collected
        if self.on_batch is not None:
            self.on_batch(collected, arrays)
        return arrays, metrics

    def _fresh_tasks(self, count: int, attempt: int) -> list[dict[str, Any]]:
        rng = np.random.default_rng(derive(self.args.seed, "fresh", self._step, attempt))
        chosen = rng.integers(len(self.train_dataset), size=count)
        return [checked_row(self.train_dataset[int(index)], int(index)) for index in chosen]

    def _stop_if_nothing_works(self, collected: Collected, mode: str) -> None:
        self._failed_batches[mode] = self._failed_batches[mode] + 1 if np.isnan(collected.final_rewards).all() else 0
        if self._failed_batches[mode] >= MAX_FAILED_BATCHES:
            raise LongreinError(
                f"every rollout of {MAX_FAILED_BATCHES} generation batches in a row failed; the first cause: "
                f"{collected.first_failure()}"
            )

    def _local(self, arrays: dict[str, Any], counts: list[int]) -> dict[str, Any]:
        """This rank's rollouts, as tensors on its device; `counts` are the rollouts of each rank."""
        rank, device = self.accelerator.process_index, self.accelerator.device
        owner, ids = arrays["row_rollout"], arrays["padded_token_ids"]
        rows = [row[:length] for row, length in zip(ids, arrays["padded_attn_mask"].sum(1), strict=True)]
        rank_of = balanced(rows, owner, arrays["group"], counts)
        rank_of_row = rank_of[owner]
        mine = np.flatnonzero(rank_of_row == rank)
        own, most = len(mine), int(np.bincount(rank_of_row).max())
        mine = np.pad(mine, (0, most - own), mode="edge")  # every rank runs the same forwards: rows that train nothing
        batch: dict[str, Any] = {
            name: torch.as_tensor(arrays[source][mine], device=device)
            for name, source in (
                ("prompt_completion_ids", "padded_token_ids"),
                ("attention_mask", "padded_attn_mask"),
                ("agent_token_mask", "padded_agent_mask"),
                ("advantages", "advantages"),
                ("recorded_logps", "padded_logprobs"),
            )
        }
        for name in ("agent_token_mask", "advantages"):
            batch[name][own:].zero_()
        place = np.cumsum(rank_of == rank) - 1
        batch["row_rollout"] = torch.as_tensor(place[owner[mine]], device=device)
        batch["num_rollouts"] = counts[rank]
        batch["num_items_in_batch"] = torch.tensor(float(arrays["padded_agent_mask"].sum()), device=device)
        return batch

    def _score(self, batch: dict[str, Any], mode: str) -> dict[str, Any]:
        """Add the old and the reference log-probabilities of the whole trajectories."""
        recorded = batch.pop("recorded_logps")
        size = self.args.per_device_train_batch_size if mode == "train" else self.args.per_device_eval_batch_size
        checkpointing: Any = self.args.gradient_checkpointing_kwargs
        options = {"batch_size": size, "parts": self._parts(batch)}
        with torch.no_grad(), disable_gradient_checkpointing(self.model, checkpointing):
            if self.args.old_logps == "recorded":
                batch["old_per_token_logps"] = recorded
            elif self._old_is_current(mode):
                batch["old_per_token_logps"] = None
            else:
                batch["old_per_token_logps"] = self._trajectory_logps(self.model, batch, **options).logps
            batch["ref_per_token_logps"] = None
            if self.beta != 0.0 and self.ref_model is not None:
                batch["ref_per_token_logps"] = self._trajectory_logps(self.ref_model, batch, **options).logps
            elif self.beta != 0.0:
                with reference_adapter(self.accelerator.unwrap_model(self.model)):
                    batch["ref_per_token_logps"] = self._trajectory_logps(self.model, batch, **options).logps
        if self._corrects_sampler:
            assert self.args.sampler_ratio_cap is not None
            old, trained = batch["old_per_token_logps"], batch["agent_token_mask"]
            assert old is not None
            found = correction(old, recorded, trained, self.args.sampler_ratio_cap)
            batch["advantages"] = batch["advantages"] * found.weights
            for name, value in mismatch_metrics(found, self.accelerator.gather).items():
                self._metrics[mode][name].append(value)
        return batch

    def _old_is_current(self, mode: str) -> bool:
        """Whether a batch is used for one update only, so that the old log-probabilities are the loss's own."""
        one_update = (
            self.num_iterations == 1 and (self.args.steps_per_generation or 1) <= self.args.gradient_accumulation_steps
        )
        return self.args.skip_old_pass and (mode == "eval" or one_update) and not self._corrects_sampler

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if self._last_update.global_step != self.state.global_step:
            self._last_update = self._progress()
        self._rollout_seconds, started = 0.0, time.perf_counter()
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._metrics["train"]["time/training"].append(time.perf_counter() - started - self._rollout_seconds)
        return loss

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        self._failed_batches["eval"] = 0
        self._eval_batches = 0  # every evaluation draws the same noise, so two of them differ by the policy alone
        self._eval_name = metric_key_prefix.removeprefix("eval").lstrip("_")
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if not self.model.training and self._eval_name:  # of several evaluation datasets, each has its own metrics
            for name in list(self._metrics["eval"]):
                self._metrics["eval"][f"{self._eval_name}_{name}"] = self._metrics["eval"].pop(name)
        super().log(logs, start_time)

    # ---- checkpoints

    def _progress(self) -> Progress:
        return Progress(self.state.global_step, self._step, self.state.num_input_tokens_seen)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        at = self._progress()
        if self._last_update.global_step == at.global_step:  # stopped in the middle of an update: it is done again
            at = self._last_update
            self.state.num_input_tokens_seen = at.tokens_seen
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        ours = folder / STATE_FILE.format(rank=self.accelerator.process_index)
        ours.unlink(missing_ok=True)  # it comes last: a checkpoint that has it is whole
        super()._save_checkpoint(model, trial)
        folder.mkdir(parents=True, exist_ok=True)
        if self.args.sync_ref_model and self.args.should_save:
            torch.save(self.accelerator.unwrap_model(self.ref_model).state_dict(), folder / REFERENCE_FILE)
        cycle = (self.args.steps_per_generation or 1) * self.num_iterations
        at_hand = at.step % cycle != 0 and at.step // cycle == self._step // cycle
        state = {
            "step": at.step,
            "processes": self.accelerator.num_processes,
            "buffered_inputs": self._buffered_inputs if at_hand else None,
        }
        torch.save(state, partial := ours.with_suffix(".part"))
        os.replace(partial, ours)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        own, main = (Path(checkpoint, STATE_FILE.format(rank=rank)) for rank in (self.accelerator.process_index, 0))
        if main.exists():
            state = torch.load(own if own.exists() else main, map_location="cpu", weights_only=True)
            fits = state["processes"] == self.accelerator.num_processes  # else the batch at hand is sampled again
            self._step = state["step"]
            self._buffered_inputs = self._prepare_input(state["buffered_inputs"]) if fits else None
        if self.args.sync_ref_model and (path := Path(checkpoint, REFERENCE_FILE)).exists():
            reference = torch.load(path, map_location="cpu", weights_only=True)
            self.accelerator.unwrap_model(self.ref_model).load_state_dict(reference)

    def _keep_texts(self, collected: Collected, arrays: dict[str, Any]) -> None:
        """Conversations for `log_completions`: what was read first, and what followed."""
        first_row = np.unique(arrays["row_rollout"], return_index=True)[1]
        weights = arrays["padded_agent_mask"][first_row]
        mean = (arrays["advantages"][first_row] * weights).sum(1) / np.maximum(weights.sum(1), 1)
        for index, (prompt, rest) in enumerate(collected.conversations()):
            self._logs["prompt"].append(prompt)
            self._logs["completion"].append(rest)
            self._logs["rewards"]["environment"].append(float(collected.final_rewards[index]))
            self._logs["advantages"].append(float(mean[index]))
