"""`longrein init`: a small project, ready to train."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from longrein.contract import LongreinError

STARTER = Path(__file__).parent.parent / "starter"
FILES = {
    "environment.py": "MODULE.py",
    "run.toml": "run.toml",
    "tests/test_environment.py": "tests/test_environment.py",
    "README.md": "README.md",
    "pyproject.toml": "pyproject.toml",
    "gitignore": ".gitignore",
}
"""Of the starter, and what each is called in the project. MODULE and NAME are filled, in the files too."""
TASKS = 256


def init(
    name: Annotated[str, typer.Argument(help="The folder to make; the environment's module is named after it.")],
) -> None:
    """Write a small project: an environment of your own, a dataset, a run file and a test.

    Example: `longrein init word-game && cd word-game && longrein train run.toml`
    """
    folder = Path(name)
    module = re.sub(r"\W", "_", folder.resolve().name).lower()
    if not re.match(r"[a-z]", module):
        raise LongreinError(f"the name is {name!r}; it must begin with a letter, for a Python module is named after it")
    if _importable(module):
        raise LongreinError(f"there is a Python module {module!r} already; choose another name than {name!r}")
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        raise LongreinError(f"{name!r} is there already and not an empty folder; choose another name")
    for source, target in FILES.items():
        path = folder / _filled(target, folder, module)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_filled((STARTER / source).read_text(), folder, module))
    from longrein.starter.environment import FirstWord

    lines = [json.dumps(task) for task in FirstWord.tasks(TASKS)]
    (folder / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    print(f"{folder}: {module}.py, tasks.jsonl, run.toml, tests/")
    print(f"now: cd {shlex.quote(str(folder))} && pytest && longrein train run.toml")


def _filled(text: str, folder: Path, module: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-._")  # as a distribution may be called
    return text.replace("MODULE", module).replace("NAME", name)


def _importable(module: str) -> bool:
    """Whether an import of that name would find something else, whatever folder it is done in."""
    import importlib.util

    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None
