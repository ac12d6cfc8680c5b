"""Small software tasks: a git repository with an instruction for a coding agent, and tests that it never sees.

Always true: the agent gets a repository of one commit, without the tests, the answer or any history that tells it; the code it
leaves runs in a sandbox of its own when it is judged. Of a generated task the expected results never enter that sandbox: calls
go in, results come out and are compared outside, so that no code can make a wrong result right. Of a task folder the test
command must end well with the hidden tests, and badly with the same tests and one more that always fails.

A generated task is `{"instruction", "files", "cases", "bug"}`; a task folder's is `{"instruction", "folder", "test_command",
"seconds"}`, made by `load_repo_tasks`.
"""

from __future__ import annotations

import ast
import json
import os
import random
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longrein.contract import LongreinError, Verdict
from longrein.envs import uses
from longrein.envs.bugs import Bug, bugs
from longrein.envs.environment import EnvConfigError
from longrein.envs.harness import HarnessConfig, HarnessEnv
from longrein.envs.modules import MODULES, Case
from longrein.harnesses.isolated import isolated
from longrein.harnesses.outcome import Outcome
from longrein.harnesses.sandbox import Sandbox, why_not

SHELL = ("{python}", "-m", "longrein.harnesses.shell", "{instruction}")
SECONDS = 30.0
"""For the judging of a task that does not say."""
_PYTEST = """
import os, sys
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
import pytest
sys.path.insert(0, os.getcwd())
sys.exit(pytest.main(sys.argv[1:]))
"""
TEST_COMMAND = (
    *("{python}", "-I", "-c", _PYTEST),
    *("-q", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull, "--rootdir", ".", "tests"),
)
"""pytest without the configuration, the plugins and the start-up files of the repository."""
CONFIGURATION = frozenset(
    [
        *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml"),
        *("sitecustomize.py", "usercustomize.py", "pytest.py", "unittest.py", "_pytest", "pytest", "unittest"),
    ]
)
"""What steers a test run, or takes its place: as it was in the repository, whatever the agent did to it."""
_LIMITS = Sandbox(memory_mb=2048, processes=128, disk_mb=512)
_FEWEST = 3
"""Uses that a bug must break, and half of those that it must not."""
_MOST_RESULTS = 10_000_000
_STEPS = 20_000
"""Lines a module may run for one use before it counts as endless."""


@dataclass(frozen=True, kw_only=True)
class RepoConfig(HarnessConfig):
    command: Sequence[str] = ()
    """Any coding agent that works in its current folder, `{instruction}` being the task's; or name a `program`. Unsaid: a loop
    with one shell tool, `longrein.harnesses.shell`."""
    verify: str | Sequence[str] = "longrein.envs.repo.verify_repo"
    max_turns: int = 20
    max_tokens: int = 8192

    def __post_init__(self) -> None:
        if not self.command and self.program is None:
            object.__setattr__(self, "command", SHELL)
        super().__post_init__()


