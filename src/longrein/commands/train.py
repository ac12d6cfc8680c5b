"""`longrein train`: a run from a file, from flags, or from both."""

from __future__ import annotations

import json
import shlex
import sys
import typing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from longrein.commands.common import Stopped, checked_sandbox, import_from, model_folder, new_run_folder, point_latest
from longrein.commands.flags import said, with_settings
from longrein.contract import LongreinError
from longrein.training.settings import (
    HUNTS,
    Settings,
    read_run_file,
    refuse_taken,
    refuse_unknown,
    saved_settings,
    settings_from,
)

EXAMPLES = """Train a policy and compare it before and after on held-out tasks.

A run is a TOML file, flags, or both: a flag wins over the file. Every flag below is a setting of a run file too, written with _ for -.

Examples: `longrein train` · `longrein train run.toml --seed 1` ·
`longrein train --model Qwen/Qwen3-0.6B --env my_envs.Shop --steps 100` ·
`longrein train --harness codex --env longrein.envs.RepoEnv --model ./my-model` · `longrein train --resume runs/latest`
"""


def command(
    context: typer.Context,
    run_file: Annotated[Path | None, typer.Argument(help="A TOML file of the settings below.", show_default=False)] = None,
    config: Annotated[Path | None, typer.Option(help="The same, as an option.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with a run that was stopped, with the settings it had; flags still win.")
    ] = None,
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke",
            help="A run of a minute, to see that a model loads, plays and trains; exit code 1 if a rollout failed.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON object; what happens meanwhile goes to stderr.")
    ] = False,
    **flags: Any,
) -> None:
    if run_file is not None and config is not None and run_file != config:
        raise LongreinError(f"two run files are named, {run_file} and {config}; a run has one")
    run_file = run_file or config
    chosen = said(context, flags)
    if run_file is not None:
        import_from(run_file.parent)
    if resume is not None:
        settings = replace(settings_from(saved_settings(resume), chosen), resume=True, out=str(resume))
    else:
        settings = settings_from({} if run_file is None else read_run_file(run_file), chosen)
    checked_sandbox(settings.sandbox)
    folder = _run(_smoke(settings) if smoke else settings, run_file, as_json=as_json)
    if smoke and (why := _some_failed(folder)):
        print(f"longrein: {why}", file=sys.stderr)
        raise typer.Exit(1)


def _run(settings: Settings, run_file: Path | None, *, as_json: bool) -> Path:
    """Train, show how it went, and give the run folder."""
    from rich.console import Console

    from longrein.display import TrainDisplay

    with TrainDisplay(Console(stderr=as_json)) as display:
        display.note("loading")
        folder = Path(settings.out) if settings.out else new_run_folder(f"seed{settings.seed}")
        rows = _checked(settings, folder)
        settings = replace(settings, model=model_folder(settings.model, display.note))
        if settings.vllm_folder is not None:  # servers have working folders of their own
            settings = replace(settings, vllm_folder=str(Path(settings.vllm_folder).absolute()))
        from longrein.training.job import train

        try:
            summary = train(settings, folder, rows=rows, progress=display.event)
        except KeyboardInterrupt:
            raise Stopped(f"stopped; {_how_to_go_on(folder, run_file) or 'nothing was trained yet'}") from None
        except Exception:
            if how := _how_to_go_on(folder, run_file):
                display.note(how)
            raise
        point_latest(folder)
        if as_json:
            print(json.dumps({**summary, "folder": str(folder)}))
        else:
            display.summary(summary, folder)
    return folder


def _some_failed(folder: Path) -> str | None:
    """How many rollouts of the run failed and why the first did; None where none has."""
    from longrein.runs import Run

    causes = [row["failed"] for row in Run(folder).rows("SELECT failed FROM rollouts ORDER BY number")]
    failed = [cause for cause in causes if cause is not None]
    return f"{len(failed)} of {len(causes)} rollouts failed; the first cause: {failed[0]}" if failed else None


def _checked(settings: Settings, folder: Path) -> Any:
    """The rows of the run. What can be refused without the libraries that train, which take seconds to load, is refused here."""
    from longrein.agents import refuse_no_model
    from longrein.training.advantages import AdvantageName
    from longrein.training.rows import rows_of

    refuse_taken(folder, resume=settings.resume)
    if settings.advantages not in (known := typing.get_args(AdvantageName)):
        raise LongreinError(f"advantages is {settings.advantages!r}; it must be one of {', '.join(known)}")
    refuse_no_model(settings.model)
    rows = rows_of(settings)
    if settings.report_to:
        from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

        refuse_unknown(settings.report_to, [*INTEGRATION_TO_CALLBACK, "all", "none"], "report_to, TRL's list of trackers,")
    return rows


def _smoke(settings: Settings) -> Settings:
    """A few small steps; hunts are made short, with text actions, so that any instruct model may find a coin."""
    short = {"actions": "text", "min_hops": 1, "max_hops": 1, "max_turns": 2, "max_tokens": 192, "max_reply_tokens": 12}
    config = {**(short if settings.env in HUNTS else {}), **settings.env_config}
    return replace(settings, env_config=config, steps=3, tasks_per_step=2, num_generations=4, micro_batch=8, heldout=4)


def _how_to_go_on(folder: Path, run_file: Path | None) -> str | None:
    """The command that does; None where no step was trained."""
    from longrein.training.interrupts import newest_checkpoint

    if newest_checkpoint(folder) is None:
        return None
    point_latest(folder)
    # The run file's folder is where the modules it names are; its settings are in the run already.
    beside = [] if run_file is None or run_file.parent.resolve() == Path.cwd() else [str(run_file)]
    return f"go on with: {shlex.join(['longrein', 'train', *beside, '--resume', str(folder)])}"


def register(app: typer.Typer) -> None:
    app.command("train", help=EXAMPLES)(with_settings(command))
