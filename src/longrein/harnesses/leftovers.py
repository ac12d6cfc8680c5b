"""Runs a command and writes down what it left: `python -m longrein.harnesses.leftovers FILE COMMAND...`

What it says: the processes that still ran when the command had ended, and the files that were new then, in its home, its working
folder and its temporary folder. Its exit status is the command's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from longrein.harnesses import supervisor

MOST = 200
"""Files named of one folder."""


def files(folder: str) -> set[str]:
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}


def told_of(new: set[str]) -> list[str]:
    """Files by name, as many as there is room for."""
    return sorted(new)[:MOST] + ([f"and {len(new) - MOST} more"] if len(new) > MOST else [])


def words(pid: int) -> str:
    """A process's command line, clipped."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()[:200]
    except OSError:
        return ""


def main() -> int:
    told, *command = sys.argv[1:]
    places = {"home": os.environ["HOME"], "work": os.getcwd(), "tmp": os.environ.get("TMPDIR", "/tmp")}
    before = {name: files(folder) for name, folder in places.items()}
    supervisor._prctl(supervisor._PR_SET_CHILD_SUBREAPER, 1)
    try:
        code = subprocess.Popen(command).wait()
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return supervisor.CANNOT_RUN
    running = [said for pid in supervisor.descendants(os.getpid()) if (said := words(pid))]
    new = {name: told_of(files(folder) - before[name]) for name, folder in places.items()}
    Path(told).write_text(json.dumps({"processes": running, "files": new}))
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os._exit(main())
