"""A small server with vLLM's routes that behaves as badly as it is told to: it drops connections, refuses, hangs, forgets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web
from patience import PATIENCE

Behaviour = Callable[[dict[str, Any]], "web.Response | str | None"]
"""What to do with a request: a response, `drop` the connection, `hang` until it closes, `hold` the answer until `let_go`, or
None to answer well."""


class BadServer:
    """Runs in a thread of its own, so that blocking calls of the engine can be tested; `restart` forgets everything."""

    def __init__(self, behaviour: Behaviour = lambda body: None, *, mode: str = "processed_logprobs") -> None:
        self.behaviour, self.mode = behaviour, mode
        self.asked: list[dict[str, Any]] = []
        self.told: list[tuple[str, Any]] = []
        self.hanging = threading.Semaphore(0)
        self.left = threading.Semaphore(0)
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.label, self.paused = "default", False
        self._let_go = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(PATIENCE)

    def stop(self) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(PATIENCE)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(PATIENCE)
            self._loop.close()

    def let_go(self) -> None:
        """Answer what is held."""
        self._loop.call_soon_threadsafe(self._let_go.set)

    def __enter__(self) -> BadServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def _open(self) -> None:
        app = web.Application()
        app.router.add_get("/server_info", self._info)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/{path:.*}", self._control)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.2)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"vllm_config": {"model_config": {"logprobs_mode": self.mode}}})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _control(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        answer = self.behaviour({"path": request.path, "body": body})
        if isinstance(answer, web.Response):
            return answer
        self.told.append((request.path, body))
        if request.path == "/update_weight_version":
            self.label = body["new_version"]
        if request.path in ("/pause", "/resume"):
            self.paused = request.path == "/pause"
        if "lora" in request.path:
            return web.Response(text="Success: adapter changed")  # plain text, as vLLM says it
        return web.json_response({"status": "ok"})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        answer = self.behaviour(body)
        if answer == "drop":
            assert request.transport is not None
            request.transport.close()
        if answer == "hang":
            self.hanging.release()
            try:
                await asyncio.sleep(10 * PATIENCE)
            finally:
                self.left.release()
        if answer == "hold":
            await self._let_go.wait()
        return answer if isinstance(answer, web.Response) else web.json_response(self.reply(body))

    def reply(self, body: dict[str, Any], **choice: Any) -> dict[str, Any]:
        """A function of the seed, as vLLM's is."""
        seed = body["sampling_params"]["seed"]
        ids = [seed % 97 + 1, 0]
        spans = [{"version": self.label, "start": 0, "end": len(ids)}]
        content = [{"token_id": token, "logprob": -token / 100} for token in ids]
        return {
            "choices": [
                {"token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}, "weight_versions": spans}
                | choice
            ]
        }
