"""The supervisor's side of a sandbox, standard library alone: starts it, watches its limits, and brings its work folder out.

Always true: a program in the box has the stated files and nothing else to read, and writes to file systems of a stated size;
once it is over its memory, processes or disk it is ended within a moment, and which limit it was stands in the report. What
comes out is what the work folder held at the end, and no link in it leads out of it, save to the system's own folders.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import stat
import time

TYPE_CHECKING = False  # type checkers take it for true; `typing` itself is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

ROOT = "/box"
"""Where the program's own file system is, in the sandbox, with its `home` and its `work`."""
TEMPORARY, SHARED = "/tmp", "/dev/shm"
"""File systems of the same size, of which nothing comes out."""
START_SECONDS = 60.0
QUICK, CALM = 0.02, 0.1
"""Seconds between two looks at a box that uses much of what it may, and at one that does not."""
DEEPEST, LONGEST = 64, 1024
"""Levels of folders that are brought out, and bytes of a path: who reads them outside can name them."""
FILES_PER_MB = 200
"""Files a box may hold, empty ones too: each takes memory of the kernel."""
OURS = 2
"""Processes in the box that are not the program's: bubblewrap's first one, and the relay. Their memory is counted with its own, as
a program can make them take some."""
SPEC, REPORT = "box", "report"
"""In a session's folder: what `sandbox.py` wrote down, and what is told of it at the end."""
SYSTEM = ("/usr/", "/bin/", "/lib/", "/lib64/", "/sbin/")

_PAGE = os.sysconf("SC_PAGESIZE")


class BoxError(Exception):
    """The sandbox could not be set up, or what was in it not brought out."""


