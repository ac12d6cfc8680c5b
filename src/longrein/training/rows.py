"""The rows of a run, from its settings: those to train on and, apart from them, those held out.

Always true: no task is in both; every row has passed its environment's checks. Neither torch nor transformers is imported, so that a
mistake in what is to be played is told at once.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from longrein.contract import LongreinError
from longrein.envs.datasets import read_tasks
from longrein.envs.environment import Environment
from longrein.envs.harness import HarnessEnv
from longrein.envs.hunt import TreasureHunt
from longrein.noise import derive
from longrein.training.settings import HUNTS, Settings
from longrein.training.trials import check_rows, environment_class

Rows = list[dict[str, Any]]


def rows_of(settings: Settings) -> tuple[Rows, Rows]:
    """The rows to train on and, apart from them, the rows held out."""
    needed = settings.tasks_per_step * settings.steps
    if settings.tasks is None:
        cls = environment_class(settings.env)
        if not issubclass(cls, Environment):
            raise LongreinError(f"{settings.env} makes no tasks of its own; name a dataset (`--tasks`)")
        config = settings.env_config
        cls.check_config(config)
        made = [
            {"env_class_path": settings.env, "env_config": config, "task_data": task}
            for task in cls.tasks(settings.heldout + needed, seed=derive(settings.seed, "tasks"), env_config=config)
        ]
        rest, kept = _apart(made, settings.heldout)
        rest, kept = (in_sandbox(_some_by_program(rows, settings), settings) for rows in (rest, kept))
        check_rows([*kept, *rest])
        return rest, kept
    rows = read_tasks(settings.tasks, env_class_path=settings.env, env_config=settings.env_config)
    check_rows(rows)
    order = np.random.default_rng(settings.seed).permutation(len(rows))
    rest, kept = _apart([rows[index] for index in order], min(settings.heldout, len(rows) // 5))
    return in_sandbox(rest, settings), in_sandbox(kept, settings)


def _apart(rows: Rows, heldout: int) -> tuple[Rows, Rows]:
    """Rows to train on, and the first rows held out; no task is in both. Where there are few different tasks, a third of
    them is held out."""
    key = [json.dumps(row, sort_keys=True) for row in rows]
    different = list(dict.fromkeys(key))
    known = set(key[:heldout])
    kept = rows[:heldout]
    if len(different) - len(known) < len(different) / 3:
        known = set(different[: max(1, len(different) // 3)] if heldout else [])
        kept = [json.loads(text) for text in different if text in known]
    rest = [row for row, text in zip(rows, key, strict=True) if text not in known]
    if not rest:
        raise LongreinError(f"there is {len(different)} task, and none is left to train on once it is held out; add tasks")
    return rest, kept


def _some_by_program(rows: Rows, settings: Settings) -> Rows:
    """Every so many rows played by the ReAct program: the same task, through a process and the proxy."""
    if not settings.program_share:
        return rows
    if settings.env not in HUNTS or settings.env_config.get("actions", "tools") != "tools":
        raise LongreinError(f"program_share is for hunts by tool calls; the environment is {settings.env}")
    every = round(1 / settings.program_share)
    config = react_config(settings.env_config)
    by_program = {"env_class_path": "longrein.envs.HarnessEnv", "env_config": config}
    return [{**row, **by_program} if index % every == 0 else row for index, row in enumerate(rows)]


def in_sandbox(rows: Rows, settings: Settings) -> Rows:
    """The rows, those of agent programs with the sandbox that was asked for where they name none of their own."""
    if settings.sandbox == "auto":
        return rows
    programs = {path for path in {row["env_class_path"] for row in rows} if issubclass(environment_class(path), HarnessEnv)}
    config = {"sandbox": settings.sandbox}
    return [{**row, "env_config": config | row["env_config"]} if row["env_class_path"] in programs else row for row in rows]


def react_config(hunt: dict[str, Any]) -> dict[str, Any]:
    """The ReAct program on hunts, with the limits of the environment it stands beside."""
    limits = TreasureHunt.check_config(hunt)
    return {
        "command": [
            "{python}",
            "-m",
            "longrein.harnesses.react",
            "--rooms",
            "{rooms}",
            "--max-turns",
            str(limits.max_turns),
        ],
        "verify": "longrein.harnesses.react.verify_hunt",
        "max_turns": limits.max_turns,
        "max_tokens": limits.max_tokens,
        "max_reply_tokens": limits.max_reply_tokens,
        "max_seconds": 120,
    }
