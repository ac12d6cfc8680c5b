"""`longrein view`: the page over a run."""

from __future__ import annotations

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
) -> None:
    """Look at a run, also while it trains.

    Examples: `longrein view` · `longrein view runs/latest --port 8000 --no-browse` · `longrein view runs/latest --export run.html`
    """
    from longrein.runs import Run

    source = Run(run or newest_run())
    if export is not None:
        from longrein.viewer.page import write_page

        count = write_page(source, export, rollouts=rollouts)
        print(f"{export}: {count} rollouts, {export.stat().st_size / 1e6:.1f} MB")
        return
    from longrein.viewer.server import serve

    try:
        serve(source, host=host, port=port, browse=browse)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