class Box:
    """One sandbox, as `sandbox.py` wrote it down.

    `spec`: `command` (bubblewrap's, up to the `--`), `relay` (what runs inside, its READY and GO to be filled in), `seed`
    (folders to fill `home` and `work` from), `work` (where the work folder comes out), `report` (a line with the limit, then what
    broke), and the limits `memory` and `disk` in bytes and `processes`.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._memory, self._processes, self._disk = spec["memory"], spec["processes"], spec["disk"]
        self._first = 0
        self._files = self._proc = -1
        self._disks: list[int] = []
        self._limit: str | None = None
        self._trouble: str | None = None
        self._pss_at = 0.0
        self.patience = QUICK

    def start(self, command: list[str], spawn: Callable[[list[str], tuple[int, ...]], int]) -> int:
        """Start the command in the box; gives the process to wait for. Where the box cannot be made, that process ends."""
        info, told_info = os.pipe()
        ready, told_ready = os.pipe()
        going, go = os.pipe()
        relay = [part.format(ready=told_ready, go=going) for part in self._spec["relay"]]
        inside = (told_info, told_ready, going)
        child = spawn([*self._spec["command"], "--info-fd", str(told_info), "--", *relay, *command], inside)
        for number in inside:
            os.close(number)
        try:
            self._first = int(_read(info, b"}").partition(b'"child-pid":')[2].split(b",")[0].rstrip(b"}\n "))
            _read(ready, b"ready")
            self._open()
            self._seed()
            os.write(go, b"g")
        except (BoxError, OSError, ValueError) as error:
            self._trouble = f"{type(error).__name__}: {error}"
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
        finally:
            for number in (info, ready, go):
                os.close(number)
        return child

    def _open(self) -> None:
        """Hold on to what is looked at later: an open folder stays readable when the sandbox is gone."""
        root = f"/proc/{self._first}/root"
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._files = os.open(root + ROOT, flags)
        self._proc = os.open(f"{root}/proc", flags)
        self._disks = [self._files, os.open(root + TEMPORARY, flags), os.open(root + SHARED, flags)]

    def _seed(self) -> None:
        for name, source in self._spec["seed"].items():
            fill = _Copy(limit=self._disk)
            with _folder(source) as outside, _folder(name, self._files) as inside:
                fill.tree(outside, inside)

    def check(self) -> None:
        """End the box where it is over a limit."""
        if self._limit is None and self._trouble is None and (limit := self._overrun()) is not None:
            self._limit = limit
            with contextlib.suppress(OSError):
                os.kill(self._first, signal.SIGKILL)  # with the first process of a namespace the kernel ends all the others

    def _overrun(self) -> str | None:
        names = [name for name in _listed(self._proc) if name.isdigit()]
        if len(names) - OURS > self._processes:
            return "processes"
        tasks, resident = -OURS, 0
        for name in names:
            with contextlib.suppress(OSError):  # it has ended since
                fields = _content(f"{name}/stat", self._proc).rpartition(b")")[2].split()
                tasks += int(fields[17])
                resident += int(fields[21]) * _PAGE
        if tasks > self._processes:
            return "processes"
        if resident > self._memory and self._really_over(names):
            return "memory"
        used = self._disk_use()
        self.patience = QUICK if max(8 * tasks / self._processes, 8 * resident / self._memory, 2 * used) > 1 else CALM
        return "disk" if used >= 1 else None

    def _really_over(self, names: list[str]) -> bool:
        """Counted with shared pages once: slower to read, so not at every look."""
        now = time.monotonic()
        if now < self._pss_at:
            return False
        self._pss_at = now + 0.2
        proportional = 0
        for name in names:
            with contextlib.suppress(OSError):
                for line in _content(f"{name}/smaps_rollup", self._proc).splitlines():
                    if line.startswith(b"Pss:"):
                        proportional += int(line.split()[1]) * 1024
                        break
        return proportional > self._memory

    def _disk_use(self) -> float:
        """How full the fullest of its file systems is."""
        most = 0.0
        for number in self._disks:
            told = os.fstatvfs(number)
            files = (told.f_files - told.f_ffree) / max(1, FILES_PER_MB * self._disk >> 20)
            most = max(most, 1 - told.f_bfree / max(1, told.f_blocks), files)
        return most

    def collect(self) -> None:
        """Bring the work folder out and write the report; everything in the box must be gone."""
        if self._trouble is None:
            try:
                if self._limit is None and self._disk_use() >= 1:
                    self._limit = "disk"  # it was told that the disk is full, and ended before we saw it
                out = _Copy(limit=self._disk)
                with _folder("work", self._files) as inside, _folder(self._spec["work"]) as outside:
                    out.tree(inside, outside)
                out.check_links(self._spec["work"])
                if out.full:
                    self._limit = self._limit or "disk"
            except OSError as error:
                self._trouble = f"the work folder could not be brought out: {error}"
        with open(self._spec["report"], "w") as report:
            report.write(f"{self._limit or ''}\n{self._trouble or ''}")


class _Copy:
    """Copies folders, files and links; no other kind of file, and not more bytes than `limit`, those of holes among them: who
    copies the files on may well fill their holes."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._links: list[str] = []
        self.full = False
        """A file was left out: by holes, and by many links to one file, a folder holds more bytes than its disk."""

    def tree(self, source: int, target: int, above: str = "", depth: int = 0) -> None:
        for name in os.listdir(source):
            if len(os.fsencode(above + name)) > LONGEST:
                continue
            found = os.stat(name, dir_fd=source, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                link = os.readlink(name, dir_fd=source)
                inside = f"{ROOT}/work/"
                if (link + "/").startswith(inside):
                    link = "../" * depth + link[len(inside) :] or "."
                os.symlink(link, name, dir_fd=target)
                self._links.append(above + name)
            elif stat.S_ISDIR(found.st_mode) and depth < DEEPEST:
                os.chmod(name, 0o700, dir_fd=source)
                os.mkdir(name, 0o700, dir_fd=target)
                with _folder(name, source) as inner, _folder(name, target) as outer:
                    self.tree(inner, outer, f"{above}{name}/", depth + 1)
                    os.chmod(outer, 0o700 | found.st_mode & 0o777)
            elif stat.S_ISREG(found.st_mode):
                self._file(name, found, source, target)

    def _file(self, name: str, found: os.stat_result, source: int, target: int) -> None:
        if found.st_size > self._left:
            self.full = True
            return
        self._left -= found.st_size
        if not found.st_mode & stat.S_IRUSR:
            os.chmod(name, found.st_mode & 0o777 | stat.S_IRUSR, dir_fd=source)
        reading = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=source)
        writing = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=target)
        try:
            for start, end in _data(reading, found.st_size):
                os.lseek(reading, start, os.SEEK_SET)
                os.lseek(writing, start, os.SEEK_SET)
                while start < end and (data := os.read(reading, min(1 << 20, end - start))):
                    os.write(writing, data)
                    start += len(data)
            os.ftruncate(writing, found.st_size)
            os.fchmod(writing, 0o600 | found.st_mode & 0o777)
            os.utime(writing, ns=(found.st_atime_ns, found.st_mtime_ns))
        finally:
            os.close(reading)
            os.close(writing)

    def check_links(self, root: str) -> None:
        """Take away every link by which a reader outside would come to a file of ours."""
        root = os.path.realpath(root)
        for link in self._links:
            leads = os.path.realpath(f"{root}/{link}") + "/"
            if not leads.startswith((f"{root}/", *SYSTEM)):
                os.unlink(f"{root}/{link}")


def report_of(folder: str) -> tuple[str, str]:
    """The limit that ended the box of a session's folder, and what broke; empty where nothing did, or there was no box."""
    if not os.path.exists(f"{folder}/{SPEC}"):
        return "", ""
    try:
        with open(f"{folder}/{REPORT}") as file:
            limit, _, trouble = file.read().partition("\n")
    except FileNotFoundError:
        return "", "it was ended before the work folder was brought out"
    return limit, trouble


def _data(number: int, size: int) -> list[tuple[int, int]]:
    """The stretches of a file that hold something: a file of holes may claim any size."""
    found: list[tuple[int, int]] = []
    at = 0
    while at < size:
        try:
            start = os.lseek(number, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break
            raise
        at = min(size, os.lseek(number, start, os.SEEK_HOLE))
        found.append((start, at))
    return found


@contextlib.contextmanager
def _folder(name: str, above: int | None = None) -> Any:
    number = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        yield number
    finally:
        os.close(number)


def _listed(number: int) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(number)
    return []


def _content(name: str, above: int) -> bytes:
    number = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=above)
    try:
        return os.read(number, 8192)
    finally:
        os.close(number)


def _read(number: int, end: bytes) -> bytes:
    """What is written to a pipe, up to `end`."""
    deadline = time.monotonic() + START_SECONDS
    told = b""
    while end not in told:
        if not select.select([number], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise BoxError(f"the sandbox did not start within {START_SECONDS:.0f} seconds")
        data = os.read(number, 4096)
        if not data:
            raise BoxError("bubblewrap could not set the sandbox up; its words are on standard error")
        told += data
    return told
