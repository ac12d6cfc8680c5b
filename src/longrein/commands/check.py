"""`longrein check`: what training with an agent program would be like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from longrein.commands.common import checked_sandbox
from longrein.contract import LongreinError


def check(
    command: Annotated[
        list[str],
        typer.Argument(
            help="After `--`: the program and its arguments; or a name that `longrein harness list` shows, react or shell."
        ),
    ],
    model: Annotated[str | None, typer.Option(help="Folder or hub name of a model. Unsaid: a scripted one.")] = None,
    script: Annotated[
        Path | None, typer.Option(help="What the scripted model says: a JSON list of texts or messages.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="A folder to copy into the program's working folder.")] = None,
    readable: Annotated[list[Path] | None, typer.Option(help="More that the program may read, in its sandbox.")] = None,
    env: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE; {url}, {base_url}, {key} and {model} are filled.")
    ] = None,
    sandbox: Annotated[str, typer.Option(help="auto (bubblewrap where it works), bubblewrap, or none.")] = "auto",
    seconds: Annotated[float, typer.Option(min=1, help="How long it may take.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Run an agent program once and tell what training with it would be like. Exit code 0 when every call was token-exact.

    Examples: `longrein check react` · `longrein check -- my-agent --task "Fix the bug"` ·
    `longrein check --folder repo/ --env MY_URL={base_url} -- my-agent`
    """
    from longrein.check import check as run
    from longrein.check import show

    report = run(
        command,
        model=model,
        script=None if script is None else _json_list(script),
        sandbox=checked_sandbox(sandbox),
        readable=[str(path.resolve()) for path in readable or ()],
        folder=folder,
        env=dict(_pair(text) for text in env or ()),
        timeout=seconds,
    )
    if as_json:
        print(report.as_json())
    else:
        show(report)
    raise typer.Exit(0 if report.exact else 1)


def _json_list(path: Path) -> list[Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LongreinError(f"--script {path} cannot be read: {error}") from None
    if not isinstance(value, list):
        raise LongreinError(f"--script {path} must hold a JSON list of texts or messages")
    return value


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise LongreinError(f"--env is {text!r}; it must be NAME=VALUE")
    return name, value
