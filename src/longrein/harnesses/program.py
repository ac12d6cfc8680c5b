"""A command that runs under its supervisor: what it wrote, how it ended, and an end that leaves no process behind.

Always true: once `ended` is done, no process of the command's tree is alive, and its output is what it wrote, the middle left
out where that is too long. Our own death, however sudden, ends the tree too (see `supervisor.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO

from longrein.harnesses import supervisor

logger = logging.getLogger(__name__)

KEPT_BYTES = 1_000_000
"""Of each output stream."""
_TICK = 0.5
_MARK = "LONGREIN_PROGRAM"
"""A variable in the environment of the whole tree, unlike any other program's."""


class Clipped:
    """The head and the tail of a stream.

    >>> clipped = Clipped(4)
    >>> clipped.add(b"abcdefgh")
    >>> clipped.text()
    'ab\\n[4 bytes left out]\\ngh'
    """

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.size = 0

    def add(self, data: bytes) -> None:
        self.size += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._half:  # now and then, not at every piece
            del self._tail[: -self._half]

    def text(self) -> str:
        tail = self._tail[-self._half :]
        missing = self.size - len(self._head) - len(tail)
        middle = f"\n[{missing} bytes left out]\n".encode() if missing else b""
        return bytes(self._head + middle + tail).decode("utf-8", "replace")


class Program:
    """Starts a command at once, in a session of its own, with the environment it is given and a mark of ours.

    >>> program = Program(["echo", "hello"], env={"PATH": "/usr/bin:/bin"}, cwd="/")
    >>> program.ended.result(), program.stdout.text()
    (0, 'hello\\n')
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | Path,
        timeout: float | None = None,
        folder: str | Path | None = None,
        box: str | Path | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`folder` is removed should we die before the program does. `box` describes the sandbox to run it in. `on_end` is
        called, on a thread of ours, when everything is over and before anyone is told so."""
        self.stdout, self.stderr = Clipped(), Clipped()
        self.timed_out = False
        self.ended: Future[int] = Future()
        """Done when everything is over, with the exit code: 128 + the signal where one ended the command."""
        self.ended.set_running_or_notify_cancel()  # who waits for it and gives up does not cancel it for others
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._on_end = on_end
        self._mark = secrets.token_hex(16)
        self._stopping = threading.Lock()
        in_box = [] if box is None else ["--box", str(box)]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", supervisor.__file__, *in_box, str(folder or "-"), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**env, _MARK: self._mark},
            cwd=cwd,
            start_new_session=True,
        )
        threading.Thread(target=self._watch, name=f"longrein-program-{self._process.pid}", daemon=True).start()

    def stop(self) -> None:
        """End the command and all it started; returns when they are gone. Any thread, any number of times."""
        self._ask_to_stop()
        self.ended.result()

    def _ask_to_stop(self) -> None:
        with self._stopping:
            control = self._process.stdin
            if control is not None and not control.closed:
                with contextlib.suppress(BrokenPipeError):
                    control.write(supervisor.STOP)
                control.close()
                self._process.send_signal(signal.SIGCONT)  # its own command may have stopped it

    def _watch(self) -> None:
        try:
            self._read_to_the_end()
        except Exception:
            logger.exception("reading the output of a program failed; it is ended")
        finally:
            self._ask_to_stop()
            code = self._collect()
            for stream in (self._process.stdout, self._process.stderr):
                if stream is not None:
                    stream.close()
            try:
                self._on_end()
            except Exception:
                logger.exception("what was to be done at the end of a program failed")
            self.ended.set_result(code)

    def _read_to_the_end(self) -> None:
        """Until the supervisor exits: it holds both streams open, so their end is its end."""
        process = self._process
        assert process.stdout is not None
        assert process.stderr is not None
        streams: dict[IO[bytes], Clipped] = {process.stdout: self.stdout, process.stderr: self.stderr}
        poller = select.poll()  # select() itself refuses file numbers past 1024
        by_number = {stream.fileno(): stream for stream in streams}
        for number in by_number:
            poller.register(number, select.POLLIN)
        asked_at: float | None = None
        while by_number:
            gone = process.poll() is not None
            events = poller.poll(0 if gone else self._patience() * 1000)
            for number, _ in events:
                data = os.read(number, 65536)
                streams[by_number[number]].add(data)
                if not data:
                    poller.unregister(number)
                    del by_number[number]
            now = time.monotonic()
            if gone and not events:
                return  # the supervisor was killed and something that outlived it holds a stream: `_collect` sees to it
            if asked_at is None and self._deadline is not None and now >= self._deadline:
                self.timed_out = process.poll() is None
                self._ask_to_stop()
            if asked_at is None and process.stdin is not None and process.stdin.closed:
                asked_at = now
            if asked_at is not None and now > asked_at + supervisor.KILL_SECONDS + 5:
                process.kill()  # the supervisor itself does not answer

    def _patience(self) -> float:
        if self._deadline is None or self.timed_out:
            return _TICK
        return min(_TICK, max(0.0, self._deadline - time.monotonic()) + 0.001)

    def _collect(self) -> int:
        """The supervisor's status; where it did not end by itself, what it left is found by its mark and killed."""
        try:
            code = self._process.wait(timeout=supervisor.KILL_SECONDS + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code < 0 or code == supervisor.STUCK:
            logger.warning("the supervisor of a program ended with %s; looking for what it left", code)
            _kill_marked(self._mark)
        return code if code >= 0 else 128 - code


def with_paths(command: Sequence[str], folder: Path | None = None) -> list[str]:
    """The command, files beside us that it names by their absolute path: it is to run in a folder of its own, where the files of
    `folder` will be. Its first word is a path only where it has a slash; others are looked for on PATH."""

    def ours(place: int, part: str) -> bool:
        return os.path.isfile(part) and (place > 0 or "/" in part) and not (folder is not None and (folder / part).exists())

    return [os.path.abspath(part) if ours(place, part) else part for place, part in enumerate(command)]


def _kill_marked(mark: str, seconds: float = supervisor.KILL_SECONDS) -> None:
    """Kill every process whose environment holds the mark."""
    wanted = f"{_MARK}={mark}".encode()
    deadline = time.monotonic() + seconds
    while left := [pid for pid in _processes() if wanted in _environment(pid)]:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
        if time.monotonic() > deadline:
            logger.error("processes of a program could not be ended: %s", left)
            return
        time.sleep(0.01)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # of a dead process there is nothing to read
            return file.read().split(b"\0")
    except OSError:
        return []
