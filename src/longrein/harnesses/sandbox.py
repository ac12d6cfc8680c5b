"""What a program may see and use of this machine: a bubblewrap sandbox, denied by default.

Always true of a program in it: it reads the system's own folders, the interpreter and the folders stated for it, all read-only,
and nothing else of ours, neither home nor repository nor run; it writes to file systems of a stated size that are its own; it
is alone in its process, network, IPC and user namespaces, and its only way out is the unix socket of the proxy, which a relay
puts at 127.0.0.1. Paths, port and user are the same for every rollout, so that what programs write of them into their prompts
is the same too.
"""

from __future__ import annotations

import functools
import logging
import marshal
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from longrein.contract import LongreinError
from longrein.harnesses import box, relay

logger = logging.getLogger(__name__)

HOME, WORK, TMP = f"{box.ROOT}/home", f"{box.ROOT}/work", box.TEMPORARY
PORT = 41900
"""Of the proxy, inside."""
URL = f"http://127.0.0.1:{PORT}"
CHOICES = ("auto", "bubblewrap", "none")

_RUN = "/run/longrein"
_SOCKET_LENGTH = 107
"""Bytes that the kernel takes as the path of a unix socket."""
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_SYSTEM = ("/usr", *(f"/{name}" for name in _MERGED))
_ETC = (
    "alternatives",
    "ca-certificates",
    "crypto-policies",
    "debian_version",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "os-release",
    "pki/ca-trust/extracted",
    "pki/tls/certs",
    "protocols",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
    "timezone",
)
"""What programs look for in /etc and may know; keys and passwords are elsewhere in it."""
_OWN_ETC = {
    "passwd": f"agent:x:1000:1000:agent:{HOME}:/bin/sh\n",
    "group": "agent:x:1000:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_NAMESPACES = (
    *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"),
    *("--uid", "1000", "--gid", "1000", "--hostname", "sandbox"),
)
_HIDDEN_PARTS = ("envs", "training", "runs")
"""Of this package: a program that is part of it needs none of them, and tasks and verifiers are made there."""


