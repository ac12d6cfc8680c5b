"""One model call on the wire, and which request is about which call.

Always true: a request that repeats one whose reply was never written to the end joins that call; any other request is a new
call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from longrein.proxy.dialect import Answer


@dataclass(frozen=True)
class Evidence:
    """What a request's headers say about being a repetition."""

    idempotency_key: str | None = None
    retries: int = 0
    """How many times the program's SDK says it has sent this request before."""


@dataclass(eq=False)
class Exchange:
    """One model call and the connections that wait for its reply."""

    turn: int
    request_id: str
    answer: asyncio.Future[Answer]
    idempotency_key: str | None = None
    call_id: str | None = None
    """Its name in the record, once it is there."""
    sampling: asyncio.Task[None] | None = None
    delivered: bool = False
    attempts: int = 0
    connections: list[Callable[[], bool]] = field(default_factory=list)
    """For each request that waits: whether its connection is still open."""

    @property
    def failed(self) -> bool:
        return self.answer.done() and (self.answer.cancelled() or self.answer.exception() is not None)

    @property
    def abandoned(self) -> bool:
        """Nobody has the reply, and nobody waits for it."""
        return not self.delivered and not any(is_open() for is_open in self.connections)

    def settle(self, outcome: Answer | Exception) -> None:
        """What all who wait get; the first outcome stays."""
        if self.answer.done():
            return
        if isinstance(outcome, Exception):
            self.answer.set_exception(outcome)
            self.answer.exception()  # the program may be gone: nobody has to look
        else:
            self.answer.set_result(outcome)


class Exchanges:
    """The calls of one rollout, by the digest of what they ask."""

    def __init__(self) -> None:
        self._alike: dict[bytes, list[Exchange]] = {}

    def __iter__(self) -> Iterator[Exchange]:
        """All of them; from any thread."""
        return iter([exchange for alike in list(self._alike.values()) for exchange in list(alike)])

    def add(self, digest: bytes, exchange: Exchange) -> None:
        self._alike.setdefault(digest, []).append(exchange)

    def repeated(self, digest: bytes, evidence: Evidence) -> Exchange | None:
        """The call that a request asks for again, if it does."""
        alike = [exchange for exchange in self._alike.get(digest, ()) if not exchange.failed]
        if (key := evidence.idempotency_key) is not None:
            if same := [exchange for exchange in alike if exchange.idempotency_key == key]:
                return same[0]
            alike = [exchange for exchange in alike if exchange.idempotency_key is None]
        for exchange in alike:
            if exchange.abandoned:
                return exchange
        # The SDK says that it sent this before and got nothing: it knows better than our side of the connection.
        tried = [exchange for exchange in alike if exchange.attempts <= evidence.retries]
        return max(tried, key=lambda exchange: (not exchange.delivered, exchange.turn), default=None)
