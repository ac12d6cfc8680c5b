"""Rows come back exactly as they went in, from wherever they come, or are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from longrein import LongreinError
from longrein.envs import load_tasks, task_dataset
from longrein.envs.datasets import checked_row, refuse_merged

HUNT = "longrein.envs.TreasureHunt"
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
dicts = st.dictionaries(st.text(min_size=1, max_size=4), json_values, max_size=3)


def row(**task: Any) -> dict[str, Any]:
    return {"env_class_path": HUNT, "env_config": {}, "task_data": task}


@settings(max_examples=30)
@given(st.lists(st.tuples(dicts, dicts), min_size=1, max_size=4))
def test_dicts_of_any_shape_come_back_as_they_went_in(pairs: list[Any]) -> None:
    rows = [{"env_class_path": HUNT, "env_config": config, "task_data": task} for config, task in pairs]
    assert [checked_row(one, i) for i, one in enumerate(task_dataset(rows))] == rows


def test_tasks_from_files_and_folders(tmp_path: Path) -> None:
    rows = [row(rooms=["attic", "barn"]), row(rooms=["den"], note="x")]
    dataset = task_dataset(rows)
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset.to_parquet(tmp_path / "tasks.parquet")
    dataset.save_to_disk(tmp_path / "folder")
    for name in ("tasks.jsonl", "tasks.parquet", "folder"):
        assert [dict(one) for one in load_tasks(str(tmp_path / name))] == rows, name


def test_rows_without_an_environment_are_tasks_of_the_given_one(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"rooms": ["attic"]}\n\n{"rooms": ["barn"]}\n')
    loaded = load_tasks(str(path), env_class_path=HUNT, env_config={"max_turns": 3})
    assert loaded[1] == {"env_class_path": HUNT, "env_config": {"max_turns": 3}, "task_data": {"rooms": ["barn"]}}
    with pytest.raises(
        LongreinError, match="have the columns rooms: without `env_class_path` the environment must be named"
    ):
        load_tasks(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "holds no rows"), ("{", "line 1, is not JSON"), ("[1]", r"line 1, is \[1\]; it must be a dict")],
)
def test_a_file_that_holds_no_tasks_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    with pytest.raises(LongreinError, match=message):
        load_tasks(str(path), env_class_path=HUNT)


def test_a_source_that_is_not_there_is_refused() -> None:
    with pytest.raises(LongreinError, match="there is no file 'nowhere.jsonl'"):
        load_tasks("nowhere.jsonl")
    with pytest.raises(LongreinError, match="'nobody/nothing' is no file or folder here, and the hub gave"):
        load_tasks("nobody/nothing")


def test_json_strings_are_read() -> None:
    text = {"env_class_path": HUNT, "env_config": '{"max_turns": 2}', "task_data": '{"rooms": ["attic"]}'}
    assert task_dataset([text])[0]["env_config"] == {"max_turns": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task_data": [1]}, r"row 0: task_data is \[1\]; it must be a dict"),
        ({"env_config": "{"}, "row 0: env_config is not JSON"),
        ({"env_class_path": 3}, "row 0: env_class_path is 3; it must be a dotted class path"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_by_column(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LongreinError, match=message):
        task_dataset([{**row(), **change}])


def test_a_row_without_a_column_is_refused() -> None:
    with pytest.raises(LongreinError, match="row 0 has no 'task_data': it has 'env_class_path', 'env_config'"):
        task_dataset([{"env_class_path": HUNT, "env_config": {}}])


def test_merged_dicts_are_refused_and_equal_ones_are_not() -> None:
    def plain(*tasks: dict[str, Any]) -> Dataset:
        return Dataset.from_dict(
            {"env_class_path": [HUNT] * len(tasks), "env_config": [{"max_turns": 3}] * len(tasks), "task_data": list(tasks)}
        )

    refuse_merged(plain({"a": 1}, {"a": 2}))
    merged = plain({"a": 1}, {"b": "s"})
    if isinstance(merged.features["task_data"], dict):  # what `datasets` does with mixed dicts is its own affair
        with pytest.raises(LongreinError, match=r"row 0: task_data\['b'\] is None.*longrein.envs.task_dataset"):
            refuse_merged(merged)
    else:
        assert merged[0]["task_data"] == {"a": 1}
