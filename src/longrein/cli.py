"""The command line: `longrein train`, `eval`, `check`, `view`, `export`, `harness`, `serve`, `serve-vllm` and `init`.

Always true: a mistake is told in one sentence, with `--debug` for the traceback. Exit codes: 0 done, 1 something broke (or `check`
found a call that is not token-exact, or `train --smoke` a rollout that failed), 2 what was asked for cannot be, 3 `eval` ended and
some rollouts failed on our side, 130 Ctrl-C. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import difflib
import logging
import os
import signal
import sys
from typing import Annotated, Any, NoReturn

import typer

from longrein.commands import evaluate, train
from longrein.commands.check import check
from longrein.commands.common import Stopped
from longrein.commands.export import export
from longrein.commands.init import init
from longrein.commands.serve import serve
from longrein.commands.serve_vllm import serve_vllm
from longrein.commands.view import view
from longrein.contract import LongreinError
from longrein.harnesses import commands as harness_commands

app = typer.Typer(
    help="Train language-model agents by reinforcement learning.",
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
    words = sys.argv[1:] or ["--help"]
    ours = words[: words.index("--")] if "--" in words else words  # after it come another program's
    debug = "--debug" in ours
    rest = [word for word in ours if word != "--debug"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what stops a service or a job ends it as Ctrl-C does
    try:
        code = app([*(["--debug"] if debug else []), *rest, *words[len(ours) :]], standalone_mode=False)
    except Stopped as stopped:
        _end(130, str(stopped))
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help is printed
            sys.exit(2)
        if debug:
            raise
        _end(*_told(error))
    if code == 130:  # what typer makes of Ctrl-C
        _end(130, "stopped")
    sys.exit(code or 0)


def _told(error: Exception) -> tuple[int, str]:
    """The exit code of what broke, and the sentence."""
    if isinstance(error, LongreinError):
        return 2, str(error)
    if hasattr(error, "format_message"):
        return 2, _misused(error)
    if isinstance(error, ModuleNotFoundError) and error.name in TRAINING:
        return 2, f"{error.name} is not installed; this needs `pip install 'longrein[train]'`"
    if isinstance(error, OSError) and error.filename is not None:
        return 1, f"{str(error.filename)!r} cannot be used: {error.strerror} (run with --debug for the traceback)"
    return 1, f"{type(error).__name__}: {error} (run with --debug for the traceback)"


def _misused(error: Any) -> str:
    """Words of the command line that make no command."""
    context, option = getattr(error, "ctx", None), getattr(error, "option_name", None)
    if context is None:
        return error.format_message()
    where = f"see `{context.command_path} --help`"
    if option is None or type(error).__name__ != "NoSuchOption":
        return f"{error.format_message().rstrip('.')} ({where})"
    known = [word for one in context.command.params for word in one.opts if word.startswith("--")]
    near = difflib.get_close_matches(option.replace("_", "-"), known, n=1)
    return f"there is no option {option}{f'. Did you mean {near[0]}?' if near else ''} ({where})"


def _end(code: int, why: str) -> NoReturn:
    print(f"longrein: {why}", file=sys.stderr)
    sys.exit(code)
