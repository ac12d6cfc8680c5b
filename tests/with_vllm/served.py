"""How these tests serve the small policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longrein.engines.vllm_server import VLLMServer

ROOT = Path(__file__).parent.parent.parent
TINY = ROOT / ".cache" / "tiny"
VLLM = ROOT / ".venv-vllm" / "bin" / "vllm"
FLAGS = ["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"]
"""A prompt that vLLM 0.32 reads in pieces ends it on a CPU, where a request has a seed ("CPU Generator does not use offset")."""
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


def serve(log: Path, **options: Any) -> VLLMServer:
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 2048, "extra": FLAGS, "environment": ENVIRONMENT}
    return VLLMServer(str(TINY), vllm=VLLM, log=log, **{**settings, **options})
