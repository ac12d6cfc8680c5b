"""`import longrein` is quick and light, and every public name is where it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import longrein

HEAVY = ("torch", "transformers", "trl", "datasets", "accelerate", "numpy", "renderers", "aiohttp")

BLOCKED = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY[:5]}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
"""


def test_import_is_light_and_quick() -> None:
    assert seconds("import longrein") < 0.3
    assert run(f"import longrein, sys; print([name for name in {HEAVY} if name in sys.modules])") == "[]"


def test_the_light_rooms_need_no_torch() -> None:
    code = f"""{BLOCKED}
import longrein.contract, longrein.rollout, longrein.rendering, longrein.recorder, longrein.agents, longrein.envs
import longrein.proxy, longrein.harnesses.process, longrein.engines.scripted, longrein.engines.replay, longrein.engines.vllm, longrein.envs.harness
import longrein.runs.export, longrein.viewer.server, longrein.viewer.page
print("ok")
"""
    assert run(code) == "ok"


def test_a_tokenizer_asked_for_where_transformers_is_missing_says_what_to_install() -> None:
    code = f"""{BLOCKED}
from longrein.contract import LongreinError
from longrein.harnesses.commands import _rendering
try:
    _rendering("anywhere")
except LongreinError as error:
    print(error)
"""
    sentence = "--tokenizer needs transformers, which is not installed: pip install 'longrein[train]', or leave it unsaid"
    assert run(code) == sentence


def test_a_mistake_in_what_is_to_be_played_is_told_before_anything_that_trains_is_imported(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    code = f"""{BLOCKED}
import contextlib, os
from longrein.cli import main
os.chdir({str(tmp_path)!r})
sys.stderr = sys.stdout
for command, *words in (
    ["train", "--env", "longrein.envs.TreasureHnut"], ["train", "--env-config", '{{"min_hops": "two"}}'],
    ["train", "--tasks", "nowhere.parquet"], ["train", "--tasks", "taken"], ["train", "--out", "taken"], ["train", "--model", "./nowhere"],
    ["eval", "--env", "longrein.envs.TreasureHnut"], ["eval", "--tasks", "nowhere.jsonl"], ["eval", "--model", "./nowhere"],
):
    sys.argv = ["longrein", command, *words]
    with contextlib.suppress(SystemExit):
        main()
"""
    told = [line.removeprefix("longrein: ") for line in run(code).splitlines() if line.startswith("longrein: ")]
    hunt = "env_class_path 'longrein.envs.TreasureHnut': the module 'longrein.envs' has no 'TreasureHnut'. Did you mean 'longrein.envs.TreasureHunt'?"
    model = "the model './nowhere' cannot be loaded: it must be a folder that `save_pretrained` wrote, or a causal model's name on the hub (there is no folder at that path)"
    assert told == [
        hunt,
        "TreasureHunt refuses its env_config: min_hops is 'two'; it must be a whole number",
        "there is no file 'nowhere.parquet'; tasks are read from a .jsonl or .parquet file, or from a dataset of the hub by its name",
        "the file 'taken' must end in .jsonl or .parquet: the ending says how it is read",
        "out is 'taken', which is a file; a run is a folder: give it another name",
        model,
        hunt,
        "there is no file 'nowhere.jsonl'; tasks are read from a .jsonl or .parquet file, or from a dataset of the hub by its name",
        model,
    ]


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
