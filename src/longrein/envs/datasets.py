"""Datasets of tasks: rows `{env_class_path, env_config, task_data}`, whatever the dicts hold.

`datasets` merges dict columns over all rows (`{"a": 1}` and `{"b": 2}` both come back with `a` and `b`), so the two dict
columns are stored as JSON and come back as they went in (floats to eleven digits, which is how `datasets` reads them).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longrein.contract import LongreinError

if TYPE_CHECKING:
    from datasets import Dataset

COLUMNS = ("env_class_path", "env_config", "task_data")
JSON_LINES = (".jsonl", ".json", ".ndjson")


def task_dataset(rows: Iterable[dict[str, Any]]) -> Dataset:
    """A `datasets.Dataset` of the given rows, each dict as given.

    >>> rows = [{"env_class_path": "longrein.envs.TreasureHunt", "env_config": {}, "task_data": {"seed": 1}}]
    >>> task_dataset(rows)[0]["task_data"]
    {'seed': 1}
    """
    from datasets import Dataset, Features, Json, Value

    rows = [checked_row(row, index) for index, row in enumerate(rows)]
    features = Features(env_class_path=Value("string"), env_config=Json(), task_data=Json())
    # as text: given dicts, `datasets` would write them itself and round every number to ten decimals
    columns = {
        column: [_as_json(row[column], column, index) for index, row in enumerate(rows)]
        for column in ("env_config", "task_data")
    }
    return Dataset.from_dict({"env_class_path": [row["env_class_path"] for row in rows], **columns}, features=features)


def load_tasks(source: str, *, env_class_path: str | None = None, env_config: dict[str, Any] | None = None) -> Dataset:
    """Tasks from a JSONL or parquet file, a folder saved by `datasets`, or the hub (`owner/name`, `owner/name:split`).

    Rows without `env_class_path` are task data for the given environment.
    """
    return task_dataset(read_tasks(source, env_class_path=env_class_path, env_config=env_config))


def read_tasks(
    source: str, *, env_class_path: str | None = None, env_config: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """The rows of `load_tasks` as they are; those of a JSONL file are read without the `datasets` library."""
    path = Path(source)
    if path.suffix in JSON_LINES and path.is_file():
        with path.open() as lines:
            rows = [as_dict(line, f"{source}, line {number},") for number, line in enumerate(lines, 1) if line.strip()]
    elif path.suffix in (*JSON_LINES, ".parquet") and not path.exists():
        raise LongreinError(
            f"there is no file {source!r}; tasks are read from a .jsonl or .parquet file, or from a dataset of the hub by its name"
        )
    elif path.is_file() and path.suffix != ".parquet":
        raise LongreinError(f"the file {source!r} must end in .jsonl or .parquet: the ending says how it is read")
    else:
        from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

        if (path.suffix == ".parquet" and path.is_file()) or path.is_dir():
            try:
                loaded = load_from_disk(str(path)) if path.is_dir() else Dataset.from_parquet(str(path))
            except Exception as error:  # of `datasets` or of pyarrow, by what is wrong with the file
                raise LongreinError(f"{source!r} cannot be read: {type(error).__name__}: {error}") from error
        else:
            name, _, split = source.partition(":")
            try:
                loaded = load_dataset(name, split=split or "train")
            except Exception as error:  # the hub's client raises a different class for every way of not finding something
                raise LongreinError(
                    f"{source!r} is no file or folder here, and the hub gave: {type(error).__name__}: {error}"
                ) from error
        if isinstance(loaded, DatasetDict):
            loaded = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
        refuse_merged(loaded)
        rows = [dict(row) for row in loaded]
    if not rows:
        raise LongreinError(f"{source!r} holds no rows")
    if "env_class_path" not in rows[0]:
        if env_class_path is None:
            raise LongreinError(
                f"the rows of {source!r} have the columns {', '.join(rows[0])}: without `env_class_path` the environment "
                "must be named (`--env`)"
            )
        rows = [
            {
                "env_class_path": env_class_path,
                "env_config": dict(env_config or {}),
                "task_data": row["task_data"] if set(row) == {"task_data"} else row,
            }
            for row in rows
        ]
    return [checked_row(row, index) for index, row in enumerate(rows)]


def checked_row(row: dict[str, Any], index: int) -> dict[str, Any]:
    """The row with its two dicts as dicts; JSON strings are read. Refused with the name of the column that does not fit."""
    for column in COLUMNS:
        if column not in row:
            raise LongreinError(
                f"row {index} has no {column!r}: it has {', '.join(map(repr, row)) or 'nothing'}; every row needs "
                f"{', '.join(COLUMNS)}"
            )
    if not isinstance(row["env_class_path"], str) or not row["env_class_path"]:
        raise LongreinError(f"row {index}: env_class_path is {row['env_class_path']!r}; it must be a dotted class path")
    return {
        "env_class_path": row["env_class_path"],
        "env_config": as_dict(row["env_config"], f"row {index}: env_config"),
        "task_data": as_dict(row["task_data"], f"row {index}: task_data"),
    }


def refuse_merged(dataset: Any) -> None:
    """Refuse a dataset whose dict columns `datasets` filled up with None: what the rows said is no longer there."""
    features = getattr(dataset, "features", None) or {}
    for column in ("env_config", "task_data"):
        feature = features.get(column)
        if not isinstance(feature, dict):
            continue
        for index, row in enumerate(dataset.select_columns([column]) if hasattr(dataset, "select_columns") else dataset):
            if (name := _none_field(row[column])) is not None:
                raise LongreinError(
                    f"row {index}: {column}[{name!r}] is None. `datasets` merges dict columns and fills what a row did not "
                    "have with None, so the rows cannot be trusted. Build the dataset with "
                    "`longrein.envs.task_dataset(rows)`, which keeps each dict as it is."
                )


def _none_field(value: Any) -> str | None:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in inside:
        if inner is None and isinstance(value, dict):
            return str(name)
        if (found := _none_field(inner)) is not None:
            return f"{name}.{found}"
    return None


def as_dict(value: Any, what: str) -> dict[str, Any]:
    """A dict that is given as one or as JSON; refused by the name of what it is."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise LongreinError(f"{what} is not JSON ({error}): {value[:80]!r}") from None
    if not isinstance(value, dict):
        raise LongreinError(f"{what} is {value!r}; it must be a dict, or the JSON of one such as '{{\"max_turns\": 4}}'")
    return value


def _as_json(value: dict[str, Any], column: str, index: int) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise LongreinError(f"row {index}: {column} cannot be written as JSON ({error}): {value!r}") from None
