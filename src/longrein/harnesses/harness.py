"""An agent program that longrein knows by name: where it is found, how it is told of the proxy, how it does a task by itself.

Always true: a `Harness` is plain settings, the same a user could write by hand; with them the program talks to no address but
the proxy's, and asks nobody anything.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from longrein.harnesses.outcome import HarnessError
from longrein.harnesses.package import Package, cache, install


class Step(NamedTuple):
    """A tool call of a demonstration."""

    tool: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Compaction:
    """How a program is brought to compact its history once it has read the logs of a demonstration."""

    log_lines: int = 150
    """How long each of the three logs is; 20 tokens a line, or a little less."""
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """In place of its own of that path."""
    context_length: int | None = None
    """The model's, for a program that compacts when it is told that its prompt is too long."""
    asks: str | None = None
    """Words of its request for a summary, where that comes with tools."""
    resumed: tuple[str, ...] = ()
    """The arguments of a second run that goes on where the first ended, for a program that compacts between two prompts."""


@dataclass(frozen=True, kw_only=True)
class SubAgent:
    """How a program is brought to start a sub-agent."""

    starts: tuple[Step, ...]
    """The calls that send one on the errand `{errand}`, and wait for it."""
    reports: tuple[Step, ...] = ()
    """How the sub-agent tells what it found, where a last word will not do."""
    files: Mapping[str, str] = field(default_factory=dict)
    """In place of the program's own of that path."""


LIBRARY_AGENTS = str(Path(__file__).parent / "scripts" / "library_agents.py")
"""For those that are libraries: a small agent in each, run by the interpreter that has it."""
LIBRARY_DEMO = (
    Step("run", {"command": "pwd && cat {file}"}),
    Step("write", {"path": "{folder}/{file}", "text": "{text}"}),
)


@dataclass(frozen=True, kw_only=True)
class Harness:
    """The settings of one program. `{name}` in them is filled as in `ProcessSessionFactory`, `{instruction}` from the task.

    >>> from longrein.harnesses.catalog import harness
    >>> harness("codex").dialect
    'responses'
    """

    name: str
    dialect: str
    """`chat`, `responses`, `messages` or `gemini`."""
    package: Package
    executable: str
    """The name of its command, or its path in the package."""
    arguments: tuple[str, ...]
    """How it does one task and ends."""
    env: Mapping[str, str | None] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Its settings, by path."""
    side_calls: str = "none"
    """The model calls it makes besides its own loop, in words."""
    demo: tuple[Step | str, ...] = ()
    """How a policy that knows its tools looks at `{file}` in `{folder}` and puts the line `{new}` in place of `{old}`, reply by
    reply: a tool call, or the words of one. `{text}` is the file as it shall be, `{quoted}` the same in Python."""
    compaction: Compaction | None = None
    sub_agent: SubAgent | None = None
    """Both only where the program, as it is run here, can do so."""
    closes: bool = True
    """Whether it asks for a last word, after its last tool call."""

    @property
    def folder(self) -> Path:
        """Where `longrein harness install` puts it."""
        return cache() / self.name

    def installed(self) -> str | None:
        """The version in the cache."""
        return self.package.installed(self.folder)

    def install(self) -> str:
        return install(self.package, self.folder)

    def find(self, path: str | None = None) -> str:
        """The program: the path that is given, the one in the cache, or the one on PATH."""
        if path is not None:
            if not os.access(path, os.X_OK):
                raise HarnessError(f"{path!r} is not a program that can be run")
            return str(Path(path).absolute())
        own = self.package.executable(self.folder, self.executable)
        if self.installed() is not None and own.exists():
            return str(own)
        found = shutil.which(Path(self.executable).name) if self.executable != "python" else None
        if found is None:
            raise HarnessError(f"{self.name} is not installed; `longrein harness install {self.name}` does it")
        return found

    def settings(self, path: str | None = None) -> dict[str, Any]:
        """What `ProcessSessionFactory` and `HarnessEnv` take: `command`, `env` and `files`."""
        return {"command": [self.find(path), *self.arguments], "env": dict(self.env), "files": dict(self.files)}
