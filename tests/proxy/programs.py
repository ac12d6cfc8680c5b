"""Programs that talk to a server, and an engine that waits for the test."""

from __future__ import annotations

import asyncio
import http.client
import json
import queue
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import openai
from patience import PATIENCE

from longrein.contract import Sampled, SampleRequest
from longrein.proxy import InterceptionServer, Traffic
from longrein.rendering import Rendering


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def message(self) -> dict[str, Any]:
        return self.json["choices"][0]["message"]


@dataclass
class Program:
    """What an agent program has: an address and a key. And what the test has: the rollout."""

    server: InterceptionServer
    rollout_id: str
    key: str
    rollout: Any = None

    @property
    def sdk(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key=self.key, timeout=PATIENCE)

    @property
    def async_sdk(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.server.url}/v1", api_key=self.key, timeout=PATIENCE)

    @property
    def traffic(self) -> Traffic:
        return self.server.traffic(self.rollout_id)

    @property
    def calls(self) -> list[Any]:
        """The recorded calls, once the server knows of every reply that was read whether it was delivered."""
        session = self.server._session(self.rollout_id)
        until(lambda: not session._handlers)
        return list(self.rollout.calls.values())

    def request(
        self, body: Any = None, *, method: str = "POST", path: str = "/v1/chat/completions", **headers: str
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Authorization": f"Bearer {self.key}", **_headers(headers)})
        response = connection.getresponse()
        reply = Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read().decode())
        connection.close()
        return reply

    def say(self, *messages: Any, **fields: Any) -> Reply:
        return self.request({"messages": list(messages), **fields})

    def start(self, body: Any, **headers: str) -> socket.socket:
        """Send a request and wait for nothing."""
        data = json.dumps(body).encode()
        lines = {"Host": "x", "Authorization": f"Bearer {self.key}", "Content-Length": str(len(data)), **_headers(headers)}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        connection = socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE)
        connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode() + data)
        return connection


def _headers(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


class Gated:
    """An engine whose every reply the test gives: `request, gate = engine.asked.get()`, then `gate.set_result("text")`."""

    policy_version = 0

    def __init__(self, rendering: Rendering) -> None:
        self.rendering = rendering
        self.asked: queue.Queue[tuple[SampleRequest, Future[str]]] = queue.Queue()

    async def sample(self, request: SampleRequest) -> Sampled:
        gate: Future[str] = Future()
        self.asked.put((request, gate))
        ids = self.rendering.encode_reply(await asyncio.wrap_future(gate))
        return Sampled(ids, [-0.5] * len(ids), "stop")

    def gate(self) -> Future[str]:
        return self.asked.get(timeout=PATIENCE)[1]

    def close(self) -> None:
        pass


def until(condition: Callable[[], object]) -> None:
    """Wait for what happens on the server's side of a connection, which tells nobody."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)
