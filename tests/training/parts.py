"""What the trainer's tests are made of: a tiny real tokenizer, tiny real policies, and a trainer around them."""

from __future__ import annotations

import copy
import functools
import random
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from longrein import Agent, GRPOEnvConfig, GRPOEnvTrainer, Sampling
from longrein.envs import task_dataset
from longrein.training.tiny import make_model, make_tokenizer


@functools.cache
def tokenizer() -> Any:
    return make_tokenizer(random.Random(0))


@functools.cache
def _policy(seed: int) -> Qwen3ForCausalLM:
    words = tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(len(words), words.pad_token_id, words.eos_token_id, hidden=64, layers=1)
        for parameter in model.parameters():  # wide enough that replies differ in probability
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.1)
    return model.eval()


def policy(seed: int = 0) -> Qwen3ForCausalLM:
    """A fresh model that was never saved; the same weights for the same seed."""
    return copy.deepcopy(_policy(seed))


def agent(seed: int = 0, max_tokens: int = 6, **options: Any) -> Agent:
    return Agent(policy(seed), tokenizer(), sampling=Sampling(max_tokens=max_tokens), **options)


def config(folder: Path, **changes: Any) -> GRPOEnvConfig:
    defaults = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_generations": 2,
        "max_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "shuffle_dataset": False,
        "advantages": "group",
    }
    return GRPOEnvConfig(str(folder), **{**defaults, **changes})


def trainer(
    folder: Path, rows: Any, *, of: Any = None, model: Any = None, options: Any = None, **changes: Any
) -> GRPOEnvTrainer:
    """A trainer of an agent (`of`) on rows; `options` are further arguments of it, `changes` of its configuration."""
    words = changes.pop("tokenizer", tokenizer())
    return GRPOEnvTrainer(
        model,
        agent=of or agent(),
        tokenizer=words,
        args=config(folder, **changes),
        train_dataset=task_dataset(rows) if isinstance(rows, list) else rows,
        **(options or {}),
    )


def repeated(rows: list[Any], times: int = 2) -> list[Any]:
    """Rows as TRL's sampler gives them: each so many times, one after the other."""
    return [row for row in rows for _ in range(times)]


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def logged(trained: GRPOEnvTrainer, name: str) -> list[float]:
    """A metric over the log of a run."""
    return [entry[name] for entry in trained.state.log_history if name in entry]
