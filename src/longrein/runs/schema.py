"""The tables of a run, and a rollout as their rows and back.

Always true: a call stores what it adds to its parent, so no token is in the file twice; token ids are little-endian int32,
log-probabilities and advantages little-endian float32, to the bit; everything made of messages is JSON text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longrein.contract import Tool
from longrein.rollout import Call, Rollout

FORMAT = 1
FILE = "run.sqlite"

TABLES = """
CREATE TABLE IF NOT EXISTS sessions (  -- each time the run was started or gone on with
    number INTEGER PRIMARY KEY,
    started REAL NOT NULL              -- seconds since 1970, as every time here
);
CREATE TABLE IF NOT EXISTS rollouts (
    number INTEGER PRIMARY KEY,        -- in the order they were written
    session INTEGER NOT NULL,
    id TEXT NOT NULL,
    "group" TEXT NOT NULL,             -- the rollouts of one task share it
    phase TEXT NOT NULL,               -- before, train, eval, after
    step INTEGER NOT NULL,             -- the optimizer step that trains on it
    finished REAL NOT NULL,
    env TEXT NOT NULL,
    task TEXT NOT NULL,                -- JSON
    seed TEXT NOT NULL,                -- decimal: seeds are unsigned
    reward REAL,
    success INTEGER,
    failed TEXT,                       -- the cause
    "limit" TEXT,                      -- turns, tokens, time
    info TEXT NOT NULL,                -- JSON
    turns INTEGER NOT NULL,
    branches INTEGER NOT NULL,
    tokens INTEGER NOT NULL,           -- of the whole tree, each counted once
    sampled INTEGER NOT NULL,          -- drawn by the policy
    advantage REAL                     -- mean over its trained tokens; NULL while no step has it
);
CREATE INDEX IF NOT EXISTS rollouts_id ON rollouts (id);
CREATE INDEX IF NOT EXISTS rollouts_group ON rollouts ("group");
CREATE INDEX IF NOT EXISTS rollouts_step ON rollouts (phase, step);
CREATE TABLE IF NOT EXISTS calls (
    rollout INTEGER NOT NULL REFERENCES rollouts (number),
    number INTEGER NOT NULL,           -- in the order they were recorded
    id TEXT NOT NULL,
    parent TEXT,                       -- id of the call it extends
    context BLOB NOT NULL,             -- int32: what its prompt adds to its parent's tokens
    completion BLOB NOT NULL,          -- int32: what was sampled
    logprobs BLOB NOT NULL,            -- float32, one a sampled token
    sampler_logprobs BLOB,             -- float32, under the truncated distribution
    advantages BLOB,                   -- float32, one a sampled token, or one for all of them; NULL while no step has it
    finish_reason TEXT NOT NULL,
    policy_version INTEGER NOT NULL,
    versions BLOB,                     -- int32, one a sampled token, where the policy changed in the middle of the reply
    messages TEXT NOT NULL,            -- JSON: what it adds to its parent's conversation
    tools INTEGER REFERENCES tools (number),
    reply TEXT NOT NULL,               -- JSON
    delivered INTEGER NOT NULL,
    reward REAL,
    excluded TEXT                      -- why its sampled tokens are not trained
);
CREATE UNIQUE INDEX IF NOT EXISTS calls_rollout ON calls (rollout, number);
CREATE TABLE IF NOT EXISTS tools (     -- each list of tools once
    number INTEGER PRIMARY KEY,
    json TEXT NOT NULL UNIQUE
);
CREATE TABLE IF NOT EXISTS pieces (    -- the bytes each token id stands for, of the ids in this run
    token INTEGER PRIMARY KEY,
    bytes BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS metrics (
    session INTEGER NOT NULL,
    step INTEGER NOT NULL,
    name TEXT NOT NULL,
    value REAL,                        -- NULL for what is not a number
    time REAL NOT NULL,
    PRIMARY KEY (session, step, name)
) WITHOUT ROWID;
"""

ROLLOUT_COLUMNS = (
    "id", "group", "phase", "step", "finished", "env", "task", "seed", "reward", "success", "failed", "limit", "info",
    "turns", "branches", "tokens", "sampled",
)  # fmt: skip
CALL_COLUMNS = (
    "number", "id", "parent", "context", "completion", "logprobs", "sampler_logprobs", "finish_reason", "policy_version",
    "versions", "messages", "tools", "reply", "delivered", "reward", "excluded",
)  # fmt: skip


class Encoded(NamedTuple):
    """A rollout as values for `ROLLOUT_COLUMNS` and `CALL_COLUMNS`, its tools still as JSON."""

    rollout: tuple[Any, ...]
    calls: list[tuple[Any, ...]]
    tokens: list[NDArray[np.int32]]
    """Every array of ids in it."""


def encoded(rollout: Rollout, phase: str, step: int, finished: float) -> Encoded:
    calls = list(rollout.calls.values())
    context, sampled = sum(len(call.context_ids) for call in calls), sum(len(call.completion_ids) for call in calls)
    row = (
        _text(rollout.id),
        _text(rollout.group),
        phase,
        step,
        finished,
        _text(rollout.env),
        to_json(rollout.task),
        str(rollout.seed),
        finite(rollout.reward),
        None if rollout.success is None else bool(rollout.success),
        _text(rollout.failed),
        rollout.limit,
        to_json(rollout.info),
        len(calls),
        len(calls) - len({call.parent for call in calls if call.parent is not None}),
        context + sampled,
        sampled,
    )
    known: dict[tuple[int, ...], str] = {}  # most calls of a rollout are given the very same tools
    rows = [_call_row(number, call, known) for number, call in enumerate(calls)]
    return Encoded(row, rows, [ids for call in calls for ids in (call.context_ids, call.completion_ids)])


def _call_row(number: int, call: Call, known: dict[tuple[int, ...], str]) -> tuple[Any, ...]:
    tools = tuple(id(tool) for tool in call.tools)
    if tools and tools not in known:
        known[tools] = to_json(call.tools)
    return (
        number,
        call.id,
        call.parent,
        int32(call.context_ids),
        int32(call.completion_ids),
        float32(call.logprobs),
        None if call.sampler_logprobs is None else float32(call.sampler_logprobs),
        call.finish_reason,
        call.policy_version,
        None if call.versions is None else int32(call.versions),
        to_json(call.messages),
        known.get(tools),
        to_json(call.reply),
        call.delivered,
        finite(call.reward),
        call.excluded,
    )


def decoded(row: Mapping[str, Any], calls: Iterable[Mapping[str, Any]], tools: Mapping[int, Sequence[Tool]]) -> Rollout:
    """The rollout that these rows hold."""
    rollout = Rollout(
        id=row["id"],
        task=json.loads(row["task"]),
        seed=int(row["seed"]),
        env=row["env"],
        reward=row["reward"],
        success=None if row["success"] is None else bool(row["success"]),
        failed=row["failed"],
        limit=row["limit"],
        info=json.loads(row["info"]),
        group=row["group"],
    )
    for call in calls:
        drawn, versions = call["sampler_logprobs"], call["versions"]
        rollout.add(
            Call(
                id=call["id"],
                parent=call["parent"],
                context_ids=np.frombuffer(call["context"], "<i4").astype(np.int32),
                completion_ids=np.frombuffer(call["completion"], "<i4").astype(np.int32),
                logprobs=np.frombuffer(call["logprobs"], "<f4").astype(np.float32),
                sampler_logprobs=None if drawn is None else np.frombuffer(drawn, "<f4").astype(np.float32),
                finish_reason=call["finish_reason"],
                policy_version=call["policy_version"],
                versions=None if versions is None else np.frombuffer(versions, "<i4").astype(np.int32),
                messages=tuple(json.loads(call["messages"])),
                tools=() if call["tools"] is None else tuple(tools[call["tools"]]),
                reply=json.loads(call["reply"]),
                delivered=bool(call["delivered"]),
                reward=call["reward"],
                excluded=call["excluded"],
            )
        )
    return rollout


def int32(ids: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(ids, "<i4").tobytes()


def float32(values: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(values, "<f4").tobytes()


def packed_advantages(values: NDArray[Any]) -> bytes:
    """One number where all tokens of a call have the same."""
    return float32(values[:1] if len(values) and (values == values[0]).all() else values)


def unpacked_advantages(blob: bytes, length: int) -> NDArray[np.float32]:
    values = np.frombuffer(blob, "<f4").astype(np.float32)
    return np.repeat(values, length) if len(values) == 1 else values


def to_json(value: Any) -> str:
    """JSON as people would search it; what JSON has no word for is written as text."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=_plain)
        text.encode()
        return text
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can hold
        return json.dumps(value, default=_plain)
    except (TypeError, ValueError, RecursionError):  # a key that is no text, or something that holds itself
        return json.dumps(_spelled(value))


def finite(value: Any) -> float | None:
    """A number SQLite can hold: it takes NaN for NULL."""
    return float(value) if isinstance(value, int | float | np.number) and math.isfinite(value) else None


def _text(value: str | None) -> str | None:
    """Text SQLite can hold: half a surrogate pair is spelled out."""
    return value if value is None else value.encode("utf-8", "backslashreplace").decode()


def _spelled(value: Any) -> Any:
    """A dict with its keys as text, whatever cannot be written in it as text too; anything else as text."""
    if not isinstance(value, Mapping):
        return str(value)
    spelled = {}
    for key, inner in value.items():
        try:
            spelled[str(key)] = json.loads(json.dumps(inner, default=_plain))
        except (TypeError, ValueError, RecursionError):
            spelled[str(key)] = str(inner)
    return spelled


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)
