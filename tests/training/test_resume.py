"""A run that is killed and resumed gives the weights of one that was not, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parts
import pytest
import torch
from worlds import Ask, Talk, row

ROWS = [row(Talk if n % 2 else Ask, word=f"w{n}") for n in range(6)]
METRICS = ("loss", "reward", "kl", "entropy", "completions/mean_length", "num_tokens", "grad_norm")


def run(
    folder: Path, steps: int, resume: str | None = None, **changes: Any
) -> tuple[dict[str, torch.Tensor], list[Any], Any]:
    trainer = parts.trainer(
        folder, ROWS, max_steps=steps, save_strategy="steps", save_steps=2, shuffle_dataset=True, beta=0.05, **changes
    )
    trainer.train(resume_from_checkpoint=resume)
    history = [{name: entry.get(name) for name in METRICS} for entry in trainer.state.log_history if "loss" in entry]
    return parts.weights(trainer.model), history, trainer


@pytest.mark.parametrize(
    "cycle",
    [
        {},
        {"num_iterations": 2},
        {"num_iterations": 3},
        {"per_device_train_batch_size": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 1},
        {"per_device_train_batch_size": 2, "steps_per_generation": 6, "gradient_accumulation_steps": 2, "num_iterations": 2},
        {"sync_ref_model": True, "ref_model_sync_steps": 1},
    ],
    ids=["plain", "between iterations", "inside iterations", "inside a generation", "inside both", "synced reference"],
)
def test_two_steps_and_two_more_are_four(tmp_path, cycle):
    straight, history, _ = run(tmp_path / "straight", 4, **cycle)
    run(tmp_path / "killed", 2, **cycle)
    resumed, continued, trainer = run(tmp_path / "killed", 4, str(tmp_path / "killed" / "checkpoint-2"), **cycle)
    assert trainer.state.global_step == 4
    assert continued == history
    for name, value in straight.items():
        assert torch.equal(resumed[name], value), name


def test_the_last_checkpoint_is_found(tmp_path):
    straight, _, _ = run(tmp_path / "straight", 4)
    run(tmp_path / "killed", 2)
    trainer = parts.trainer(
        tmp_path / "killed", ROWS, max_steps=4, save_strategy="steps", save_steps=2, shuffle_dataset=True, beta=0.05
    )
    trainer.train(resume_from_checkpoint=True)
    assert all(torch.equal(value, straight[name]) for name, value in parts.weights(trainer.model).items())


def test_lora_resumes(tmp_path):
    from peft import LoraConfig

    def options() -> dict[str, Any]:
        return {"peft_config": LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")}

    straight, _, _ = run(tmp_path / "straight", 4, options=options())
    run(tmp_path / "killed", 2, options=options())
    resumed, _, _ = run(tmp_path / "killed", 4, str(tmp_path / "killed" / "checkpoint-2"), options=options())
    assert all(torch.equal(resumed[name], value) for name, value in straight.items())


def test_a_checkpoint_of_another_number_of_processes_samples_the_batch_at_hand_again(tmp_path):
    run(tmp_path, 2, num_iterations=3)
    state_file = tmp_path / "checkpoint-2" / "longrein_state_0.pt"
    state = torch.load(state_file, weights_only=True)
    assert state["buffered_inputs"] is not None
    torch.save(state | {"processes": 4}, state_file)
    _, history, trainer = run(tmp_path, 4, str(tmp_path / "checkpoint-2"), num_iterations=3)
    assert trainer.state.global_step == 4
    assert len(history) == 4


@pytest.mark.parametrize("at", [2, 3, 5])
@pytest.mark.parametrize(
    "cycle",
    [
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {
            "per_device_train_batch_size": 2,
            "steps_per_generation": 4,
            "gradient_accumulation_steps": 2,
            "num_iterations": 2,
        },
    ],
    ids=["one update a generation", "several"],
)
def test_a_run_stopped_between_micro_batches_goes_on_from_its_last_update(tmp_path, cycle, at, monkeypatch):
    straight, history, _ = run(tmp_path / "straight", 4, **cycle)
    trainer = parts.trainer(tmp_path / "stopped", ROWS, max_steps=4, shuffle_dataset=True, beta=0.05, **cycle)
    backward, passes = trainer.accelerator.backward, iter(range(99))

    def interrupted(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        if next(passes) == at:
            raise KeyboardInterrupt

    monkeypatch.setattr(trainer.accelerator, "backward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer._save_checkpoint(trainer.model, trial=None)  # as `longrein train` does
    resumed, continued, trainer = run(tmp_path / "stopped", 4, True, **cycle)
    assert trainer.state.global_step == 4
    assert continued == history
    for name, value in straight.items():
        assert torch.equal(resumed[name], value), name
