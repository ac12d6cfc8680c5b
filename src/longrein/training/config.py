"""The settings of `GRPOEnvTrainer`: TRL's own, and the few that environments add."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from trl.trainer.grpo_config import GRPOConfig

from longrein.agents import Agent
from longrein.contract import LongreinError
from longrein.engines.scripted import ScriptedEngine
from longrein.training.advantages import ADVANTAGES, AdvantageName

REFUSED: dict[str, tuple[Any, str]] = {
    "use_vllm": (False, "give the Agent a vLLM engine; the trainer samples through the agent"),
    "use_liger_kernel": (False, "its kernels replace the loss that works on whole trajectories"),
    "use_transformers_continuous_batching": (False, "the agent's engine samples and batches by itself"),
    "generation_kwargs": (None, "set `sampling=Sampling(...)` on the Agent"),
    "chat_template_kwargs": (None, "give them to the Agent: `Agent(model, tokenizer, enable_thinking=False)`"),
    "reward_weights": (None, "an environment gives one reward; weigh its parts there"),
    "max_tool_calling_iterations": (None, "set `max_turns` in env_config"),
    "repetition_penalty": (1.0, "the log-probabilities of a penalised sampler are not the policy's"),
    "multi_objective_aggregation": ("sum_then_normalize", "an environment gives one reward; combine its parts there"),
}
"""Options of TRL without a meaning here: the only value that is taken, and what to do instead."""


@dataclass
class GRPOEnvConfig(GRPOConfig):
    """`GRPOConfig` with what environments add.

    >>> GRPOEnvConfig(output_dir="runs/x", advantages="group", num_generations=8).advantages      # doctest: +SKIP
    'group'
    """

    advantages: AdvantageName = field(
        default="rewards",
        metadata={"help": "How rewards become per-token advantages: rewards, group, turn, return or leave_one_out."},
    )
    discount: float = field(
        default=1.0, metadata={"help": "Discount per turn of the reward still to come (`return` and `turn`)."}
    )
    resample_flat_groups: int = field(
        default=0,
        metadata={
            "help": "Replace groups whose rollouts all got the same reward by fresh tasks, in at most so many rounds."
        },
    )
    old_logps: Literal["policy", "recorded"] = field(
        default="policy",
        metadata={
            "help": "Where old log-probabilities come from: a pass of the policy, or the sampler's own record (only for "
            "untruncated sampling)."
        },
    )

    skip_old_pass: bool = field(
        default=False,
        metadata={
            "help": "Where each generation batch is used for one update, take the old log-probabilities from the loss's own pass "
            "(detached) instead of a pass of their own."
        },
    )
    packing: Literal["auto", "off"] = field(
        default="auto",
        metadata={
            "help": "Forward each shared prefix once and no padding ('auto'), or rows padded as TRL does ('off'). The loss and "
            "its gradient are the same."
        },
    )
    packing_backend: str = field(
        default="auto", metadata={"help": "The attention of packed passes: auto, cudnn, varlen, flex or sdpa."}
    )
    packing_compiled: bool | None = field(
        default=None,
        metadata={"help": "Compile what a layer does around its attention in packed passes; unsaid, on a GPU."},
    )
    token_budget: int | None = field(
        default=None,
        metadata={"help": "Unique tokens a packed pass; unsaid, what half of the device's free memory holds."},
    )
    sampler_ratio_cap: float | None = field(
        default=2.0,
        metadata={
            "help": "Where an engine samples from a copy of the policy (vLLM), weigh every token by its probability under the "
            "trainer over the sampler's, at most this; None trains as if they agreed."
        },
    )
    max_staleness: int | None = field(
        default=None,
        metadata={"help": "Leave out rows that were sampled more than so many optimizer steps ago; None keeps all."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing not in ("auto", "off"):
            raise LongreinError(f"packing is {self.packing!r}; it must be 'auto' or 'off'")
        if self.token_budget is not None and self.token_budget < 1:
            raise LongreinError(f"token_budget is {self.token_budget}; it must be 1 token or more, or unsaid")
        if self.advantages not in ADVANTAGES:
            raise LongreinError(f"advantages is {self.advantages!r}; it must be one of {', '.join(ADVANTAGES)}")
        if not 0 <= self.discount <= 1:
            raise LongreinError(f"discount is {self.discount}; it must be between 0 and 1")
        if self.old_logps not in ("policy", "recorded"):
            raise LongreinError(f"old_logps is {self.old_logps!r}; it must be 'policy' or 'recorded'")
        if self.sampler_ratio_cap is not None and self.sampler_ratio_cap < 1:
            raise LongreinError(
                f"sampler_ratio_cap is {self.sampler_ratio_cap}; it must be 1 or more, or None for no weights"
            )
        if self.max_staleness is not None and self.max_staleness < 0:
            raise LongreinError(
                f"max_staleness is {self.max_staleness}; it must be 0 or more steps, or None to keep all rows"
            )
        if self.resample_flat_groups < 0:
            raise LongreinError(f"resample_flat_groups is {self.resample_flat_groups}; it must be 0 or more rounds")


def env_config_of(args: GRPOConfig) -> GRPOEnvConfig:
    """TRL's configuration with our defaults added; a `GRPOEnvConfig` is itself."""
    if isinstance(args, GRPOEnvConfig):
        return args
    upgraded = object.__new__(GRPOEnvConfig)  # `__init__` would derive the batch sizes a second time
    upgraded.__dict__.update(args.__dict__)
    for ours in fields(GRPOEnvConfig):
        if ours.name not in upgraded.__dict__:
            setattr(upgraded, ours.name, ours.default)
    return upgraded


def check_config(args: GRPOEnvConfig, agent: Agent) -> None:
    """Refuse options that have no meaning here, and sampling that is not the agent's."""
    sampling = agent.sampling
    for name, (accepted, instead) in REFUSED.items():
        if getattr(args, name, accepted) != accepted:
            raise LongreinError(f"{name}={getattr(args, name)!r} has no meaning with environments: {instead}")
    if sampling.temperature == 0:
        raise LongreinError(
            "the agent samples at temperature 0: all rollouts of a task would be the same. Raise it to train"
        )
    for name, default in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0), ("min_p", None)):
        asked, drawn = getattr(args, name), getattr(sampling, name)
        if name == "temperature" and asked != drawn:
            raise LongreinError(
                f"the trainer's temperature is {asked} and the agent samples at {drawn}: log-probabilities would be of "
                "another policy. Give both the same."
            )
        if asked != default and (asked or 0) != drawn:
            raise LongreinError(f"{name}={asked} in the configuration, {drawn} on the Agent: set it on the Agent's Sampling")
    if args.old_logps == "recorded" and sampling.truncated:
        raise LongreinError(
            "old_logps='recorded' needs untruncated sampling, and the agent samples with top-p, top-k or min-p on"
        )
    if args.old_logps == "recorded" and isinstance(agent.engine, ScriptedEngine):
        raise LongreinError("old_logps='recorded' needs an agent that samples from the policy; a script records none")
