"""The example folder, copied elsewhere, runs with the light base and `requests` alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples/trl_harness_rollout"
BLOCKED = """
import runpy, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "trl", "datasets", "accelerate", "tokenizers"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
sys.path.insert(0, ".")
sys.argv = ["run.py", *sys.argv[1:]]
runpy.run_path("run.py", run_name="__main__")
"""


def run(tmp_path: Path, *arguments: str, code: str = BLOCKED) -> str:
    folder = shutil.copytree(EXAMPLE, tmp_path / "copied")
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, text=True, timeout=480
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_scripted_without_torch(tmp_path: Path) -> None:
    told = run(tmp_path, "--engine", "scripted", "--tasks", "3")
    assert told.count("reward 1.0") == 3
    assert "sampled ids [261, 10, 123" in told


def test_with_a_model_of_transformers(tmp_path: Path, folder: object) -> None:
    unblocked = BLOCKED.replace("sys.meta_path.insert(0, Blocked())", "")
    told = run(tmp_path, "--engine", "transformers", "--model", str(folder("tiny")), "--tasks", "1", code=unblocked)
    assert "rollout-0: reward" in told
    assert "log-probabilities [-" in told
