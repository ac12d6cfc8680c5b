"""What several commands need: finding runs and the small policy, and where modules are imported from."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from longrein.contract import LongreinError
from longrein.training.settings import TINY


class Stopped(Exception):
    """Ctrl-C, after what was done is saved; says how to go on."""


def checked_sandbox(choice: str) -> str:
    """The choice, if there is such; that programs run without one is said, whatever else is logged."""
    from longrein.harnesses.sandbox import CHOICES, logger

    if choice not in CHOICES:
        raise LongreinError(f"--sandbox is {choice!r}; it must be one of {', '.join(CHOICES)}")
    logger.setLevel(min(logging.WARNING, logging.getLogger().level))
    return choice


def model_folder(model: str, note: Callable[[str], None]) -> str:
    """The model as `from_pretrained` takes it; the small policy by its name is built the first time."""
    if model != TINY or Path(model).is_dir():
        from longrein.agents import refuse_no_model

        refuse_no_model(model)
        return model
    folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "longrein" / TINY
    if not (folder / "model.safetensors").exists():
        note("building the small policy (a minute, once)")
        from longrein.training.tiny import build

        build(folder)
    return str(folder)


def import_from(folder: Path) -> None:
    """Modules of the folder can be named by dotted path."""
    if (place := str(folder.resolve())) not in sys.path:
        sys.path.insert(0, place)


def new_run_folder(what: str) -> Path:
    """A folder for a run that was given none: named after the time, and never one that is there."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{what}"
    taken = sum(1 for _ in Path("runs").glob(f"{name}*"))
    return Path("runs") / (f"{name}-{taken + 1}" if taken else name)


def point_latest(folder: Path) -> None:
    """`runs/latest` is the newest run that trained, so that `runs/latest/model` stays what it was while models are evaluated."""
    folder = folder.resolve()  # it may have been named by this very link
    latest = folder.parent / "latest"
    if latest.is_symlink() or not latest.exists():
        latest.unlink(missing_ok=True)
        latest.symlink_to(folder.name)


def newest_run() -> Path:
    """The run under runs/ that was written to last."""
    found = [path.parent for path in Path("runs").glob("*/run.sqlite") if not path.parent.is_symlink()]
    if not found:
        raise LongreinError("there is no run under runs/ here; name a run folder, or make one with `longrein train`")
    return max(found, key=lambda folder: max(path.stat().st_mtime for path in folder.glob("run.sqlite*")))
