"""What a trainer plays is on disk before it is trained on, with what the step makes of it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import parts
import pytest
from records import plain
from worlds import Ask, Broken, Flat, Forking, Moody, Recording, Talk, row

from longrein.contract import LongreinError
from longrein.rollout import Rollout
from longrein.runs import Run
from longrein.runs.reader import Filter
from longrein.training.keeper import RunKeeper


def kept(folder: Path, rows: list[Any], **changes: Any) -> tuple[Any, RunKeeper]:
    trainer = parts.trainer(folder / "checkpoints", rows, **changes)
    keeper = RunKeeper(trainer, folder)
    trainer.add_callback(keeper)
    return trainer, keeper


def test_every_rollout_is_kept_with_its_group_and_the_steps_advantages(tmp_path: Path) -> None:
    trainer, keeper = kept(tmp_path, [row(Talk, word="a"), row(Ask, n=1)], max_steps=2)
    batches: list[Any] = []
    on_batch = trainer.on_batch
    trainer.on_batch = lambda batch, arrays: (batches.append((batch, arrays)), on_batch(batch, arrays))
    trainer.train()
    keeper.close()
    run = Run(tmp_path)
    assert len(batches) == 2
    for step, (batch, arrays) in enumerate(batches, start=1):
        stored = {record.id: record for record in run.rollouts(Filter(phase="train", step=step))}
        assert len(stored) == len(batch.played) == 4
        for index, one in enumerate(batch.played):
            record = one.rollout
            assert plain(stored[record.id]) == plain(record)
            mine = arrays["row_rollout"] == index
            expected = arrays["advantages"][mine][arrays["padded_agent_mask"][mine].astype(bool)]
            assert np.concatenate(list(run.advantages(run.find(record.id)).values())).tolist() == expected.tolist()
        groups = [one.rollout.group for one in batch.played]
        assert [len(set(groups[:2])), len(set(groups[2:])), len(set(groups))] == [1, 1, 2]
    rewards = dict(run.metrics()["reward"])
    assert rewards == {
        entry["step"]: pytest.approx(entry["reward"]) for entry in trainer.state.log_history if "reward" in entry
    }
    assert json.loads((tmp_path / "config.json").read_text())["num_generations"] == 2
    assert run.about()["run"]["sessions"][0]["seed"] == trainer.args.seed


def test_the_tokens_of_a_run_can_be_read_without_its_tokenizer(tmp_path: Path) -> None:
    trainer, keeper = kept(tmp_path, [row(Talk, word="é日 b"), row(Talk, word="attic")])
    trainer.train()
    keeper.close()
    run = Run(tmp_path)
    pieces = run.pieces()
    for record in run.rollouts():
        for branch in record.branches():
            text = b"".join(pieces[token] for token in branch.token_ids.tolist())
            assert text.decode(errors="replace") == parts.tokenizer().decode(branch.token_ids)


def test_a_rollout_is_handed_over_when_it_ends_not_when_its_batch_does(tmp_path: Path) -> None:
    trainer, keeper = kept(tmp_path, [row(Talk, word="a"), row(Ask, n=1)])
    assert keeper.writer is not None
    ended: list[Rollout] = []
    write = keeper.writer.write
    keeper.writer.write = lambda rollout, **where: (ended.append(rollout), write(rollout, **where))[1]  # type: ignore[method-assign]
    trainer.on_batch = lambda batch, arrays: pytest.fail("the batch was whole first") if len(ended) < 4 else None
    trainer.train()
    keeper.close()
    assert len(ended) == 4


def test_a_failed_rollout_is_kept_with_its_cause(tmp_path: Path) -> None:
    trainer, keeper = kept(tmp_path, [row(Moody, of=2, breaks=[1], word=f"w{n}") for n in range(2)])
    trainer.train()
    keeper.close()
    run = Run(tmp_path)
    failed = list(run.rollouts(Filter(failed=True)))
    assert [record.failed for record in failed] == ["RuntimeError: rollout 1 lost its sandbox"] * 2
    assert len(list(run.rollouts(Filter(failed=False)))) == 2
    assert run.advantages(run.find(failed[0].id)) == {}


def test_a_truncated_rollout_that_is_masked_has_its_reason(tmp_path: Path) -> None:
    limits = {"max_reply_tokens": 1}
    trainer, keeper = kept(tmp_path, [row(Ask, limits, n=n) for n in range(2)], mask_truncated_completions=True)
    trainer.train()
    keeper.close()
    records = list(Run(tmp_path).rollouts())
    assert any(record.truncated for record in records)
    for record in records:
        assert {call.excluded for call in record.calls.values()} == {"truncated" if record.truncated else None}


def test_a_stale_rollout_that_is_left_out_has_its_reason(tmp_path: Path) -> None:
    behind = parts.agent()
    trainer, keeper = kept(tmp_path, [row(Talk, word="a"), row(Ask, n=1)], of=behind, max_staleness=0)
    sample = behind.engine.sample

    async def old(request: Any) -> Any:
        return dataclasses.replace(await sample(request), policy_version=-1)

    behind.engine.sample = old  # type: ignore[method-assign]
    trainer.train()
    keeper.close()
    run = Run(tmp_path)
    records = list(run.rollouts())
    assert {call.excluded for record in records for call in record.calls.values()} == {"stale"}
    assert all(run.advantages(number) == {} for number in range(1, 5))


def test_rounds_that_were_sampled_again_are_kept_too(tmp_path: Path) -> None:
    trainer, keeper = kept(tmp_path, [row(Flat, n=n) for n in range(2)], resample_flat_groups=1)
    trainer.train()
    keeper.close()
    run = Run(tmp_path)
    rows = run.rows("SELECT advantage IS NULL AS unused, count(*) AS n FROM rollouts GROUP BY unused")
    assert rows == [{"unused": 0, "n": 4}, {"unused": 1, "n": 4}]


@pytest.mark.parametrize("env", [Recording, Forking, Broken])
def test_an_environment_that_gives_arrays_alone_is_kept_as_well(tmp_path: Path, env: type) -> None:
    trainer, keeper = kept(tmp_path, [row(env, n=n) for n in range(2)], max_steps=2)
    arrays: list[Any] = []
    on_batch = trainer.on_batch
    trainer.on_batch = lambda batch, made: (arrays.append((batch, made)), on_batch(batch, made))
    trainer.train()
    keeper.close()
    records = list(Run(tmp_path).rollouts())
    assert len(records) == 8
    if env is Broken:
        assert [record.failed for record in records[:4]] == [None, "the sandbox died", None, None]
        return
    (batch, made), *_ = arrays
    for index, record in enumerate(records[:4]):
        assert record.reward == pytest.approx(batch.final_rewards[index])
        rows = made["row_rollout"] == index
        whole = [
            ids[mask == 1].tolist()
            for ids, mask in zip(made["padded_token_ids"][rows], made["padded_attn_mask"][rows], strict=True)
        ]
        assert [branch.token_ids.tolist() for branch in record.branches()] == whole
    assert len({record.group for record in records}) == 4


def test_a_run_that_cannot_be_written_stops_in_words(tmp_path: Path) -> None:
    trainer, keeper = kept(tmp_path, [row(Talk, word="a"), row(Ask, n=1)])
    assert keeper.writer is not None
    keeper.writer._put(lambda: lambda database: database.execute("DROP TABLE calls") and None).result()
    with pytest.raises(LongreinError, match="could not be written: OperationalError"):
        trainer.train()
    with pytest.raises(LongreinError, match="could not be written"):
        keeper.close()


def test_a_killed_run_keeps_every_step_it_told_of(folder: Any, tmp_path: Path) -> None:
    flags = ["--steps", "30", "--tasks-per-step", "2", "--num-generations", "4", "--heldout", "4", "--micro-batch", "8"]
    command = [sys.executable, "-u", "-c", "from longrein.cli import main; main()", "train", "--model", str(folder("tiny"))]
    with subprocess.Popen(
        [*command, *flags, "--out", "run"],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 2"):
                os.kill(process.pid, signal.SIGKILL)
                break
        told = [line for line in process.stdout if line.startswith("step")]
    run = Run(tmp_path / "run")
    counts = {
        row["step"]: row["n"]
        for row in run.rows("SELECT step, count(*) AS n FROM rollouts WHERE phase = 'train' GROUP BY step")
    }
    assert [counts[step] for step in range(1, 3 + len(told))] == [8] * (2 + len(told))
    assert len(list(run.rollouts(Filter(phase="before")))) == 4
