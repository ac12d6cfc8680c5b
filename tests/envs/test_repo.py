"""Repository tasks: made from seeds, played by a real coding program, judged by tests that it cannot see, change or fool."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

from longrein import Agent, LongreinError
from longrein.engines.scripted import ScriptedEngine
from longrein.envs import RepoEnv, load_repo_tasks, task_dataset
from longrein.envs.modules import MODULES
from longrein.envs.repo import SHELL, _results, make_task, verify_repo, write_repository
from longrein.envs.uses import as_text
from longrein.harnesses import Outcome


def left(workdir: Path) -> Outcome:
    return Outcome(stdout="", stderr="", exit_code=0, workdir=workdir)


def fix(task: dict[str, Any], workdir: Path) -> None:
    module = task["bug"]["module"]
    (workdir / f"{module}.py").write_text(MODULES[module].source)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longrein.envs.repo.SECONDS", 10 * PATIENCE)


@pytest.fixture
def task() -> dict[str, Any]:
    return next(task for number in range(99) if (task := make_task(number))["bug"]["module"] == "runs")


def test_a_seed_makes_the_same_task_and_another_seed_another() -> None:
    tasks = RepoEnv.tasks(6, seed=4)
    assert tasks == RepoEnv.tasks(6, seed=4)
    assert len({json.dumps(task["files"]) for task in [*tasks, *RepoEnv.tasks(6, seed=5)]}) == 12
    assert task_dataset([{"env_class_path": "x", "env_config": {}, "task_data": tasks[0]}])[0]["task_data"] == tasks[0]


def test_many_seeds_give_many_modules_and_kinds_and_each_bug_shows() -> None:
    tasks = RepoEnv.tasks(40, seed=7)
    assert {task["bug"]["module"] for task in tasks} == set(MODULES)
    assert len({task["bug"]["kind"] for task in tasks}) >= 5
    for task in tasks:
        for source, ends in (
            (lambda name, task=task: task["files"][f"{name}.py"], False),
            (lambda n: MODULES[n].source, True),
        ):
            told = [as_text(_results(source(name), [case])[0]) == expected for name, case, expected in task["cases"]]
            assert all(told) is ends
        assert told.count(True) >= 10
        for path, text in task["files"].items():
            if path.endswith(".py"):
                ast.parse(text)


def test_the_visible_tests_pass_with_the_bug_and_hidden_ones_are_not_among_them(tmp_path: Path) -> None:
    task = make_task("visible")
    write_repository(task, tmp_path)
    result = subprocess.run(["python3", "-m", "unittest", "-q"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Ran" in result.stderr


def test_the_repository_is_one_commit_that_is_always_the_same(tmp_path: Path, task: dict[str, Any]) -> None:
    heads = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_repository(task, tmp_path / name)
        log = subprocess.run(["git", "log", "--format=%H %an"], cwd=tmp_path / name, capture_output=True, text=True)
        heads.append(log.stdout.splitlines())
    assert heads[0] == heads[1]
    assert len(heads[0]) == 1


def test_the_bug_is_0_and_its_fix_is_1(tmp_path: Path, task: dict[str, Any]) -> None:
    write_repository(task, tmp_path)
    verdict = verify_repo(task, left(tmp_path))
    assert verdict.env_reward == 0.0
    assert 0 < verdict.info["passed"] < verdict.info["tests"] == len(task["cases"])
    fix(task, tmp_path)
    assert verify_repo(task, left(tmp_path)).env_reward == 1.0


def test_what_works_before_must_work_after(tmp_path: Path, task: dict[str, Any]) -> None:
    write_repository(task, tmp_path)
    fix(task, tmp_path)
    with (tmp_path / "runs.py").open("a") as file:
        file.write("\ndef longest(items):\n    return 1\n")
    assert verify_repo(task, left(tmp_path)).env_reward == 0.0


EQUAL_TO_ALL = """
class Any(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def encode(items): return Any("x")
decode = longest = encode
def streaks(items, least): return Any("x")
"""
ATTACKS = {
    "leaves early": "import os; os._exit(0)",
    "exits": "import sys; sys.exit(0)",
    "equal to all": EQUAL_TO_ALL,
    "changes JSON": "import json\njson.dumps = lambda *a, **k: 'true'\njson.dump = lambda v, f: f.write('[true]')\n",
    "changes the worker": "import sys\nm = sys.modules['__main__']\nm.as_text = lambda v: 'ok'\nm.results = lambda *a: 'ok'\n",
    "writes the results": (
        "import atexit, glob, os\nplace = glob.glob('judge_*')[0]\n"
        "calls = open(place + '/calls.json').read()\nopen(place + '/results.json', 'w').write(calls)\nos._exit(0)"
    ),
    "a pipe for results": "import glob, os\nos.mkfifo(glob.glob('judge_*')[0] + '/results.json')\nos._exit(0)",
    "results that never end": (
        "import glob, os\nopen(glob.glob('judge_*')[0] + '/results.json', 'w').write('[' * 5_000_000)\nos._exit(0)"
    ),
    "looks for the answer": (
        "import gc, os, glob\nfound = [o for o in gc.get_objects() if isinstance(o, dict) and 'expected' in o]\n"
        "text = ''.join(open(p, errors='replace').read() for p in glob.glob('/box/**', recursive=True) if os.path.isfile(p))\n"
        "assert found or 'gives' in text.replace('\"gives\": value', ''), 'nothing to be found'"
    ),
    "hangs": "while True: pass",
    "fills memory": "held = [bytearray(10_000_000) for _ in range(5)]; raise MemoryError",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_code_makes_a_wrong_result_right(tmp_path: Path, task: dict[str, Any], attack: str) -> None:
    write_repository(task, tmp_path)
    with (tmp_path / "runs.py").open("a") as file:
        file.write("\n" + ATTACKS[attack])
    for name in ("sitecustomize.py", "conftest.py", "json.py", "usercustomize.py"):
        (tmp_path / name).write_text("import os; os._exit(0)")
    verdict = verify_repo({**task, "seconds": 2} if attack == "hangs" else task, left(tmp_path))
    assert verdict.env_reward == 0.0
    assert verdict.info.get("tests_limit") == ("time" if attack == "hangs" else None)


# Task folders

TESTS = """
import unittest

from shop import price


class TestPrice(unittest.TestCase):
    def test_many(self):
        self.assertEqual(price(3), 27)


def test_none():
    assert price(0) == 0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "tasks/price"
    (place / "repo").mkdir(parents=True)
    (place / "tests").mkdir()
    (place / "repo/shop.py").write_text("def price(count):\n    return count * 8\n")
    (place / "repo/pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '-q'\n")
    subprocess.run(["git", "init", "-q"], cwd=place / "repo", check=True)
    (place / "repo/.git/the-answer").write_text("count * 9")
    (place / "instruction.md").write_text("Each costs 9.\n")
    (place / "tests/test_price.py").write_text(TESTS)
    return place


def played(folder: Path, tmp_path: Path, **changes: str) -> tuple[dict[str, Any], Path]:
    (task,) = load_repo_tasks(folder.parent)
    work = tmp_path / "work"
    work.mkdir()
    write_repository(task, work)
    for name, text in changes.items():
        path = work / name.replace("__", "/").replace("_py", ".py").replace("_toml", ".toml")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return task, work


def test_a_folder_is_a_task_without_its_tests_and_its_history(folder: Path, tmp_path: Path) -> None:
    task, work = played(folder, tmp_path)
    assert task["instruction"] == "Each costs 9."
    assert {path.name for path in work.iterdir()} == {".git", "shop.py", "pyproject.toml"}
    assert not (work / ".git/the-answer").exists()
    assert verify_repo(task, left(work)).env_reward == 0.0
    (work / "shop.py").write_text("def price(count):\n    return count * 9\n")
    assert verify_repo(task, left(work)).env_reward == 1.0


def test_a_test_command_of_the_tasks_own(folder: Path, tmp_path: Path) -> None:
    command = ["sh", "-c", 'test "$(cat tests/wanted)" = "$(cat shop.py)"']
    (folder / "task.json").write_text(json.dumps({"test_command": command, "seconds": 60}))
    (folder / "tests/wanted").write_text("nine")
    (folder / "tests/test_price.py").unlink()
    task, work = played(folder, tmp_path)
    assert verify_repo(task, left(work)).env_reward == 0.0
    (work / "shop.py").write_text("nine")
    assert verify_repo(task, left(work)).env_reward == 1.0


def test_the_configuration_of_tests_is_the_repositorys_own(folder: Path, tmp_path: Path) -> None:
    (folder / "repo/conftest.py").write_text("import pytest\n@pytest.fixture\ndef nine():\n    return 9\n")
    (folder / "tests/test_price.py").write_text("import shop\ndef test_one(nine):\n    assert shop.price(1) == nine\n")
    (folder / "task.json").write_text(json.dumps({"test_command": ["{python}", "-m", "pytest", "-q", "tests"]}))
    task, work = played(folder, tmp_path, conftest_py="import pytest\n@pytest.fixture\ndef nine():\n    return 8\n")
    assert verify_repo(task, left(work)).env_reward == 0.0
    (work / "shop.py").write_text("def price(count):\n    return count * 9\n")
    (work / "conftest.py").unlink()
    assert verify_repo(task, left(work)).env_reward == 1.0


WRONG = "def price(count):\n    return count * 8\n"
FORGERIES = {
    "leaves early": {"shop_py": WRONG + "import os; os._exit(0)"},
    "leaves at the end": {"shop_py": WRONG + "import atexit, os; atexit.register(os._exit, 0)"},
    "changes what a failure is": {
        "shop_py": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef price(count):\n    return 0\n"
    },
    "changes pytest": {
        "shop_py": WRONG + "import _pytest.runner\n_pytest.runner.check_interactive_exception = lambda *a: False\n"
        "import _pytest.main\n_pytest.main.Session.testsfailed = property(lambda s: 0, lambda s, v: None)\n"
    },
    "steers by conftest": {
        "conftest_py": "import os\ndef pytest_sessionfinish(session): os._exit(0)",
        "tests__conftest_py": "import os\ndef pytest_sessionfinish(session): os._exit(0)",
    },
    "steers by configuration": {"pyproject_toml": "[tool.pytest.ini_options]\naddopts = '--collect-only'\n"},
    "takes the runner's place": {"pytest_py": "import sys; sys.exit(0)", "unittest_py": "import os; os._exit(0)"},
    "takes the tests' place": {"tests__test_price_py": "def test_all(): pass"},
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_test_run_is_no_pass(folder: Path, tmp_path: Path, name: str) -> None:
    task, work = played(folder, tmp_path, **FORGERIES[name])
    verdict = verify_repo(task, left(work))
    assert verdict.env_reward == 0.0
    assert verdict.info in (
        {"test_exit_code": 1},
        {"test_exit_code": 0, "forged": True},
    )  # the tests were run, or were to be


def in_the_way(work: Path) -> None:
    """Files where the judge has folders, folders where it has files."""
    for path in (work / "tests", work / "package", work / "shop.py"):
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
    for name in ("tests", "package"):
        (work / name).write_text("in the way")
    for name in ("pyproject.toml", "conftest.py"):
        (work / name).unlink(missing_ok=True)
        (work / name / "x").mkdir(parents=True)


def folders_for_tests(work: Path) -> None:
    for path in work.glob("tests/*"):
        path.unlink()
        (path / "deeper").mkdir(parents=True)


def links(work: Path) -> None:
    shutil.rmtree(work / "tests")
    (work / "tests").symlink_to("/usr")
    (work / "shop.py").unlink()
    (work / "shop.py").symlink_to(work.parent / "tasks/price/tests/test_price.py")


@pytest.mark.parametrize("left_behind", [in_the_way, folders_for_tests, links])
@pytest.mark.parametrize("with_tests", [True, False])
def test_what_an_agent_puts_in_the_judges_way_costs_it_the_reward(
    folder: Path, tmp_path: Path, left_behind: Any, with_tests: bool
) -> None:
    (folder / "repo/package").mkdir()
    (folder / "repo/package/conftest.py").write_text("")
    if with_tests:
        (folder / "repo/tests").mkdir()
        (folder / "repo/tests/test_price.py").write_text("def test_one(): pass")
    task, work = played(folder, tmp_path, tests__more_py="")
    left_behind(work)
    verdict = verify_repo(task, left(work))
    assert verdict.env_reward == 0.0
    assert verdict.info["test_exit_code"] in (1, 2)  # they were run


def test_read_only_tests_judge_as_others_do(folder: Path, tmp_path: Path) -> None:
    (folder / "tests/test_price.py").chmod(0o444)
    task, work = played(folder, tmp_path, shop_py=FORGERIES["leaves at the end"]["shop_py"])
    assert verify_repo(task, left(work)).info == {"test_exit_code": 0, "forged": True}
    assert (folder / "tests/test_price.py").read_text() == TESTS


@pytest.mark.parametrize("path", [".git/config", "deeper/.git/config"])
def test_a_task_cannot_configure_git(tmp_path: Path, path: str) -> None:
    ran = tmp_path / "ran"
    config = f"[core]\n\tfsmonitor = touch {ran}\n\thooksPath = .\n"
    (tmp_path / "work").mkdir()
    with pytest.raises(LongreinError, match="is git's own"):
        write_repository({"files": {path: config, "x": ""}}, tmp_path / "work")
    assert not ran.exists()


def test_a_folder_that_is_no_task_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LongreinError, match="holds no task"):
        load_repo_tasks(tmp_path / "nothing")
    (folder / "task.json").write_text('{"test_comand": []}')
    with pytest.raises(LongreinError, match="task.json has test_comand"):
        load_repo_tasks(folder)
    (folder / "instruction.md").unlink()
    with pytest.raises(LongreinError, match="has no `instruction.md`"):
        load_repo_tasks(folder)
    with pytest.raises(LongreinError, match="needs `files` or `folder`; this one has instruction"):
        write_repository({"instruction": "x"}, tmp_path)
    with pytest.raises(LongreinError, match="outside its repository"):
        write_repository({"files": {"../x": ""}}, tmp_path)


# The whole way


def coder(right: bool, task: dict[str, Any]) -> Any:
    """A model that looks for what is hidden, then writes the module, rightly or as it was."""
    module = task["bug"]["module"]
    secret = next(expected for _, _, expected in task["cases"] if len(expected) > 30)
    text = MODULES[module].source if right else task["files"][f"{module}.py"]
    commands = [
        f"git status --short; ls; grep -rlF {secret[2:28]!r} /box /run /tmp /etc /root /home /dev/shm -s | head -3",
        f"cat > {module}.py <<'END_OF_FILE'\n{text}\nEND_OF_FILE\npython3 -m unittest -q 2>&1 | tail -1; git diff --stat",
    ]

    def reply(messages: Sequence[dict[str, Any]], tools: Any) -> dict[str, Any]:
        turn = sum(message["role"] == "assistant" for message in messages)
        if turn == len(commands):
            return {"role": "assistant", "content": "Done."}
        function = {"name": "shell", "arguments": json.dumps({"command": commands[turn]})}
        return {"role": "assistant", "content": "", "tool_calls": [{"id": "", "type": "function", "function": function}]}

    return reply


@pytest.mark.parametrize("right", [True, False])
def test_a_coding_program_is_rewarded_for_the_fix_alone(
    tokenizer: Any, rendering: Any, task: dict[str, Any], right: bool
) -> None:
    engine = ScriptedEngine(coder(right, task), rendering("qwen3"))
    command = [*SHELL, "--seconds", "600"]
    config = {
        "max_tokens": 16_000,
        "max_reply_tokens": 4000,
        "sandbox": "bubblewrap",
        "command": command,
        "max_seconds": 600,
    }
    env = RepoEnv(tokenizer=tokenizer("qwen3"), env_config=config)
    (rollout,) = env.run_trial([task], Agent(None, tokenizer("qwen3"), engine=engine), 1)["rollouts"]
    assert rollout.failed is None
    assert (rollout.reward, rollout.success, rollout.turns) == (float(right), right, 3)
    assert rollout.info["tests"] == len(task["cases"])
    seen = [message["content"] for call in rollout.calls.values() for message in call.messages if message["role"] == "tool"]
    assert len(seen) == 2
    assert "runs.py" in seen[0]
    assert "/" not in seen[0]  # what was looked for is nowhere
    assert "OK" in seen[1]
