"""`import longrein` is quick and light, and every public name is where it says."""

from __future__ import annotations

import subprocess
import sys

import longrein

HEAVY = ("torch", "transformers", "trl", "datasets", "accelerate", "numpy", "renderers", "aiohttp")


def test_import_is_light_and_quick() -> None:
    assert seconds("import longrein") < 0.3
    assert run(f"import longrein, sys; print([name for name in {HEAVY} if name in sys.modules])") == "[]"


def test_the_light_rooms_need_no_torch() -> None:
    code = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY[:5]}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
import longrein.contract, longrein.rollout, longrein.rendering, longrein.recorder, longrein.agents, longrein.envs
import longrein.proxy, longrein.harnesses.process, longrein.engines.scripted, longrein.engines.replay, longrein.engines.vllm, longrein.envs.harness
import longrein.runs.export, longrein.viewer.server, longrein.viewer.page
print("ok")
"""
    assert run(code) == "ok"


def test_every_public_name_is_importable() -> None:
    for name in longrein.__all__:
        assert getattr(longrein, name) is not None


def test_the_command_line_answers_quickly() -> None:
    assert seconds("import longrein.cli") < 0.3


def seconds(code: str) -> float:
    """Processor time of a statement in a fresh interpreter, the best of three: the machine may be busy."""
    timed = f"import time; start = time.process_time(); {code}; print(time.process_time() - start)"
    return min(float(run(timed)) for _ in range(3))


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=480)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
