"""`longrein export`: a run's rollouts as training data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longrein.commands.common import newest_run
from longrein.contract import LongreinError

if TYPE_CHECKING:
    from longrein.runs import Run
    from longrein.runs.reader import Filter


def export(
    run: Annotated[Path | None, typer.Argument(help="The run folder. Unsaid: the newest under runs/.")] = None,
    to: Annotated[
        Path | None,
        typer.Option(help="A .jsonl or .parquet file. Unsaid: a .jsonl file in the run folder, named after the format."),
    ] = None,
    format: Annotated[str, typer.Option(help="messages, prompt-completion, preference or tokens.")] = "messages",
    min_reward: Annotated[float | None, typer.Option(help="Only rollouts with this reward or more.")] = None,
    solved: Annotated[bool, typer.Option("--solved", help="Only rollouts that solved their task.")] = False,
    env: Annotated[str | None, typer.Option(help="Only rollouts of this environment, by its class name.")] = None,
    phase: Annotated[
        str, typer.Option(help="train, eval, before, after, or all: held-out tasks are not in train.")
    ] = "train",
    min_step: Annotated[int | None, typer.Option(help="Only rollouts of this step and later.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a sentence.")] = False,
) -> None:
    """Write a run's rollouts as training data for other trainers.

    Examples: `longrein export` · `longrein export runs/latest --solved --to good.parquet` ·
    `longrein export runs/latest --format prompt-completion --min-reward 0.5`
    """
    from longrein.runs import Run
    from longrein.runs.export import export as write
    from longrein.runs.reader import Filter

    source = Run(run or newest_run())
    path = to or source.folder / f"{format}.jsonl"
    chosen = Filter(
        phase=None if phase == "all" else phase,
        env=env,
        min_reward=min_reward,
        solved=solved or None,
        min_step=min_step,
        failed=False,
    )
    count = write(source, path, format=format, of=chosen)
    if not count:
        raise LongreinError(_why_nothing(source, chosen, format))
    if as_json:
        print(json.dumps({"examples": count, "format": format, "path": str(path)}))
    else:
        print(f"{count} examples in {path}")


def _why_nothing(run: Run, chosen: Filter, format: str) -> str:
    """What was looked for, one thing after another, up to the one that left no rollout."""
    from longrein.runs.reader import Filter

    def left(of: Filter) -> int:
        condition, values = of.sql()
        return run.rows(f"SELECT count(*) FROM rollouts WHERE {condition}", values, raw=True)[0][0]

    so_far, told = Filter(), f"nothing was written: {run.folder} has {left(Filter())} rollouts"
    for name in ("phase", "failed", "env", "solved", "min_reward", "min_step"):
        if (value := getattr(chosen, name)) is None:
            continue
        there = run.rows(f"SELECT DISTINCT {name} FROM rollouts ORDER BY 1", raw=True) if name in ("phase", "env") else ()
        so_far = replace(so_far, **{name: value})
        count = left(so_far)
        flag = f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        told += f", {count} of them {'not failed' if name == 'failed' else f'with {flag}'}"
        if not count:
            return told + (f" (there is {', '.join(str(one) for (one,) in there)})" if there else "")
    return f"{told}, and --format {format} makes no example of those"
