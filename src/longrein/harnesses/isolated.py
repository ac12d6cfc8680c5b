"""A command run once in a sandbox of its own, on a copy of a folder: how verifiers run code that a policy wrote.

Always true: the command works on its copy and nothing else; when `isolated` is left, nothing of it is there any more.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longrein.contract import LongreinError
from longrein.harnesses.box import report_of
from longrein.harnesses.program import Program
from longrein.harnesses.sandbox import HOME, TMP, WORK, Sandbox, chosen

_PASSED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, and what it left."""

    exit_code: int
    limit: str | None
    """`time`, `memory`, `processes` or `disk`, where it ran into one."""
    stdout: str
    stderr: str
    workdir: Path


@contextlib.contextmanager
def isolated(
    command: Sequence[str],
    *,
    folder: Path,
    timeout: float,
    sandbox: str | Mapping[str, Any] | Sandbox = "auto",
    env: Mapping[str, str] | None = None,
) -> Iterator[Ended]:
    """Run a command in a copy of `folder` and give what it left. `{python}` in it is this interpreter."""
    box = chosen(sandbox)
    with tempfile.TemporaryDirectory(prefix="longrein-verify-", ignore_cleanup_errors=True) as name:
        root = Path(name)
        work = root / "work" if box is None else root / "seed/work"
        shutil.copytree(folder, work, symlinks=True)
        for made in (root / "work", root / "tmp", root / "home", root / "seed/home"):
            made.mkdir(parents=True, exist_ok=True)
        places = (root / "home", root / "tmp", root / "work") if box is None else (HOME, TMP, WORK)
        variables = {key: os.environ[key] for key in _PASSED if key in os.environ}
        variables |= dict(zip(("HOME", "TMPDIR", "PWD"), map(str, places), strict=True)) | dict(env or {})
        filled = [part.replace("{python}", sys.executable) for part in command]
        described = None if box is None else box.write_down(folder=root, program=command, env=variables, socket=None)
        program = Program(filled, env=variables, cwd=root / "work", timeout=timeout, folder=root, box=described)
        try:
            code = program.ended.result()
        finally:
            program.stop()
        limit, trouble = report_of(name)
        if trouble:
            raise LongreinError(f"the sandbox of {command[0]!r} broke: {trouble} {program.stderr.text()[-500:]}")
        yield Ended(
            exit_code=code,
            limit="time" if program.timed_out else limit or None,
            stdout=program.stdout.text(),
            stderr=program.stderr.text(),
            workdir=root / "work",
        )
