"""What an agent program left, and how it is judged.

Always true: a verdict is made after the program and all it started are gone, from what it left behind; whatever goes wrong in
making one is an error, never a reward of 0.
"""

from __future__ import annotations

import importlib
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from longrein.contract import LongreinError, Message, Verdict
from longrein.harnesses.program import Program, with_paths
from longrein.harnesses.supervisor import STUCK
from longrein.harnesses.templates import fill


class HarnessError(LongreinError):
    """Our side of a session broke, or was set up wrong: there is no reward to speak of."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an agent program left."""

    stdout: str
    stderr: str
    exit_code: int
    """128 + the signal, where one ended it."""
    workdir: Path
    """Its working folder, there until the session is closed."""
    limit: str | None = None
    """`time`, `calls` or `tokens`, when it ran into one."""
    messages: Sequence[Message] = ()
    """The conversation of its last call, with the reply."""

    def last_line(self) -> str:
        """The last line it printed that is not empty."""
        return next((line for line in reversed(self.stdout.splitlines()) if line.strip()), "").strip()


VERIFIER = ("workdir", "outcome", "python")
"""What `{name}` may be in a command that judges, besides the task's fields."""

Verify = Callable[[Any, Outcome], float | Verdict]
"""Of a task and what the program left."""

Judge = Callable[[Any, Outcome, Callable[[Program], None]], Verdict]
"""The same, whatever it was given as. A judge that is a program shows it to the third argument, for others to end."""


def as_judge(verify: Verify | str | Sequence[str], *, env: Mapping[str, str], timeout: float | None) -> Judge:
    """A callable, the dotted path of one, or a command, as one way to get a verdict."""
    if isinstance(verify, str):
        verify = _imported(verify)
    if callable(verify):
        function = verify
        return lambda task, outcome, _: _as_verdict(function(task, outcome))
    command = list(verify)
    if not command or not all(isinstance(part, str) for part in command):
        raise HarnessError(
            f"verify is {verify!r}; it must be a callable, its dotted path, or a command as a list of strings"
        )
    if shutil.which(command[0], path=env.get("PATH")) is None and "{" not in command[0]:
        raise HarnessError(f"verify names the command {command[0]!r}, which is not there")
    command = with_paths(command)
    return lambda task, outcome, started: _verdict_of_command(command, task, outcome, env, timeout, started)


def _verdict_of_command(
    command: Sequence[str],
    task: Any,
    outcome: Outcome,
    env: Mapping[str, str],
    timeout: float | None,
    started: Callable[[Program], None],
) -> Verdict:
    """Exit code 0 is 1.0, or the number on the last line printed; any other exit code is 0.0.

    It runs in a folder of its own, where nothing that the program wrote is found by accident; and as we do, in no sandbox: one
    that runs what the program left does so through `isolated`.
    """
    with tempfile.TemporaryDirectory(prefix="longrein-verify-", ignore_cleanup_errors=True) as folder:
        report = Path(folder, "outcome.json")
        report.write_text(
            json.dumps(
                {
                    "task": task,
                    "stdout": outcome.stdout,
                    "stderr": outcome.stderr,
                    "exit_code": outcome.exit_code,
                    "workdir": str(outcome.workdir),
                    "limit": outcome.limit,
                    "messages": list(outcome.messages),
                },
                default=str,
            )
        )
        values = {"workdir": str(outcome.workdir), "outcome": str(report), "python": sys.executable}
        filled = [fill(part, task, values, f"verify[{index}]") for index, part in enumerate(command)]
        variables = {**env, "HOME": folder, "TMPDIR": folder, "LONGREIN_OUTCOME": str(report)}
        program = Program(filled, env=variables, cwd=folder, timeout=timeout, folder=folder)
        try:
            started(program)
            code = program.ended.result()
        finally:
            program.stop()
    printed = program.stdout.text().strip()
    if program.timed_out:
        raise HarnessError(f"the verifier {command[0]!r} did not end within {timeout} seconds")
    if code >= STUCK:
        raise HarnessError(f"the verifier {command[0]!r} broke with {code}: {program.stderr.text()[-500:].strip()}")
    if code != 0:
        return Verdict(0.0, {"verifier_exit_code": code})
    try:
        reward = float(printed.rsplit("\n", 1)[-1])
    except ValueError:
        reward = 1.0
    return _as_verdict(reward)


def _as_verdict(value: Any) -> Verdict:
    if isinstance(value, Verdict):
        verdict = value
    elif isinstance(value, str) or not hasattr(value, "__float__"):
        raise HarnessError(f"verify returned {value!r}; it must return a number or a Verdict")
    else:
        verdict = Verdict(float(value))
    if not math.isfinite(verdict.env_reward):
        raise HarnessError(f"verify gave the reward {verdict.env_reward}; it must be a finite number")
    return verdict


def _imported(path: str) -> Verify:
    module, _, name = path.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise HarnessError(f"verify is {path!r}, which cannot be imported: {error}") from error
    if not callable(found):
        raise HarnessError(f"verify is {path!r}, which is no callable")
    return cast(Verify, found)
