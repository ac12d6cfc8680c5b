"""Loss and backward over the same rows by each of those that are compared: ours, TRL's trainer, TRL's tree of its async trainer.

Always true: each has a model of the same weights, and after a run its gradient stands in it.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from trl import GRPOConfig, GRPOTrainer

from benchmarks.workloads import Row
from longrein.training.head import Head
from longrein.training.logprobs import carry_packed_passes
from longrein.training.loss import TrajectoryLoss


def make_model(device: str, *, small: bool = False) -> Any:
    """4 layers in float32 on a CPU (or if `small`), the shape of Qwen3-0.6B in bfloat16 on a GPU; random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tiny: dict[str, Any] = {
        "vocab_size": 32_000, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": False,
    }  # fmt: skip
    qwen: dict[str, Any] = {
        "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0,
    }  # fmt: skip
    torch.manual_seed(0)
    large = device == "cuda" and not small
    config = Qwen3Config(**(qwen if large else tiny), max_position_embeddings=32_768)
    dtype = torch.bfloat16 if large else torch.float32
    with torch.device(device):
        return Qwen3ForCausalLM(config).to(dtype)


def make_trainer(cls: Any, model: Any, folder: str, device: str, **extra: Any) -> Any:
    """A trainer whose loss can be computed; it is never trained."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a")),
        pad_token="<pad>", eos_token="<eos>", unk_token="a",
    )  # fmt: skip
    cuda = device == "cuda"
    args = GRPOConfig(
        folder, per_device_train_batch_size=2, num_generations=2, report_to=[], use_cpu=not cuda, bf16=False,
        gradient_checkpointing=cuda, loss_type="dapo",
    )  # fmt: skip
    for name, value in extra.items():
        setattr(args, name, value)
    trainer = cls(model, lambda **_: [0.0], args, Dataset.from_dict({"prompt": ["a", "a"]}), processing_class=words)
    if cuda:  # as `train()` would
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    trainer.model.train()
    return trainer


class Values:
    """What the loss needs besides the rows, the same for all: advantages a rollout, old log-probabilities a token."""

    def __init__(self, rows: Sequence[Row], vocabulary: int) -> None:
        rng = np.random.default_rng(0)
        self.advantages = rng.standard_normal(1 + max(row.rollout for row in rows)).astype(np.float32)
        # near what random weights give, so that some ratios are clipped and most are not
        self.old = [rng.normal(-np.log(vocabulary), 0.2, len(row.ids)).astype(np.float32) for row in rows]
        self.total = float(sum(row.mask.sum() for row in rows))


class Ours:
    def __init__(self, model: Any, folder: str, device: str, *, compiled: bool | None = None, backend: str = "auto") -> None:
        self.device = device
        settings = {
            "packing": "auto",
            "packing_backend": backend,
            "packing_compiled": compiled,
            "token_budget": None,
            "old_logps": "policy",
        }
        self.trainer = make_trainer(TrajectoryLoss, copy.deepcopy(model), folder, device, **settings)
        self.model = self.trainer.model
        carry_packed_passes(self.model)

    def prepare(self, rows: Sequence[Row], values: Values) -> Any:
        width = max(len(row.ids) for row in rows)
        stacked = lambda parts: torch.as_tensor(np.stack([np.pad(one, (0, width - len(one))) for one in parts]))  # noqa: E731
        batch = {
            "prompt_completion_ids": stacked([row.ids for row in rows]),
            "attention_mask": stacked([np.ones_like(row.ids) for row in rows]),
            "agent_token_mask": stacked([row.mask for row in rows]),
            "advantages": stacked([row.mask * values.advantages[row.rollout] for row in rows]).float(),
            "old_per_token_logps": stacked(values.old),
            "row_rollout": torch.tensor([row.rollout for row in rows]),
            "num_items_in_batch": torch.tensor(values.total),
        }
        batch = {name: value.to(self.device) for name, value in batch.items()}
        return batch | {"num_rollouts": 1 + max(row.rollout for row in rows)}

    def run(self, batch: Any) -> Tensor:
        self.model.zero_grad()
        self.trainer.current_gradient_accumulation_steps = self.trainer.args.steps_per_generation = 1
        loss = self.trainer.compute_loss(self.model, batch)
        loss.backward()
        return loss.detach()


class Trl:
    """TRL's trainer as it is; on a CPU its head replaced by a chunked one over the scored positions."""

    def __init__(self, model: Any, folder: str, device: str) -> None:
        self.device = device
        self.trainer = make_trainer(GRPOTrainer, copy.deepcopy(model), folder, device)
        self.model = self.trainer.model

    def prepare(self, rows: Sequence[Row], values: Values, micro_batch: int, *, by_length: bool = False) -> Any:
        order = sorted(range(len(rows)), key=lambda one: len(rows[one].ids)) if by_length else list(range(len(rows)))
        chunks = [order[start : start + micro_batch] for start in range(0, len(order), micro_batch)]
        return [self._batch([rows[one] for one in chunk], [values.old[one] for one in chunk], values) for chunk in chunks]

    def _batch(self, rows: Sequence[Row], old: Sequence[Any], values: Values) -> dict[str, Tensor]:
        starts = [int(row.mask.argmax()) for row in rows]
        ends = [int(np.flatnonzero(row.mask)[-1]) + 1 for row in rows]  # TRL ends a row with what was sampled
        before, after = max(starts), max(end - start for start, end in zip(starts, ends, strict=True))

        def left(parts: Sequence[Any]) -> Tensor:
            return torch.stack([pad(torch.as_tensor(v[:s]), (before - s, 0)) for v, s in zip(parts, starts, strict=True)])

        def right(parts: Sequence[Any]) -> Tensor:
            cut = [torch.as_tensor(v[s:e]) for v, s, e in zip(parts, starts, ends, strict=True)]
            return torch.stack([pad(v, (0, after - len(v))) for v in cut])

        ids, ones, masks = [row.ids for row in rows], [np.ones_like(row.ids) for row in rows], [row.mask for row in rows]
        batch = {
            "prompt_ids": left(ids),
            "prompt_mask": left(ones),
            "completion_ids": right(ids),
            "completion_mask": right(ones),
            "tool_mask": right(masks),
            "advantages": torch.tensor([float(values.advantages[row.rollout]) for row in rows]),
            "old_per_token_logps": right(old),
            "num_items_in_batch": torch.tensor(values.total),
        }
        return {name: value.to(self.device) for name, value in batch.items()}

    def run(self, batches: Sequence[dict[str, Tensor]]) -> Tensor:
        self.model.zero_grad()
        self.trainer.current_gradient_accumulation_steps = self.trainer.args.steps_per_generation = len(batches)
        total = torch.zeros((), device=self.device)
        with chunked_head() if self.device == "cpu" else contextlib.nullcontext():
            for batch in batches:
                loss = self.trainer.compute_loss(self.model, batch)
                loss.backward()
                total += loss.detach()
        return total

    def forwarded(self, batches: Sequence[dict[str, Tensor]]) -> int:
        return sum(one["prompt_ids"].numel() + one["completion_ids"].numel() for one in batches)


