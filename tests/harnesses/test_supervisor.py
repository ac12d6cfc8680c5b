"""The supervisor as a program of its own: what it runs is gone when it is."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time

import pytest
from patience import PATIENCE, until
from processes import BOMB, DAEMON, RABBIT, alive, marker

from longrein.harnesses import supervisor


def start(*command: str, **options: object) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-I", "-S", supervisor.__file__, "-", *command]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)  # type: ignore[call-overload]


def stop(process: subprocess.Popen[bytes]) -> int:
    assert process.stdin is not None
    process.stdin.write(supervisor.STOP)
    process.stdin.close()
    return process.wait(timeout=PATIENCE)


def line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def test_its_status_is_the_commands_status() -> None:
    assert start("sh", "-c", "exit 7").wait(timeout=PATIENCE) == 7
    assert start("true").wait(timeout=PATIENCE) == 0


def test_a_signal_is_told_as_a_shell_tells_it() -> None:
    assert start("sh", "-c", "kill -TERM $$").wait(timeout=PATIENCE) == 128 + signal.SIGTERM


def test_a_command_that_is_not_there_is_said_to_be_so() -> None:
    process = start("/no/such/command")
    assert process.wait(timeout=PATIENCE) == supervisor.CANNOT_RUN
    assert process.stderr is not None
    assert b"/no/such/command" in process.stderr.read()


def test_it_ends_the_command_when_told_to() -> None:
    mark = marker()
    process = start("sh", "-c", "sleep 100; true", mark)
    assert until(lambda: len(alive(mark)) == 2)  # the supervisor and the shell
    assert stop(process) == 128 + signal.SIGKILL
    assert alive(mark) == []


def test_a_command_that_ignores_every_polite_signal_ends_too() -> None:
    mark = marker()
    ignore = (
        "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; print('x', flush=True); time.sleep(90)"
    )
    process = start(sys.executable, "-c", ignore, mark)
    line(process)
    stop(process)
    assert alive(mark) == []


def test_a_daemon_ends_with_the_command_that_left_it() -> None:
    mark = marker()
    process = start(sys.executable, "-c", DAEMON, "0", mark)
    assert line(process) == b"started\n"
    assert process.wait(timeout=PATIENCE) == 0
    assert alive(mark) == []


def test_a_daemon_ends_when_told_to() -> None:
    mark = marker()
    process = start(sys.executable, "-c", DAEMON, "100", mark)
    assert line(process) == b"started\n"
    assert len(alive(mark)) == 3
    stop(process)
    assert alive(mark) == []


def test_a_fork_bomb_is_ended_while_it_goes_on() -> None:
    mark = marker()
    process = start(sys.executable, "-S", "-c", BOMB, "16", mark)
    assert until(lambda: len(alive(mark)) > 30)
    assert stop(process) == 128 + signal.SIGKILL  # and not `STUCK`
    assert alive(mark) == []


def test_a_process_that_hops_from_session_to_session_is_caught() -> None:
    mark = marker()
    process = start(sys.executable, "-S", "-c", RABBIT, "100", mark)
    assert line(process) == b"started\n"
    stop(process)
    time.sleep(0.1)  # one that got away would hop on
    assert alive(mark) == []


def test_the_commands_session_is_its_own() -> None:
    process = start("sh", "-c", "cut -d' ' -f1,5,6 /proc/$$/stat")
    pid, group, session = line(process).split()
    assert pid == group == session
    assert int(session) != process.pid
    process.wait(timeout=PATIENCE)


def test_nothing_of_ours_is_open_in_the_command() -> None:
    process = start("sh", "-c", "ls /proc/$$/fd; readlink /proc/$$/fd/0")
    process.wait(timeout=PATIENCE)
    assert process.stdout is not None
    assert process.stdout.read().split() == [b"0", b"1", b"2", b"/dev/null"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_command_ends_when_the_supervisors_parent_dies(how: int) -> None:
    mark = marker()
    keeper = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)\n"
        "print('ready', flush=True)\n"
        "time.sleep(100)\n"
    )
    command = [sys.executable, "-I", "-S", supervisor.__file__, "-", sys.executable, "-c", DAEMON, "100", mark]
    parent = subprocess.Popen([sys.executable, "-c", keeper, *command], stdout=subprocess.PIPE)
    assert sorted([line(parent), line(parent)]) == [b"ready\n", b"started\n"]
    os.kill(parent.pid, how)
    parent.wait(timeout=PATIENCE)
    assert until(lambda: alive(mark) == [])


def test_a_forked_copy_of_the_parent_that_holds_the_pipe_open_changes_nothing() -> None:
    keeper = (
        "import os, subprocess, sys, time\n"
        "p = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)\n"
        "copy = os.fork()\n"
        "if copy == 0:\n"
        "    time.sleep(100)\n"
        "    os._exit(0)\n"
        "print(p.pid, copy, flush=True)\n"
        "time.sleep(100)\n"
    )
    command = [sys.executable, "-I", "-S", supervisor.__file__, "-", "sleep", "97"]
    parent = subprocess.Popen([sys.executable, "-c", keeper, *command], stdout=subprocess.PIPE)
    pid, copy = map(int, line(parent).split())
    assert until(lambda: len(supervisor.descendants(pid)) == 1)
    (sleeper,) = supervisor.descendants(pid)
    parent.kill()
    parent.wait(timeout=PATIENCE)
    assert until(lambda: not os.path.exists(f"/proc/{sleeper}"))
    os.kill(copy, signal.SIGKILL)  # it held the pipe all the while


def test_it_starts_in_a_moment() -> None:
    """Of processor time, that is: other programs may be busy on this machine."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    times = []
    for _ in range(5):
        before = spent()
        start("true").wait(timeout=PATIENCE)
        times.append(spent() - before)
    assert min(times) < 0.2
