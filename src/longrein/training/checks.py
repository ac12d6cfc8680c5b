"""Bad input, refused when the trainer is built: one sentence that says what was given, what is expected and what to do."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from longrein.agents import Agent
from longrein.contract import LongreinError
from longrein.engines.transformers import TransformersEngine
from longrein.envs.datasets import COLUMNS, checked_row, refuse_merged
from longrein.training.config import GRPOEnvConfig
from longrein.training.trials import check_rows

ARGUMENTS = {
    "reward_funcs": "rewards come from the environments of the dataset's rows",
    "reward_processing_classes": "rewards come from the environments of the dataset's rows",
    "env": "environments are named in the dataset: `env_class_path` and `env_config` in every row",
    "tools": "an environment offers its own tools (`Episode.tools`)",
    "rollout_func": "rollouts are played by the environments of the dataset's rows",
    "environment_factory": "environments are named in the dataset: `env_class_path` and `env_config` in every row",
    "processing_class": "pass it as `tokenizer`",
    "quantization_config": "load the agent's policy model with it",
}
"""Arguments of TRL's trainers that have no meaning here, and what takes their place."""


def refuse_arguments(given: dict[str, Any]) -> None:
    for name in given:
        if name in ARGUMENTS:
            raise LongreinError(f"GRPOEnvTrainer takes no `{name}`: {ARGUMENTS[name]}")
        raise TypeError(f"GRPOEnvTrainer got an unexpected argument {name!r}")


def check_agent(agent: Any, tokenizer: Any, model: Any) -> Any:
    """The policy model that is trained."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise LongreinError(
            f"the tokenizer is a {type(tokenizer).__name__}; it must be a tokenizer (of a processor, its `.tokenizer`; images "
            "are not read)"
        )
    if not getattr(tokenizer, "chat_template", None):
        raise LongreinError("the tokenizer has no chat template; use an instruct model or set `tokenizer.chat_template`")
    if tokenizer.pad_token_id is None:
        raise LongreinError("the tokenizer has no pad token; set `tokenizer.pad_token` (often to `tokenizer.eos_token`)")
    policy = agent.policy_model if isinstance(agent, Agent) else None
    if (
        isinstance(agent, Agent)
        and agent.tokenizer is not tokenizer
        and agent.tokenizer.get_vocab() != tokenizer.get_vocab()
    ):
        raise LongreinError(
            f"the agent's tokenizer ({agent.tokenizer.name_or_path!r}, {len(agent.tokenizer)} tokens) is not the trainer's "
            f"({tokenizer.name_or_path!r}, {len(tokenizer)} tokens); give both the same"
        )
    if model is not None and policy is not None and model is not policy:
        raise LongreinError(
            "the model is not the agent's policy model: what is trained must be what samples. Leave `model` out, or build "
            "the Agent with this model"
        )
    if model is None and policy is None:
        raise LongreinError(f"{type(agent).__name__} has no policy model; give the trainer the `model` to train")
    model = policy if policy is not None else model
    if not isinstance(model, nn.Module):
        raise LongreinError(f"the model is {model!r}; it must be a loaded model, as `from_pretrained` gives it")
    return model


def check_dataset(dataset: Any, args: GRPOEnvConfig, generations: int | None, context: int | None = None) -> None:
    """Refuse rows that cannot be trained on. `generations` is None for evaluation; `context` is what the model can read."""
    if dataset is None:
        if generations is not None:
            raise LongreinError(
                "train_dataset is missing; `Environment.get_train_dataset()` or `task_dataset(rows)` make one"
            )
        return
    if isinstance(dataset, dict):
        for part in dataset.values():
            check_dataset(part, args, generations, context)
        return
    columns = dataset.column_names
    if columns is not None and (missing := [column for column in COLUMNS if column not in columns]):
        raise LongreinError(
            f"the dataset has no column {', '.join(missing)}; it has {', '.join(columns)}. Every row needs {', '.join(COLUMNS)}"
        )
    if columns is not None and (images := [column for column in ("image", "images") if column in columns]):
        raise LongreinError(f"the dataset has the column {images[0]}: environments give text, and images are not read")
    if not hasattr(dataset, "__len__"):  # a stream is checked row by row as it comes
        if generations is not None and args.resample_flat_groups:
            raise LongreinError(
                "resample_flat_groups needs a dataset with a length, to draw fresh tasks from; this is a stream"
            )
        return
    if not len(dataset):
        raise LongreinError("the dataset is empty")
    refuse_merged(dataset)
    check_rows((checked_row(row, index) for index, row in enumerate(dataset)), context)
    if generations is not None and len(dataset) < (needed := (args.generation_batch_size or 0) // generations):
        raise LongreinError(
            f"the dataset has {len(dataset)} rows and a generation batch needs {needed} (generation_batch_size "
            f"{args.generation_batch_size} / num_generations {generations}): TRL would train 0 steps. Add rows, or lower "
            "per_device_train_batch_size or steps_per_generation"
        )


def check_engine(engine: Any, trainer: Any) -> None:
    """Let an embedded engine sample from the trainer's own module; refuse where that module is in pieces."""
    if not isinstance(engine, TransformersEngine):
        return
    plugin = trainer.args.deepspeed_plugin
    sharded = "FSDP" if trainer.is_fsdp_enabled else "ZeRO-3" if plugin is not None and plugin.zero_stage == 3 else None
    if sharded:
        raise LongreinError(
            f"under {sharded} no process holds the whole model, so it cannot sample in this process: give the Agent a vLLM "
            "engine"
        )
    engine.model = trainer.model
    engine.forward_context = trainer.accelerator.autocast
