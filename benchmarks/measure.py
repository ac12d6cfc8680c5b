"""How the benchmarks measure: contenders take turns in one process, so that a busy machine is busy for all of them."""

from __future__ import annotations

import datetime
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def machine() -> dict[str, Any]:
    """The date, the versions and the hardware that a table belongs to."""
    import os

    import torch

    def found(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    names = ("torch", "transformers", "trl")
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        **{name: found(name) for name in names},
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def alternate(contenders: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median seconds of each contender over rounds in which every one runs once."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}
