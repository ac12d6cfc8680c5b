"""One episode on an OpenEnv server, over one WebSocket.

Always true: the socket is opened once. A server gives every socket an environment of its own, so whoever connects again plays
another one, which was never reset: a session that lost its socket, or waited too long for an answer, is over and says why.
A full server is waited for, within a stated limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from typing import Any, NoReturn

import aiohttp

from longrein.contract import LongreinError

FIRST_WAIT, LONGEST_WAIT = 0.05, 5.0
"""Seconds before a full server is asked again: doubled each time, up to the second."""
CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 2.0
MAX_BYTES = 100 * 2**20
"""Of one observation, as OpenEnv's own client has it."""


class SessionOver(LongreinError):
    """The session is gone, and with it the episode."""


class Refused(LongreinError):
    """The server answered with an error and the session goes on. `code` is OpenEnv's."""

    def __init__(self, code: str, message: str, errors: list[dict[str, Any]]) -> None:
        super().__init__(f"{message} ({code})" + "".join(f"; {_place(error)}: {error.get('msg')}" for error in errors))
        self.code = code
        self.wrong = "; ".join(f"{_place(error)}: {error.get('msg')}" for error in errors) or message


class Session:
    """`reset` once, `step` as often as you like, `close`; all on one event loop."""

    def __init__(self, url: str, *, answer_seconds: float, full_seconds: float, idle_seconds: float | None) -> None:
        """`url` is the server's (`http://...`)."""
        self.url = url
        self._answer_seconds = answer_seconds
        self._full_seconds = full_seconds
        self._idle_seconds = idle_seconds
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reader: asyncio.Task[None] | None = None
        self._frames: asyncio.Queue[str | None] = asyncio.Queue()
        self._over: str | None = None
        self._last = 0.0

    async def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        """Open the session and begin its episode; waits while the server has no room."""
        if self._http is not None:
            raise LongreinError("a session is reset once: make a new one for a new episode")
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS))
        deadline, wait = time.monotonic() + self._full_seconds, FIRST_WAIT
        while True:
            await self._open()
            try:
                return await self._ask({"type": "reset", "data": data})
            except Refused as refusal:
                if refusal.code != "CAPACITY_REACHED":
                    raise
                await self._hang_up()
                pause = wait * random.uniform(0.5, 1.0)  # those that wait together do not come back together
                if time.monotonic() + pause > deadline:
                    raise SessionOver(
                        f"the OpenEnv server {self.url} was full for {self._full_seconds:g} s ({refusal}): raise its "
                        "`max_concurrent_envs`, lower `concurrency`, or wait longer (`full_seconds`)"
                    ) from None
                await asyncio.sleep(pause)
                wait = min(2 * wait, LONGEST_WAIT)

    async def step(self, action: dict[str, Any]) -> dict[str, Any]:
        """What follows an action: `observation`, `reward`, `done`."""
        idle = time.monotonic() - self._last
        if self._over is None and self._idle_seconds is not None and idle > self._idle_seconds:
            self._over = (
                f"it was idle for {idle:.1f} s, and the server ends sessions after {self._idle_seconds:g} s (`idle_seconds`)"
            )
        return await self._ask({"type": "step", "data": action})

    async def close(self) -> None:
        await self._hang_up()
        if self._http is not None:
            await self._http.close()

    async def _open(self) -> None:
        assert self._http is not None
        timeout = aiohttp.ClientWSTimeout(ws_close=CLOSE_SECONDS)  # type: ignore[call-arg]
        try:
            self._socket = await self._http.ws_connect(f"{self.url}/ws", max_msg_size=MAX_BYTES, timeout=timeout)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise SessionOver(f"no OpenEnv server answers at {self.url}: {type(error).__name__}: {error}") from error
        self._frames = asyncio.Queue()
        # Read all the time: the server's pings are answered by whoever reads, also while the policy thinks for minutes.
        self._reader = asyncio.create_task(self._read(self._socket, self._frames))

    async def _read(self, socket: aiohttp.ClientWebSocketResponse, frames: asyncio.Queue[str | None]) -> None:
        try:
            async for message in socket:
                if message.type is aiohttp.WSMsgType.TEXT:
                    frames.put_nowait(message.data)
        finally:
            frames.put_nowait(None)

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._over is not None:
            raise SessionOver(f"the OpenEnv session at {self.url} is over: {self._over}")
        assert self._socket is not None
        with contextlib.suppress(
            aiohttp.ClientError, OSError
        ):  # a server that hung up may have said why: that is read below
            await self._socket.send_str(json.dumps(message))
        try:
            frame = await asyncio.wait_for(self._frames.get(), self._answer_seconds)
        except TimeoutError:
            # Its answer may still come, and would be taken for the next one's.
            self._lose(f"the server did not answer a {message['type']} within {self._answer_seconds:g} s (`answer_seconds`)")
        if frame is None:
            code = self._socket.close_code
            self._lose(f"the connection was lost during a {message['type']} (close code {code})")
        self._last = time.monotonic()
        try:
            answer = json.loads(frame)
            kind, data = answer["type"], answer["data"]
        except (ValueError, KeyError, TypeError):
            self._lose(f"the server said {frame[:200]!r}, which is not OpenEnv's protocol")
        if kind == "error":
            raise Refused(str(data.get("code")), str(data.get("message")), data.get("errors") or [])
        return data

    def _lose(self, cause: str) -> NoReturn:
        self._over = cause
        raise SessionOver(f"the OpenEnv session at {self.url} is over: {cause}") from None

    async def _hang_up(self) -> None:
        socket, self._socket = self._socket, None
        if socket is None:
            return
        with contextlib.suppress(aiohttp.ClientError, OSError):
            if not socket.closed:
                await socket.send_str('{"type": "close"}')
            await socket.close()
        assert self._reader is not None
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


def _place(error: dict[str, Any]) -> str:
    return ".".join(map(str, error.get("loc", ()))) or "action"
