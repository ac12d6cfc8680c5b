"""Waiting for what happens in another thread or process, on a machine of any speed."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 60.0
"""Seconds that a slow machine may take for anything; on a quick one nothing waits so long."""


def until(condition: Callable[[], object], seconds: float = PATIENCE) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
