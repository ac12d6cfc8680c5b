"""What a program's request gets: the routes of every dialect, whole replies and streams.

Always true: without a known key no route but `/` answers; a request never gets a 500 for what it says, only for what broke on
our side; a stream that waits for its reply says so every `keep_alive_seconds`, and a reply counts as delivered once all of it
went to a live connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from aiohttp import web

from longrein.proxy import chat, gemini, messages, responses
from longrein.proxy.dialect import Dialect, DialectError, ModelRequest
from longrein.proxy.exchange import Exchange
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
from longrein.proxy.marks import origin
from longrein.proxy.session import MAX_UNKNOWN_ROUTES, Session

BLOCK = 64 * 1024
"""Bytes of a stream written at once."""
DIALECTS: dict[str, Dialect] = {"/v1/chat/completions": chat, "/v1/responses": responses, "/v1/messages": messages}
"""By the route that answers it; Gemini's, `/v1beta/models/NAME:generateContent`, has the model's name in it."""
REFUSED_ROUTES = {
    "/v1/completions": "Text completions are not served: this model answers chat, at /v1/chat/completions.",
    "/v1/embeddings": "Embeddings are not served: this model answers chat, at /v1/chat/completions.",
}


class Routes:
    """The routes, over the sessions that keys name."""

    keep_alive_seconds = 10.0
    """How often a stream says that it still waits for its reply."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self._keys: dict[str, Session] = {}
        self._created = int(time.time())

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
        request, answer = session.stored.find(origin(http.match_info["id"]))
        return json_response(dialect.whole(answer, request, created=int(time.time()), model=self.model_name))

    async def _forget(self, http: web.Request, session: Session, dialect: Dialect) -> web.Response:
        session.stored.forget(origin(http.match_info["id"]))
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
