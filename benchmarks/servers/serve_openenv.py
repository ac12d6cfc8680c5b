"""OpenEnv's capture server, with token ids and log-probabilities kept, in front of the stub."""

from __future__ import annotations

import socket
import threading
import time

import control
import uvicorn
from openenv.core.harness.capture.server import create_app


def main() -> None:
    app = create_app(llm_url=control.options().upstream, model="policy")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # As its own `CaptureServer` runs it, but on loopback only.
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    opened: list[str] = []

    def fresh(count: int) -> list[str]:
        for session_id in opened:
            app.state.registry.delete(session_id)
        opened[:] = [app.state.registry.create().session_id for _ in range(count)]
        return list(opened)

    control.serve(f"http://127.0.0.1:{port}", fresh)
    server.should_exit = True
    thread.join(10)


if __name__ == "__main__":
    main()
