"""`longrein view`: the page over a run."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from longrein.commands.common import newest_run


def view(
    run: Annotated[Path | None, typer.Argument(help="The run folder. Unsaid: the newest under runs/.")] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write one self-contained HTML file instead, to send to somebody.")
    ] = None,
    rollouts: Annotated[
        int, typer.Option(min=1, help="Rollouts such a file holds: the failed ones, then the last ones.")
    ] = 200,
    host: Annotated[str, typer.Option(help="Where the page listens. Anyone who reaches it can read the run.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    browse: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object, with the url once it is served or the file that was written."),
    ] = False,
) -> None:
    """Look at a run, also while it trains.

    Examples: `longrein view` · `longrein view runs/latest --port 8000 --no-browse` · `longrein view runs/latest --export run.html`
    """
    from longrein.runs import Run

    source = Run(run or newest_run())
    if export is not None:
        from longrein.viewer.page import write_page

        count = write_page(source, export, rollouts=rollouts)
        size = export.stat().st_size
        told = {"path": str(export), "rollouts": count, "bytes": size}
        print(json.dumps(told) if as_json else f"{export}: {count} rollouts, {size / 1e6:.1f} MB")
        return
    from longrein.viewer.server import serve

    def ready(url: str) -> None:
        told = {"url": url, "run": str(source.folder)}
        print(json.dumps(told) if as_json else f"{source.folder} at {url} (Ctrl-C ends it)", flush=True)
        if browse:
            webbrowser.open(url)

    try:
        serve(source, host=host, port=port, ready=ready)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
