"""The wire to vLLM servers: one event loop in a thread of its own, one session, as many connections as there are calls.

Always true: an answer is the server's JSON (None where it gives plain text); what may pass when asked again is `Away`, what will not is a `LongreinError`. Who
stops waiting for an answer closes its connection, and vLLM stops sampling for it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import orjson

from longrein.contract import LongreinError

FIRST_WAIT, LONGEST_WAIT = 0.25, 8.0
"""Seconds before a server that is away is asked again; the wait doubles each time."""
HOW_TO_START = "start it with `longrein serve-vllm`, which sets what is needed (docs/vllm.md lists it)"

T = TypeVar("T")


class Away(Exception):
    """The server gives no answer now, and may give one later."""


class Broken(Away):
    """The server answers that it failed."""


@dataclass(slots=True, eq=False)
class Replica:
    """What the client knows of one server."""

    url: str
    calls: int = 0
    """In flight."""
    ready: bool = False
    """Whether it has our weights under our label, as far as we know."""
    paused: bool = False
    logprobs_mode: str = ""
    away_until: float = 0.0
    _failures: int = 0
    """In a row."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its weights change."""

    def failed(self) -> bool:
        """Leave it alone for a while, longer each time. Calls that fail together are one failure; whether this is a new one."""
        self.ready = False
        now = time.monotonic()
        if self.away_until > now:
            return False
        self.away_until = now + min(LONGEST_WAIT, FIRST_WAIT * 2**self._failures)
        self._failures += 1
        return True

    def answered(self) -> None:
        self._failures = 0


class Wire:
    """Runs coroutines in its own event loop, for callers in any thread or loop, and talks to servers from there."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._closed:
                coroutine.close()
                raise LongreinError("this engine is closed; make a new one to sample again")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._work, args=(self._loop,), name="longrein-vllm", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.submit(coroutine).result()

    def close(self) -> None:
        """End every coroutine and connection."""
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is not None and thread is not None and thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    async def post(self, replica: Replica, path: str, body: dict[str, Any] | None = None) -> Any:
        return await self._ask(replica, "POST", path, None if body is None else orjson.dumps(body))

    async def get(self, replica: Replica, path: str) -> Any:
        return await self._ask(replica, "GET", path, None)

    async def _ask(self, replica: Replica, method: str, path: str, body: bytes | None) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self.timeout, sock_connect=10),
                connector=aiohttp.TCPConnector(limit=0),
                headers={"Content-Type": "application/json"},
            )
        try:
            async with self._session.request(method, replica.url + path, data=body) as response:
                status, kind, content = response.status, response.content_type, await response.read()
        except aiohttp.ClientError as error:  # one that did not connect in time too
            raise Away(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error
        except TimeoutError as error:
            raise LongreinError(f"vLLM at {replica.url} took longer than {self.timeout:g} s to answer") from error
        if status < 400:
            return orjson.loads(content) if kind == "application/json" else None
        text = f"{status}: {content.decode(errors='replace')[:500]}"
        if status >= 500:
            raise Broken(text)
        if status in (408, 429):
            raise Away(text)
        start = f"; {HOW_TO_START}" if status in (403, 404, 405) else ""
        raise LongreinError(f"vLLM at {replica.url} refuses the request ({text}){start}")

    async def _end(self) -> None:
        own = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not own]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    @staticmethod
    def _work(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        loop.close()
