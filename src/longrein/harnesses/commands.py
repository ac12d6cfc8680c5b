"""`longrein harness ...`: the agent programs that longrein knows, and putting them onto this machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from longrein.contract import LongreinError
from longrein.harnesses.catalog import FILES, harness, harnesses

if TYPE_CHECKING:
    from longrein.rendering import Rendering

app = typer.Typer(help="Agent programs that longrein knows by name.", no_args_is_help=True)


@app.command("list")
def list_(as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False) -> None:
    """The programs, the dialect each speaks, and which version is installed."""
    if as_json:
        for known in harnesses():
            told = {"program": known.name, "dialect": known.dialect, "package": known.package.name}
            told |= {"pinned": known.package.version, "installed": known.installed(), "side_calls": known.side_calls}
            typer.echo(json.dumps(told))
        return
    from rich.console import Console
    from rich.table import Table

    from longrein.harnesses.package import cache

    table = Table(caption=f"installed in {cache()}", caption_justify="left")
    for column in ("program", "dialect", "package", "pinned", "installed", "side calls"):
        table.add_column(column, no_wrap=column in ("program", "dialect"))
    for known in harnesses():
        package = known.package
        table.add_row(known.name, known.dialect, package.name, package.version, known.installed() or "-", known.side_calls)
    Console().print(table)


@app.command()
def install(
    names: Annotated[list[str], typer.Argument(help=f"Programs to install: {', '.join(FILES)}, or all.")],
    force: Annotated[bool, typer.Option("--force", help="Install again what is there already.")] = False,
) -> None:
    """Install programs, in the versions that longrein was tried with, into its cache and nowhere else."""
    for known in harnesses() if names == ["all"] else [harness(name) for name in names]:
        if not force and known.installed() == known.package.version:
            typer.echo(f"{known.name} {known.package.version} is there")
            continue
        typer.echo(f"{known.name} {known.package.version} is being installed into {known.folder}")
        known.install()


@app.command()
def bench(
    names: Annotated[list[str] | None, typer.Argument(help="Programs to run. Unsaid: all that are installed.")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Folder or hub name of a tokenizer with a chat template. Unsaid: one of longrein's own."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Run each program on a small task with a scripted policy: what it calls, what is trained, and how long it takes.

    Those that compact their history or start sub-agents play an episode more for each.
    """
    from longrein.harnesses.demonstration import demonstrate, episodes

    chosen = [harness(name) for name in names] if names else [known for known in harnesses() if known.installed()]
    if not chosen:
        raise LongreinError("no program is installed; `longrein harness install all` does it")
    rendering = _rendering(tokenizer)
    columns = {
        "program": "program",
        "version": "version",
        "dialect": "dialect",
        "episode": "episode",
        "reward": "reward",
        "calls": "calls",
        "side_calls": "side calls",
        "branches": "branches",
        "sampled_tokens": "tokens sampled",
        "trained_tokens": "trained",
        "forwarded_tokens": "forwarded",
        "unique_tokens": "unique",
        "seconds": "seconds",
    }
    if not as_json:
        typer.echo(f"| {' | '.join(columns.values())} |\n|{'---|' * len(columns)}")
    for program, episode in [(known, episode) for known in chosen for episode in episodes(known)]:
        summary = demonstrate(program, rendering, episode=episode).summary()
        line = f"| {' | '.join(str(summary[column]) for column in columns)} |"
        typer.echo(json.dumps(summary) if as_json else line)


def _rendering(tokenizer: str | None) -> Rendering:
    from longrein.rendering import rendering_for
    from longrein.tokenizer import Lexicon

    if tokenizer is None:
        return rendering_for(Lexicon(), "qwen3")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise LongreinError(
            "--tokenizer needs transformers, which is not installed: pip install 'longrein[train]', or leave it unsaid"
        ) from None
    try:
        return rendering_for(AutoTokenizer.from_pretrained(tokenizer))
    except (OSError, ValueError) as error:
        raise LongreinError(f"--tokenizer {tokenizer} cannot be loaded: {error}") from None
