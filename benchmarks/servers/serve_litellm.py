"""LiteLLM's proxy in front of the stub, as `litellm --config` starts it: it relays, and records nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import control

CONFIG = """\
model_list:
  - model_name: policy
    litellm_params: {{model: openai/policy, api_base: {upstream}/v1, api_key: sk-stub}}
litellm_settings: {{telemetry: false}}
general_settings: {{dangerously_permit_weak_or_unset_master_key: true}}
"""


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.yaml")
        config.write_text(CONFIG.format(upstream=control.options().upstream))
        command = [Path(sys.executable).with_name("litellm"), "--config", config, "--host", "127.0.0.1", "--port", str(port)]
        env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "NO_DOCS": "True"}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=env)
        try:
            wait(f"http://127.0.0.1:{port}/health/liveliness", process)
            control.serve(f"http://127.0.0.1:{port}", lambda count: ["sk-any"] * count)
        finally:
            process.terminate()
            process.wait(30)


def wait(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(240):
        if process.poll() is not None:
            sys.exit(f"litellm ended with {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    sys.exit("litellm did not come up in two minutes")


if __name__ == "__main__":
    main()
