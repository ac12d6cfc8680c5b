"""Ctrl-C that never cuts an update or a file in two.

Always true: a checkpoint is of a run after a whole step, and is complete once it is called one; Ctrl-C is at once while rollouts are
played and passes are run, and waits for the end of an optimizer's step, of what is told of it, and of a file being saved. A second
one does not wait.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from longrein.training.trainer import STATE_FILE, GRPOEnvTrainer


class Interrupts(TrainerCallback):
    """What a trainer needs to be stopped at any moment and to go on as if it had not been."""

    def __init__(self, trainer: GRPOEnvTrainer) -> None:
        self._trainer = trainer
        self._before: dict[int, Any] = {}
        """The handlers that were there, while Ctrl-C waits."""
        self._came = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Ctrl-C waits until this is left."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def hold(self) -> None:
        if not self._before and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._later) for number in (signal.SIGINT, signal.SIGTERM)}

    def release(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        if self._came:
            self._came = False
            raise KeyboardInterrupt

    def save(self) -> None:
        """A checkpoint of the run as it was after its last whole step; none before the first."""
        if self._trainer.state.global_step:
            with self.held():
                self._trainer._save_checkpoint(self._trainer.model, trial=None)

    def _later(self, number: int, frame: Any) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.release()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.hold()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.release()


def newest_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint that was written whole; None where there is none."""
    whole = [path.parent for path in folder.glob(f"checkpoints/checkpoint-*/{STATE_FILE.format(rank=0)}")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
