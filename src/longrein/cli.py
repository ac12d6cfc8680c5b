"""The command line: `longrein train`, `eval`, `check`, `view`, `export`, `harness`, `serve`, `serve-vllm` and `init`.

Always true: a mistake is told in one sentence, with `--debug` for the traceback. Exit codes: 0 done, 1 something broke (or `check`
found a call that is not token-exact), 2 what was asked for cannot be, 3 `eval` ended and some rollouts failed on our side, 130 Ctrl-C.
Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated, NoReturn

import typer

from longrein.commands import evaluate, train
from longrein.commands.check import check
from longrein.commands.export import export
from longrein.commands.init import init
from longrein.commands.serve import serve
from longrein.commands.serve_vllm import serve_vllm
from longrein.commands.view import view
from longrein.contract import LongreinError
from longrein.harnesses import commands as harness_commands

app = typer.Typer(
    help="Train language-model agents by reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
train.register(app)
evaluate.register(app)
for command in (check, view, export, serve, serve_vllm, init):
    app.command()(command)
app.add_typer(harness_commands.app, name="harness")

TRAINING = ("torch", "transformers", "trl", "datasets", "accelerate", "peft")


@app.callback(
    epilog="Exit codes: 0 done · 1 something broke · 2 what was asked for cannot be · 3 some rollouts of `eval` failed · 130 Ctrl-C"
)
def common(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and everything that is logged.")] = False,
) -> None:
    """Train language-model agents by reinforcement learning, in environments and in agent programs."""
    sys.path.insert(0, os.getcwd())  # environments and verifiers of the user's own folder are named by dotted path
    # Threads that wait for work sleep rather than spin: harness programs need the cores too. Set before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.basicConfig(level=logging.INFO if debug else logging.ERROR, format="%(name)s: %(message)s")
    if not debug:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def main() -> None:
    """The `longrein` command: errors in one sentence, `--debug` for the traceback."""
    words = sys.argv[1:]
    ours = words[: words.index("--")] if "--" in words else words  # after it come another program's
    debug = "--debug" in ours
    rest = [word for word in ours if word != "--debug"]
    try:
        app([*(["--debug"] if debug else []), *rest, *words[len(ours) :]])
    except KeyboardInterrupt:
        _end(130, "stopped")
    except Exception as error:
        if debug:
            raise
        if isinstance(error, LongreinError):
            _end(2, str(error))
        if isinstance(error, ModuleNotFoundError) and error.name in TRAINING:
            _end(2, f"{error.name} is not installed; this needs `pip install 'longrein[train]'`")
        _end(1, f"{type(error).__name__}: {error} (run with --debug for the traceback)")


def _end(code: int, why: str) -> NoReturn:
    print(f"longrein: {why}", file=sys.stderr)
    sys.exit(code)
