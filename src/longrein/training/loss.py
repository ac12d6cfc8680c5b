"""TRL's loss over trajectories: the log-probabilities come from packed passes, one a planned part, everything else from TRL.

Always true: in the loss a rollout is one row, whatever it forked into, and only agent tokens count; the loss, its metrics and
its gradient are those of the whole batch, however many parts it was planned in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import DistributedType
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from longrein.contract import LongreinError
from longrein.training.agent_tokens import AgentTokens
from longrein.training.logprobs import PackedRows, Packing, as_arrays, only, packed_scores, trajectory_logps
from longrein.training.planning import default_budget, plan
from longrein.training.slopes import ClippedSlope, GivenSlope, token_weights, why_not_clipped
from longrein.training.tree import Ints
from longrein.training.tree_attention import wants_aligned
from longrein.training.way import way_for

if TYPE_CHECKING:
    from longrein.training.config import GRPOEnvConfig


class _Current(NamedTuple):
    """The batch whose loss TRL is computing."""

    inputs: dict[str, Any]
    tokens: AgentTokens
    parts: list[Ints] | None
    known: tuple[Tensor, Tensor] | None = None
    """Log-probabilities and entropies, (rows, tokens), where they were computed before."""


class TrajectoryLoss(GRPOTrainer):
    """The loss of `GRPOEnvTrainer`."""

    args: GRPOEnvConfig
    model: Any
    _token_budget: int | None = None

    @property
    def packing(self) -> Packing | None:
        """How passes are packed; None for padded ones. A model may have another way in training, when it drops out."""
        way = way_for(self.accelerator.unwrap_model(self.model)) if self.args.packing == "auto" else None
        if way is None or way.name == "padded" or self.aux_loss_enabled:
            return None
        return Packing(
            share=way.name == "tree",
            temperature=self.temperature,
            float32_head=self.args.cast_lm_head_to_fp32,
            backend=self.args.packing_backend,
            aligned=wants_aligned(self.args.packing_backend, self.accelerator.device, half=self._half),
            compiled=self.args.packing_compiled,
        )

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """The loss of a batch. With gradients on, all parts but the last have gone backward when it returns."""
        if return_outputs:
            raise LongreinError("GRPOEnvTrainer computes a loss and no outputs; call it with return_outputs=False")
        agent_mask = inputs["agent_token_mask"]
        inputs = {"num_items_in_batch": agent_mask.sum().float(), **inputs}
        if inputs.get("row_rollout") is None:  # a row is a rollout
            inputs["row_rollout"] = torch.arange(len(agent_mask), device=agent_mask.device)
            inputs["num_rollouts"] = len(agent_mask)
        tokens = AgentTokens(agent_mask, inputs["row_rollout"], inputs["num_rollouts"])
        current = _Current(inputs, tokens, self._parts(inputs))
        if current.parts is None or not torch.is_grad_enabled():
            return self._trl_loss(model, current)
        if why_not_clipped(self) is None:
            return self._formed_loss(model, current)
        if len(current.parts) == 1:
            return self._trl_loss(model, current)
        return self._twice_run_loss(model, current)

    def _trl_loss(self, model: Any, current: _Current) -> Tensor:
        inputs, tokens = current.inputs, current.tokens
        ids = tokens.gather(inputs["prompt_completion_ids"])
        as_trl = {
            "prompt_ids": ids[:, :1],  # TRL wants a prompt; the forward below reads the trajectories instead
            "prompt_mask": torch.ones_like(ids[:, :1]),
            "completion_ids": ids,
            "completion_mask": tokens.mask,
            "advantages": tokens.gather(inputs["advantages"]),
            "num_items_in_batch": inputs["num_items_in_batch"],
        }
        for name in ("old_per_token_logps", "ref_per_token_logps"):
            if inputs.get(name) is not None:
                as_trl[name] = tokens.gather(inputs[name])
        self._current = current
        try:
            return self._compute_loss(model, as_trl)
        finally:
            del self._current

    def _get_per_token_logps_and_entropies(
        self, model: Any, *args: Any, compute_entropy: bool = False, compute_aux_loss: bool = False, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """TRL's loss asks for the log-probabilities of its rows: those of the trajectories, one row a rollout."""
        inputs, tokens, parts, known = self._current
        logps, entropies, aux_loss = (
            self._trajectory_logps(model, inputs, parts=parts, entropy=compute_entropy, aux_loss=compute_aux_loss)
            if known is None
            else (*known, None)
        )
        if self.args.old_logps == "recorded" and self.model.training:
            self._watch(tokens.gather(logps.detach() - inputs["old_per_token_logps"]).abs(), tokens.mask)
        return tokens.gather(logps), None if entropies is None else tokens.gather(entropies), aux_loss

    def _watch(self, difference: Tensor, mask: Tensor) -> None:
        """Log how far recorded log-probabilities are from the policy's own, while the weights are still those that sampled."""
        cycle = (self.args.steps_per_generation or 1) * self.num_iterations
        if self._step % cycle >= self.args.gradient_accumulation_steps:
            return
        own = torch.stack([(difference * mask).sum(), mask.sum(), (difference * mask).amax()])[None]
        every = torch.as_tensor(self.accelerator.gather(own))
        self._metrics["train"]["old_logps/difference_mean"].append(float(every[:, 0].sum() / every[:, 1].sum().clamp(min=1)))
        self._metrics["train"]["old_logps/difference_max"].append(float(every[:, 2].max()))

    def _trajectory_logps(self, model: Any, batch: dict[str, Any], batch_size: int | None = None, **options: Any) -> Any:
        with self.accelerator.autocast():
            return trajectory_logps(
                model,
                batch["prompt_completion_ids"],
                batch["attention_mask"],
                batch["agent_token_mask"],
                packing=self.packing,
                batch_size=batch_size,
                **options,
            )

    # ---- more passes than one

    def _formed_loss(self, model: Any, current: _Current) -> Tensor:
        """A clipped loss: each part's gradient is formed in its forward pass; then TRL's loss judges them all."""
        inputs, tokens = current.inputs, current.tokens
        mode = "train" if self.model.training else "eval"
        weights = token_weights(self, inputs, tokens.counts, mode)[inputs["row_rollout"]]
        values = {
            "advantages": inputs["advantages"],
            "weights": weights[:, None].expand(inputs["advantages"].shape),
            "old": inputs.get("old_per_token_logps"),
            "ref": inputs.get("ref_per_token_logps"),
        }
        options: dict[str, Any] = {
            "epsilon": (self.epsilon_low, self.epsilon_high),
            "beta": self.beta,
            "corrected": self.args.use_bias_correction_kl,
            "device": weights.device,
        }
        slopes: list[ClippedSlope] = []

        def slope_of(packed: PackedRows) -> ClippedSlope:
            slopes.append(ClippedSlope(packed, values, **options))
            return slopes[-1]

        surrogate, known = self._backward_by_parts(model, current, slope_of)
        known[0].requires_grad_()
        loss = self._trl_loss(model, current._replace(known=known))
        (judged,) = torch.autograd.grad(loss, known[0])
        for slope in slopes:
            slope.check(judged)
        return loss.detach() + (surrogate - surrogate.detach())

    def _twice_run_loss(self, model: Any, current: _Current) -> Tensor:
        """Any loss in several parts: the first passes give TRL's loss its values, the second ones take its slopes back."""
        with torch.no_grad():
            logps, entropies, _ = self._trajectory_logps(model, current.inputs, parts=current.parts, entropy=True)
        known = (logps.requires_grad_(), entropies.requires_grad_())
        loss = self._trl_loss(model, current._replace(known=known))
        by_logp, by_entropy = torch.autograd.grad(loss, known, allow_unused=True)
        by_logp = torch.zeros_like(logps) if by_logp is None else by_logp
        if by_entropy is not None and not self._entropy_bonus_enabled:
            by_entropy = None  # a bonus of 0
        surrogate, _ = self._backward_by_parts(model, current, lambda packed: GivenSlope(packed, by_logp, by_entropy))
        return loss.detach() + (surrogate - surrogate.detach())

    def _backward_by_parts(self, model: Any, current: _Current, slope_of: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run the parts, all but the last backward too: the last one's surrogate loss, and what all of them computed."""
        inputs, packing = current.inputs, self.packing
        assert packing is not None
        assert current.parts
        ids, scored = as_arrays(inputs["prompt_completion_ids"], inputs["attention_mask"], inputs["agent_token_mask"])
        *before, last = current.parts
        known, forwarded = [], 0

        def run(rows: Ints) -> Tensor:
            nonlocal forwarded
            packed = PackedRows(ids, only(scored, rows), share=packing.share, aligned=packing.aligned)
            forwarded += len(packed.tree)
            with self.accelerator.autocast():
                scores = packed_scores(model, packed, packing, entropy=True, slope=slope_of(packed))
            assert scores.entropies is not None
            known.append([packed.spread(value.detach(), ids.shape) for value in (scores.logps, scores.entropies)])
            assert scores.surrogate is not None
            return scores.surrogate

        for rows in before:  # gradients meet those of other ranks once, with the last part's
            with self.accelerator.no_sync(model):
                self.accelerator.backward(run(rows))
        surrogate = run(last)
        logps, entropies = (torch.stack(values).sum(0) for values in zip(*known, strict=True))
        self._metrics["train"]["packing/tokens_per_forwarded"].append(float(inputs["attention_mask"].sum()) / forwarded)
        return surrogate, (logps, entropies)

    # ---- the plan

    def _parts(self, batch: dict[str, Any]) -> list[Ints] | None:
        """The rows of each packed pass over a batch, as many passes on every rank; None for padded ones."""
        if (packing := self.packing) is None:
            return None
        ids, scored = as_arrays(batch["prompt_completion_ids"], batch["attention_mask"], batch["agent_token_mask"])
        read = np.where(scored.any(1), scored.shape[1] - scored[:, ::-1].argmax(1), 0)
        held = np.flatnonzero(read)
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            return [held]  # its engine steps with every backward
        owner = batch["row_rollout"].cpu().numpy()[held]
        parts = plan([ids[row, : read[row]] for row in held], owner, self.token_budget, share=packing.share)
        parts = [held[part] for part in parts] or [held]
        if self.accelerator.num_processes > 1:
            count = torch.tensor([len(parts)], device=self.accelerator.device)
            most = int(torch.as_tensor(self.accelerator.gather(count)).max())
            parts += [held[:0]] * (most - len(parts))
        return parts

    @property
    def _half(self) -> bool:
        """Whether passes are in half precision."""
        return self.accelerator.mixed_precision in ("bf16", "fp16") or self.model.dtype in (torch.bfloat16, torch.float16)

    @property
    def token_budget(self) -> int:
        """Unique tokens a pass."""
        if self.args.token_budget is not None:
            return self.args.token_budget
        if self._token_budget is None:
            model = self.accelerator.unwrap_model(self.model)
            self._token_budget = default_budget(
                model.config.get_text_config(),
                self.accelerator.device,
                itemsize=2 if self._half else model.dtype.itemsize,
                trained=sum(one.numel() for one in model.parameters() if one.requires_grad),
                checkpointing=self.args.gradient_checkpointing,
            )
        return self._token_budget
