"""Which replica answers a call: the one that has its conversation in its cache, unless another has much less to do.

Pure bookkeeping: it knows no server, only how many calls each has and which are away.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

REMEMBERED = 65536
"""Conversations whose replica is known; the one that was asked about longest ago is forgotten first."""
SLACK = 8
"""How many calls more than twice the least a replica may have before its conversations move."""


class Balance:
    """Least-loaded with affinity.

    >>> balance = Balance()
    >>> balance.choose("a", loads=[3, 0], here=[0, 1]), balance.choose("a", loads=[3, 7], here=[0, 1])
    (1, 1)
    """

    def __init__(self) -> None:
        self._home: OrderedDict[str, int] = OrderedDict()

    def choose(self, conversation: str, loads: Sequence[int], here: Sequence[int]) -> int:
        """Of the replicas that are `here`, the one for this conversation (an empty name is no conversation)."""
        least = min(here, key=lambda index: loads[index])
        home = self._home.get(conversation)
        keeps = home is not None and home in here and loads[home] <= 2 * loads[least] + SLACK
        chosen = home if home is not None and keeps else least
        if conversation:
            self._home[conversation] = chosen
            self._home.move_to_end(conversation)
            if len(self._home) > REMEMBERED:
                self._home.popitem(last=False)
        return chosen
