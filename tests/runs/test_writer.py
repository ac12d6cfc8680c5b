"""What was acknowledged is on disk, whole and to the bit, however the process ends."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversations import JSON, LOOK, MOVE, TEXT, TOOLS, assistant, user
from hypothesis import given, settings
from hypothesis import strategies as st
from records import plain, rollout

from longrein.contract import LongreinError
from longrein.rollout import Call, Rollout
from longrein.runs import Run, RunWriter
from longrein.runs.reader import Filter
from longrein.runs.schema import FILE

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(lambda ids: np.array(ids, np.int32))
FINITE = st.floats(allow_nan=False)


def floats(length: int) -> st.SearchStrategy[Any]:
    """Any bits a float32 has, also those that are no number."""
    return st.binary(min_size=4 * length, max_size=4 * length).map(lambda bits: np.frombuffer(bits, np.float32))


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    record = Rollout(
        id=draw(TEXT),
        task=draw(JSON),
        seed=draw(st.integers(0, 2**64 - 1)),
        env=draw(TEXT),
        reward=draw(st.none() | FINITE),
        success=draw(st.sampled_from([None, True, False])),
        failed=draw(st.none() | TEXT),
        limit=draw(st.sampled_from([None, "turns"])),
        info=draw(st.dictionaries(st.text(max_size=3), JSON, max_size=2)),
        group=draw(TEXT),
    )
    for index in range(draw(st.integers(0, 5))):
        drawn = draw(IDS)
        record.add(
            Call(
                id=f"{index}{draw(TEXT)}",
                parent=draw(st.sampled_from([None, *record.calls])),
                context_ids=draw(IDS),
                completion_ids=drawn,
                logprobs=draw(floats(len(drawn))),
                sampler_logprobs=draw(st.none() | floats(len(drawn))),
                finish_reason=draw(st.sampled_from(["stop", "length", "aborted"])),
                policy_version=draw(st.integers(0, 10**9)),
                versions=draw(st.none() | st.just(np.arange(len(drawn), dtype=np.int32))),
                messages=tuple(draw(st.lists(TEXT.map(user), max_size=2))),
                tools=tuple(draw(TOOLS)),
                reply=assistant(draw(TEXT), *[("look", {"a": draw(JSON)})]),
                delivered=draw(st.booleans()),
                reward=draw(st.none() | FINITE),
                excluded=draw(st.sampled_from([None, "stale", "truncated"])),
            )
        )
    return record


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunWriter]:
    with RunWriter(tmp_path_factory.mktemp("shared")) as writer:
        yield writer


@given(record=rollouts())
@settings(max_examples=60)
def test_a_rollout_is_read_back_as_it_was_written(shared: RunWriter, record: Rollout) -> None:
    shared.write(record, phase="eval", step=3).result()
    run = Run(shared.folder)
    assert plain(run.rollout(run.find(record.id))) == plain(record)


def test_text_that_is_half_a_character_is_kept(tmp_path: Path) -> None:
    record = rollout(0, task={"text": "a\ud800b"}, failed="odd \udfff byte", env="e\0f")
    with RunWriter(tmp_path) as writer:
        writer.write(record)
    (read,) = Run(tmp_path).rollouts()
    assert read.task == record.task
    assert read.env == record.env
    assert read.failed == "odd \\udfff byte"


def test_what_a_call_adds_is_stored_once(tmp_path: Path) -> None:
    record = Rollout(id="r", reward=0.0)
    length = 2000
    for index in range(50):  # a conversation whose whole context is read again by each call
        ids = np.full(length, index, np.int32)
        record.add(
            Call(
                f"c{index}", f"c{index - 1}" if index else None, ids, ids, ids.astype(np.float32), "stop", tools=(LOOK, MOVE)
            )
        )
    with RunWriter(tmp_path) as writer:
        writer.write(record)
    stored = 50 * length * (4 + 4 + 4)
    assert (tmp_path / FILE).stat().st_size < 1.1 * stored
    assert [row["json"] for row in Run(tmp_path).rows("SELECT json FROM tools")] == [
        json.dumps([LOOK, MOVE], ensure_ascii=False)
    ]


def test_a_kill_loses_nothing_that_was_acknowledged_and_leaves_nothing_half(tmp_path: Path) -> None:
    rng, acknowledged, kills, first = random.Random(0), set(), 0, 0
    for _ in range(20):
        with subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("killed.py")), str(tmp_path), str(first)],
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            seen = [int(process.stdout.readline()) for _ in range(rng.randint(1, 40))]  # at any moment after so many
            os.kill(process.pid, signal.SIGKILL)
            seen += [int(line) for line in process.stdout.read().split(b"\n") if line]
            assert process.wait() == -signal.SIGKILL
        kills += 1
        acknowledged.update(seen)
        first = max(seen) + 1000
        run = Run(tmp_path)
        assert run.rows("PRAGMA integrity_check", raw=True) == [("ok",)]
        assert acknowledged <= {row["step"] for row in run.rows("SELECT step FROM rollouts")}
        for record in run.rollouts(Filter(min_step=min(seen))):  # also what was not acknowledged any more
            assert plain(record) == plain(rollout(int(record.id[1:])))
    assert kills == 20
    assert len(acknowledged) > 100
    assert [row["number"] for row in run.rows("SELECT number FROM sessions")] == list(range(1, 21))
    sessions = run.about()["run"]["sessions"]
    assert len(sessions) == 20
    assert sessions[0]["versions"]["numpy"] == np.__version__


def test_two_processes_do_not_write_one_run(tmp_path: Path) -> None:
    with RunWriter(tmp_path), pytest.raises(LongreinError, match="is being written by another process"):
        RunWriter(tmp_path)
    RunWriter(tmp_path).close()


def test_a_file_that_is_no_run_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("not a database, but long enough to look at" * 40)
    with pytest.raises(LongreinError, match="cannot be opened as a run: file is not a database"):
        RunWriter(tmp_path)
    with pytest.raises(LongreinError, match="is no run"):
        Run(tmp_path)
    with pytest.raises(LongreinError, match="holds no run: there is no run.sqlite in it"):
        Run(tmp_path / "nowhere")


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    RunWriter(tmp_path).close()
    with sqlite3.connect(tmp_path / FILE) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(LongreinError, match="it has format 99 and this longrein writes 1"):
        RunWriter(tmp_path)
    with pytest.raises(LongreinError, match="has format 99; this longrein reads 1"):
        Run(tmp_path)


def test_a_full_disk_is_told_and_later_flushes_tell_it_too(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    writer.write(rollout(1)).result()
    small = writer._put(lambda: lambda database: database.execute("PRAGMA max_page_count = 1") and None)
    small.result()
    big = rollout(2, info={"text": "x" * 1_000_000})
    assert isinstance(writer.write(big).exception(), sqlite3.OperationalError)
    with pytest.raises(LongreinError, match=r"could not be written: OperationalError: database or disk is full"):
        writer.flush()
    with pytest.raises(LongreinError, match="could not be written"):
        writer.close()
    assert [record.id for record in Run(tmp_path).rollouts()] == ["r1"]


def test_one_rollout_that_cannot_be_kept_takes_no_other_with_it(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    tools = ({"type": "function", "function": {"name": "look"}},)
    records = [rollout(n) for n in (1, 2, 3)]
    for record, version in zip(records[1:], (2**70, 0), strict=True):  # the file's integers end at 63 bits
        for call in list(record.calls.values()):
            record.calls[call.id] = replace(call, tools=tools, policy_version=version)
    written = [writer.write(record) for record in records]
    assert [type(one.exception()) for one in written] == [type(None), OverflowError, type(None)]
    with pytest.raises(LongreinError, match="OverflowError"):
        writer.close()
    first, third = Run(tmp_path).rollouts()
    assert (first.id, third.id) == ("r1", "r3")
    assert all(call.tools == tools for call in third.calls.values())


def test_what_json_cannot_say_is_kept_as_text(tmp_path: Path) -> None:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    info = {("a", 1): 2, "list": np.arange(2), "loop": loop, 3: {"x"}}
    record = rollout(1, info=info, success=np.bool_(True), reward=np.float32(0.5))
    with RunWriter(tmp_path) as writer:
        writer.write(record)
    (read,) = Run(tmp_path).rollouts(Filter(solved=True, min_reward=0.5))
    assert read.info == {"('a', 1)": 2, "list": [0, 1], "loop": "{'self': {...}}", "3": ["x"]}
    assert (read.success, read.reward) == (True, 0.5)


def test_credit_is_kept_to_the_token(tmp_path: Path) -> None:
    record = Rollout(id="r", reward=1.0)
    for index, length in enumerate((3, 2, 0)):
        ids = np.arange(length, dtype=np.int32)
        record.add(Call(f"c{index}", None, ids, ids, ids.astype(np.float32), "stop"))
    with RunWriter(tmp_path) as writer:
        writer.write(record)
        given = {"c0": np.array([0.5, 0.5, 0.5]), "c1": np.array([-1.0, 2.0])}
        writer.credit("r", given, {"c2": "truncated"})
    run = Run(tmp_path)
    advantages = run.advantages(1)
    assert {call: values.tolist() for call, values in advantages.items()} == {"c0": [0.5] * 3, "c1": [-1.0, 2.0]}
    assert run.rollout(1).calls["c2"].excluded == "truncated"
    assert run.rows("SELECT advantage FROM rollouts") == [{"advantage": pytest.approx(0.5)}]


def test_metrics_of_a_step_that_was_done_again_are_the_last(tmp_path: Path) -> None:
    for value in (0.25, 0.75):
        with RunWriter(tmp_path) as writer:
            writer.metrics(1, {"reward": value, "note": "text", "odd": float("nan")})
            writer.metrics(2, {"reward": 1})
    assert Run(tmp_path).metrics() == {"odd": [(1, None)], "reward": [(1, 0.75), (2, 1.0)]}


def test_a_run_is_read_while_it_is_written_and_from_a_folder_that_is_read_only(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.write(rollout(1)).result()
        assert [record.id for record in Run(tmp_path).rollouts()] == ["r1"]
        writer.write(rollout(2)).result()
        assert len(list(Run(tmp_path).rollouts())) == 2
    before = sorted(path.name for path in tmp_path.iterdir())
    assert len(list(Run(tmp_path).rollouts())) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == before == ["run.json", "run.sqlite", "writer.lock"]
