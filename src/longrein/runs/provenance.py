"""Where a run comes from: versions, machine, and the git revision of the folder it was started in."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("longrein", "torch", "transformers", "trl", "accelerate", "datasets", "peft", "renderers", "numpy", "vllm")


def provenance(folder: Path | None = None) -> dict[str, Any]:
    """What would be needed to do it again, besides the settings; nothing of the environment's variables."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()},
        "git": git_revision(folder or Path.cwd()),
    }


def git_revision(folder: Path) -> dict[str, Any] | None:
    """The commit checked out around a folder and whether files differ from it; None where there is no repository."""
    revision = _git(folder, "rev-parse", "HEAD")
    if revision is None:
        return None
    return {"revision": revision, "changed": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        told = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip() if told.returncode == 0 else None


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
