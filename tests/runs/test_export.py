"""A run as training data: `datasets` reads it, TRL trains on it, and only what was asked for is in it."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from records import TOOLS, rollout

from longrein.cli import main
from longrein.contract import LongreinError
from longrein.rollout import Call, Rollout
from longrein.runs import Run, RunWriter
from longrein.runs.export import FORMATS, export
from longrein.runs.reader import Filter


def talk(name: str, reward: float, group: str = "g", **fields: Any) -> Rollout:
    """Two calls: a tool is asked for, then an answer is given."""
    record = Rollout(id=name, task={"n": 1}, env="Talk", reward=reward, success=reward >= 1, group=group, **fields)
    asked = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"room": "attic"}'}}]}  # fmt: skip
    for call_id, parent, sent, reply in (
        ("a", None, [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "find"}]}], asked),
        ("b", "a", [{"role": "tool", "tool_call_id": "call_1", "content": "a coin"}], {"role": "assistant", "content": f"é{reward}"}),
    ):  # fmt: skip
        ids = np.array([7, 8, 9], np.int32)
        record.add(
            Call(
                call_id,
                parent,
                ids,
                ids + 10,
                np.full(3, -0.5, np.float32),
                "stop",
                messages=tuple(sent),
                tools=TOOLS,
                reply=reply,
            )
        )
    return record


@pytest.fixture
def run(tmp_path: Path) -> Run:
    with RunWriter(tmp_path / "run") as writer:
        for name, reward, group in (("r1", 1.0, "g1"), ("r2", 0.0, "g1"), ("r3", 0.5, "g2"), ("r4", 0.5, "g2")):
            writer.write(talk(name, reward, group))
        writer.write(talk("failed", 0.0, failed="EngineError: away"))
        writer.write(talk("held out", 1.0), phase="after")
    return Run(tmp_path / "run")


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
@pytest.mark.parametrize(("format", "lines"), [("messages", 4), ("prompt-completion", 8), ("preference", 1), ("tokens", 4)])
def test_datasets_reads_every_format(run: Run, tmp_path: Path, ending: str, format: str, lines: int) -> None:
    from datasets import load_dataset

    path = tmp_path / f"out{ending}"
    assert export(run, path, format=format) == lines
    kind = {".jsonl": "json", ".parquet": "parquet"}[ending]
    loaded: Any = load_dataset(kind, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(loaded) == lines
    assert "r1" in loaded["rollout"]
    assert not {"failed", "held out"} & set(loaded["rollout"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", f"out{ending}", "run"]


def test_a_conversation_is_as_it_was_said(run: Run, tmp_path: Path) -> None:
    export(run, tmp_path / "out.jsonl", of=Filter(min_reward=1, phase="train"))
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    example = json.loads(line)
    assert example["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "find"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"room": "attic"}'}}]},
        {"role": "tool", "content": "a coin", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "é1.0"},
    ]  # fmt: skip
    assert json.loads(example["tools"]) == list(TOOLS)
    assert example["reward"] == 1.0


def test_a_preference_is_between_rollouts_of_one_group(run: Run, tmp_path: Path) -> None:
    export(run, tmp_path / "out.jsonl", format="preference")
    (example,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert [message["role"] for message in example["prompt"]] == ["system", "user"]
    assert (example["chosen"][-1]["content"], example["rejected"][-1]["content"]) == ("é1.0", "é0.0")


def test_token_rows_are_the_recorded_ids_with_labels_on_the_policys_own(run: Run, tmp_path: Path) -> None:
    export(run, tmp_path / "out.jsonl", format="tokens", of=Filter(solved=True, phase="train"))
    (example,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert example["input_ids"] == [7, 8, 9, 17, 18, 19] * 2
    assert example["labels"] == [-100, -100, -100, 17, 18, 19] * 2
    assert example["logprobs"] == [0, 0, 0, -0.5, -0.5, -0.5] * 2


def test_what_was_not_trained_is_no_completion(tmp_path: Path) -> None:
    record = talk("r", 1.0)
    record.update("b", delivered=False)
    with RunWriter(tmp_path / "run") as writer:
        writer.write(record)
    assert export(Run(tmp_path / "run"), tmp_path / "out.jsonl", format="prompt-completion") == 1
    assert export(Run(tmp_path / "run"), tmp_path / "out.jsonl", format="messages") == 1
    assert json.loads((tmp_path / "out.jsonl").read_text())["messages"][-1]["role"] == "assistant"


@pytest.mark.parametrize("format", ["messages", "prompt-completion", "tokens"])
def test_trl_trains_on_it(run: Run, tmp_path: Path, format: str) -> None:
    from datasets import load_dataset
    from parts import policy, tokenizer
    from trl import SFTConfig, SFTTrainer

    export(run, tmp_path / "out.parquet", format=format)
    rows: Any = load_dataset(
        "parquet", data_files=str(tmp_path / "out.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    args = SFTConfig(
        str(tmp_path / "sft"), max_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True, bf16=False,
        save_strategy="no", disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    trainer = SFTTrainer(policy(), args=args, train_dataset=rows, processing_class=tokenizer())
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0


def test_a_real_template_writes_it_as_the_policy_did(run: Run, tmp_path: Path, tokenizer: Any) -> None:
    """What SFTTrainer and GRPOTrainer do with a conversation: tools are read from their JSON, calls are not quoted twice."""
    export(run, tmp_path / "out.parquet", format="prompt-completion")
    row = _loaded(tmp_path / "out.parquet")[0]
    tools = json.loads(row["tools"])
    render = functools.partial(tokenizer("qwen3").apply_chat_template, tools=tools, tokenize=False)
    prompt = render(row["prompt"], add_generation_prompt=True)
    whole = render(row["prompt"] + row["completion"])
    assert whole.startswith(prompt)
    assert '{"name": "look", "arguments": {"room": "attic"}}' in whole.removeprefix(prompt)


def test_trls_grpo_samples_from_its_prompts(run: Run, tmp_path: Path) -> None:
    from parts import policy, tokenizer
    from trl import GRPOConfig, GRPOTrainer

    export(run, tmp_path / "out.parquet", format="prompt-completion")
    seen: list[Any] = []

    def reward(prompts: Any, completions: Any, task: Any, **columns: Any) -> list[float]:
        seen.extend(zip(prompts, task, strict=True))
        return [float(len(str(completion))) for completion in completions]

    args = GRPOConfig(
        str(tmp_path / "grpo"), max_steps=1, per_device_train_batch_size=2, num_generations=2, max_completion_length=4,
        report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = _loaded(tmp_path / "out.parquet").remove_columns(["completion", "tools"])
    GRPOTrainer(policy(), reward, args=args, train_dataset=rows, processing_class=tokenizer()).train()
    assert seen[0][0][0]["role"] == "system"
    assert json.loads(seen[0][1]) == {"n": 1}


def _loaded(path: Path) -> Any:
    from datasets import load_dataset

    return load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(path.parent / "cache"))


@pytest.mark.parametrize("format", FORMATS)
def test_any_rollout_can_be_exported(tmp_path: Path, format: str) -> None:
    with RunWriter(tmp_path / "run") as writer:
        for seed in range(40):
            writer.write(rollout(seed))
    counts = {export(Run(tmp_path / "run"), tmp_path / f"out{ending}", format=format) for ending in (".jsonl", ".parquet")}
    assert len(counts) == 1
    assert counts.pop() > 5


def test_an_export_that_breaks_leaves_no_file_and_says_why(run: Run, tmp_path: Path) -> None:
    with pytest.raises(LongreinError, match="the format is 'best'; it must be one of messages, prompt-completion"):
        export(run, tmp_path / "out.jsonl", format="best")
    with pytest.raises(LongreinError, match=r"out.csv must end in .jsonl or .parquet"):
        export(run, tmp_path / "out.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_the_command_takes_the_newest_run(run: Run, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["longrein", "export", "--solved"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "there is no run under runs/ here" in capsys.readouterr().err
    (tmp_path / "runs").mkdir()
    run.folder.rename(tmp_path / "runs/first")
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
    assert capsys.readouterr().out == "1 examples in runs/first/messages.jsonl\n"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--min-reward", "2"], "6 rollouts, 5 of them with --phase train, 4 of them not failed, 0 of them with --min-reward 2.0"),
        (["--env", "Talks", "--solved"], "4 of them not failed, 0 of them with --env Talks (there is Talk)"),
        (["--phase", "eval"], "has 6 rollouts, 0 of them with --phase eval (there is after, train)"),
        (["--phase", "after", "--format", "preference"], "1 of them not failed, and --format preference makes no example of those"),
    ],
)  # fmt: skip
def test_where_nothing_is_left_the_command_says_what_left_none(
    run: Run, tmp_path: Path, monkeypatch: Any, capsys: Any, flags: list[str], why: str
) -> None:
    kept = tmp_path / "new/out.jsonl"
    assert export(run, kept) == 4, "a folder that is not there is made"
    before = kept.read_text()
    monkeypatch.setattr(sys, "argv", ["longrein", "export", str(run.folder), "--to", str(kept), *flags])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    told = capsys.readouterr()
    assert why in told.err
    assert told.out == ""
    assert kept.read_text() == before, "what stood there stays"
