"""verifiers' interception server in front of the stub, with its relaying client: it keeps messages, not tokens."""

from __future__ import annotations

import asyncio
import threading

import control
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask


def main() -> None:
    upstream = f"{control.options().upstream}/v1"
    ready = threading.Event()
    servers: list[InterceptionServer] = []
    loop = asyncio.new_event_loop()

    async def run() -> None:
        server = InterceptionServer()
        async with server:
            servers.append(server)
            ready.set()
            await asyncio.Event().wait()

    threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True).start()
    ready.wait()
    opened: list[tuple[str, str]] = []

    def session() -> RolloutSession:
        context = ModelContext(model="policy", client=EvalClientConfig(base_url=upstream, api_key_var="LONGREIN_BENCH_KEY"))
        task = TraceTask(type="Task", data=TaskData(idx=0, prompt="bench"))
        return RolloutSession(ctx=context, trace=Trace(task=task, agent=AgentInfo(config=AgentConfig())))

    async def fresh(count: int) -> list[str]:
        for pair in opened:
            servers[0].unregister(*pair)
        opened[:] = [servers[0].register(session()) for _ in range(count)]
        return [model for model, _ in opened]

    control.serve(servers[0].base_url, lambda count: asyncio.run_coroutine_threadsafe(fresh(count), loop).result(timeout=60))


if __name__ == "__main__":
    main()
