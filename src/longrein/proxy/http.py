"""Between aiohttp and the dialects: keys and evidence out of headers, JSON out of bodies, and writes whose end is known."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson
from aiohttp import web

from longrein.proxy.dialect import Dialect, DialectError
from longrein.proxy.exchange import Evidence

MAX_BODY = 32 * 1024**2


def key_of(http: web.Request) -> str:
    scheme, _, bearer = http.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return bearer.strip()
    names = ("x-api-key", "x-goog-api-key", "api-key")
    return next((http.headers[name] for name in names if name in http.headers), "") or http.query.get("key", "")


def evidence_of(http: web.Request) -> Evidence:
    retries = http.headers.get("x-stainless-retry-count", "")
    return Evidence(
        idempotency_key=http.headers.get("Idempotency-Key") or None,
        retries=int(retries) if retries.isascii() and retries.isdigit() and len(retries) < 10 else 0,
    )


async def read_json(http: web.Request) -> Any:
    try:
        body = await http.read()
    except web.HTTPRequestEntityTooLarge:
        raise DialectError(413, f"The body is larger than {MAX_BODY // 1024**2} MB.", code="request_too_large") from None
    except Exception as error:  # broken chunks, broken compression, a client that left: aiohttp has a class for each
        raise DialectError(400, f"The body cannot be read: {error}") from None
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    try:
        return orjson.loads(_SURROGATES.sub(_whole_character, body))
    except orjson.JSONDecodeError as error:
        raise DialectError(400, f"The body is not JSON: {error}") from None


_SURROGATES = re.compile(rb"\\\\|\\u[dD][89abAB]..(?:\\u[dD][c-fC-F]..)?|\\u[dD][c-fC-F]..")
"""The escapes of characters in two halves; a backslash that is escaped itself starts none."""


def _whole_character(found: re.Match[bytes]) -> bytes:
    """Half a character, which a program in JavaScript sends when it cuts a text short, is written as an unknown one."""
    return rb"\ufffd" if len(found[0]) == 6 else found[0]


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=_written(body), status=status, content_type="application/json", headers=headers)


def error_response(error: DialectError, dialect: Dialect) -> web.Response:
    # SDKs retry 409 and 5xx on their own; here the answer would be the same.
    return json_response(dialect.error_body(error), error.status, {"x-should-retry": "false"})


def sse_event(body: dict[str, Any]) -> bytes:
    """An event on the wire, named where it has a type."""
    name = b"event: " + body["type"].encode() + b"\n" if "type" in body else b""
    return name + b"data: " + _written(body) + b"\n\n"


def _written(body: Any) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError:  # a model may write integers of more than 64 bits
        return json.dumps(body, ensure_ascii=False).encode()


def write_through(http: web.Request) -> None:
    """From here on a write ends when the kernel has all of it, so that a client that left is noticed."""
    if http.transport is not None:
        http.transport.set_write_buffer_limits(high=0)


async def send_whole(http: web.Request, response: web.Response) -> bool:
    """Write a response; whether all of it went to a live connection."""
    write_through(http)
    try:
        await response.prepare(http)
        await response.write_eof()
    except OSError:
        return False
    return True
