"""`longrein harness ...`: the agent programs that longrein knows, and putting them onto this machine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from longrein.harnesses.catalog import FILES, harness, harnesses
from longrein.harnesses.package import cache

app = typer.Typer(help="Agent programs that longrein knows by name.", no_args_is_help=True)


@app.command("list")
def list_() -> None:
    """The programs, the dialect each speaks, and which version is installed."""
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
