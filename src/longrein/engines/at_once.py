"""Engines that have no model: they give each reply at once, so nothing ever waits or runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class AtOnce:
    """What such an engine does besides `sample`: nothing."""

    policy_version = 0

    def cancel(self) -> None:
        """Nothing waits."""

    def pause(self) -> None:
        """Nothing runs between two replies."""

    def resume(self) -> None:
        """Nothing waits."""

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """There are no weights."""

    def close(self) -> None:
        """Nothing to let go of."""
