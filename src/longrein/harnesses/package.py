"""Where an agent program comes from: a package of npm or PyPI, put into a folder of its own under longrein's cache.

Always true: an installed program is the version that is named here, whatever else the machine has; nothing is installed unless
`install` is called, and a failed install leaves no folder that looks like a finished one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longrein.harnesses.outcome import HarnessError


def cache() -> Path:
    """Where programs are installed: `LONGREIN_HARNESSES`, or a folder of the user's cache."""
    if folder := os.environ.get("LONGREIN_HARNESSES"):
        return Path(folder).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "longrein" / "harnesses"


@dataclass(frozen=True, slots=True)
class Npm:
    """A package of npm, with its pinned version."""

    name: str
    version: str

    def install(self, folder: Path) -> None:
        npm = _needed("npm", "Node.js, with npm")
        # A package's own scripts may fetch its binary, from the same registry.
        _run([npm, "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(folder), f"{self.name}@{self.version}"])

    def installed(self, folder: Path) -> str | None:
        """The version that is there."""
        try:
            return json.loads((folder / "node_modules" / self.name / "package.json").read_text())["version"]
        except (OSError, ValueError, KeyError):
            return None

    def executable(self, folder: Path, name: str) -> Path:
        inside = folder / "node_modules" / self.name / name  # a path in the package, where it has no command
        return inside if "/" in name else folder / "node_modules" / ".bin" / name


@dataclass(frozen=True, slots=True)
class PyPI:
    """A package of PyPI, with its pinned version and what it needs besides, in a virtual environment of its own."""

    name: str
    version: str
    extras: str = ""
    besides: Sequence[str] = ()

    def install(self, folder: Path) -> None:
        _run([sys.executable, "-m", "venv", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        _run([*pip, f"{self.name}{self.extras}=={self.version}", *self.besides])

    def installed(self, folder: Path) -> str | None:
        """The version that is there."""
        name = self.name.replace("-", "_")
        found = [
            path.name.removesuffix(".dist-info") for path in folder.glob(f"lib/python*/site-packages/{name}-*.dist-info")
        ]
        return found[0].rpartition("-")[2] if found else None

    def executable(self, folder: Path, name: str) -> Path:
        return folder / "bin" / name


Package = Npm | PyPI


def install(package: Package, folder: Path) -> str:
    """Put a package into a folder, in place of what was there; gives its version."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        package.install(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    version = package.installed(folder)
    if version != package.version:
        raise HarnessError(
            f"{package.name} {package.version} was installed into {folder}, and {version or 'nothing'} is there"
        )
    return package.version


def _needed(command: str, what: str) -> str:
    found = shutil.which(command)
    if found is None:
        raise HarnessError(f"{command} is not on PATH; install {what} first")
    return found


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-800:]
        raise HarnessError(f"{' '.join(command)} ended with exit code {done.returncode}: {said}")