class RepoEnv(HarnessEnv):
    """A coding agent on repositories; without a dataset it makes its own, a bug in a small module each.

    >>> RepoEnv.tasks(1, seed=3)[0]["files"].keys() >= {"README.md"}
    True
    """

    Config = RepoConfig
    config: RepoConfig

    @classmethod
    def tasks(cls, count: int, *, seed: int = 0, env_config: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        return [make_task(f"{seed}/{number}") for number in range(count)]

    def prepare(self, task_data: dict[str, Any], workdir: Path) -> None:
        write_repository(task_data, workdir)


# Making tasks


def make_task(seed: int | str) -> dict[str, Any]:
    """A repository of one to three modules with a bug in one of them; the same for the same seed."""
    rng = random.Random(f"repository {seed}")
    while True:
        names = rng.sample(sorted(MODULES), rng.randint(1, 3))
        cases = _cases(names[0], rng, 40)
        right = _results(MODULES[names[0]].source, cases)
        for bug in bugs(MODULES[names[0]].source, rng):
            wrong = _results(bug.source, cases)
            failing = [number for number in range(len(cases)) if right[number] != wrong[number]]
            enough = _FEWEST <= len(failing) <= len(cases) - 2 * _FEWEST
            if None not in wrong and enough:
                return _task(names, bug, cases, right, wrong, failing, rng)


def _task(
    names: list[str], bug: Bug, cases: list[Case], right: list[Any], wrong: list[Any], failing: list[int], rng: random.Random
) -> dict[str, Any]:
    broken = names[0]
    passing = [number for number in range(len(cases)) if number not in failing]
    kept = [*failing[:12], *passing[3:15]]
    hidden = [[broken, cases[number], uses.as_text(right[number])] for number in kept]
    shown = {broken: [(cases[number], right[number]) for number in passing[:3]]}
    files = {f"{broken}.py": bug.source + "\n"}
    for name in names[1:]:
        files[f"{name}.py"] = ast.unparse(ast.parse(MODULES[name].source)) + "\n"
        more = _cases(name, rng, 7)
        gives = _results(MODULES[name].source, more)
        shown[name] = list(zip(more[:3], gives[:3], strict=True))
        hidden += [[name, case, uses.as_text(given)] for case, given in zip(more[3:], gives[3:], strict=True)]
    for name in names:
        files[f"test_{name}.py"] = _visible_tests(name, shown[name])
    listed = "\n".join(f"- `{name}.py`: {ast.get_docstring(ast.parse(MODULES[name].source))}" for name in sorted(names))
    files["README.md"] = f"# Parts\n\n{listed}\n\nTests: `python -m unittest`.\n"
    files[".gitignore"] = "__pycache__/\n"
    rng.shuffle(hidden)
    example = min(failing, key=lambda number: (len(json.dumps(cases[number])), number))
    return {
        "instruction": f"`{broken}.py` has a bug. {_symptom(cases[example], right[example], wrong[example])} The docstrings say "
        "what is right. Find the bug and fix it in place; everything else must stay as it is.",
        "files": files,
        "cases": hidden,
        "bug": {"module": broken, "function": bug.function, "kind": bug.kind},
    }


def _cases(name: str, rng: random.Random, count: int) -> list[Case]:
    """Different uses of a module, as many as there are up to `count`."""
    found: dict[str, Case] = {}
    for _ in range(4 * count):
        case = MODULES[name].case(rng)
        found.setdefault(json.dumps(case), case)
        if len(found) == count:
            break
    return list(found.values())


def _results(source: str, cases: Sequence[Case]) -> list[Any]:
    """What a module gives in each case, as JSON has it; None where it does not end."""
    left = 0

    def step(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise _EndlessError
        return step

    found: list[Any] = []
    before = sys.gettrace()
    code = compile(source, "module", "exec")
    for case in cases:
        module = types.ModuleType("module")
        left = _STEPS
        try:
            exec(code, module.__dict__)
            arguments = json.loads(json.dumps(case))  # a use may change what it is given
            sys.settrace(step)
            results = uses.results(module, arguments)
        except _EndlessError:
            results = None
        finally:
            sys.settrace(before)
        found.append(results)
    return found


class _EndlessError(BaseException):
    """Not an `Exception`: code that catches those is stopped too."""


def _visible_tests(name: str, cases: Sequence[tuple[Case, list[Any]]]) -> str:
    lines = ["import unittest", "", f"import {name}", "", "", f"class Test{name.title()}(unittest.TestCase):"]
    for number, (case, results) in enumerate(cases):
        lines.append(f"    def test_{number}(self):")
        target = name
        for step, (call, result) in enumerate(zip(case, results, strict=True)):
            text = f"{target}.{_call(call)}"
            if step == 0 and len(case) > 1:
                target = "it"
                lines.append(f"        it = {text}")
            elif "raises" in result:
                lines += [f"        with self.assertRaises({result['raises']}):", f"            {text}"]
            else:
                lines.append(f"        self.assertEqual({text}, {result['gives']!r})")
        lines.append("")
    return "\n".join([*lines, "", 'if __name__ == "__main__":', "    unittest.main()", ""])


def _symptom(case: Case, right: list[Any], wrong: list[Any]) -> str:
    """The first call that goes wrong, and what came before it."""
    at = next(number for number in range(len(case)) if right[number] != wrong[number])
    before = "; ".join(("it = " if number == 0 else "it.") + _call(call) for number, call in enumerate(case[:at]))
    call = ("it." if len(case) > 1 and at else "") + _call(case[at])
    return (
        f"{f'After `{before}`, ' if before else ''}`{call}` {_told(wrong[at])}, and should {_told(right[at], should=True)}."
    )


def _told(result: dict[str, Any], should: bool = False) -> str:
    verb, what = ("raise", result["raises"]) if "raises" in result else ("give", repr(result["gives"]))
    return f"{verb if should else verb + 's'} `{what}`"


def _call(step: list[Any]) -> str:
    return f"{step[0]}({', '.join(map(repr, step[1]))})"


# Task folders


def load_repo_tasks(folder: str | Path) -> list[dict[str, Any]]:
    """Tasks from a folder of task folders, or from one: `repo/`, `instruction.md`, `tests/`, and maybe a `task.json` with
    `test_command` (a list of strings; unsaid, pytest over `tests/`) and `seconds`."""
    root = Path(folder)
    found = [root] if (root / "repo").is_dir() else sorted(path.parent for path in root.glob("*/repo") if path.is_dir())
    if not found:
        raise LongreinError(f"{folder} holds no task: a task is a folder with `repo/`, `instruction.md` and `tests/`")
    tasks = []
    for place in found:
        for needed in ("instruction.md", "tests"):
            if not (place / needed).exists():
                raise LongreinError(f"the task folder {place} has no `{needed}`")
        told = json.loads((place / "task.json").read_text()) if (place / "task.json").exists() else {}
        if unknown := set(told) - {"test_command", "seconds"}:
            raise LongreinError(f"{place}/task.json has {', '.join(sorted(unknown))}; it may have test_command and seconds")
        instruction = (place / "instruction.md").read_text().strip()
        tasks.append(
            {
                "instruction": instruction,
                "folder": str(place.resolve()),
                "test_command": list(TEST_COMMAND),
                "seconds": SECONDS,
            }
            | told
        )
    return tasks


def write_repository(task: Mapping[str, Any], workdir: Path) -> None:
    """The task's repository as the agent gets it: its files in one commit, always the same one."""
    if "folder" in task:
        _copy(Path(task["folder"], "repo"), workdir)
    elif "files" in task:
        for path, text in task["files"].items():
            place = workdir / path
            if not place.resolve().is_relative_to(workdir.resolve()):
                raise EnvConfigError(f"the task has the file {path!r}, which lies outside its repository")
            if ".git" in Path(path).parts:  # git runs what its configuration names
                raise EnvConfigError(f"the task has the file {path!r}; what git keeps of a repository is git's own")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
    else:
        raise EnvConfigError(f"a repository task needs `files` or `folder`; this one has {', '.join(task) or 'nothing'}")
    _git(workdir, "init", "--quiet", "--initial-branch=main")
    _git(workdir, "add", "--all", "--force")
    _git(workdir, "commit", "--quiet", "--allow-empty", "--message=Start")


def _git(workdir: Path, *arguments: str) -> None:
    who = {f"GIT_{role}_{field}": value for role in ("AUTHOR", "COMMITTER") for field, value in _SIGNATURE.items()}
    env = {"PATH": os.environ.get("PATH", os.defpath), "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", **who}
    try:
        result = subprocess.run(["git", *arguments], cwd=workdir, env=env, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        raise LongreinError("repository tasks need `git`, which is not on PATH (Debian: apt-get install git)") from None
    if result.returncode != 0:
        raise LongreinError(f"git {arguments[0]} failed in a task's repository: {result.stderr.strip()}")


_SIGNATURE = {"NAME": "longrein", "EMAIL": "longrein@localhost", "DATE": "2026-01-01T00:00:00Z"}


# Judging


def verify_repo(task: Mapping[str, Any], outcome: Outcome) -> Verdict:
    """1.0 when every hidden test passes with the code that the agent left, else 0.0."""
    with tempfile.TemporaryDirectory(prefix="longrein-repo-", ignore_cleanup_errors=True) as name:
        code = Path(name, "code")
        _copy(outcome.workdir, code)
        return _by_cases(task, code) if "cases" in task else _by_command(task, code)


def _by_cases(task: Mapping[str, Any], code: Path) -> Verdict:
    cases = task["cases"]
    ours = f"judge_{secrets.token_hex(8)}"
    (code / ours).mkdir()
    shutil.copyfile(uses.__file__, code / ours / "uses.py")
    (code / ours / "calls.json").write_text(json.dumps([[module, case] for module, case, _ in cases]))
    command = ["{python}", "-I", "-B", f"{ours}/uses.py", f"{ours}/calls.json", f"{ours}/results.json"]
    with isolated(command, folder=code, timeout=float(task.get("seconds", SECONDS)), sandbox=_sandbox()) as ended:
        told = _results_of(ended.workdir / ours / "results.json")
    told = told if isinstance(told, list) and len(told) == len(cases) else [None] * len(cases)
    passed = sum(given == expected for given, (_, _, expected) in zip(told, cases, strict=True))
    info = {"tests": len(cases), "passed": passed, **({"tests_limit": ended.limit} if ended.limit else {})}
    return Verdict(float(passed == len(cases)), info)


def _results_of(path: Path) -> Any:
    """A file that code of the policy may have put there."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(number, "rb") as file:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_RESULTS:
            return None
        try:
            return json.loads(file.read())
        except (ValueError, RecursionError):
            return None


def _by_command(task: Mapping[str, Any], code: Path) -> Verdict:
    folder = Path(task["folder"])
    _restore_configuration(folder / "repo", code)
    if not (folder / "repo/tests").is_dir():
        _remove(code / "tests")
    _copy(folder / "tests", code / "tests")
    ended = _tested(task, code)
    if ended != 0:
        return Verdict(0.0, {"test_exit_code": ended})
    if not _spoil(folder / "tests", code / "tests"):
        return Verdict(1.0, {"test_exit_code": 0})
    forged = _tested(task, code) == 0
    return Verdict(float(not forged), {"test_exit_code": 0, **({"forged": True} if forged else {})})


def _tested(task: Mapping[str, Any], code: Path) -> int:
    """The exit code of the test command; 124 where it ran into a limit."""
    with isolated(task["test_command"], folder=code, timeout=float(task["seconds"]), sandbox=_sandbox()) as ended:
        return 124 if ended.limit else ended.exit_code


def _restore_configuration(original: Path, code: Path) -> None:
    for path in sorted(code.rglob("*"), reverse=True):
        if path.name in CONFIGURATION:
            _remove(path)
    for path in original.rglob("*"):
        inside = path.relative_to(original)
        if ".git" not in inside.parts and path.is_file() and CONFIGURATION & set(inside.parts):
            for above in inside.parents[-2::-1]:
                _make_folder(code / above)
            shutil.copy(path, code / inside)


def _spoil(hidden: Path, tests: Path) -> bool:
    """Put a test that fails into every hidden Python test file; whether there was one. A run that ends well all the same was
    not ended by its tests: the code it tests left early, or changed what a failure is."""
    name = f"{random.choice(('handles', 'keeps', 'returns', 'rejects'))}_{secrets.token_hex(3)}"
    spoiled = False
    for path in hidden.rglob("*.py"):
        if path.name.startswith("test") or path.stem.endswith("_test"):
            spoiling = f"import unittest as _u\n\n\nclass Test_{name}(_u.TestCase):\n    def test_{name}(self):\n"
            place = tests / path.relative_to(hidden)
            place.unlink()  # it may be read-only, as the task's own is
            place.write_text(f"{path.read_text()}\n\n{spoiling}        self.assertEqual(1, 2)\n")
            spoiled = True
    return spoiled


def _sandbox() -> Sandbox | str:
    return _LIMITS if why_not() is None else "none"


def _copy(source: Path, target: Path) -> None:
    """Files and folders, without version control, caches, links and whatever else is no file; in place of what is there."""
    _make_folder(target)
    for entry in os.scandir(source):
        if entry.name in (".git", "__pycache__"):
            continue
        if entry.is_dir(follow_symlinks=False):
            _copy(Path(entry.path), target / entry.name)
        elif entry.is_file(follow_symlinks=False):
            _remove(target / entry.name)
            shutil.copy(entry.path, target / entry.name)


def _make_folder(path: Path) -> None:
    if not path.is_dir():
        _remove(path)
        path.mkdir()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
