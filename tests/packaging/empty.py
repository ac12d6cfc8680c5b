"""Environments that hold a wheel and what it asks for, and nothing else of this machine's."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


@dataclass(frozen=True)
class Empty:
    """A virtual environment, and a folder to work in that knows of no other."""

    place: Path
    home: Path

    def run(self, program: str, *arguments: str, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        path = f"{self.place / 'bin'}:/usr/bin:/bin"
        env = {"PATH": path, "HOME": str(self.home), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
        command = [str(self.place / "bin" / program), *arguments]
        return subprocess.run(command, cwd=self.home, env=env, capture_output=True, text=True, timeout=timeout)


def installed(place: Path, wheel: Path, extra: str = "") -> None:
    """The wheel and all it asks for, from the package index. TORCH says which torch, where the newest is not wanted."""
    _venv(place)
    pinned = [os.environ["TORCH"]] if extra and "TORCH" in os.environ else []
    asked = f"{wheel}[{extra}]" if extra else str(wheel)
    subprocess.run([*PIP, "--python", str(place), "install", *pinned, asked], check=True, timeout=1800)


def linked(place: Path, wheel: Path, extra: str = "") -> None:
    """The wheel, and links to what it asks for where that is installed for the tests: what it forgot to ask for is not there."""
    _venv(place)
    command = [*PIP, "--python", str(place), "install", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    subprocess.run(command, check=True, timeout=900)
    site = Path(sysconfig.get_path("purelib", "posix_prefix", {"base": str(place)}))
    requires = next(site.glob("longrein-*.dist-info")).joinpath("METADATA").read_text().splitlines()
    asked = [Requirement(line.partition(": ")[2]) for line in requires if line.startswith("Requires-Dist: ")]
    for name in _closure(asked, extra):
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(str(found.locate_file(top)))


def _closure(asked: list[Requirement], extra: str) -> set[str]:
    """The names of all distributions that these requirements bring here."""
    waiting = [(one, extra) for one in asked]
    seen: set[tuple[str, str]] = set()
    while waiting:
        one, of = waiting.pop()
        if one.marker is not None and not one.marker.evaluate({**default_environment(), "extra": of}):
            continue
        name = canonicalize_name(one.name)
        for wanted in {"", *one.extras}:
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                waiting += [(Requirement(line), wanted) for line in distribution(name).requires or ()]
    return {name for name, _ in seen}


def _venv(place: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True, timeout=900)
