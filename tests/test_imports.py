"""`import longrein` is quick and light, and every public name is where it says."""

from __future__ import annotations

import subprocess
import sys

import longrein

HEAVY = ("torch", "transformers", "trl", "datasets", "accelerate", "numpy", "renderers", "aiohttp")


def test_import_is_light_and_quick() -> None:
    code = (
        "import time, sys; start = time.perf_counter(); import longrein; took = time.perf_counter() - start;"
        f"print(took, [name for name in {HEAVY} if name in sys.modules])"
    )
    took, loaded = run(code).split(" ", 1)
    assert float(took) < 0.3
    assert loaded == "[]"


def test_the_light_rooms_need_no_torch() -> None:
    code = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY[:5]}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
import longrein.contract, longrein.rollout, longrein.rendering, longrein.recorder, longrein.agents, longrein.envs
import longrein.proxy, longrein.harnesses.process, longrein.engines.scripted, longrein.engines.vllm, longrein.envs.harness
print("ok")
"""
    assert run(code) == "ok"


def test_every_public_name_is_importable() -> None:
    for name in longrein.__all__:
        assert getattr(longrein, name) is not None


def test_the_command_line_answers_quickly() -> None:
    code = "import time; start = time.perf_counter(); import longrein.cli; print(time.perf_counter() - start)"
    assert float(run(code)) < 0.3


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
