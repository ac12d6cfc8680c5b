"""R1 and R2, T1, T2 and T4: environments named by rows feed the trainer."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import parts
import pytest
import torch
from datasets import IterableDataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig
from worlds import Ask, Broken, Flat, Forking, Moody, Recording, Recording2, Talk, Uneven, Unheard, Vowels, row

from longrein import Agent, GRPOEnvTrainer, LongreinError, Sampling
from longrein.envs import TreasureHunt, task_dataset
from longrein.training.trainer import MAX_FAILED_BATCHES
from longrein.training.trials import Collected


def talks(count: int) -> list[dict[str, Any]]:
    return [row(Talk, word=f"word{n}") for n in range(count)]


# ---- T1


def test_init_keeps_agent_and_tokenizer_and_an_empty_cache(tmp_path):
    agent = parts.agent()
    trainer = parts.trainer(tmp_path, talks(2), of=agent)
    assert trainer.agent is agent
    assert trainer.tokenizer is parts.tokenizer()
    assert trainer.env_cache == {}
    assert trainer.model is agent.policy_model
    assert trainer.ref_model is None


def test_the_agents_own_model_may_be_named(tmp_path):
    agent = parts.agent()
    assert parts.trainer(tmp_path, talks(2), of=agent, model=agent.policy_model).model is agent.policy_model


def test_another_model_is_refused(tmp_path):
    with pytest.raises(LongreinError, match="not the agent's policy model"):
        parts.trainer(tmp_path, talks(2), model=parts.policy())


def test_trls_own_configuration_is_taken(tmp_path):
    args = GRPOConfig(
        str(tmp_path), per_device_train_batch_size=4, num_generations=2, report_to=[], use_cpu=True, bf16=False, beta=0.2
    )
    agent = parts.agent()
    trainer = GRPOEnvTrainer(agent=agent, tokenizer=agent.tokenizer, args=args, train_dataset=task_dataset(talks(2)))
    assert (trainer.args.advantages, trainer.args.old_logps, trainer.beta) == ("rewards", "policy", 0.2)
    assert trainer.args.generation_batch_size == args.generation_batch_size


# ---- T2


def mixed() -> list[dict[str, Any]]:
    """Two classes and two configs, so four environments, two tasks each, shuffled."""
    rows = [
        row(cls, {"size": size}, n=4 * first + 2 * second + third)
        for first, cls in enumerate((Recording, Recording2))
        for second, size in enumerate((1, 2))
        for third in range(2)
    ]
    random.Random(3).shuffle(rows)
    return rows


def test_a_mixed_batch_is_grouped_played_and_put_back_in_order(tmp_path, monkeypatch):
    rows = mixed()
    trainer = parts.trainer(tmp_path, rows, per_device_train_batch_size=16, advantages="rewards", beta=0.1)
    scored = []
    whole = trainer._trajectory_logps
    monkeypatch.setattr(
        trainer,
        "_trajectory_logps",
        lambda model, batch, **options: scored.append((model, batch)) or whole(model, batch, **options),
    )
    result = trainer._generate_and_score_completions(parts.repeated(rows))

    assert len(Recording.built) == 4
    assert {(name, config["size"]) for name, _, config in Recording.built} == {
        ("Recording", 1), ("Recording", 2), ("Recording2", 1), ("Recording2", 2)
    }  # fmt: skip
    assert all(tokenizer is parts.tokenizer() for _, tokenizer, _ in Recording.built)
    assert len(trainer.env_cache) == 4

    assert len(Recording.trials) == 4
    for name, config, tasks, agent, generations in Recording.trials:
        named = [one for one in rows if one["env_class_path"].endswith(f".{name}") and one["env_config"] == config]
        assert tasks == [one["task_data"] for one in named]
        assert agent is trainer.agent
        assert generations == 2

    numbers = [one["task_data"]["n"] for one in rows for _ in range(2)]
    ids, attention, agent_mask = (result[n] for n in ("prompt_completion_ids", "attention_mask", "agent_token_mask"))
    assert ids.shape == attention.shape == agent_mask.shape == (16, 3 + 7)
    assert ids[:, 0].tolist() == [10 + n for n in numbers]
    assert attention.sum(1).tolist() == [3 + n for n in numbers]
    assert (ids[attention == 0] == parts.tokenizer().pad_token_id).all()
    assert agent_mask.sum(1).tolist() == [2] * 16
    for name in ("prompt_completion_ids", "attention_mask", "agent_token_mask"):
        assert result[name].dtype == torch.int64
    for name in ("advantages", "old_per_token_logps", "ref_per_token_logps"):
        assert result[name].dtype == torch.float32
        assert result[name].shape == (16, 10)
    assert {value.device for value in result.values() if isinstance(value, torch.Tensor)} == {trainer.accelerator.device}

    earned = [one["task_data"]["n"] + i / 10 for one in rows for i in range(2)]
    assert result["advantages"].sum(1).tolist() == pytest.approx(earned)
    assert (result["advantages"] * (1 - agent_mask) == 0).all()

    assert [model for model, _ in scored] == [trainer.model, trainer.ref_model]
    for _, batch in scored:
        assert torch.equal(batch["prompt_completion_ids"], ids)
        assert torch.equal(batch["attention_mask"], attention)
    logits = trainer.model(input_ids=ids, attention_mask=attention).logits
    expected = torch.log_softmax(logits[:, :-1], -1).gather(2, ids[:, 1:, None])[..., 0]
    expected = torch.nn.functional.pad(expected, (1, 0)) * agent_mask
    torch.testing.assert_close(result["old_per_token_logps"], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result["ref_per_token_logps"], expected, rtol=1e-4, atol=1e-5)

    trainer._generate_and_score_completions(parts.repeated(rows))
    assert len(Recording.built) == 4, "environments are built once and cached"


def test_equal_rows_are_tasks_of_their_own(tmp_path):
    rows = [row(Recording, n=1), row(Recording, n=1)]
    trainer = parts.trainer(tmp_path, rows)
    result = trainer._generate_and_score_completions(parts.repeated(rows))
    assert Recording.trials[0][2] == [{"n": 1}, {"n": 1}]
    assert len(result["prompt_completion_ids"]) == 4


def test_a_batch_that_is_not_repeated_is_refused(tmp_path):
    rows = [row(Recording, n=1), row(Recording, n=2)]
    with pytest.raises(LongreinError, match="rows 0 to 1 of the batch must be 2 copies of one task"):
        parts.trainer(tmp_path, rows)._generate_and_score_completions(rows)


# ---- T4


def test_a_step_on_two_real_environments(tmp_path):
    rows = [*TreasureHunt.get_train_dataset(2, env_config={"max_reply_tokens": 8}), *talks(2)]
    trainer = parts.trainer(tmp_path, rows, per_device_train_batch_size=8, advantages="rewards")
    before = parts.weights(trainer.model)
    trainer.train()
    assert trainer.state.global_step == 1
    entry = trainer.state.log_history[0]
    for name in (
        "loss", "reward", "reward_std", "rewards/TreasureHunt/mean", "rewards/TreasureHunt/std", "rewards/Talk/mean",
        "turns/mean", "turns/max", "completions/mean_length", "completions/clipped_ratio", "failed", "branches", "success",
        "frac_reward_zero_std", "time/rollout", "time/training", "num_tokens", "entropy",
    ):  # fmt: skip
        assert np.isfinite(entry[name]), name
    assert entry["rewards/Talk/mean"] > 0
    assert any(not torch.equal(before[name], value) for name, value in parts.weights(trainer.model).items())


def test_the_policy_learns(tmp_path):
    rows = [row(Vowels, n=n) for n in range(4)]
    trainer = parts.trainer(tmp_path, rows, per_device_train_batch_size=64, num_generations=16, max_steps=15)
    trainer.train()
    rewards = parts.logged(trainer, "reward")
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.15


def test_the_final_model_loads(tmp_path):
    trainer = parts.trainer(tmp_path / "run", talks(2))
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert all(torch.equal(value, trainer.model.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "final").chat_template == parts.tokenizer().chat_template


def test_a_text_agent_plays_and_a_given_model_learns(tmp_path):
    class Parrot:
        def get_action(self, messages: list[Any], state: Any) -> tuple[str, Any]:
            return "a" * (len(messages) + random.Random(len(messages)).randint(0, 3)), state

    model, parrot = parts.policy(), Parrot()
    trainer = parts.trainer(tmp_path, talks(2), of=parrot, model=model, advantages="rewards")
    assert trainer.agent is parrot
    before = parts.weights(model)
    trainer.train()
    assert parts.logged(trainer, "reward")[0] > 0
    assert any(not torch.equal(before[name], value) for name, value in parts.weights(model).items())


def test_a_text_agent_needs_a_model(tmp_path):
    class Parrot:
        def get_action(self, messages: list[Any], state: Any) -> tuple[str, Any]:
            return "a", state

    with pytest.raises(LongreinError, match="Parrot has no policy model; give the trainer the `model` to train"):
        parts.trainer(tmp_path, talks(2), of=Parrot())


def test_it_trains_inside_a_running_event_loop(tmp_path):
    async def notebook() -> int:
        trainer = parts.trainer(tmp_path, [*talks(2), row(Ask, n=1), row(Ask, n=2)], per_device_train_batch_size=8)
        trainer.train()
        return trainer.state.global_step

    assert asyncio.run(notebook()) == 1


# ---- what is logged


def test_sample_conversations_are_kept(tmp_path):
    trainer = parts.trainer(tmp_path, talks(2))
    trainer.train()
    logs = trainer._textual_logs
    assert (
        len(logs["prompt"]) == len(logs["completion"]) == len(logs["advantages"]) == len(logs["rewards"]["environment"]) == 4
    )
    assert logs["prompt"][0] == [{"role": "user", "content": "Say word0."}]
    assert [message["role"] for message in logs["completion"][0]] == ["assistant", "user", "assistant"]


def test_completions_are_written_also_with_tool_calls(tmp_path, capsys):
    class Caller:
        def get_action(self, messages: list[Any], state: Any) -> tuple[str, Any]:
            if len(messages) > 2:
                return '<tool_call>\n{"name": "answer", "arguments": {"room": "attic"}}\n</tool_call>', state
            return (
                'Hm. <tool_call>\n{"name": "look", "arguments": {"room": "attic", "floor": [1, {"a": 2}]}}\n</tool_call>',
                state,
            )

    import pandas

    rows = [*TreasureHunt.get_train_dataset(2), row(Recording, n=1), row(Recording, n=2)]
    trainer = parts.trainer(
        tmp_path, rows, of=Caller(), model=parts.policy(), per_device_train_batch_size=8, log_completions=True
    )
    trainer.train()
    table = pandas.read_parquet(next(Path(tmp_path, "completions").glob("*.parquet")))
    assert len(table) == 8
    assert "attic" in capsys.readouterr().out


# ---- evaluation


def test_two_evaluations_of_one_policy_are_the_same(tmp_path):
    trainer = parts.trainer(
        tmp_path, talks(2), options={"eval_dataset": task_dataset([row(Talk, word=f"e{n}") for n in range(5)])}
    )
    first = trainer.evaluate()
    texts = list(trainer._textual_logs["completion"])
    second = trainer.evaluate()
    same = [name for name in first if "runtime" not in name and "per_second" not in name and "time" not in name]
    assert {name: first[name] for name in same} == {name: second[name] for name in same}
    assert texts == list(trainer._textual_logs["completion"])
    assert first["eval_reward"] > 0
    assert trainer.env_cache


def test_evaluation_during_training_with_its_own_group_size(tmp_path):
    held_out = {"talk": task_dataset([row(Recording, n=n) for n in range(3)]), "ask": task_dataset([row(Ask, n=1)])}
    trainer = parts.trainer(
        tmp_path, talks(2), options={"eval_dataset": held_out}, eval_strategy="steps", eval_steps=1, num_generations_eval=1,
        max_steps=2,
    )  # fmt: skip
    trainer.train()
    assert parts.logged(trainer, "eval_talk_reward") == pytest.approx([1.0, 1.0])
    assert len(parts.logged(trainer, "eval_ask_reward")) == 2
    assert [one[4] for one in Recording.trials] == [1, 1]
    assert len(parts.logged(trainer, "reward")) == 2


# ---- generation cycles


def test_generations_are_reused_over_iterations_and_micro_batches(tmp_path):
    rows = [row(Recording, n=n) for n in range(4)]
    trainer = parts.trainer(
        tmp_path, rows, per_device_train_batch_size=2, steps_per_generation=4, gradient_accumulation_steps=2,
        num_iterations=2, max_steps=8, advantages="rewards",
    )  # fmt: skip
    batches: list[tuple[int, ...]] = []
    whole = trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, **kwargs: (  # type: ignore[method-assign]
        batches.append(tuple(inputs["prompt_completion_ids"][:, 0].tolist())) or whole(model, inputs, **kwargs)
    )
    trainer.train()
    assert len(Recording.trials) == 2, "8 optimizer steps are 16 micro-batches; a cycle of 4 x 2 takes 8 of them"
    assert len(batches) == 16
    for cycle in (batches[:8], batches[8:]):
        assert cycle[:4] == cycle[4:]
        assert sorted(n for one in cycle[:4] for n in one) == [10, 10, 11, 11, 12, 12, 13, 13]
    assert batches[:4] != batches[8:12], "shuffled anew for each generation"


def test_old_logps_stay_those_of_the_sampling_policy(tmp_path):
    trainer = parts.trainer(tmp_path, talks(2), num_iterations=3, max_steps=3)
    olds, ratios = [], []
    whole = trainer._compute_loss

    def spy(model: Any, inputs: dict[str, Any]) -> Any:
        olds.append(inputs["old_per_token_logps"])
        logps = trainer._get_per_token_logps_and_entropies(model)[0].detach()
        ratios.append(float((logps - olds[-1]).abs().max()))
        return whole(model, inputs)

    trainer._compute_loss = spy  # type: ignore[method-assign]
    trainer.train()
    assert torch.equal(olds[0], olds[1])
    assert torch.equal(olds[0], olds[2])
    assert ratios[0] < 1e-5
    assert ratios[1] > 1e-3
    assert ratios[2] > 1e-3


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_gradient_accumulation_is_one_large_batch(tmp_path, accumulate):
    def trained(folder: str, size: int, steps: int) -> dict[str, torch.Tensor]:
        trainer = parts.trainer(
            tmp_path / folder, talks(4), per_device_train_batch_size=size, gradient_accumulation_steps=steps,
            loss_type="dapo", optim="sgd", learning_rate=1.0,
        )  # fmt: skip
        trainer.train()
        return parts.weights(trainer.model)

    whole, split = trained("whole", 8, 1), trained("split", 8 // accumulate, accumulate)
    for name, value in whole.items():
        torch.testing.assert_close(split[name], value, rtol=1e-5, atol=1e-6)


def test_recorded_logps_are_the_policys_own(tmp_path):
    rows = [*talks(2), *TreasureHunt.get_train_dataset(2)]
    by = {}
    for source in ("policy", "recorded"):
        of = Agent(parts.policy(), parts.tokenizer(), sampling=Sampling(temperature=0.7, max_tokens=8))
        trainer = parts.trainer(
            tmp_path / source, rows, of=of, per_device_train_batch_size=8, old_logps=source, temperature=0.7
        )
        by[source] = trainer._generate_and_score_completions(parts.repeated(rows))
    assert torch.equal(by["policy"]["prompt_completion_ids"], by["recorded"]["prompt_completion_ids"])
    policy, recorded = by["policy"]["old_per_token_logps"], by["recorded"]["old_per_token_logps"]
    assert recorded.abs().sum() > 0
    torch.testing.assert_close(recorded, policy, rtol=0, atol=1e-4)


def test_recorded_logps_are_watched_while_the_weights_are_those_that_sampled(tmp_path):
    trainer = parts.trainer(tmp_path, talks(2), old_logps="recorded", max_steps=4, num_iterations=2)
    trainer.train()
    for name in ("old_logps/difference_mean", "old_logps/difference_max"):
        assert [0 <= value < 1e-4 for value in parts.logged(trainer, name)] == [True, True]  # steps 1 and 3
    assert "old_logps/difference_mean" not in trainer.state.log_history[1]
    plain = parts.trainer(tmp_path, talks(2))
    plain.train()
    assert not parts.logged(plain, "old_logps/difference_mean")


def test_recorded_logps_of_other_weights_are_refused(tmp_path, monkeypatch):
    trainer = parts.trainer(tmp_path, talks(2), old_logps="recorded")
    monkeypatch.setattr(Collected, "versions", lambda self: {0, 7})
    with pytest.raises(LongreinError, match=r"weights of this step \(0\); some are of 7"):
        trainer.train()


def test_the_versions_of_a_batch_are_those_of_its_tokens(tmp_path):
    trainer = parts.trainer(tmp_path, talks(2))
    trainer.train()
    assert trainer.last_batch is not None
    assert trainer.last_batch.versions() == {0}
    call = next(iter(trainer.last_batch.played[0].rollout.calls.values()))
    object.__setattr__(call, "versions", np.array([0, 3], np.int32))
    assert trainer.last_batch.versions() == {0, 3}


def test_no_pass_for_old_logps_where_a_batch_is_used_once(tmp_path, monkeypatch):
    weights, passes = {}, {}
    for skip, iterations in ((False, 1), (True, 1), (True, 2)):
        trainer = parts.trainer(
            tmp_path / f"{skip}{iterations}", talks(2), skip_old_pass=skip, num_iterations=iterations, max_steps=2
        )
        count = []
        whole = trainer._trajectory_logps
        monkeypatch.setattr(
            trainer, "_trajectory_logps", lambda *a, whole=whole, count=count, **o: count.append(1) or whole(*a, **o)
        )
        trainer.train()
        weights[skip, iterations], passes[skip, iterations] = parts.weights(trainer.model), len(count)
    assert passes == {(False, 1): 2, (True, 1): 0, (True, 2): 1}
    for name, value in weights[False, 1].items():
        torch.testing.assert_close(weights[True, 1][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", ["dapo", "cispo"])
def test_packed_training_is_padded_training(tmp_path, loss):
    def trained(name: str, **changes: Any) -> GRPOEnvTrainer:
        settings = {
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "optim": "sgd",
            "learning_rate": 0.5,
            "beta": 0.1,
        }
        rows = [row(Uneven), *talks(1)] * 2
        trainer = parts.trainer(tmp_path / name, rows, loss_type=loss, max_steps=2, **settings, **changes)
        trainer.train()
        return trainer

    padded, packed, parted = trained("off", packing="off"), trained("auto"), trained("parts", token_budget=40)
    assert padded.packing is None
    assert packed.packing is not None
    assert parts.logged(parted, "packing/tokens_per_forwarded")[0] > 1.2
    for other in (packed, parted):
        for name, value in parts.weights(padded.model).items():
            torch.testing.assert_close(parts.weights(other.model)[name], value, rtol=1e-5, atol=1e-6)
        for metric in ("loss", "kl", "entropy", "grad_norm"):
            assert parts.logged(other, metric) == pytest.approx(parts.logged(padded, metric), rel=1e-3, abs=1e-5), metric


def test_recorded_logps_need_an_environment_that_gives_them(tmp_path):
    trainer = parts.trainer(tmp_path, [row(Recording, n=n) for n in range(2)], old_logps="recorded")
    with pytest.raises(LongreinError, match="no padded_logprobs"):
        trainer.train()


# ---- truncated, failed and flat


def test_truncated_rollouts_are_masked_by_their_record(tmp_path):
    """`Ask` ends on an agent token and `Talk` may too; what counts is that the tokens ran out, not the last id."""
    trainer = parts.trainer(tmp_path, talks(8), per_device_train_batch_size=16, mask_truncated_completions=True)
    result = trainer._generate_and_score_completions(parts.repeated(talks(8)))
    truncated = torch.tensor([one.rollout.truncated for one in trainer.last_batch.played])
    assert truncated.any()
    assert (result["agent_token_mask"].sum(1)[truncated] == 0).all()
    assert (result["advantages"][truncated] == 0).all()
    assert result["num_items_in_batch"] == result["agent_token_mask"].sum()

    of = parts.agent(max_tokens=600)
    tail = parts.trainer(tmp_path / "tail", [row(Talk, {"max_turns": 1, "max_reply_tokens": 200})] * 2, of=of,
                         mask_truncated_completions=True)  # fmt: skip
    # stopped by the limit of turns, not of tokens: trained
    result = tail._generate_and_score_completions(parts.repeated([row(Talk, {"max_turns": 1, "max_reply_tokens": 200})] * 2))
    whole = ~torch.tensor([one.rollout.truncated for one in tail.last_batch.played])
    assert (result["agent_token_mask"].sum(1)[whole] > 0).all()


def test_a_failed_rollout_weighs_zero_and_leaves_its_groups_baseline_alone(tmp_path, caplog):
    rows = [row(Moody, breaks=[1], of=4, word="a")]
    trainer = parts.trainer(tmp_path, rows, num_generations=4)
    result = trainer._generate_and_score_completions(parts.repeated(rows, 4))
    rewards = trainer.last_batch.final_rewards
    assert np.isnan(rewards).tolist() == [False, True, False, False]
    assert result["agent_token_mask"].sum(1)[1] == 0
    assert (result["advantages"][1] == 0).all()
    scored = rewards[[0, 2, 3]]
    expected = (scored - scored.mean()) / (scored.std(ddof=1) + 1e-4)
    assert result["advantages"][[0, 2, 3]].amax(1).tolist() == pytest.approx(np.maximum(expected, 0), abs=1e-5)
    assert trainer._metrics["eval"]["failed"] == [0.25]
    assert "lost its sandbox" in caplog.text
    trainer.train()
    assert np.isfinite(parts.logged(trainer, "loss")[0])


def test_a_failed_rollout_of_a_foreign_environment_weighs_zero_too(tmp_path):
    rows = [row(Broken, n=1)]
    trainer = parts.trainer(tmp_path, rows, num_generations=4, beta=0.1)
    result = trainer._generate_and_score_completions(parts.repeated(rows, 4))
    assert result["agent_token_mask"].sum(1).tolist() == [2, 0, 2, 2]
    assert result["num_items_in_batch"] == 6
    scored = np.array([1.0, 1.2, 1.3])
    expected = (scored - scored.mean()) / (scored.std(ddof=1) + 1e-4)
    assert result["advantages"][[0, 2, 3], 2].tolist() == pytest.approx(expected, abs=1e-4)
    assert (result["advantages"][1] == 0).all()
    assert trainer.last_batch.metrics()["reward"] == pytest.approx(scored.mean())


def test_a_batch_in_which_everything_failed_has_loss_zero_and_the_run_goes_on(tmp_path):
    rows = [row(Moody, breaks=[0, 1, 2, 3], of=8)] * 2
    trainer = parts.trainer(tmp_path, rows, max_steps=2, beta=0.1)
    trainer.train()
    assert parts.logged(trainer, "loss")[0] == 0
    assert parts.logged(trainer, "failed") == [1.0, 0.0]
    assert trainer.state.global_step == 2
    assert all(torch.isfinite(value).all() for value in parts.weights(trainer.model).values())


def test_a_rollout_that_trains_nothing_is_scored_and_the_run_goes_on(tmp_path):
    trained = parts.trainer(tmp_path, [row(Unheard, word=f"w{n}") for n in range(4)])
    trained.train()
    batch = trained.last_batch
    assert [int(one.rows["padded_agent_mask"].sum() > 0) for one in batch.played] == [1, 0, 1, 0]
    assert not np.isnan(batch.final_rewards).any()
    assert parts.logged(trained, "failed") == [0.0]


def test_a_run_in_which_nothing_works_stops_with_the_cause(tmp_path):
    trainer = parts.trainer(tmp_path, [row(Moody, breaks=[0], of=1)] * 2, max_steps=9)
    with pytest.raises(
        LongreinError, match="every rollout of 3 generation batches in a row failed; the first cause: RuntimeErr"
    ):
        trainer.train()
    assert trainer.state.global_step == MAX_FAILED_BATCHES - 1


def test_one_failed_evaluation_batch_does_not_stop_the_run(tmp_path):
    held_out = task_dataset([row(Moody, breaks=[0], of=1), row(Talk), row(Talk)])
    trainer = parts.trainer(
        tmp_path, talks(2), options={"eval_dataset": held_out}, per_device_eval_batch_size=1, num_generations_eval=1
    )
    assert 0 < trainer.evaluate()["eval_failed"] < 1


def test_flat_groups_are_counted_and_replaced(tmp_path):
    rows = [row(Flat, n=0), row(Talk, word="b"), *[row(Talk, word=f"c{n}") for n in range(20)]]
    trainer = parts.trainer(tmp_path, rows, num_generations=4, per_device_train_batch_size=8, resample_flat_groups=3)
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["frac_reward_zero_std"] >= 0.5
    assert entry["frac_reward_zero_std_after_resampling"] == 0
    assert entry["rewards/Talk/mean"] > 0
    assert "rewards/Flat/mean" not in entry


def test_flat_groups_that_find_no_replacement_stay(tmp_path):
    trainer = parts.trainer(tmp_path, [row(Flat, n=n) for n in range(2)], resample_flat_groups=2)
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["frac_reward_zero_std"] == entry["frac_reward_zero_std_after_resampling"] == 1
    assert entry["reward"] == 0.5


def test_a_task_drawn_again_is_played_anew(tmp_path):
    """With one task in the dataset, a replacement is that task: other noise, or it could never be any better."""
    rows = [row(Talk, word="only")]
    trainer = parts.trainer(tmp_path, rows, resample_flat_groups=1, num_generations=4)
    played = []
    monkey = trainer._fresh_tasks
    trainer._fresh_tasks = lambda *args: played.append(trainer._sampler.seed) or monkey(*args)  # type: ignore[method-assign]
    import longrein.training.trainer as module

    real = module.flat_groups
    try:
        module.flat_groups = lambda *args: [0]
        trainer.model.train()
        trainer._generate_and_score_completions(parts.repeated(rows, 4))
    finally:
        module.flat_groups = real
    assert played
    assert trainer._sampler.seed != played[0]


# ---- rows and streams


def test_a_stream_of_rows(tmp_path):
    stream = IterableDataset.from_generator(lambda: iter(talks(8)))
    trainer = parts.trainer(tmp_path, stream, max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
    assert len(parts.logged(trainer, "reward")) == 2


def test_a_bad_row_of_a_stream_is_named(tmp_path):
    stream = IterableDataset.from_generator(lambda: iter([{"env_class_path": "worlds.Talk", "env_config": "{}"}] * 8))
    with pytest.raises(LongreinError, match="row 0 has no 'task_data'"):
        parts.trainer(tmp_path, stream, max_steps=2).train()


def test_forked_rollouts_train(tmp_path):
    rows = [row(Forking, n=n) for n in range(4)]
    trainer = parts.trainer(
        tmp_path, rows, per_device_train_batch_size=4, steps_per_generation=2, gradient_accumulation_steps=2, beta=0.1
    )
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["branches"] == 3
    assert np.isfinite(entry["loss"])
    assert np.isfinite(entry["grad_norm"])


def test_mixed_precision_samples_and_trains_alike(tmp_path):
    trainer = parts.trainer(tmp_path, talks(4), bf16=True, per_device_train_batch_size=8, old_logps="recorded", max_steps=2)
    gaps: list[float] = []
    whole = trainer._compute_loss

    def spy(model: Any, inputs: dict[str, Any]) -> Any:
        logps = trainer._get_per_token_logps_and_entropies(model)[0].detach()
        gaps.append(float(((logps - inputs["old_per_token_logps"]) * inputs["completion_mask"]).abs().max()))
        return whole(model, inputs)

    trainer._compute_loss = spy  # type: ignore[method-assign]
    trainer.train()
    assert trainer.state.global_step == 2
    assert max(gaps) < 0.1, "the sampler's log-probabilities are the trainer's, to bfloat16's precision"
