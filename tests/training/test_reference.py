"""The reference model: the policy as it was at the start, frozen, also when it was never saved and with adapters."""

from __future__ import annotations

from typing import Any

import parts
import pytest
import torch
from peft import LoraConfig, get_peft_model
from worlds import Talk, row

from longrein import Agent, Sampling

ROWS = [row(Talk, word=f"w{n}") for n in range(2)]
LORA = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=True)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(10, 30)[None]).logits


def test_a_model_that_was_never_saved_is_its_own_reference(tmp_path):
    trainer = parts.trainer(tmp_path, ROWS, beta=0.1, max_steps=3)
    assert trainer.ref_model is not trainer.model
    start = parts.weights(trainer.model)
    assert same(parts.weights(trainer.ref_model), start)
    assert not any(parameter.requires_grad for parameter in trainer.ref_model.parameters())
    trainer.train()
    assert same(parts.weights(trainer.ref_model), start)
    assert not same(parts.weights(trainer.model), start)
    divergence = parts.logged(trainer, "kl")
    assert divergence[0] == pytest.approx(0, abs=1e-7)
    assert divergence[1] > 1e-6
    assert divergence[2] > divergence[1]


def test_without_a_divergence_term_there_is_no_reference(tmp_path):
    trainer = parts.trainer(tmp_path, ROWS, beta=0.0)
    assert trainer.ref_model is None
    assert trainer._generate_and_score_completions(parts.repeated(ROWS))["ref_per_token_logps"] is None


def test_a_synced_reference_follows_the_policy(tmp_path):
    trainer = parts.trainer(
        tmp_path, ROWS, beta=0.1, max_steps=2, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=1.0
    )
    trainer.train()
    assert same(parts.weights(trainer.ref_model), parts.weights(trainer.model))


def test_half_precision_with_a_full_precision_head(tmp_path):
    model = parts.policy().to(torch.bfloat16)
    agent = Agent(model, parts.tokenizer(), sampling=Sampling(max_tokens=6))
    trainer = parts.trainer(tmp_path, ROWS, of=agent, beta=0.1, cast_lm_head_to_fp32=True)
    trainer.train()
    assert parts.logged(trainer, "kl")[0] == pytest.approx(0, abs=1e-6)


def test_lora_trains_the_adapter_and_its_absence_is_the_reference(tmp_path):
    agent = parts.agent()
    base = parts.weights(agent.policy_model)
    before = logits(agent.policy_model)
    trainer = parts.trainer(
        tmp_path, ROWS, of=agent, options={"peft_config": LORA}, beta=0.1, max_steps=3, learning_rate=0.1
    )
    assert trainer.ref_model is None
    trainer.train()
    after = {name: value for name, value in trainer.model.get_base_model().state_dict().items() if "lora" not in name}
    assert same({name.replace(".base_layer", ""): value for name, value in after.items()}, base)
    assert not torch.allclose(logits(trainer.model), before)
    divergence = parts.logged(trainer, "kl")
    assert divergence[0] == pytest.approx(0, abs=1e-7)
    assert divergence[-1] > 1e-6
    with trainer.model.disable_adapter():
        torch.testing.assert_close(logits(trainer.model), before)


def test_the_adapter_samples(tmp_path):
    agent = parts.agent()
    trainer = parts.trainer(tmp_path, ROWS, of=agent, options={"peft_config": LORA}, old_logps="recorded")
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.5)
    recorded = trainer._generate_and_score_completions(parts.repeated(ROWS))
    assert agent.engine.model is trainer.model
    own = trainer._trajectory_logps(trainer.model, recorded).logps
    torch.testing.assert_close(recorded["old_per_token_logps"], own, rtol=0, atol=1e-4)
    with trainer.model.disable_adapter():
        base = trainer._trajectory_logps(trainer.model, recorded).logps
    assert (own - base).abs().max() > 1e-2


def test_a_model_that_already_has_an_adapter_is_compared_with_that_adapter(tmp_path):
    torch.manual_seed(1)
    model = get_peft_model(parts.policy(), LORA)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.2)
    agent = Agent(model, parts.tokenizer(), sampling=Sampling(max_tokens=6))  # type: ignore[arg-type]
    start = logits(model)
    trainer = parts.trainer(tmp_path, ROWS, of=agent, beta=0.1, max_steps=2, learning_rate=0.1)
    assert trainer.ref_model is None
    torch.testing.assert_close(logits(model), start)
    trainer.train()
    divergence = parts.logged(trainer, "kl")
    assert divergence[0] == pytest.approx(0, abs=1e-7)
    assert divergence[1] > 1e-6
    assert not torch.allclose(logits(model), start)
    model.set_adapter("ref")
    torch.testing.assert_close(logits(model), start)


def test_a_trained_adapter_loads(tmp_path):
    from peft import AutoPeftModelForCausalLM

    policy = parts.policy()
    policy.save_pretrained(tmp_path / "base")
    agent = Agent(type(policy).from_pretrained(tmp_path / "base"), parts.tokenizer(), sampling=Sampling(max_tokens=6))
    trainer = parts.trainer(tmp_path / "run", ROWS, of=agent, options={"peft_config": LORA}, learning_rate=0.1)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "final")
    torch.testing.assert_close(logits(loaded), logits(trainer.model.eval()))
