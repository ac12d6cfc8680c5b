"""A server that agent programs talk to in place of a provider, in the provider's own dialect.

Always true: the key names the rollout, and without a known key no route but `/` answers; a request never gets a 500 for what
it says, only for what broke on our side, and that ends one rollout, never the server.

The server runs its own event loop in its own thread, so that ordinary code and code on any other loop can use it. Nothing is
awaited across: what a rollout is told (`open`, `end`, `seal`, `close`) holds when the method returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from longrein.contract import Intercept, LongreinError, Message, Sampling
from longrein.proxy import chat, gemini, messages, responses
from longrein.proxy.auxiliary import mark_auxiliary
from longrein.proxy.dialect import Dialect, DialectError, ModelRequest, origin
from longrein.proxy.http import (
    MAX_BODY,
    error_response,
    evidence_of,
    json_response,
    key_of,
    read_json,
    send_whole,
    sse_event,
    write_through,
)
from longrein.proxy.session import MAX_UNKNOWN_ROUTES, CallLimits, Exchange, Session, Traffic
from longrein.recorder import Recorder
from longrein.rendering import Rendering

logger = logging.getLogger(__name__)

BLOCK = 64 * 1024
"""Bytes of a stream written at once."""
DIALECTS: dict[str, Dialect] = {"/v1/chat/completions": chat, "/v1/responses": responses, "/v1/messages": messages}
"""By the route that answers it; Gemini's, `/v1beta/models/NAME:generateContent`, has the model's name in it."""
REFUSED_ROUTES = {
    "/v1/completions": "Text completions are not served: this model answers chat, at /v1/chat/completions.",
    "/v1/embeddings": "Embeddings are not served: this model answers chat, at /v1/chat/completions.",
}


class InterceptionServer:
    """One server for all rollouts of a run.

    >>> with InterceptionServer() as server:                                               # doctest: +SKIP
    ...     key = server.open("r0")                          # the program gets server.url + "/v1" and this key
    ...     while (intercept := server.next_request("r0")) is not None:
    ...         server.deliver("r0", intercept, "Hello!")

    With `open(..., recorder=recorder)` calls are answered at once, and nothing is pulled.
    """

    keep_alive_seconds = 10.0
    """How often a stream says that it still waits for its reply."""

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        model_name: str = "policy",
        unix_socket: str | None = None,
        train_auxiliary: bool = False,
    ) -> None:
        self.host, self.port = host, port
        self.model_name = model_name
        self.unix_socket = unix_socket
        self.train_auxiliary = train_auxiliary
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._keys: dict[str, Session] = {}
        self._closed: set[str] = set()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._runner: web.AppRunner | None = None
        self._sockets: dict[str, web.UnixSite] = {}
        self._created = int(time.time())

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

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_get("/", self._hello)
        for path, dialect in DIALECTS.items():
            app.router.add_post(path, self._answering(self._call, dialect))
        app.router.add_post("/v1/messages/count_tokens", self._answering(self._count_tokens, messages))
        app.router.add_get("/v1/responses/{id}", self._answering(self._stored, responses))
        app.router.add_delete("/v1/responses/{id}", self._answering(self._forget, responses))
        for version in ("v1", "v1beta"):
            app.router.add_get(f"/{version}/models", self._answering(self._models))
            app.router.add_get(f"/{version}/models/{{id:.+}}", self._answering(self._model))
            app.router.add_post(f"/{version}/models/{{model:[^:]+}}:{{method}}", self._answering(self._gemini, gemini))
        app.router.add_route("*", "/{tail:.*}", self._answering(self._unknown))
        return app

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

    # Routes

    def _answering(
        self,
        route: Callable[[web.Request, Session, Dialect], Awaitable[web.StreamResponse]],
        dialect: Dialect | None = None,
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """The route for those with a key; what it raises is told in the dialect's shape."""

        async def handler(http: web.Request) -> web.StreamResponse:
            session = self._keys.get(key_of(http))
            spoken = dialect or _spoken(http)
            try:
                if session is None:
                    raise DialectError(
                        401, "Incorrect API key provided.", type="authentication_error", code="invalid_api_key"
                    )
                return await route(http, session, spoken)
            except DialectError as error:
                refused = error
            except OSError:  # the client is gone
                return web.Response(status=499)
            except Exception as error:
                refused = DialectError(500, "The server broke.") if session is None else session.fail(error)
            if session is not None and not session.sealed:
                session.refused(refused)
            return error_response(refused, spoken)

        return handler

    async def _hello(self, http: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, http: web.Request, session: Session, dialect: Dialect) -> web.Response:
        if dialect is gemini:
            return json_response({"models": [gemini.model_card(self.model_name, self._length(session))]})
        card = self._model_card(self.model_name, session)
        page = {"has_more": False, "first_id": self.model_name, "last_id": self.model_name}
        return json_response({"object": "list", "data": [card], **page})

    async def _model(self, http: web.Request, session: Session, dialect: Dialect) -> web.Response:
        name = http.match_info["id"]
        gemini_card = gemini.model_card(name, self._length(session))
        return json_response(gemini_card if dialect is gemini else self._model_card(name, session))

    def _length(self, session: Session) -> int | None:
        lengths = [session.max_length, session.recorder.context_length if session.recorder else None]
        return min((length for length in lengths if length is not None), default=None)

    def _model_card(self, name: str, session: Session) -> dict[str, Any]:
        """A model as OpenAI's programs and Anthropic's find it: the fields of both."""
        made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._created))
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "longrein"}
        card |= {"type": "model", "display_name": name, "created_at": made}
        length = self._length(session)
        return card if length is None else {**card, "max_model_len": length}

    async def _unknown(self, http: web.Request, session: Session, dialect: Dialect) -> web.Response:
        route = f"{http.method} {http.path}"
        known = session.traffic.unknown_routes
        if not session.sealed and route not in known and len(known) < MAX_UNKNOWN_ROUTES:
            known.append(route)
        message = REFUSED_ROUTES.get(http.path, f"There is no route {route}; this server answers {', '.join(DIALECTS)}.")
        raise DialectError(404, message, code="unknown_url")

    async def _call(self, http: web.Request, session: Session, dialect: Dialect) -> web.StreamResponse:
        return await self._answer(http, session, dialect, dialect.parse(await read_json(http)))

    async def _gemini(self, http: web.Request, session: Session, dialect: Dialect) -> web.StreamResponse:
        """Google's address holds what other bodies do: the model, what is asked of it, and whether to stream."""
        method = http.match_info["method"]
        if method not in ("generateContent", "streamGenerateContent", "countTokens"):
            return await self._unknown(http, session, dialect)
        request = gemini.parse(await read_json(http))
        if method == "countTokens":
            return json_response(gemini.token_count(session.count_tokens(request)))
        streamed, as_events = method == "streamGenerateContent", http.query.get("alt") == "sse"
        request = replace(request, model=http.match_info["model"], stream=streamed and as_events)
        request.wire["list"] = streamed and not as_events
        return await self._answer(http, session, dialect, request)

    async def _count_tokens(self, http: web.Request, session: Session, dialect: Dialect) -> web.Response:
        return json_response(messages.token_count(session.count_tokens(messages.parse(await read_json(http)))))

    async def _stored(self, http: web.Request, session: Session, dialect: Dialect) -> web.Response:
        request, answer = session.stored(origin(http.match_info["id"]))
        return json_response(dialect.whole(answer, request, created=int(time.time()), model=self.model_name))

    async def _forget(self, http: web.Request, session: Session, dialect: Dialect) -> web.Response:
        session.forget(origin(http.match_info["id"]))
        return json_response(responses.deleted(http.match_info["id"]))

    async def _answer(
        self, http: web.Request, session: Session, dialect: Dialect, request: ModelRequest
    ) -> web.StreamResponse:
        transport = http.transport

        def is_open() -> bool:
            return transport is not None and not transport.is_closing()

        exchange = session.exchange(request, evidence_of(http), is_open)
        name = _name(dialect)
        if name not in session.traffic.dialects:
            session.traffic.dialects.append(name)
        delivered = False
        try:
            if request.stream:
                response, delivered = await self._stream(http, request, exchange, dialect)
            else:
                await asyncio.wait([exchange.answer])
                body = dialect.whole(exchange.answer.result(), request, created=int(time.time()), model=self.model_name)
                response = json_response(body)
                delivered = await send_whole(http, response)
        finally:
            session.written(exchange, is_open, whole=delivered)
        return response

    async def _stream(
        self, http: web.Request, request: ModelRequest, exchange: Exchange, dialect: Dialect
    ) -> tuple[web.StreamResponse, bool]:
        """Write a reply as events. Until there is something to say the status stays open: an error may come instead."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        while not (await asyncio.wait([exchange.answer], timeout=self.keep_alive_seconds))[0]:
            if not response.prepared:
                await response.prepare(http)
            await response.write(dialect.WAITING)
        try:
            answer = exchange.answer.result()
        except DialectError as error:
            if not response.prepared:
                raise
            await response.write(sse_event(dialect.error_event(error)))
            return response, False
        write_through(http)
        await response.prepare(http)
        block = bytearray()
        for event in dialect.events(answer, request, created=int(time.time()), model=self.model_name):
            block += sse_event(event)
            if len(block) >= BLOCK:
                await response.write(bytes(block))
                block.clear()
        await response.write(bytes(block) + dialect.END)
        return response, True


def _spoken(http: web.Request) -> Dialect:
    """The dialect of a request to a route that is not one dialect's own."""
    if http.path.startswith("/v1beta") or "x-goog-api-key" in http.headers:
        return gemini
    return messages if "anthropic-version" in http.headers else chat


def _name(dialect: Dialect) -> str:
    """`chat`, `responses`, `messages` or `gemini`: a dialect is a module."""
    return getattr(dialect, "__name__", "").rpartition(".")[2]


def turn_of(intercept: Intercept) -> int:
    """The number of this call in its rollout, as calls arrived."""
    return int(intercept["request_id"].rpartition("/")[2])


def _new_loop() -> asyncio.AbstractEventLoop:
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()
