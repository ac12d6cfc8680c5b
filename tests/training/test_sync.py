"""An engine that samples from a copy of the policy: it gets the weights, its mismatch is corrected, its old tokens are left out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import parts
import pytest
import torch
from peft import LoraConfig
from worlds import Talk, row

from longrein import Agent, LongreinError, Sampling
from longrein.contract import Sampled, SampleRequest
from longrein.engines.transformers import TransformersEngine

MISMATCH = ("sampler/logp_diff_mean", "sampler/logp_diff_max", "sampler/ratio_mean", "sampler/ratio_capped")


class Elsewhere:
    """Samples from a model of its own, as a server does; it can misreport its log-probabilities and its version."""

    def __init__(self, seed: int = 0, *, shift: float = 0.0, behind: int = 0) -> None:
        self.own = TransformersEngine(parts.policy(seed))
        self.shift, self.behind = shift, behind
        self.updates: list[int] = []
        self.paused = False

    @property
    def policy_version(self) -> int:
        return self.own.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        if version != self.own.policy_version:
            assert self.paused
        self.own.policy_version = version

    async def sample(self, request: SampleRequest) -> Sampled:
        sampled = await self.own.sample(request)
        logprobs = [logprob + self.shift for logprob in sampled.logprobs]
        return replace(sampled, logprobs=logprobs, policy_version=sampled.policy_version - self.behind)

    def pause(self) -> None:
        self.paused = True
        self.own.pause()

    def resume(self) -> None:
        self.paused = False
        self.own.resume()
        self.updates.append(self.policy_version)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        assert self.paused
        self.own.load_weights(weights)

    def cancel(self) -> None:
        self.own.cancel()

    def close(self) -> None:
        self.own.close()


def agent(engine: Elsewhere) -> Agent:
    return Agent(parts.policy(0), parts.tokenizer(), engine=engine, sampling=Sampling(max_tokens=6))


def talks(count: int = 2) -> list[dict[str, Any]]:
    return [row(Talk, word=f"word{n}") for n in range(count)]


def scored(tmp_path: Any, engine: Elsewhere, **changes: Any) -> dict[str, Any]:
    trainer = parts.trainer(tmp_path, talks(), of=agent(engine), **changes)
    trainer.model.train()
    return trainer._generate_and_score_completions(parts.repeated(talks()))


def test_weights_go_to_the_engine_before_every_generation_batch(tmp_path: Any) -> None:
    engine = Elsewhere(seed=5)  # other weights than the policy has
    trainer = parts.trainer(tmp_path, talks(4), of=agent(engine), max_steps=3)
    seen = []
    collect = trainer._collect

    def watch(rows: Any, mode: str) -> Any:
        same = zip(trainer.model.parameters(), engine.own.model.parameters(), strict=True)
        seen.append(all(torch.equal(one, other) for one, other in same))
        return collect(rows, mode)

    trainer._collect = watch  # type: ignore[method-assign]
    trainer.train()
    assert seen == [True, True, True]
    assert engine.updates == [0, 1, 2]
    assert trainer.last_batch is not None
    versions = {call.policy_version for one in trainer.last_batch.played for call in one.rollout.calls.values()}  # type: ignore[union-attr]
    assert versions == {2}
    assert max(parts.logged(trainer, "sampler/logp_diff_max")) < 1e-4
    assert parts.logged(trainer, "sampler/ratio_mean") == pytest.approx([1.0] * 3, abs=1e-4)


def test_the_engine_that_is_the_model_itself_gets_nothing_and_is_not_corrected(tmp_path: Any) -> None:
    trainer = parts.trainer(tmp_path, talks())
    trainer.train()
    assert not any(name in entry for entry in trainer.state.log_history for name in MISMATCH)


@pytest.mark.parametrize(
    ("shift", "weight"), [(-0.5, math.exp(0.5)), (0.5, math.exp(-0.5)), (-1.0, 2.0)], ids=["less", "more", "capped"]
)
def test_advantages_are_weighed_by_the_truncated_ratio(tmp_path: Any, shift: float, weight: float) -> None:
    plain = scored(tmp_path, Elsewhere(shift=shift), sampler_ratio_cap=None)
    corrected = scored(tmp_path, Elsewhere(shift=shift))
    assert torch.equal(plain["prompt_completion_ids"], corrected["prompt_completion_ids"])
    trained = plain["agent_token_mask"] == 1
    assert plain["advantages"][trained].abs().max() > 0
    torch.testing.assert_close(corrected["advantages"][trained], plain["advantages"][trained] * weight, rtol=1e-4, atol=1e-6)


def test_the_loss_follows_the_weights(tmp_path: Any) -> None:
    losses = []
    for cap in (None, 1.5):
        trainer = parts.trainer(tmp_path, talks(), of=agent(Elsewhere(shift=-3.0)), sampler_ratio_cap=cap)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        batch = trainer._generate_and_score_completions(parts.repeated(talks()))
        trainer.compute_loss(trainer.model, batch).backward()
        losses.append([parameter.grad.clone() for parameter in trainer.model.parameters()])
    for plain, corrected in zip(*losses, strict=True):
        torch.testing.assert_close(corrected, 1.5 * plain, rtol=1e-4, atol=1e-7)


def test_recorded_old_log_probabilities_correct_by_themselves(tmp_path: Any) -> None:
    trainer = parts.trainer(tmp_path, talks(), of=agent(Elsewhere()), old_logps="recorded")
    trainer.train()
    assert not parts.logged(trainer, "sampler/ratio_mean")


def test_rows_older_than_the_limit_are_left_out_with_the_reason_and_counted(tmp_path: Any) -> None:
    for limit, share in ((2, 1.0), (3, 0.0)):
        trainer = parts.trainer(tmp_path, talks(), of=agent(Elsewhere(behind=3)), max_staleness=limit)
        trainer.train()
        assert parts.logged(trainer, "stale") == [share]
        assert trainer.last_batch is not None
        calls = [call for one in trainer.last_batch.played for call in one.rollout.calls.values()]  # type: ignore[union-attr]
        assert {call.excluded for call in calls} == ({"stale"} if share else {None})
        assert (parts.logged(trainer, "grad_norm")[0] == 0) == bool(share)


def test_settings_out_of_range_are_refused(tmp_path: Any) -> None:
    with pytest.raises(LongreinError, match="sampler_ratio_cap is 0.5"):
        parts.config(tmp_path, sampler_ratio_cap=0.5)
    with pytest.raises(LongreinError, match="max_staleness is -1"):
        parts.config(tmp_path, max_staleness=-1)


def test_an_engine_that_takes_no_adapter_is_named(tmp_path: Any) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    trainer = parts.trainer(tmp_path, talks(), of=agent(Elsewhere()), options={"peft_config": lora})
    with pytest.raises(LongreinError, match="Elsewhere takes no LoRA adapters"):
        trainer.train()
