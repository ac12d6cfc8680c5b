"""Work that one process does for all of them: every rank gets its result, or its error.

Always true: no rank waits in a collective for much longer than `HEARTBEAT_SECONDS`, however long the work takes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from longrein.contract import LongreinError

T = TypeVar("T")

HEARTBEAT_SECONDS = 5.0
"""How often the ranks that wait hear from the main process; far below any collective's timeout."""


def on_main_process(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """Run `work` on the main process and give what it returns, or the error it raises, to every rank."""
    if accelerator.num_processes == 1:
        return work()
    return _lead(work) if accelerator.is_main_process else _follow()


def _lead(work: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1, thread_name_prefix="longrein-main") as pool:
        future = pool.submit(work)
        while not wait([future], timeout=HEARTBEAT_SECONDS).done:
            broadcast_object_list([("working", None)])
    if (error := future.exception()) is not None:
        broadcast_object_list([("failed", f"{type(error).__name__}: {error}")])
    else:
        broadcast_object_list([("done", future.result())])
    return future.result()


def _follow() -> Any:
    while True:
        told: list[Any] = [None]
        broadcast_object_list(told)
        state, outcome = told[0]
        if state == "failed":
            raise LongreinError(f"the main process stopped: {outcome}")
        if state == "done":
            return outcome
