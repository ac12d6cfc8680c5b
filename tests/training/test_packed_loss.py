"""Promise 4: the packed loss, its metrics and the gradient of every parameter are the padded ones, however it was planned."""

from __future__ import annotations

from typing import Any

import numpy as np
import parts
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from test_packed import forked_rows, made
from trl import GRPOConfig

from longrein import LongreinError
from longrein.training import loss as loss_module
from longrein.training import slopes, tree
from longrein.training.logprobs import Logps, carry_packed_passes
from longrein.training.loss import TrajectoryLoss
from longrein.training.slopes import CLIPPED, why_not_clipped

OTHERS = ("cispo", "sapo", "luspo", "vespo")
MODELS = ("qwen3", "llama", "gemma2", "mistral")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory) -> TrajectoryLoss:
    folder = tmp_path_factory.mktemp("loss")
    args = GRPOConfig(
        str(folder), per_device_train_batch_size=2, num_generations=2, report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False,
    )  # fmt: skip
    args.__dict__.update(
        packing="auto", packing_backend="auto", packing_compiled=False, token_budget=None, old_logps="policy"
    )
    dataset = Dataset.from_dict({"prompt": ["a", "b"]})
    return TrajectoryLoss(parts.policy(), lambda **_: [0.0], args, dataset, processing_class=parts.tokenizer())


def policy(name: str, dtype: torch.dtype, lora: bool = False) -> Any:
    model: Any = made(name, dtype=dtype)
    for parameter in model.parameters():  # wide enough that no gradient is zero but for rounding
        parameter.data.mul_(3) if parameter.dim() > 1 else None
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        model.to(dtype)
    carry_packed_passes(model.get_base_model() if lora else model)
    return model.train()


@st.composite
def batches(draw) -> dict[str, Any]:
    """Rows that fork, some of one rollout, with agent tokens anywhere and values of their own on each."""
    rows = draw(forked_rows())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    width = max(map(len, rows))
    shape = (len(rows), width)
    ids, attention = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)], attention[index, : len(row)] = row, 1
    agent = attention * (rng.random(shape) < 0.6)
    agent[:, 0] = 0
    agent[0, 1] = 1
    owner = np.sort(rng.integers(0, len(rows), len(rows)))
    near = torch.as_tensor(rng.normal(-np.log(40), 0.4, (2, *shape)))
    return {
        "prompt_completion_ids": torch.as_tensor(ids),
        "attention_mask": torch.as_tensor(attention),
        "agent_token_mask": torch.as_tensor(agent),
        "advantages": torch.as_tensor(rng.standard_normal(shape) * agent),
        "old_per_token_logps": near[0] if draw(st.booleans()) else None,
        "ref_per_token_logps": near[1],
        "row_rollout": torch.as_tensor(owner),
        "num_rollouts": len(rows),
        "num_items_in_batch": torch.tensor(float(agent.sum())),
    }