@contextlib.contextmanager
def chunked_head() -> Iterator[None]:
    """On a CPU TRL projects every position in tiles far larger than a cache. In its place: only what its loss scores, in tiles
    that fit, made again in the backward pass: what TRL does on a GPU."""
    from trl.trainer import utils

    def apply(hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, temperature: float, *rest: Any) -> Any:
        head = Head(_linear(weight, bias))
        scores = head.score(hidden, targets)
        return scores.logps, scores.entropies, None, None, None

    before = utils._ChunkedLogProbFunction, utils._use_triton
    utils._ChunkedLogProbFunction, utils._use_triton = types.SimpleNamespace(apply=apply), lambda device: True
    try:
        yield
    finally:
        utils._ChunkedLogProbFunction, utils._use_triton = before


def _linear(weight: Tensor, bias: Tensor | None) -> Any:
    linear = torch.nn.Linear(1, 1, bias=False, device="meta")
    linear.weight, linear.bias = weight, bias  # type: ignore[assignment]
    return linear


class TrlTree:
    """The pass of TRL's async trainer over its `TreeRow`, with torch's varlen attention in place of its kernel."""

    def __init__(self, model: Any, device: str) -> None:
        from trl.experimental.async_grpo import packing
        from trl.trainer.utils import add_fused_lm_head

        self.device, self._tree = device, packing
        packing._flash_attn = lambda: types.SimpleNamespace(flash_attn_varlen_func=_varlen)  # type: ignore[assignment]
        packing.register_tree_attention()
        self.model = copy.deepcopy(model)
        self.model.config._attn_implementation = packing.TREE_ATTENTION
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train()
        add_fused_lm_head(self.model, outputs=("log_probs", "entropy"))

    def prepare(self, rows: Sequence[Row], values: Values) -> Any:
        tree = self._tree.TreeRow()
        for row, old in zip(rows, values.old, strict=True):
            advantage = float(values.advantages[row.rollout])
            tree.add({"input_ids": row.ids, "completion_mask": row.mask, "old_log_probs": old, "advantage": advantage,
                      "group_id": 0})  # fmt: skip
        packed = {name: value.to(self.device) for name, value in tree.pack().items()}
        return packed | {"total": values.total, "max": packed["tree_max_seqlens"].tolist()}

    def run(self, packed: Any) -> Tensor:
        self.model.zero_grad()
        names = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
        output = self.model(
            input_ids=packed["input_ids"][None], position_ids=packed["position_ids"][None],
            shift_labels=packed["shift_labels"][None], fused_lm_head=True, **{name: packed[name] for name in names},
            tree_max_seqlen_q=packed["max"][0], tree_max_seqlen_k=packed["max"][1],
        )  # fmt: skip
        ratio = torch.exp(output.log_probs.flatten()[packed["token_index"]] - packed["old_log_probs"])
        advantages = packed["advantages"]
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / packed["total"]
        loss.backward()
        return loss.detach()


def _varlen(query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
            softmax_scale: float | None = None, **options: Any) -> Tensor:  # fmt: skip
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
    return varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, scale=softmax_scale, window_size=(-1, 0))  # type: ignore[return-value]
