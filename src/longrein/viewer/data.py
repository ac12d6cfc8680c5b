"""What the page shows, as plain values made from a run.

Always true: everything here is a pure reading of the run; texts of models and programs go out as JSON strings and nothing else; the
answer for a page of rollouts does not grow with the run.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import IO, Any

import orjson

from longrein.contract import LongreinError
from longrein.rollout import Call, Rollout
from longrein.runs import Run
from longrein.runs.reader import Filter

try:
    import fcntl
except ImportError:  # Windows: a run that is being written looks like any other there
    fcntl = None

PAGE = 50
SORTS = ("number", "step", "reward", "turns", "branches", "tokens", "advantage", "env")
LISTED = (
    'number, id, "group", phase, step, finished, env, substr(task, 1, 400) AS task, reward, success, substr(failed, 1, 400) AS '
    'failed, "limit", turns, branches, tokens, sampled, advantage'
)


def state(run: Run) -> str:
    """Changes when the run does."""
    ((rollouts, credited),) = run.rows("SELECT max(number), count(advantage) FROM rollouts", raw=True)
    ((written,),) = run.rows("SELECT max(time) FROM metrics", raw=True)
    return f"{rollouts}-{credited}-{written}-{is_live(run)}"


def overview(run: Run) -> dict[str, Any]:
    """The first screen."""
    rows = run.rows(
        "SELECT phase, step, session, env, count(*) AS n, avg(reward) AS reward, avg(success) AS success, "
        'sum(failed IS NOT NULL) AS failed, sum("limit" IS NOT NULL) AS limited, sum(tokens) AS tokens, sum(sampled) AS sampled, '
        "sum(turns) AS turns, sum(branches > 1) AS forked FROM rollouts GROUP BY phase, step, session, env ORDER BY step"
    )
    last: dict[tuple[str, int], int] = {}  # a step that was done again after a restart counts as it was done last
    for row in (row for row in rows if row["phase"] != "eval"):  # an evaluation that goes on adds to what it has
        key = (row["phase"], row["step"])
        last[key] = max(last.get(key, 0), row["session"])
    return {
        "state": state(run),
        "name": run.folder.resolve().name,
        "live": is_live(run),
        "about": run.about(),
        "series": [row for row in rows if row["session"] == last.get((row["phase"], row["step"]), row["session"])],
        "evaluated": _figures(run),
        "hardest": run.rows(
            'SELECT "group", substr(min(task), 1, 400) AS task, count(*) AS n, sum(success) AS solved, avg(reward) AS reward '
            "FROM rollouts WHERE phase = 'eval' AND failed IS NULL GROUP BY \"group\" HAVING avg(success) < 1 "
            "ORDER BY avg(success), avg(reward), min(number) LIMIT 10"
        ),
        "metrics": run.metrics(),
        "failures": run.rows(
            "SELECT substr(failed, 1, 300) AS cause, count(*) AS n, max(number) AS last FROM rollouts "
            "WHERE failed IS NOT NULL GROUP BY cause ORDER BY n DESC LIMIT 20"
        ),
        "limits": run.rows(
            'SELECT "limit", count(*) AS n FROM rollouts WHERE "limit" IS NOT NULL GROUP BY "limit" ORDER BY n DESC'
        ),
    }


def _figures(run: Run) -> dict[str, Any] | None:
    """What `longrein eval` made of the run, with its intervals, once it has."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        results = json.loads((run.folder / "eval.json").read_text())
        return {name: results[name] for name in ("complete", "overall", "by_env")}
    return None


def listed(run: Run, of: Filter, *, page: int = 0, sort: str = "number", down: bool = True) -> dict[str, Any]:
    """One page of the table of rollouts."""
    if sort not in SORTS:
        raise LongreinError(f"sort is {sort!r}; it must be one of {', '.join(SORTS)}")
    condition, values = of.sql()
    ((total,),) = run.rows(f"SELECT count(*) FROM rollouts WHERE {condition}", values, raw=True)
    order = f"{sort} {'DESC' if down else 'ASC'} NULLS LAST, number DESC"
    rows = run.rows(
        f"SELECT {LISTED} FROM rollouts WHERE {condition} ORDER BY {order} LIMIT {PAGE} OFFSET ?", (*values, page * PAGE)
    )
    return {"total": total, "page": page, "pages": max(1, math.ceil(total / PAGE)), "rows": rows}