def typed(batch: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


class Padded:
    """Full logits of padded rows, in place of the trainer's own passes."""

    def __init__(self, trainer: TrajectoryLoss) -> None:
        self.trainer = trainer

    def __enter__(self) -> None:
        self.trainer.args.packing = "off"
        self.trainer._trajectory_logps = self.logps  # type: ignore[method-assign]

    def __exit__(self, *_: Any) -> None:
        self.trainer.args.packing = "auto"
        del self.trainer._trajectory_logps

    def logps(self, model: Any, batch: dict[str, Any], **_: Any) -> Logps:
        ids, scored = batch["prompt_completion_ids"], batch["agent_token_mask"]
        logits = model(input_ids=ids, attention_mask=batch["attention_mask"]).logits[:, :-1]
        logps = torch.log_softmax(logits / self.trainer.temperature, -1)
        entropies = -(logps.exp() * logps).sum(-1)
        chosen = logps.gather(2, ids[:, 1:, None])[..., 0]
        return Logps(*(torch.nn.functional.pad(one, (1, 0)) * scored for one in (chosen, entropies)), None)


def outcome(trainer: TrajectoryLoss, batch: dict[str, Any]) -> tuple[float, dict[str, Any], dict[str, torch.Tensor]]:
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    metrics = {name: values for name, values in trainer._metrics["train"].items() if not name.startswith("packing/")}
    found = {name: one.grad.clone() for name, one in trainer.model.named_parameters() if one.grad is not None}
    return loss.item(), metrics, found


def assert_equal(trainer: TrajectoryLoss, batch: dict[str, Any], tolerance: float) -> None:
    with Padded(trainer):
        loss, metrics, expected = outcome(trainer, batch)
    found_loss, found_metrics, found = outcome(trainer, batch)
    assert found_loss == pytest.approx(loss, rel=tolerance, abs=tolerance)
    assert found_metrics.keys() == metrics.keys()
    for name, values in metrics.items():
        assert found_metrics[name] == pytest.approx(values, rel=1e-5, abs=1e-6, nan_ok=True), name
    assert found.keys() == expected.keys()
    scale = max(float(one.norm()) for one in expected.values())
    for name, gradient in expected.items():
        size = max(float(gradient.norm()), 1e-3 * scale)  # one that is zero but for rounding has no size of its own
        assert float((found[name] - gradient).norm()) <= tolerance * size, name


def settle(trainer: TrajectoryLoss, model: Any, **changes: Any) -> TrajectoryLoss:
    defaults = {"loss_type": "dapo", "beta": 0.0, "importance_sampling_level": "token", "temperature": 1.0,
                "top_entropy_quantile": 1.0, "_entropy_bonus_enabled": False, "entropy_coef": 0.0, "model": model}  # fmt: skip
    for name, value in {**defaults, **changes}.items():
        setattr(trainer, name, value)
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 1
    return trainer


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=20)
@given(
    batch=batches(),
    loss=st.sampled_from((*CLIPPED, *CLIPPED, *OTHERS)),
    level=st.sampled_from(("token", "token", "sequence")),
    beta=st.sampled_from((0.0, 0.2)),
    temperature=st.sampled_from((1.0, 0.6)),
    budget=st.sampled_from((1, 25, None)),
    bonus=st.sampled_from((0.0, 0.0, 0.1)),
    corrected=st.booleans(),
)
def test_in_float64_loss_metrics_and_gradients_are_the_padded_ones(
    trainer, name, batch, loss, level, beta, temperature, budget, bonus, corrected
):
    settle(
        trainer, cached(name, torch.float64), loss_type=loss, importance_sampling_level=level, beta=beta, temperature=temperature,
        _entropy_bonus_enabled=bonus > 0, entropy_coef=bonus,
    )  # fmt: skip
    trainer.args.token_budget, trainer.args.use_bias_correction_kl = budget, corrected
    assert_equal(trainer, typed(batch, torch.float64), 1e-10)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=4)
@given(batch=batches(), loss=st.sampled_from((*CLIPPED, *OTHERS)), budget=st.sampled_from((1, None)))
def test_in_float32_they_are_within_rounding(trainer, name, batch, loss, budget):
    settle(trainer, cached(name, torch.float32), loss_type=loss, beta=0.1)
    trainer.args.token_budget = budget
    assert_equal(trainer, typed(batch, torch.float32), 1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
@settings(max_examples=4)
@given(batch=batches(), loss=st.sampled_from((*CLIPPED, *OTHERS)), budget=st.sampled_from((1, None)))
def test_with_adapters_and_checkpointing_too(trainer, checkpointing, batch, loss, budget):
    model = cached("qwen3", torch.float64, lora=True)
    (model.gradient_checkpointing_enable if checkpointing else model.gradient_checkpointing_disable)()
    model.enable_input_require_grads()
    settle(trainer, model, loss_type=loss, beta=0.1)
    trainer.args.token_budget = budget
    assert_equal(trainer, typed(batch, torch.float64), 1e-10)


@settings(max_examples=10)
@given(batch=batches(), loss=st.sampled_from((*CLIPPED, *OTHERS)), budget=st.sampled_from((1, None)))
def test_over_trees_that_fork_at_round_places_too(trainer, batch, loss, budget):
    settle(trainer, cached("qwen3", torch.float64), loss_type=loss, beta=0.1)
    trainer.args.token_budget = budget
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"GRAINS": (4, 2), "FEW": 0.9, "TAIL": 3}.items():
            patch.setattr(tree, name, value)
        patch.setattr(loss_module, "wants_aligned", lambda *_, **__: True)
        assert_equal(trainer, typed(batch, torch.float64), 1e-10)