class SandboxError(LongreinError):
    """The sandbox cannot be had here, or not as it was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sandbox:
    """The limits of a sandbox, and what can be read in it besides the system and the program itself.

    >>> Sandbox(memory_mb=512, readable=["/opt/agent"]).processes
    1024
    """

    memory_mb: int = 4096
    """Of all its processes together, pages they share counted once. Its files are counted as disk."""
    processes: int = 1024
    """Processes and threads together."""
    disk_mb: int = 1024
    """Of its home and working folder together; as much again for its temporary folder, and for its shared memory."""
    readable: Sequence[str] = ()
    """Files and folders it may read, at the path they have here."""

    def __post_init__(self) -> None:
        for name in ("memory_mb", "processes", "disk_mb"):
            if not isinstance(value := getattr(self, name), int) or isinstance(value, bool) or value < 1:
                raise SandboxError(f"{name} of the sandbox is {value!r}; it must be a whole number of 1 or more")
        if isinstance(self.readable, str) or not all(isinstance(path, str) for path in self.readable):
            raise SandboxError(f"readable of the sandbox is {self.readable!r}; it must be a list of paths")
        for path in self.readable:
            if not os.path.isabs(path) or not os.path.exists(path):
                raise SandboxError(
                    f"readable of the sandbox names {path!r}, which is no absolute path of a file or folder here"
                )

    def write_down(
        self,
        *,
        folder: Path,
        program: Sequence[str],
        env: Mapping[str, str],
        socket: Path | None,
        hidden: Iterable[str] = (),
    ) -> Path:
        """Describe a sandbox for `program`, the command before its placeholders were filled, to the supervisor; gives the
        file. The program finds in its home and working folder what `folder` has under `seed`; `hidden` can be read nowhere.
        Without a `socket` it reaches nothing at all."""
        if socket is not None and len(os.fsencode(socket)) > _SOCKET_LENGTH:
            raise SandboxError(
                f"the path of the proxy's socket is too long for the kernel: {socket}; set TMPDIR to a short path"
            )
        etc, empty = folder / "etc", folder / "empty"
        etc.mkdir()
        empty.touch()
        for name, text in _OWN_ETC.items():
            (etc / name).write_text(text)
        needed = [*_of_program(program, env.get("PATH")), *_of_python(sys.base_prefix)]
        disk = str(self.disk_mb << 20)
        mounts = [
            *_system(),
            # As root in a namespace a program could still write to the kernel's own settings.
            *("--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev"),
            *(
                word
                for place in (box.ROOT, TMP, box.SHARED)
                for word in ("--perms", "1777", "--size", disk, "--tmpfs", place)
            ),
            *_each("--ro-bind", (str(etc / name) for name in _OWN_ETC), to=lambda path: f"/etc/{Path(path).name}"),
            *_each("--ro-bind", _outermost(needed)),
            *_hide(hidden, needed, empty),
            *_each("--ro-bind", _outermost(self.readable)),
            *(("--ro-bind", str(socket), f"{_RUN}/proxy") if socket is not None else ()),
            *("--ro-bind", relay.__file__, f"{_RUN}/relay.py"),
            *("--dir", HOME, "--dir", WORK, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK),
        ]
        spec = {
            "command": [_bubblewrap(), *_NAMESPACES, *mounts],
            "relay": [
                *(os.path.realpath(sys.executable), "-I", "-S", f"{_RUN}/relay.py", f"{_RUN}/proxy", str(PORT)),
                # above our own limit, which says its name: this one only holds off what is too quick for it
                *("{ready}", "{go}", str(2 * self.processes + 64 if _counts_processes() else 0)),
            ],
            "seed": {"home": str(folder / "seed/home"), "work": str(folder / "seed/work")},
            "work": str(folder / "work"),
            "report": str(folder / box.REPORT),
            "memory": self.memory_mb << 20,
            "disk": self.disk_mb << 20,
            "processes": self.processes,
        }
        described = folder / box.SPEC
        described.write_bytes(marshal.dumps(spec))
        return described


def folders_of(program: Sequence[str]) -> list[str]:
    """What a program needs to read of this machine besides the system, as far as its command tells."""
    return [path for path in _outermost(_of_program(program, os.environ.get("PATH"))) if os.path.exists(path)]


def chosen(setting: str | Mapping[str, Any] | Sandbox) -> Sandbox | None:
    """The sandbox that a setting asks for: `auto` (where it works here), `bubblewrap`, `none`, or its limits by name."""
    if isinstance(setting, Sandbox):
        wanted = setting
    elif isinstance(setting, Mapping):
        known = {field.name for field in fields(Sandbox)}
        if unknown := sorted(set(map(str, setting)) - known):
            raise SandboxError(f"sandbox has no setting {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        wanted = Sandbox(**setting)
    elif setting == "none":
        _warn("programs run without a sandbox: they can read and write what you can, and reach the network")
        return None
    elif setting in CHOICES:
        wanted = Sandbox()
    else:
        raise SandboxError(f"sandbox is {setting!r}; it must be one of {', '.join(CHOICES)}, or its limits by name")
    if (why := why_not()) is None:
        return wanted
    if setting != "auto":
        raise SandboxError(f"a sandbox was asked for, and bubblewrap does not work here: {why}")
    _warn(f"programs run without a sandbox, as bubblewrap does not work here: {why}")
    return None


@functools.cache
def why_not() -> str | None:
    """Why there is no sandbox on this machine; None where there is one. Tried once."""
    if not sys.platform.startswith("linux"):
        return "it is for Linux"
    if shutil.which("bwrap") is None:
        return "there is no `bwrap` on PATH (Debian: apt-get install bubblewrap)"
    trial = [_bubblewrap(), *_NAMESPACES, *_system(), "--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev", "--"]
    try:
        result = subprocess.run([*trial, "/bin/sh", "-c", ":"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if result.returncode == 0 else result.stderr.strip() or f"bwrap ended with {result.returncode}"


@functools.cache
def _warn(message: str) -> None:
    logger.warning(message)


def _bubblewrap() -> str:
    return shutil.which("bwrap") or "bwrap"


def _counts_processes() -> bool:
    """Whether the kernel's own limit on processes is one of the sandbox: from Linux 5.14 on a user namespace has its own
    count, and root has no such limit."""
    release = [int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdigit()]
    return os.getuid() != 0 and release >= [5, 14]


@functools.cache
def _system() -> tuple[str, ...]:
    """The read-only system."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in _MERGED:
        path = Path("/", name)
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    return (*arguments, *_each("--ro-bind", (f"/etc/{name}" for name in _ETC if os.path.exists(f"/etc/{name}"))))


