"""`RunWriter`: the one writer of a run's file, a thread fed by a bounded queue.

Always true: what a `Future` of `write` has acknowledged, or a returned `flush`, is on disk, and survives `kill -9` and a power cut;
a rollout is in the file whole or not at all; whoever writes waits only when the queue is full.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from longrein.contract import LongreinError
from longrein.rollout import Rollout
from longrein.runs.provenance import provenance
from longrein.runs.schema import (
    CALL_COLUMNS,
    FILE,
    FORMAT,
    ROLLOUT_COLUMNS,
    TABLES,
    encoded,
    finite,
    packed_advantages,
)

try:
    import fcntl
except ImportError:  # Windows: two writers of one folder are not kept apart there
    fcntl = None

Write = Callable[[sqlite3.Connection], None]

QUEUE = 1024
"""Writes that may wait; beyond it, whoever writes waits."""
TOGETHER = 256
"""Writes that share a commit when they have piled up."""


class RunWriter:
    """Opens a run folder for writing, a new one or one to go on with.

    >>> with RunWriter("runs/mine", seed=0) as run:                                              # doctest: +SKIP
    ...     run.write(rollout, phase="train", step=1)

    `pieces` gives the bytes that token ids stand for (`longrein.runs.pieces.Pieces`); they make the run readable by itself.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        pieces: Callable[[Iterable[int]], list[bytes]] | None = None,
        seed: int | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _only_writer(self.folder)
        self._pieces = pieces
        self._known: set[int] = set()
        self._tools: dict[str, int] = {}
        self._queue: queue.Queue[tuple[Callable[[], Write], Future[None]] | None] = queue.Queue(QUEUE)
        self._broken: BaseException | None = None
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="longrein-run-writer", daemon=True)
        self._thread.start()
        try:
            self._started.result()
        except sqlite3.Error as error:
            raise LongreinError(f"{self.folder / FILE} cannot be opened as a run: {error}") from error
        _note_session(self.folder, {**provenance(), "seed": seed, **(about or {})})
        atexit.register(self.close)

    def write(self, rollout: Rollout, *, phase: str = "train", step: int = 0) -> Future[None]:
        """Keep a finished rollout. The future is done once it is on disk."""
        now, copied = time.time(), _snapshot(rollout)
        return self._put(lambda: self._insert(copied, phase, step, now))

    def credit(
        self, rollout_id: str, advantages: Mapping[str, NDArray[Any]], excluded: Mapping[str, str | None] | None = None
    ) -> Future[None]:
        """What a step made of a written rollout: the advantages of each call's sampled tokens, and why calls were left out."""
        values = {call: np.array(value, np.float32) for call, value in advantages.items()}
        return self._put(lambda: self._update(rollout_id, values, dict(excluded or {})))

    def metrics(self, step: int, values: Mapping[str, Any]) -> Future[None]:
        """Keep a step's figures; those that are no numbers are left out."""
        now = time.time()
        rows = [(step, name, finite(value), now) for name, value in values.items() if isinstance(value, int | float)]
        statement = f"INSERT OR REPLACE INTO metrics VALUES ({self.session}, ?, ?, ?, ?)"
        return self._put(lambda: lambda database: database.executemany(statement, rows) and None)

    def flush(self) -> None:
        """Return once everything written before is on disk; raise if it could not be."""
        self._put(lambda: lambda database: None).exception()
        self.check()

    def check(self) -> None:
        """Raise if something could not be written."""
        if self._broken is not None:
            raise LongreinError(
                f"the run in {self.folder} could not be written: {type(self._broken).__name__}: {self._broken}"
            ) from self._broken

    def close(self) -> None:
        """Write what waits and let go of the file."""
        atexit.unregister(self.close)
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        if self._lock is not None:
            self._lock.close()
        self.check()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- the thread

    def _put(self, make: Callable[[], Write]) -> Future[None]:
        done: Future[None] = Future()
        while True:
            if not self._thread.is_alive():
                done.set_exception(LongreinError(f"the run in {self.folder} is closed"))
                return done
            with contextlib.suppress(queue.Full):
                self._queue.put((make, done), timeout=1)
                return done

    def _run(self) -> None:
        try:
            database = _database(self.folder / FILE)
            self.session = _new_session(database)
            self._known = {token for (token,) in database.execute("SELECT token FROM pieces")}
            self._tools = {text: number for number, text in database.execute("SELECT number, json FROM tools")}
            self._started.set_result(None)
        except BaseException as error:
            self._started.set_exception(error)
            return
        with contextlib.closing(database):
            open_ = True
            while open_:
                work = [self._queue.get()]
                with contextlib.suppress(queue.Empty):
                    while len(work) < TOGETHER:
                        work.append(self._queue.get_nowait())
                open_ = None not in work
                self._commit(database, [one for one in work if one is not None])
            with contextlib.suppress(sqlite3.OperationalError):  # somebody reads it
                database.execute("PRAGMA journal_mode = DELETE")  # one file, to be read where nothing can be written

    def _commit(self, database: sqlite3.Connection, work: list[tuple[Callable[[], Write], Future[None]]]) -> None:
        """All of the work in one transaction; a piece of it that makes no sense fails alone."""
        try:
            database.execute("BEGIN IMMEDIATE")
            for make, done in work:
                database.execute("SAVEPOINT piece")
                try:
                    make()(database)
                except sqlite3.OperationalError:  # the file, not the piece
                    raise
                except Exception as error:
                    database.execute("ROLLBACK TO piece")
                    self._tools.clear()  # those it added are not there: looked up again with the next rollout
                    self._broken = self._broken or error
                    done.set_exception(error)
                database.execute("RELEASE piece")
            database.execute("COMMIT")
        except Exception as error:
            self._broken = self._broken or error
            self._known.clear()  # what the transaction added is not there either
            self._tools.clear()
            with contextlib.suppress(sqlite3.Error):
                database.execute("ROLLBACK")
            for _, done in work:
                if not done.done():
                    done.set_exception(error)
        for _, done in work:
            if not done.done():
                done.set_result(None)

    def _insert(self, rollout: Rollout, phase: str, step: int, now: float) -> Write:
        rows = encoded(rollout, phase, step, now)
        new = set(np.unique(np.concatenate(rows.tokens)).tolist()) - self._known if self._pieces and rows.tokens else set()
        pieces = list(zip(new, self._pieces(new), strict=True)) if self._pieces and new else []

        def write(database: sqlite3.Connection) -> None:
            cursor = database.execute(INSERT_ROLLOUT, (self.session, *rows.rollout))
            at = CALL_COLUMNS.index("tools")
            database.executemany(
                INSERT_CALL,
                [
                    (cursor.lastrowid, *call[:at], self._tools_number(database, call[at]), *call[at + 1 :])
                    for call in rows.calls
                ],
            )
            database.executemany("INSERT OR IGNORE INTO pieces VALUES (?, ?)", pieces)
            self._known |= new

        return write

    def _tools_number(self, database: sqlite3.Connection, tools: str | None) -> int | None:
        if tools is None:
            return None
        if tools not in self._tools:
            database.execute("INSERT OR IGNORE INTO tools (json) VALUES (?)", (tools,))
            (self._tools[tools],) = database.execute("SELECT number FROM tools WHERE json = ?", (tools,)).fetchone()
        return self._tools[tools]

    def _update(self, rollout_id: str, advantages: dict[str, NDArray[Any]], excluded: dict[str, str | None]) -> Write:
        trained = [values for values in advantages.values() if len(values)]
        mean = finite(np.concatenate(trained).mean()) if trained else None
        packed = {call: packed_advantages(values) for call, values in advantages.items()}

        def write(database: sqlite3.Connection) -> None:
            found = database.execute(
                "SELECT max(number) FROM rollouts WHERE id = ? AND session = ?", (rollout_id, self.session)
            ).fetchone()[0]
            if found is None:
                raise LongreinError(f"rollout {rollout_id} was credited before it was written")
            database.execute("UPDATE rollouts SET advantage = ? WHERE number = ?", (mean, found))
            at = "WHERE rollout = ? AND id = ?"
            database.executemany(
                f"UPDATE calls SET advantages = ? {at}", [(blob, found, call) for call, blob in packed.items()]
            )
            database.executemany(
                f"UPDATE calls SET excluded = ? {at}", [(reason, found, call) for call, reason in excluded.items()]
            )

        return write


