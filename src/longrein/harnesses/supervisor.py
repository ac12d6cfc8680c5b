"""Runs a command and leaves nothing of it behind: `python -I -S supervisor.py [--box SPEC] FOLDER COMMAND...`, standard
library alone.

Always true: everything the command starts, also what forks twice and moves to a session of its own, is a descendant of this
process (it is their subreaper), and is dead before this process exits. It ends the command when its standard input says
`STOP`. When that closes instead, or its parent is no more, whoever started it had no chance to clean up: then it removes
FOLDER too (`-` for none). Its exit status is the command's (128 + the signal, where one ended it); `STUCK` when something could
not be killed. With `--box` the command runs in the sandbox that the file SPEC describes (see `box.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False  # type checkers take it for true; `typing` itself is slow to import
if TYPE_CHECKING:
    from longrein.harnesses.box import Box

KILL_SECONDS = 10.0
"""How long the killing may take before it is given up (a process that hangs in the kernel, or belongs to another user)."""
STOP = b"stop"
STUCK = 125
CANNOT_RUN = 127

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219}
_KEYCTL_JOIN_SESSION_KEYRING = 1


def supervise(folder: str, command: list[str], box: Box | None = None) -> int:
    """Run the command to its end or ours, in a box where there is one."""
    parent = os.getppid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the way to stop this is its standard input
        signal.signal(ignored, signal.SIG_IGN)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    if box is not None:
        _leave_keyring()
    child = _start(command) if box is None else box.start(command, _start)
    if box is not None:
        _schedule(os.SCHED_FIFO, 1)  # root only: the one that ends a fork bomb runs before its thousand processes
    status: int | None = None
    told, orphaned = False, False
    while status is None and not told and not orphaned:
        readable, _, _ = select.select([0, woken], [], [], 1.0 if box is None else box.patience)
        if woken in readable:
            os.read(woken, 4096)
        status = _reap().get(child)
        if 0 in readable:
            told = os.read(0, len(STOP)) != b""
            orphaned = not told
        orphaned = orphaned or os.getppid() != parent  # a forked copy of our parent may hold the pipe open after its death
        if box is not None and status is None:
            box.check()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)  # root only: else a fork bomb's many processes starve the one that ends it
    reaped, clean = kill_descendants(KILL_SECONDS)
    if box is not None and clean and not orphaned:
        _schedule(os.SCHED_OTHER, 0)
        box.collect()
    if orphaned and folder != "-":
        import shutil  # rarely needed, and slow to import

        shutil.rmtree(folder, ignore_errors=True)
    if not clean:
        return STUCK
    status = reaped.get(child) if status is None else status
    code = os.waitstatus_to_exitcode(status) if status is not None else -signal.SIGKILL
    return code if code >= 0 else 128 - code


def kill_descendants(seconds: float) -> tuple[dict[int, int], bool]:
    """Kill every descendant of this process, which must be their subreaper; the statuses reaped, and whether all are gone.

    All are stopped before any is killed: a process that still runs could fork another, or answer a death by a birth.
    """
    deadline = time.monotonic() + seconds
    reaped = _reap()
    while _has_children() and time.monotonic() < deadline:
        stopped: set[int] = set()
        while time.monotonic() < deadline:
            found = descendants(os.getpid())
            if found.keys() <= stopped:
                break
            _signal(found, signal.SIGSTOP)
            stopped |= found.keys()
        _signal(descendants(os.getpid()), signal.SIGKILL)
        for _ in range(50):  # deaths take a moment; the tree comes to us generation by generation
            reaped |= _reap()
            if not _has_children():
                break
            time.sleep(0.001)
    return reaped, not _has_children()


def descendants(root: int) -> dict[int, int]:
    """Every process below `root`, dead ones not yet reaped too, with its process group."""
    children: dict[int, list[tuple[int, int]]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                stat = file.read()
        except OSError:  # it has ended since
            continue
        _, parent, group = stat[stat.rindex(b")") + 2 :].split(None, 3)[:3]  # a command name may hold spaces and brackets
        children.setdefault(int(parent), []).append((int(name), int(group)))
    found: dict[int, int] = {}
    unvisited = [root]
    while unvisited:
        for pid, group in children.get(unvisited.pop(), ()):
            if pid not in found:
                found[pid] = group
                unvisited.append(pid)
    return found


def _signal(processes: dict[int, int], number: int) -> None:
    """To each process, and first to each group at once: within a group no fork gets past the signal.

    The groups are the command's own: its first process started a session, and no one joins a group of another session.
    """
    for group in set(processes.values()) - {os.getpgrp()}:
        with contextlib.suppress(OSError):
            os.killpg(group, number)
    for pid in processes:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def _schedule(policy: int, priority: int) -> None:
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, policy, os.sched_param(priority))


def _start(command: list[str], inherited: tuple[int, ...] = ()) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        for number in inherited:
            os.set_inheritable(number, True)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot run {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(CANNOT_RUN)


def _reap() -> dict[int, int]:
    """The statuses of the children that have ended since the last time."""
    statuses: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            statuses[pid] = status
    return statuses


def _has_children() -> bool:
    """Whether anything is left: every descendant has an ancestor among our children."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _leave_keyring() -> None:
    """Have an empty session keyring of our own: no namespace keeps a program from the keys in the one it inherits. Where the
    kernel refuses this, it refuses the program too."""
    if (number := _KEYCTL.get(os.uname().machine)) is not None:
        ctypes.CDLL(None).syscall(number, _KEYCTL_JOIN_SESSION_KEYRING, None)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _box(spec: str) -> Box:
    import marshal  # `json` is slow to import

    sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # no package is on the path of this process
    from box import Box  # type: ignore[import-not-found]

    with open(spec, "rb") as file:
        return Box(marshal.load(file))


if __name__ == "__main__":
    _, *arguments = sys.argv
    found = _box(arguments[1]) if arguments[0] == "--box" else None
    folder, *command = arguments if found is None else arguments[2:]
    os._exit(supervise(folder, command, found))