def _each(option: str, paths: Iterable[str], to: Any = lambda path: path) -> list[str]:
    return [word for path in paths for word in (option, path, to(path))]


def _hide(hidden: Iterable[str], needed: Sequence[str], empty: Path) -> list[str]:
    """Empty places over what would be seen and is not needed: this package's tasks, the working folder and home of whoever
    trains where they lie in the system's folders, and what is asked for."""
    package = Path(__file__).parent.parent
    wanted = [*(str(package / part) for part in _HIDDEN_PARTS), os.getcwd(), str(Path.home()), *hidden]
    seen = [path for path in wanted if _within(path, *needed, *_SYSTEM) and path not in needed and os.path.exists(path)]
    arguments: list[str] = []
    for path in _outermost(seen, but=()):
        if os.path.isdir(path):
            kept = _outermost([one for one in needed if _within(one, path)], but=())
            arguments += ["--tmpfs", path, *_each("--ro-bind", kept), "--remount-ro", path]
        else:
            arguments += ["--ro-bind", str(empty), path]
    return arguments


def _of_program(program: Sequence[str], search: str | None) -> list[str]:
    """What a command needs to read: where its executable lives, and the files that it names by their path."""
    first = sys.executable if program[0] == "{python}" else shutil.which(program[0], path=search)
    found = [part for part in program[1:] if os.path.isabs(part) and os.path.isfile(part)]
    if first is None:
        return found
    if os.path.dirname(first) == os.path.dirname(sys.executable) and Path(first).name.startswith("python"):
        packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        found += [path for path in packages if os.path.isdir(path)]
        found.append(str(Path(__file__).parent.parent))  # this package may be installed as a link to its source
    return [*found, *_of_executable(first, search)]


def _of_executable(path: str, search: str | None, depth: int = 0) -> list[str]:
    """The virtual environment, node package folder or file that an executable is, and the interpreter it asks for."""
    if depth > 8 or (_within(path, *_SYSTEM) and _within(os.path.realpath(path), *_SYSTEM)):
        return []
    parts = Path(path).parts
    prefix = Path(path).parent.parent
    if "node_modules" in parts:
        found = [str(Path(*parts[: parts.index("node_modules") + 1]))]
    elif (prefix / "pyvenv.cfg").is_file():
        found = _of_environment(prefix)
    else:
        found = [path]
    if os.path.islink(path):
        target = os.path.join(os.path.dirname(path), os.readlink(path))
        return [*found, *_of_executable(os.path.normpath(target), search, depth + 1)]
    if (interpreter := _shebang(path, search)) is not None:
        found += _of_executable(interpreter, search, depth + 1)
    return found


def _of_environment(prefix: Path) -> list[str]:
    """A virtual environment, and the interpreter it was made from."""
    for line in (prefix / "pyvenv.cfg").read_text().splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "home":
            return [str(prefix), *_of_python(os.path.dirname(value.strip()))]
    return [str(prefix)]


def _of_python(prefix: str) -> list[str]:
    return [] if not prefix or _within(prefix, *_SYSTEM) else [prefix]


def _shebang(path: str, search: str | None) -> str | None:
    try:
        with open(path, "rb") as file:
            line = file.readline(512)
    except OSError:
        return None
    words = os.fsdecode(line[2:]).split() if line.startswith(b"#!") else []
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        return shutil.which(words[0], path=search) if words else None
    return words[0] if words else None


def _outermost(paths: Iterable[str], but: Sequence[str] = _SYSTEM) -> list[str]:
    """Each path once, none that lies in another or in `but`."""
    kept: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths}, key=len):
        if not _within(path, *kept, *but):
            kept.append(path)
    return kept


def _within(path: str, *folders: str) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)