def one(run: Run, number: int) -> dict[str, Any]:
    """A rollout as people read it: its calls with their messages, and the other rollouts of its group."""
    rollout = run.rollout(number)
    (row,) = run.rows("SELECT * FROM rollouts WHERE number = ?", (number,))
    order = {call_id: index for index, call_id in enumerate(rollout.calls)}
    tools: list[Any] = []
    calls = []
    for call in rollout.calls.values():
        if call.tools and list(call.tools) not in tools:
            tools.append(list(call.tools))
        calls.append(
            {
                "id": call.id,
                "parent": None if call.parent is None else order[call.parent],
                "messages": call.messages,
                "reply": call.reply,
                "tools": tools.index(list(call.tools)) if call.tools else None,
                "read": len(call.context_ids),
                "sampled": len(call.completion_ids),
                "finish_reason": call.finish_reason,
                "policy_version": call.policy_version,
                "reward": call.reward,
                "reason": rollout.reason(call),
            }
        )
    ((previous, following),) = run.rows(
        "SELECT (SELECT max(number) FROM rollouts WHERE number < ?), (SELECT min(number) FROM rollouts WHERE number > ?)",
        (number, number),
        raw=True,
    )
    return {
        **{name: row[name] for name in row if name not in ("task", "info")},
        "task": rollout.task,
        "info": rollout.info,
        "calls": calls,
        "tools": tools,
        "previous": previous,
        "next": following,
        "siblings": run.rows(
            'SELECT number, reward, success, failed IS NOT NULL AS failed, turns, tokens FROM rollouts WHERE "group" = ? '
            "AND (session = ? OR phase = 'eval') AND \"group\" != '' ORDER BY number",
            (row["group"], row["session"]),
        ),
    }


def tokens(run: Run, number: int, call: int | None = None) -> dict[str, Any]:
    """What the model read and wrote from the root to a call (unsaid: the last), token by token."""
    rollout = run.rollout(number)
    calls = list(rollout.calls)
    if call is not None and not 0 <= call < len(calls):
        raise LongreinError(f"rollout {number} has no call {call}; it has {len(calls)}")
    if not calls:
        return {"segments": [], "pieces": {}}
    credit = run.advantages(number)
    path = rollout.path(calls[-1 if call is None else call])
    segments = [segment for call in path for segment in _segments(rollout, call, calls.index(call.id), credit)]
    return {"segments": segments, "pieces": pieces(run, {token for segment in segments for token in segment["ids"]})}


def segments_by_call(run: Run, number: int) -> list[list[dict[str, Any]]]:
    """What each call of a rollout read and wrote beyond its parent."""
    rollout, credit = run.rollout(number), run.advantages(number)
    return [_segments(rollout, call, index, credit) for index, call in enumerate(rollout.calls.values())]


def _segments(rollout: Rollout, call: Call, index: int, advantages: Mapping[str, Any]) -> list[dict[str, Any]]:
    segments: list[dict[str, Any]] = []
    if len(call.context_ids):
        segments.append({"call": index, "sampled": False, "ids": call.context_ids.tolist()})
    if len(call.completion_ids):
        credit = advantages.get(call.id)
        segments.append(
            {
                "call": index,
                "sampled": True,
                "ids": call.completion_ids.tolist(),
                "logprobs": [round(float(value), 5) for value in call.logprobs],
                "advantages": None if credit is None else [round(float(value), 5) for value in credit],
                "versions": None if call.versions is None else call.versions.tolist(),
                "policy_version": call.policy_version,
                "reason": rollout.reason(call),
            }
        )
    return segments


def pieces(run: Run, tokens: Iterable[int]) -> dict[int, str]:
    """The text of token ids. Bytes that are no whole character are spelled, as in `\\xe6\\x97`."""
    wanted = sorted(tokens)
    found: dict[int, str] = {}
    for start in range(0, len(wanted), 500):
        some = wanted[start : start + 500]
        marks = ", ".join("?" * len(some))
        for row in run.rows(f"SELECT token, bytes FROM pieces WHERE token IN ({marks})", some):
            found[row["token"]] = row["bytes"].decode("utf-8", "backslashreplace")
    return found


def is_live(run: Run) -> bool:
    """Whether a process is writing the run now."""
    if fcntl is None:
        return False
    with contextlib.suppress(FileNotFoundError), (run.folder / "writer.lock").open() as file:
        return not _lockable(file)
    return False


def _lockable(file: IO[str]) -> bool:
    assert fcntl is not None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True


def wire(value: Any) -> bytes:
    """JSON a browser takes: no NaN, no half characters, no integer beyond 64 bits."""
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        return orjson.dumps(_clean(value), option=orjson.OPT_NON_STR_KEYS)


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {_clean(key): _clean(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(inner) for inner in value]
    if isinstance(value, int) and abs(value) >= 2**63:
        return str(value)
    return value if value is None or isinstance(value, int | float) else json.dumps(value, default=str)
