"""Finding processes by a marker in their command line, for tests that promise that none is left."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

from patience import until

from longrein.harnesses.program import Program


def marker() -> str:
    """A word that no other process has in its command line."""
    return f"marker-{uuid.uuid4().hex}"


def alive(*words: str) -> list[int]:
    """The living processes with the marker, and whatever else is asked for, among their arguments."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            arguments = Path("/proc", name, "cmdline").read_bytes()
            state = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if all(word.encode() in arguments for word in words) and state not in "ZX":
            found.append(int(name))
    return found


def time_is_up(program: Program) -> None:
    """Its limit of time is now: for a program that has come, however slowly, to where a test wants it."""
    assert until(lambda: program.stdout.size)
    program._deadline = time.monotonic()


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.chdir("/")
        for number in (0, 1, 2):
            os.close(number)
        time.sleep(120)
    os._exit(0)
os.wait()
print("started", flush=True)
time.sleep(float(sys.argv[1]))
"""
"""Leaves a daemon of the classic kind (forked twice, in a session of its own, streams closed), then lives on for a while."""

BOMB = """
import os, sys, time
count = int(sys.argv[1])
if os.fork() == 0:
    os.setsid()
for _ in range(count.bit_length() - 1):
    if os.fork() == 0 and os.getpid() % 3 == 0:
        os.setsid()
    time.sleep(0.001)
end = time.monotonic() + 30
while time.monotonic() < end:
    time.sleep(0.01)
    try:
        if os.fork() == 0:
            time.sleep(0.02)
            os._exit(0)
        os.waitpid(-1, os.WNOHANG)
    except OSError:
        pass
"""
"""Doubles to about twice `count` processes, some in sessions of their own, each of which goes on forking for half a minute."""

RABBIT = """
import os, sys, time
if os.fork():
    os.wait()
    print("started", flush=True)
    time.sleep(float(sys.argv[1]))
    os._exit(0)
end = time.monotonic() + 15
while time.monotonic() < end:
    if os.fork():
        os._exit(0)
    os.setsid()
"""
"""Beside the program itself never more than one process or two, and never the same for long: each forks the next, in a session
of its own, and ends."""