@settings(max_examples=5)
@given(batch=batches(), budget=st.sampled_from((1, None)))
def test_a_quantile_of_entropies_is_over_the_whole_batch(trainer, batch, budget):
    settle(trainer, cached("llama", torch.float64), loss_type="grpo", top_entropy_quantile=0.5)
    trainer.args.token_budget = budget
    assert_equal(trainer, typed(batch, torch.float64), 1e-10)


_models: dict[tuple[Any, ...], Any] = {}


def cached(name: str, dtype: torch.dtype, lora: bool = False) -> Any:
    key = (name, dtype, lora)
    if key not in _models:
        _models[key] = policy(name, dtype, lora)
    return _models[key]


def one_batch() -> dict[str, Any]:
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]])
    agent = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]])
    return {
        "prompt_completion_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "agent_token_mask": agent,
        "advantages": torch.tensor([[0.0, 0, 1, 1], [0, 0, -1, 2]]),
        "old_per_token_logps": torch.full((2, 4), -3.7),
    }


def test_a_loss_that_trl_changed_is_noticed(trainer, monkeypatch):
    settle(trainer, cached("llama", torch.float32))
    trainer.args.token_budget = None
    weights = slopes.token_weights
    monkeypatch.setattr("longrein.training.loss.token_weights", lambda *args: 2 * weights(*args))
    with pytest.raises(LongreinError, match="differs from TRL's"):
        trainer.compute_loss(trainer.model, one_batch())


def test_shared_tokens_are_forwarded_once_and_scored_pairs_projected_once(trainer):
    settle(trainer, cached("llama", torch.float32))
    trainer.args.token_budget = None
    trainer.compute_loss(trainer.model, one_batch())  # what is tried once, of a model, is tried now
    trainer._metrics["train"].clear()
    seen = []
    hook = trainer.model.model.register_forward_hook(lambda module, args, output: seen.append(output.last_hidden_state))
    trainer.compute_loss(trainer.model, one_batch()).backward()
    hook.remove()
    assert [one.shape[1] for one in seen] == [4]  # 1 2, then 3 and 5: what they predict is read by none
    assert trainer._metrics["train"]["packing/tokens_per_forwarded"] == [2.0]


@pytest.mark.parametrize("formed", [True, False])
def test_where_that_is_faster_rows_part_at_round_places(trainer, formed, monkeypatch):
    settle(trainer, cached("llama", torch.float32), loss_type="dapo" if formed else "sapo")
    trainer.args.token_budget = None
    trainer.compute_loss(trainer.model, one_batch())
    for name, value in {"GRAINS": (4, 4), "FEW": 0.9, "TAIL": 1}.items():
        monkeypatch.setattr(tree, name, value)
    monkeypatch.setattr(loss_module, "wants_aligned", lambda *_, **__: True)
    seen = []
    hook = trainer.model.model.register_forward_hook(lambda module, args, output: seen.append(output.last_hidden_state))
    trainer.compute_loss(trainer.model, one_batch()).backward()
    hook.remove()
    assert [one.shape[1] for one in seen] == [8]  # 1 2 3 and 1 2 5, and two that nothing reads


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"loss_type": "cispo"}, "loss_type='cispo'"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level='sequence'"),
        ({"top_entropy_quantile": 0.5}, "top_entropy_quantile"),
        ({"_entropy_bonus_enabled": True}, "an entropy bonus"),
    ],
)
def test_what_is_not_formed_is_named(trainer, change, named):
    assert why_not_clipped(settle(trainer, cached("llama", torch.float32))) is None
    assert why_not_clipped(settle(trainer, cached("llama", torch.float32), **change)) == named
