"""R3 and T3: only agent tokens count, a rollout is one row, and all of it is TRL's loss to the last digit."""

from __future__ import annotations

from itertools import product
from typing import Any

import parts
import pytest
import torch
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from worlds import Ask, row

from longrein import GRPOEnvTrainer
from longrein.training.logprobs import PackedRows
from longrein.training.planning import split_by_rollout

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> GRPOEnvTrainer:
    trainer = parts.trainer(tmp_path_factory.mktemp("ours"), [row(Ask, n=n) for n in range(2)], beta=0.04)
    trainer.model.train()
    return trainer


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    args = GRPOConfig(
        str(tmp_path_factory.mktemp("theirs")), per_device_train_batch_size=4, num_generations=2, report_to=[], use_cpu=True,
        bf16=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        parts.policy(),
        lambda **_: [0.0],
        args,
        Dataset.from_dict({"prompt": ["a", "b"]}),
        processing_class=parts.tokenizer(),
    )
    trainer.model.train()
    return trainer


def settle(trainer: Any, loss: str = "grpo", beta: float = 0.0, level: str = "token", steps: int = 1) -> Any:
    trainer.loss_type, trainer.beta, trainer.importance_sampling_level = loss, beta, level
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = steps
    return trainer


def trajectories(multi_turn: bool, seed: int = 0) -> dict[str, Any]:
    """Four right-padded rows, their agent tokens in one run or in two, with old and reference values near the policy's."""
    generator = torch.Generator().manual_seed(seed)
    prompts, first, between, second = (5, 3, 7, 4), (4, 6, 2, 5), (3, 2, 4, 2), (3, 5, 1, 4)
    rows, masks = [], []
    for p, a, e, b in zip(prompts, first, between, second, strict=True):
        mask = [0] * p + [1] * a + ([0] * e + [1] * b if multi_turn else [])
        masks.append(mask)
        rows.append(torch.randint(10, 500, (len(mask),), generator=generator).tolist())
    width = max(map(len, rows))
    ids = torch.tensor([one + [0] * (width - len(one)) for one in rows])
    agent = torch.tensor([one + [0] * (width - len(one)) for one in masks])
    attention = torch.tensor([[1] * len(one) + [0] * (width - len(one)) for one in rows])
    with torch.no_grad():
        logits = parts.policy()(input_ids=ids, attention_mask=attention).logits
    logps = torch.log_softmax(logits[:, :-1], -1).gather(2, ids[:, 1:, None])[..., 0]
    logps = torch.nn.functional.pad(logps, (1, 0)) * agent
    noise = torch.randn((2, *ids.shape), generator=generator) * 0.3
    return {
        "prompt_completion_ids": ids,
        "attention_mask": attention,
        "agent_token_mask": agent,
        "advantages": torch.randn(4, generator=generator)[:, None] * agent,
        "old_per_token_logps": (logps + noise[0]) * agent,
        "ref_per_token_logps": (logps + noise[1]) * agent,
        "row_rollout": torch.arange(4),
        "num_rollouts": 4,
        "num_items_in_batch": agent.sum().float(),
    }


def as_trl(batch: dict[str, Any], per_token: bool, tool_mask: bool) -> dict[str, Any]:
    """The same data as TRL has it: prompts padded on the left, completions from the first agent token on the right."""
    ids, attention, agent = (batch[name] for name in ("prompt_completion_ids", "attention_mask", "agent_token_mask"))
    starts = [int(one.nonzero()[0]) for one in agent]
    ends = attention.sum(1).tolist()
    longest = max(end - start for start, end in zip(starts, ends, strict=True))

    def left(values: Tensor) -> Tensor:
        return torch.stack(
            [torch.nn.functional.pad(v[:s], (max(starts) - s, 0)) for v, s in zip(values, starts, strict=True)]
        )

    def right(values: Tensor) -> Tensor:
        cut = [v[s:e] for v, s, e in zip(values, starts, ends, strict=True)]
        return torch.stack([torch.nn.functional.pad(v, (0, longest - len(v))) for v in cut])

    result = {
        "prompt_ids": left(ids),
        "prompt_mask": left(attention),
        "completion_ids": right(ids),
        "completion_mask": right(attention),
        "advantages": right(batch["advantages"]) if per_token else batch["advantages"].gather(
            1, torch.tensor(starts)[:, None])[:, 0],
        "old_per_token_logps": right(batch["old_per_token_logps"]),
        "ref_per_token_logps": right(batch["ref_per_token_logps"]),
        "num_items_in_batch": batch["num_items_in_batch"],
    }  # fmt: skip
    return result | ({"tool_mask": right(agent)} if tool_mask else {})


