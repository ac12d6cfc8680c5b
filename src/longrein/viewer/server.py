"""`longrein view`: a local server of the page and of what it shows.

Always true: it only reads; it answers only requests that name it by a local address (so no other site's page can read a run through
it), and the browser is told to load nothing from anywhere else.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from aiohttp import web

from longrein.contract import LongreinError
from longrein.runs import Run
from longrein.runs.reader import Filter
from longrein.viewer import data

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
FILES = {"/": ("index.html", "text/html"), "/page.js": ("page.js", "text/javascript"), "/page.css": ("page.css", "text/css")}


def application(run: Run, hosts: frozenset[str] = frozenset({"127.0.0.1", "localhost", "[::1]"})) -> web.Application:
    """The page over a run. `hosts` are the names it may be asked by."""

    @web.middleware
    async def guarded(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.host.rpartition(":")[0] not in hosts and request.host not in hosts:
            return web.Response(status=403, text=f"this page is not served as {request.host!r}\n", headers=HEADERS)
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = web.Response(status=error.status, text=f"{error.reason}\n")
        response.headers.update(HEADERS)
        return response

    def answers(make: Callable[[web.Request], Any]) -> Callable[[web.Request], Any]:
        async def handler(request: web.Request) -> web.Response:
            try:
                body = await asyncio.to_thread(lambda: data.wire(make(request)))
            except (LongreinError, ValueError, OverflowError, sqlite3.Error) as error:
                return web.Response(status=404, body=data.wire({"error": str(error)}), content_type="application/json")
            return web.Response(body=body, content_type="application/json")

        return handler

    def overview(request: web.Request) -> Any:
        known = request.query.get("known")
        return {"state": known, "same": True} if known and known == data.state(run) else data.overview(run)

    def listed(request: web.Request) -> Any:
        query = request.query
        return data.listed(
            run,
            filter_of(query),
            page=max(0, int(query.get("page", 0))),
            sort=query.get("sort", "number"),
            down="up" not in query,
        )

    def tokens(request: web.Request) -> Any:
        call = request.query.get("call")
        return data.tokens(run, _number(request), None if call is None else int(call))

    app = web.Application(middlewares=[guarded])
    for path, (name, kind) in FILES.items():
        app.router.add_get(path, _file(name, kind))
    app.router.add_get("/api/overview", answers(overview))
    app.router.add_get("/api/rollouts", answers(listed))
    app.router.add_get(r"/api/rollouts/{number:\d{1,18}}", answers(lambda request: data.one(run, _number(request))))
    app.router.add_get(r"/api/rollouts/{number:\d{1,18}}/tokens", answers(tokens))
    return app


def filter_of(query: Any) -> Filter:
    """The page's filter, from a query string."""

    def number(name: str, kind: Any) -> Any:
        return kind(query[name]) if query.get(name) else None

    outcome = query.get("outcome", "")
    return Filter(
        phase=query.get("phase") or None,
        env=query.get("env") or None,
        group=query.get("group") or None,
        step=number("step", int),
        min_reward=number("min_reward", float),
        max_reward=number("max_reward", float),
        solved={"solved": True, "unsolved": False}.get(outcome),
        failed=True if outcome == "failed" else False if outcome == "unsolved" else None,
        limited=True if outcome == "limited" else None,
        forked=True if query.get("forked") else None,
        search=query.get("search", ""),
    )


def serve(run: Run, *, host: str = "127.0.0.1", port: int = 0, ready: Callable[[str], None] = print) -> None:
    """Serve the page until Ctrl-C; `ready` is told its url. Port 0 takes a free one."""
    asyncio.run(_serve(run, host, port, ready))


async def _serve(run: Run, host: str, port: int, ready: Callable[[str], None]) -> None:
    runner = web.AppRunner(application(run, frozenset({"127.0.0.1", "localhost", "[::1]", host})), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else error
            raise LongreinError(f"the page cannot be served at {host}:{port}: {why}") from error
        await asyncio.to_thread(ready, f"http://{host}:{runner.addresses[0][1]}/")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def static(name: str) -> str:
    """One of the page's own files."""
    return files("longrein.viewer").joinpath("static", name).read_text(encoding="utf-8")


def _file(name: str, kind: str) -> Callable[[web.Request], Any]:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=static(name), content_type=kind, charset="utf-8")

    return handler


def _number(request: web.Request) -> int:
    return int(request.match_info["number"])
