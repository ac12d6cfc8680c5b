"""One function for every pass: index t speaks of token t, what is not scored is 0, and batching changes nothing."""

from __future__ import annotations

import parts
import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

from longrein.training import tree
from longrein.training.agent_tokens import AgentTokens
from longrein.training.logprobs import Packing, carry_packed_passes, trajectory_logps

IDS = torch.randint(10, 500, (5, 9), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([9, 4, 7, 1, 6])
ATTENTION = (torch.arange(9) < LENGTHS[:, None]).long()
SCORED = ATTENTION * torch.tensor([0, 1, 1, 0, 1, 1, 0, 0, 1])


@pytest.fixture(scope="module")
def model():
    policy = parts.policy()
    add_fused_lm_head(policy, temperature=0.7, outputs=("log_probs", "entropy"))
    return policy


def test_they_are_the_models_log_probabilities_of_the_scored_tokens(model):
    with torch.no_grad():
        result = trajectory_logps(model, IDS, ATTENTION, SCORED, entropy=True)
        full = torch.log_softmax(model(input_ids=IDS, attention_mask=ATTENTION).logits / 0.7, -1)
    for row in range(5):
        for t in range(9):
            expected = full[row, t - 1, IDS[row, t]] if SCORED[row, t] else torch.tensor(0.0)
            assert result.logps[row, t] == pytest.approx(expected.item(), abs=1e-5)
    entropy = -(full.exp() * full).sum(-1)[:, :-1]
    scored = SCORED[:, 1:].bool()
    torch.testing.assert_close(result.entropies[:, 1:][scored], entropy[scored], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_rows_a_forward_change_nothing(model, size):
    with torch.no_grad():
        whole = trajectory_logps(model, IDS, ATTENTION, SCORED).logps
        split = trajectory_logps(model, IDS, ATTENTION, SCORED, batch_size=size).logps
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-5)


def test_the_padding_changes_nothing(model):
    wide = [torch.nn.functional.pad(value, (0, 5)) for value in (IDS, ATTENTION, SCORED)]
    with torch.no_grad():
        whole = trajectory_logps(model, IDS, ATTENTION, SCORED).logps
        padded = trajectory_logps(model, *wide).logps
    assert padded.shape == (5, 14)
    assert (padded[:, 9:] == 0).all()
    torch.testing.assert_close(padded[:, :9], whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", [True, False])
def test_forks_at_round_places_change_nothing(share, monkeypatch):
    """Nor do the tokens after the last row's, in the result or in a gradient."""
    for name, value in {"GRAINS": (4, 2), "FEW": 0.9, "TAIL": 3}.items():
        monkeypatch.setattr(tree, name, value)
    policy = parts.policy()
    carry_packed_passes(policy)
    ids = IDS.clone()
    ids[1:, :3] = ids[0, :3]  # they fork at no round place
    found, sizes = [], []
    policy.get_input_embeddings().register_forward_hook(lambda _, given, __: sizes.append(given[0].numel()))
    for aligned in (False, True):
        policy.zero_grad()
        logps = trajectory_logps(policy, ids, ATTENTION, SCORED, packing=Packing(share=share, aligned=aligned)).logps
        (logps * torch.arange(1, 10)).sum().backward()
        found.append([logps.detach(), *(one.grad.clone() for one in policy.parameters() if one.grad is not None)])
    assert sizes[-1] >= sizes[-2] + 3
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_agent_tokens_gather_rows_of_a_rollout_into_one():
    mask = torch.tensor([[0, 1, 1], [0, 0, 1], [0, 0, 0], [0, 1, 0]])
    values = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]])
    tokens = AgentTokens(mask, torch.tensor([0, 0, 1, 2]), 4)
    assert tokens.gather(values).tolist() == [[2, 3, 6], [0, 0, 0], [11, 0, 0], [0, 0, 0]]
    assert tokens.mask.tolist() == [[1, 1, 1], [0, 0, 0], [1, 0, 0], [0, 0, 0]]