def loss_and_gradients(trainer: Any, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


def assert_same(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=1e-5, atol=1e-6)
    assert one[1].keys() == other[1].keys()
    largest = max(gradient.norm() for gradient in other[1].values())
    assert largest > 1e-3, "the comparison needs a gradient"
    for name, gradient in one[1].items():
        assert (gradient - other[1][name]).norm() <= 1e-5 * largest, name


@pytest.mark.parametrize(
    ("loss", "beta", "level", "per_token"), list(product(LOSSES, (0.0, 0.1), ("token", "sequence"), (False, True)))
)
def test_single_turn_loss_and_gradient_are_trls(ours, theirs, loss, beta, level, per_token):
    batch = trajectories(multi_turn=False)
    if per_token:
        batch["advantages"] = batch["advantages"] * torch.linspace(0.5, 1.5, batch["advantages"].shape[1])
    expected = loss_and_gradients(settle(theirs, loss, beta, level), as_trl(batch, per_token, tool_mask=False))
    assert_same(loss_and_gradients(settle(ours, loss, beta, level), batch), expected)


@pytest.mark.parametrize(("loss", "beta"), list(product(LOSSES, (0.0, 0.1))))
def test_multi_turn_loss_and_gradient_are_trls_with_a_tool_mask(ours, theirs, loss, beta):
    batch = trajectories(multi_turn=True)
    expected = loss_and_gradients(settle(theirs, loss, beta), as_trl(batch, True, tool_mask=True))
    assert_same(loss_and_gradients(settle(ours, loss, beta), batch), expected)


def test_the_parity_data_is_clipped(ours):
    settle(ours)
    ours._metrics["train"].clear()
    loss_and_gradients(ours, trajectories(multi_turn=False))
    assert 0 < ours._metrics["train"]["clip_ratio/region_mean"][-1] < 1


def output_gradients(trainer: GRPOEnvTrainer, batch: dict[str, Any]) -> Tensor:
    """The size of the loss's gradient at each token's prediction: index t is where token t is predicted."""
    seen: list[Tensor] = []
    backbone = trainer.model.model
    hook = backbone.register_forward_hook(lambda module, args, output: seen.append(output.last_hidden_state))
    try:
        loss = trainer.compute_loss(trainer.model, batch)
        (gradient,) = torch.autograd.grad(loss, seen[0])
    finally:
        hook.remove()
    agent = batch["agent_token_mask"]
    packed = PackedRows(batch["prompt_completion_ids"].numpy(), agent.numpy().astype(bool))
    result = torch.zeros(agent.shape)
    for index, places in enumerate(packed.tree.places):  # every row has agent tokens
        result[index, 1 : len(places) + 1] = gradient[0, places].norm(dim=-1)
    return result


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("term", ["policy", "kl", "both"])
def test_no_gradient_comes_from_a_token_the_agent_did_not_write(ours, loss, term):
    settle(ours, loss, beta=0.0 if term == "policy" else 0.1)
    ours.epsilon_low = ours.epsilon_high = 10.0  # nothing clipped: every agent token has a gradient
    batch = trajectories(multi_turn=True)
    if term == "kl":
        batch["advantages"] = torch.zeros_like(batch["advantages"])
    try:
        gradient = output_gradients(ours, batch)
    finally:
        ours.epsilon_low = ours.epsilon_high = ours.args.epsilon
    agent = batch["agent_token_mask"].bool()
    assert (gradient[~agent] == 0).all()
    assert (gradient[agent] > 0).all()


@pytest.mark.parametrize("loss", LOSSES)
def test_values_on_environment_tokens_change_nothing(ours, loss):
    settle(ours, loss, beta=0.1)
    batch = trajectories(multi_turn=True)
    spoiled = dict(batch)
    for name in ("advantages", "old_per_token_logps", "ref_per_token_logps"):
        spoiled[name] = torch.where(batch["agent_token_mask"].bool(), batch[name], torch.tensor(float("nan")))
    before, after = loss_and_gradients(ours, batch), loss_and_gradients(ours, spoiled)
    assert torch.equal(before[0], after[0])
    assert all(torch.equal(before[1][name], after[1][name]) for name in before[1])


def test_masking_changes_the_loss(ours):
    settle(ours)
    batch = trajectories(multi_turn=True)
    unmasked = batch | {"agent_token_mask": batch["attention_mask"].clone()}
    unmasked["agent_token_mask"][:, 0] = 0
    assert not torch.isclose(loss_and_gradients(ours, batch)[0], loss_and_gradients(ours, unmasked)[0])


def test_the_seeds_six_keys_are_enough(ours):
    settle(ours, "dapo", beta=0.1)
    batch = trajectories(multi_turn=True)
    six = {name: value for name, value in batch.items() if name.endswith(("ids", "mask", "advantages", "logps"))}
    assert len(six) == 6
    assert torch.equal(ours.compute_loss(ours.model, six), ours.compute_loss(ours.model, batch))


def forked(batch: dict[str, Any]) -> dict[str, Any]:
    """The same rollouts, each as two rows: one that ends with the first reply and trains it, one that trains the second."""
    agent = batch["agent_token_mask"]
    runs = (torch.diff(agent, dim=1, prepend=agent[:, :1] * 0) == 1).cumsum(1)
    first, second = agent * (runs == 1), agent * (runs == 2)
    length = first.shape[1] - first.flip(1).argmax(1)
    short = batch["attention_mask"] * (torch.arange(agent.shape[1]) < length[:, None])
    rows = {"agent_token_mask": (first, second), "attention_mask": (short, batch["attention_mask"])}
    result = {
        name: torch.stack(rows.get(name, (value, value)), 1).flatten(0, 1)
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.dim() == 2
    }
    return batch | result | {"row_rollout": torch.arange(4).repeat_interleave(2)}


@pytest.mark.parametrize(("loss", "level"), list(product(LOSSES, ("token", "sequence"))))
def test_a_forked_rollout_weighs_as_one(ours, loss, level):
    settle(ours, loss, beta=0.1, level=level)
    batch = trajectories(multi_turn=True)
    assert_same(loss_and_gradients(ours, forked(batch)), loss_and_gradients(ours, batch))


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "bnpo"])  # bnpo's mean is over a micro-batch's tokens
def test_micro_batches_add_up(ours, loss):
    batch = forked(trajectories(multi_turn=True))
    whole = loss_and_gradients(settle(ours, loss, beta=0.1), batch)
    settle(ours, loss, beta=0.1, steps=2)
    micro = [loss_and_gradients(ours, part) for part in split_by_rollout(batch, 2, torch.Generator().manual_seed(1))]
    summed = {name: micro[0][1][name] + micro[1][1][name] for name in micro[0][1]}
    assert_same((micro[0][0] + micro[1][0], summed), whole)


def test_micro_batches_are_whole_rollouts_without_needless_padding(ours):
    batch = forked(trajectories(multi_turn=True))
    seen = []
    for part in split_by_rollout(batch, 4, torch.Generator().manual_seed(0)):
        assert part["num_rollouts"] == 1
        assert part["row_rollout"].tolist() == [0, 0]
        assert part["attention_mask"].shape[1] == part["attention_mask"].sum(1).max()
        seen.append(tuple(part["prompt_completion_ids"][0, :5].tolist()))
    assert sorted(seen) == sorted({tuple(one[:5].tolist()) for one in batch["prompt_completion_ids"]})


def test_nothing_to_train_is_a_loss_of_zero_with_a_gradient_of_zero(ours):
    batch = trajectories(multi_turn=True)
    batch["agent_token_mask"] = torch.zeros_like(batch["agent_token_mask"])
    batch["num_items_in_batch"] = torch.tensor(0.0)
    for loss in LOSSES:
        value, gradients = loss_and_gradients(settle(ours, loss, beta=0.1), batch)
        assert value == 0
        assert gradients
        assert all((gradient == 0).all() for gradient in gradients.values())
