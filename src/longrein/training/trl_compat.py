"""Everything that leans on TRL's private surface, in one place; `tests/training/test_trl_compat.py` names what moved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from trl.models.utils import disable_gradient_checkpointing, prepare_deepspeed, prepare_fsdp
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model, use_adapter

__all__ = [
    "OVERRIDDEN",
    "READ",
    "attach_reference",
    "disable_gradient_checkpointing",
    "environment_reward",
    "logit_kernels",
    "reference_adapter",
    "without_reference",
]

OVERRIDDEN = (
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "_load_optimizer_and_scheduler",
    "_prepare_inputs",
    "_save_checkpoint",
    "_set_signature_columns_if_needed",
    "compute_loss",
    "evaluate",
    "log",
    "training_step",
)
"""Methods of `GRPOTrainer` that `GRPOEnvTrainer` replaces or wraps."""

READ = ("_buffered_inputs", "_compute_loss", "_logs", "_metrics", "_step", "aux_loss_enabled", "num_generations_eval")
"""Attributes of a `GRPOTrainer` that `GRPOEnvTrainer` reads or sets."""


def environment_reward(*args: Any, **kwargs: Any) -> list[float]:
    """TRL asks for a reward function; rewards come from environments, so this is never called."""
    raise AssertionError("rewards come from environments; TRL's reward path must not run")


@contextmanager
def without_reference(args: GRPOConfig) -> Iterator[None]:
    """TRL would load the reference model from the hub by name, which fails for a model that was never saved: build it
    ourselves, and have TRL's constructor see a run without one."""
    beta, sync = args.beta, args.sync_ref_model
    args.beta, args.sync_ref_model = 0.0, False
    try:
        yield
    finally:
        args.beta, args.sync_ref_model = beta, sync


def attach_reference(trainer: Any, reference: Any) -> None:
    """Give a trainer its frozen reference model, prepared as TRL prepares its own."""
    args = trainer.args
    trainer.beta = args.beta
    reference.requires_grad_(False)
    if args.disable_dropout:
        disable_dropout_in_model(reference)
    if args.cast_lm_head_to_fp32:
        dtype = reference.dtype
        reference.get_output_embeddings().float()
        reference.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output.to(dtype))
    add_fused_lm_head(reference, temperature=trainer.temperature, cast_lm_head_to_fp32=args.cast_lm_head_to_fp32)
    if trainer.is_deepspeed_enabled:
        reference = prepare_deepspeed(reference, trainer.accelerator)
    elif trainer.is_fsdp_enabled:
        reference = prepare_fsdp(reference, trainer.accelerator)
    else:
        reference = trainer.accelerator.prepare_model(reference, evaluation_mode=True)
    trainer.ref_model = reference
    if args.sync_ref_model:
        trainer.add_callback(SyncRefModelCallback(ref_model=reference, accelerator=trainer.accelerator))


def reference_adapter(model: Any) -> Any:
    """A context in which a PEFT model is its own reference: a copied adapter if there is one, else none."""
    return use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None)


class LogitKernels(NamedTuple):
    """TRL's Triton kernels for a tile of logits: one folds it, one turns it into its gradient."""

    forward: Any
    backward: Any
    block: int


def logit_kernels(device: torch.device) -> LogitKernels | None:
    """TRL's kernels where they run, else None."""
    from trl.kernels import chunked_logprob

    if not chunked_logprob._use_triton(device):
        return None
    return LogitKernels(chunked_logprob._forward_kernel, chunked_logprob._backward_kernel, chunked_logprob._BLOCK_SIZE)
