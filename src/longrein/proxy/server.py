"""A server that agent programs talk to in place of a provider, in the provider's own dialect.

Always true: the key names the rollout; what breaks on our side ends one rollout, never the server.

The server runs its own event loop in its own thread, so that ordinary code and code on any other loop can use it. Nothing is
awaited across: what a rollout is told (`open`, `end`, `seal`, `close`) holds when the method returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import threading
from pathlib import Path
from typing import Self

from aiohttp import web

from longrein.contract import Intercept, LongreinError, Message, Sampling
from longrein.proxy.auxiliary import mark_auxiliary
from longrein.proxy.routes import Routes
from longrein.proxy.session import CallLimits, Session, Traffic
from longrein.recorder import Recorder
from longrein.rendering import Rendering

logger = logging.getLogger(__name__)


class InterceptionServer(Routes):
    """One server for all rollouts of a run.

    >>> with InterceptionServer() as server:                                               # doctest: +SKIP
    ...     key = server.open("r0")                          # the program gets server.url + "/v1" and this key
    ...     while (intercept := server.next_request("r0")) is not None:
    ...         server.deliver("r0", intercept, "Hello!")

    With `open(..., recorder=recorder)` calls are answered at once, and nothing is pulled.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        model_name: str = "policy",
        unix_socket: str | None = None,
        train_auxiliary: bool = False,
    ) -> None:
        super().__init__(model_name)
        self.host, self.port = host, port
        self.unix_socket = unix_socket
        self.train_auxiliary = train_auxiliary
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._closed: set[str] = set()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._runner: web.AppRunner | None = None
        self._sockets: dict[str, web.UnixSite] = {}

    # The server

    def start(self) -> Self:
        if self._thread is not None:
            raise LongreinError("this server is already started")
        started = threading.Event()
        trouble: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(started, trouble), name="longrein-proxy", daemon=True)
        self._thread.start()
        started.wait()
        if trouble:
            self._thread.join()
            self._thread = None
            why = os.strerror(trouble[0].errno) if isinstance(trouble[0], OSError) and trouble[0].errno else trouble[0]
            raise LongreinError(f"the server cannot listen on {self.host}:{self.port}: {why}") from trouble[0]
        return self

    def stop(self) -> None:
        """Close every rollout and end the thread; nothing listens any more when this returns."""
        if self._thread is None:
            return
        self._check_thread("stop")
        for rollout_id in list(self._sessions):
            self.close(rollout_id)
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._thread = self._loop = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where the server listens; the OpenAI base URL is this and `/v1`."""
        self._running()
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def _run(self, started: threading.Event, trouble: list[BaseException]) -> None:
        loop = _new_loop()
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._serve(started))
        except BaseException as error:
            trouble.append(error)
            if started.is_set():
                logger.exception("the interception server broke")
        finally:
            started.set()
            loop.close()

    async def _serve(self, started: threading.Event) -> None:
        runner = web.AppRunner(self._app(), access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self.host, self.port, backlog=1024)
            await site.start()
            if self.unix_socket is not None:
                await web.UnixSite(runner, self.unix_socket).start()
            self.port = runner.addresses[0][1]
            self._loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            self._runner = runner
            started.set()
            await self._stop.wait()
        finally:
            await runner.cleanup()

    # Rollouts, from any thread

    def open(
        self,
        rollout_id: str,
        *,
        recorder: Recorder | None = None,
        limits: CallLimits = CallLimits(),  # noqa: B008
        sampling: Sampling | None = None,
        max_length: int | None = None,
        rendering: Rendering | None = None,
    ) -> str:
        """Register a rollout; gives the key that names it.

        `recorder` must have the rollout open; it answers calls at once. Without it they wait for `deliver`, whose text is
        read by `rendering` where there is one.
        """
        key = f"sk-longrein-{secrets.token_urlsafe(24)}"
        session = Session(
            rollout_id,
            key,
            self._running(),
            recorder=recorder,
            rendering=rendering,
            limits=limits,
            sampling=sampling,
            max_length=max_length,
        )
        with self._lock:
            if rollout_id in self._sessions:
                raise LongreinError(f"rollout {rollout_id!r} is already open on this server")
            if not self._sessions:
                # While calls come in Python looks for garbage often, and each time through all that a trainer has imported:
                # a fifth of the proxy's work, in pauses of a fifth of a second.
                gc.freeze()
            self._sessions[rollout_id] = self._keys[key] = session
            self._closed.discard(rollout_id)
        return key

    def listen(self, rollout_id: str, path: str | Path) -> None:
        """Listen on a unix socket as well, until the rollout is closed: for a program that has no network."""
        self._check_thread("listen")

        async def start() -> None:
            assert self._runner is not None
            site = web.UnixSite(self._runner, str(path), backlog=1024)
            await site.start()
            self._sockets[rollout_id] = site

        try:
            asyncio.run_coroutine_threadsafe(start(), self._running()).result()
        except OSError as error:
            raise LongreinError(f"the server cannot listen on {path}: {error}") from error

    def next_request(self, rollout_id: str) -> Intercept | None:
        """The rollout's next model call; waits for it. None once there will be none: it ended, hit a limit or was closed."""
        self._check_thread("next_request")
        session = self._unless_closed(rollout_id)
        return None if session is None else session.next_request()

    def deliver(self, rollout_id: str, intercept: Intercept, completion: str | Message) -> None:
        """Answer a call: text in the model's own format, or an assistant message.

        Whether it arrived is in `traffic`, by turn. Text is cut at the program's stop words, which an intercept does not
        name: whoever kept the whole text sees the program quote another one, and starts a new branch.
        """
        self._session(rollout_id).deliver(intercept, completion)

    def refuse(self, rollout_id: str, intercept: Intercept, error: Exception) -> None:
        """Answer a call with an error; a `ContextLengthError` in the provider's words, so that the program compacts."""
        self._session(rollout_id).refuse(intercept, error)

    def end(self, rollout_id: str) -> None:
        """The program has ended: whoever waits for its calls wakes, and calls that still wait get an error."""
        self._check_thread("end")
        if (session := self._unless_closed(rollout_id)) is not None:
            session.end()

    def seal(self, rollout_id: str) -> None:
        """The rollout is verified: its record does not change any more, whatever still comes."""
        self._check_thread("seal")
        session = self._session(rollout_id)
        if session.sealed:
            return
        session.end()
        session.sealed = True
        if session.rollout is not None:
            session.rollout.info["asked"] = list(session.traffic.asked)
            if not self.train_auxiliary:
                mark_auxiliary(session.rollout)

    def close(self, rollout_id: str) -> None:
        """Forget a rollout; its key is unknown from now on."""
        self._check_thread("close")
        with self._lock:
            session = self._sessions.pop(rollout_id, None)
            if session is None:
                return
            del self._keys[session.key]
            self._closed.add(rollout_id)
            if not self._sessions:
                gc.unfreeze()
        session.end()
        if (site := self._sockets.pop(rollout_id, None)) is not None:
            asyncio.run_coroutine_threadsafe(site.stop(), self._running()).result()

    def traffic(self, rollout_id: str) -> Traffic:
        """What the program has asked for so far."""
        return self._session(rollout_id).snapshot()

    def _session(self, rollout_id: str) -> Session:
        with self._lock:
            session = self._sessions.get(rollout_id)
        if session is None:
            raise LongreinError(f"rollout {rollout_id!r} is not open on this server; call `open` first")
        return session

    def _unless_closed(self, rollout_id: str) -> Session | None:
        """None where it was closed. One look at both: another thread may close it at any moment."""
        with self._lock:
            session, closed = self._sessions.get(rollout_id), rollout_id in self._closed
        return None if closed else session or self._session(rollout_id)

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise LongreinError("this server is not running; call `start`, or use it in a `with` block")
        return self._loop

    def _check_thread(self, method: str) -> None:
        if threading.current_thread() is self._thread:
            raise LongreinError(f"{method} waits, and was called on the server's own loop, which would never wake it")


def turn_of(intercept: Intercept) -> int:
    """The number of this call in its rollout, as calls arrived."""
    return int(intercept["request_id"].rpartition("/")[2])


def _new_loop() -> asyncio.AbstractEventLoop:
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()
