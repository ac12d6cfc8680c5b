"""Agent programs that own their loop, run as sessions. Names are imported when first used, so that a program starts quickly."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longrein.harnesses.outcome import HarnessError, Outcome
    from longrein.harnesses.process import ProcessSession, ProcessSessionFactory

__all__ = ["HarnessError", "Outcome", "ProcessSession", "ProcessSessionFactory"]

_HOMES = {
    "HarnessError": "outcome",
    "Outcome": "outcome",
    "ProcessSession": "process",
    "ProcessSessionFactory": "process",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"longrein.harnesses.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'longrein.harnesses' has no attribute {name!r}")