def _columns(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


INSERT_ROLLOUT = f"INSERT INTO rollouts (session, {_columns(ROLLOUT_COLUMNS)}) VALUES (?{', ?' * len(ROLLOUT_COLUMNS)})"
INSERT_CALL = f"INSERT INTO calls (rollout, {_columns(CALL_COLUMNS)}) VALUES (?{', ?' * len(CALL_COLUMNS)})"


def _snapshot(rollout: Rollout) -> Rollout:
    """The rollout as it is now: calls are immutable, what is around them is not."""
    copied = Rollout(
        id=rollout.id,
        task=rollout.task,
        seed=rollout.seed,
        env=rollout.env,
        reward=rollout.reward,
        success=rollout.success,
        failed=rollout.failed,
        limit=rollout.limit,
        info=dict(rollout.info),
        group=rollout.group,
    )
    copied.calls = dict(rollout.calls)
    return copied


def _database(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None, timeout=60)
    database.execute("PRAGMA journal_mode = WAL")  # readers never wait for the writer, nor it for them
    database.execute("PRAGMA synchronous = FULL")  # a commit is on disk when it returns; it is the thread that waits for it
    database.execute("BEGIN IMMEDIATE")
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version not in (0, FORMAT):
        raise sqlite3.DatabaseError(f"it has format {version} and this longrein writes {FORMAT}")
    for statement in TABLES.split(";\n"):
        database.execute(statement)
    database.execute(f"PRAGMA user_version = {FORMAT}")
    database.execute("COMMIT")
    return database


def _new_session(database: sqlite3.Connection) -> int:
    cursor = database.execute("INSERT INTO sessions (started) VALUES (?)", (time.time(),))
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def _only_writer(folder: Path) -> IO[str] | None:
    """Hold the folder; the operating system lets go of it when this process ends, however it ends."""
    if fcntl is None:
        return None
    file = (folder / "writer.lock").open("w")
    for _ in range(10):  # a page that looks whether a run is live holds it for an instant
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError:
            time.sleep(0.02)
    file.close()
    raise LongreinError(f"{folder} is being written by another process; give this run a folder of its own")


def _note_session(folder: Path, session: dict[str, Any]) -> None:
    """Add to `run.json` where this session's rollouts come from."""
    path = folder / "run.json"
    sessions = json.loads(path.read_text())["sessions"] if path.exists() else []
    fresh = path.with_suffix(".json.new")
    fresh.write_text(json.dumps({"format": FORMAT, "sessions": [*sessions, session]}, indent=2))
    os.replace(fresh, path)
