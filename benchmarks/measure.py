"""How the benchmarks measure: contenders take turns in one process, so that a busy machine is busy for all of them."""

from __future__ import annotations

import datetime
import platform
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
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


def alternate(
    contenders: Mapping[str, Callable[[], Any]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    before: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """The median seconds of each contender over rounds in which every one runs once, and over one `before` them.

    With `time.process_time` as the clock, other programs on a busy machine do not count.
    """
    seconds = {name: [] if before is None else [before[name]] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            seconds[name].append(timed(run, clock))
    return {name: statistics.median(values) for name, values in seconds.items()}


def timed(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """The seconds of one run, with what it left to the GPU."""
    _settle()
    started = clock()
    run()
    _settle()
    return clock() - started


def peak_gib(run: Callable[[], Any]) -> float:
    """The most memory a run holds beyond what was held before it."""
    import torch

    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**30
    done = threading.Event()
    before = most = _resident()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.01):
            most = max(most, _resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    return (most - before) / 2**30


def matrix_rate(device: str, dtype: Any, clock: Callable[[], float] = time.perf_counter) -> float:
    """Floating-point operations a second of a large matrix product."""
    import torch

    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    for _ in range(3):
        torch.mm(a, b, out=product)
    return 2 * size**3 / min(timed(lambda: torch.mm(a, b, out=product), clock) for _ in range(10))


def _settle() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
