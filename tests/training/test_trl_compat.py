"""What we lean on in TRL, so that a version that moved it fails here, by name."""

from __future__ import annotations

import inspect

import parts
import pytest
from trl import GRPOTrainer
from worlds import Ask, row

from longrein import GRPOEnvTrainer
from longrein.training.loss import TrajectoryLoss
from longrein.training.trl_compat import OVERRIDDEN, READ, environment_reward

OWN = {**vars(TrajectoryLoss), **vars(GRPOEnvTrainer)}
PARAMETERS = {
    "_compute_loss": ["self", "model", "inputs"],
    "_generate_and_score_completions": ["self", "inputs"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    "_prepare_inputs": ["self", "generation_batch"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_set_signature_columns_if_needed": ["self"],
    "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
    "evaluate": ["self", "eval_dataset", "ignore_keys", "metric_key_prefix"],
    "log": ["self", "logs", "start_time"],
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
}
KEYS_OF_THE_LOSS = (
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "old_per_token_logps",
    "ref_per_token_logps", "num_items_in_batch",
)  # fmt: skip


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_methods_we_override_are_still_trls(name):
    assert hasattr(GRPOTrainer, name), f"TRL's GRPOTrainer has no {name} any more; GRPOEnvTrainer overrides it"
    assert name in OWN, f"GRPOEnvTrainer does not override {name}: take it off trl_compat.OVERRIDDEN"


def test_every_override_is_listed():
    own = {name for name, value in OWN.items() if inspect.isfunction(value) and not name.startswith("__")}
    assert {name for name in own if hasattr(GRPOTrainer, name)} == set(OVERRIDDEN)


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_their_parameters_have_not_moved(name):
    found = list(inspect.signature(getattr(GRPOTrainer, name)).parameters)
    assert found == PARAMETERS[name], f"TRL's GRPOTrainer.{name} takes {found} now"


@pytest.mark.parametrize("name", READ)
def test_attributes_we_read_are_still_there(tmp_path, name):
    trainer = parts.trainer(tmp_path, [row(Ask, n=n) for n in range(2)])
    source = inspect.getsource(GRPOTrainer)
    assert hasattr(trainer, name), f"a GRPOTrainer has no {name} any more"
    assert f"self.{name}" in source or f"def {name}" in source, f"TRL's GRPOTrainer does not use {name} any more"


def test_the_loss_reads_the_keys_we_give_it():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    for key in KEYS_OF_THE_LOSS:
        assert f'"{key}"' in source, f"TRL's _compute_loss does not read {key!r} any more"


def test_the_loss_asks_for_log_probabilities_by_the_method_we_override():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert "self._get_per_token_logps_and_entropies(" in source
    parameters = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
    assert {"compute_entropy", "compute_aux_loss"} <= parameters.keys()


def test_the_reward_that_trl_wants_is_never_asked(tmp_path):
    with pytest.raises(AssertionError, match="rewards come from environments"):
        environment_reward()
    parts.trainer(tmp_path, [row(Ask, n=n) for n in range(2)]).train()
