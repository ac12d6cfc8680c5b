"""`Run`: a run folder read back, also while it is being written.

Always true: a rollout read is equal to the one that was written, with what a step made of it since; reading changes nothing in
the folder and never makes the writer wait.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longrein.contract import LongreinError, Tool
from longrein.rollout import Rollout
from longrein.runs.schema import FILE, FORMAT, decoded, unpacked_advantages

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which rollouts; what is unsaid leaves all in."""

    phase: str | None = None
    env: str | None = None
    group: str | None = None
    step: int | None = None
    min_step: int | None = None
    max_step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    solved: bool | None = None
    failed: bool | None = None
    limited: bool | None = None
    """Whether it ran into a limit."""
    forked: bool | None = None
    """Whether it has more than one branch."""
    search: str = ""
    """Text in its id, task, cause or conversation, in any case of ASCII letters."""

    def sql(self) -> tuple[str, list[Any]]:
        """A condition on `rollouts` and its values."""
        terms: list[str] = []
        values: list[Any] = []
        for column, operator, value in (
            ("phase", "=", self.phase),
            ("env", "=", self.env),
            ('"group"', "=", self.group),
            ("step", "=", self.step),
            ("step", ">=", self.min_step),
            ("step", "<=", self.max_step),
            ("reward", ">=", self.min_reward),
            ("reward", "<=", self.max_reward),
        ):
            if value is not None:
                terms.append(f"{column} {operator} ?")
                values.append(value)
        for condition, wanted in (
            ("success IS 1", self.solved),
            ("failed IS NOT NULL", self.failed),
            ('"limit" IS NOT NULL', self.limited),
            ("branches > 1", self.forked),
        ):
            if wanted is not None:
                terms.append(condition if wanted else f"NOT ({condition})")
        if self.search:
            in_json = json.dumps(self.search, ensure_ascii=False)[1:-1]
            plain, escaped = (f"%{_literal(text)}%" for text in (self.search, in_json))
            like = "LIKE ? ESCAPE '\\'"
            terms.append(
                f"(id {like} OR failed {like} OR task {like} OR info {like} OR EXISTS (SELECT 1 FROM calls "
                f"WHERE rollout = rollouts.number AND (messages {like} OR reply {like})))"
            )
            values += [plain, plain, escaped, escaped, escaped, escaped]
        return " AND ".join(terms) or "1", values


class Run:
    """A run folder.

    >>> run = Run("runs/latest")                                                                 # doctest: +SKIP
    >>> best = [rollout for rollout in run.rollouts(Filter(min_reward=1.0))]                     # doctest: +SKIP
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._path = self.folder / FILE
        if not self._path.is_file():
            raise LongreinError(f"{self.folder} holds no run: there is no {FILE} in it")
        try:
            ((version,),) = self.rows("PRAGMA user_version", raw=True)
        except sqlite3.DatabaseError as error:
            raise LongreinError(f"{self._path} is no run: {error}") from error
        if version != FORMAT:
            raise LongreinError(f"{self._path} has format {version}; this longrein reads {FORMAT}")

    def rollouts(self, of: Filter | None = None) -> Iterator[Rollout]:
        """The rollouts in the order they were written. Each is read when it is asked for."""
        condition, values = (of or Filter()).sql()
        for row in self.rows(f"SELECT number FROM rollouts WHERE {condition} ORDER BY number", values):
            yield self.rollout(row["number"])

    def rollout(self, number: int) -> Rollout:
        """The rollout that was written as the `number`-th."""
        with self._reading() as database:
            row = database.execute("SELECT * FROM rollouts WHERE number = ?", (number,)).fetchone()
            if row is None:
                raise LongreinError(f"the run in {self.folder} has no rollout {number}")
            calls = database.execute("SELECT * FROM calls WHERE rollout = ? ORDER BY number", (number,)).fetchall()
            tools = _tools(database, {call["tools"] for call in calls})
        return decoded(row, calls, tools)

    def find(self, rollout_id: str) -> int:
        """The number of the rollout with this id; of several, the last."""
        ((found,),) = self.rows("SELECT max(number) FROM rollouts WHERE id = ?", (rollout_id,), raw=True)
        if found is None:
            raise LongreinError(f"the run in {self.folder} has no rollout {rollout_id!r}")
        return found

    def advantages(self, number: int) -> dict[str, NDArray[np.float32]]:
        """The advantage of each sampled token, by call; calls that no step has are left out."""
        rows = self.rows(
            "SELECT id, advantages, length(completion) / 4 AS drawn FROM calls "
            "WHERE rollout = ? AND advantages IS NOT NULL ORDER BY number",
            (number,),
        )
        return {row["id"]: unpacked_advantages(row["advantages"], row["drawn"]) for row in rows}

    def metrics(self) -> dict[str, list[tuple[int, float | None]]]:
        """Each figure over the steps; where a step was done again after a restart, the last time counts."""
        result: dict[str, list[tuple[int, float | None]]] = {}
        for row in self.rows("SELECT step, name, value, max(session) FROM metrics GROUP BY name, step ORDER BY name, step"):
            result.setdefault(row["name"], []).append((row["step"], row["value"]))
        return result

    def pieces(self) -> dict[int, bytes]:
        """The bytes each token id of the run stands for; empty when its tokenizer was not known."""
        return {row["token"]: row["bytes"] for row in self.rows("SELECT token, bytes FROM pieces")}

    def about(self) -> dict[str, Any]:
        """What stands beside the file: `run.json`, and `config.json` and `summary.json` where they are."""
        about: dict[str, Any] = {}
        for name in ("run", "config", "summary"):
            with contextlib.suppress(OSError, ValueError):
                about[name] = json.loads((self.folder / f"{name}.json").read_text())
        return about

    def rows(self, statement: str, values: Sequence[Any] = (), *, raw: bool = False) -> list[Any]:
        """Any question in SQL, answered with dicts (`raw`: tuples). The tables are explained in `longrein.runs.schema`."""
        with self._reading() as database:
            found = database.execute(statement, values).fetchall()
        return [tuple(row) for row in found] if raw else [dict(row) for row in found]

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(self._connect()) as database:
            database.row_factory = sqlite3.Row
            yield database

    def _connect(self) -> sqlite3.Connection:
        place = self._path.resolve().as_uri()
        database = sqlite3.connect(f"{place}?mode=ro", uri=True, timeout=60)
        try:
            database.execute("SELECT 1 FROM sqlite_master")
            return database
        except sqlite3.OperationalError:  # a folder that cannot be written to: nobody else writes there either
            database.close()
            return sqlite3.connect(f"{place}?mode=ro&immutable=1", uri=True)


def _tools(database: sqlite3.Connection, numbers: set[int | None]) -> Mapping[int, list[Tool]]:
    known = [number for number in numbers if number is not None]
    marks = ", ".join("?" * len(known))
    rows = database.execute(f"SELECT number, json FROM tools WHERE number IN ({marks})", known)
    return {row["number"]: json.loads(row["json"]) for row in rows}


def _literal(text: str) -> str:
    """Text for LIKE that stands for itself."""
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
