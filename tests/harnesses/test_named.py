"""Programs that longrein knows by name: where they are looked for, and what their settings are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from longrein.cli import app
from longrein.harnesses import HarnessError
from longrein.harnesses.catalog import FILES, harness, harnesses
from longrein.harnesses.demonstration import unique_tokens
from longrein.harnesses.package import Npm, PyPI, cache, install
from longrein.harnesses.policies import Policy
from longrein.harnesses.templates import fill

DIALECTS = {"chat", "responses", "messages", "gemini"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGREIN_HARNESSES", str(tmp_path / "programs"))
    return tmp_path / "programs"


def put(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_every_program_is_a_file_with_a_pinned_package_and_a_dialect() -> None:
    assert len(FILES) == 12
    for name, known in zip(FILES, harnesses(), strict=True):
        assert (known.name, known.dialect in DIALECTS) == (name, True)
        assert all(part.isdigit() for part in known.package.version.split("."))
        assert len(known.demo) >= 2
        assert any("{instruction}" in argument for argument in known.arguments)
        for path, text in known.files.items():
            if path.endswith(".json"):
                values = {"base_url": "http://x/v1", "url": "http://x", "key": "k", "model": "m", "home": "/h"}
                json.loads(fill(text, {}, values, path, strict=False))


def test_a_program_is_a_path_or_the_one_in_the_cache_or_the_one_on_path(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = harness("codex")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(HarnessError, match="longrein harness install codex"):
        known.find()
    on_path = put(tmp_path / "bin" / "codex")
    assert known.find() == str(on_path)
    own = put(folder / "codex/node_modules/.bin/codex")
    assert known.find() == str(on_path)  # a half-made install is none
    put(folder / "codex/node_modules/@openai/codex/package.json", '{"version": "9.9.9"}')
    assert (known.find(), known.installed()) == (str(own), "9.9.9")
    assert known.find(str(on_path)) == str(on_path)
    with pytest.raises(HarnessError, match="not a program that can be run"):
        known.find(str(tmp_path / "nothing"))
    assert known.settings()["command"][0] == str(own)


def test_a_library_is_never_the_python_on_path(folder: Path) -> None:
    known = harness("langgraph")
    with pytest.raises(HarnessError, match="langgraph is not installed"):
        known.find()
    python = put(folder / "langgraph/bin/python")
    (folder / "langgraph/lib/python3.11/site-packages/langgraph-1.2.3.dist-info").mkdir(parents=True)
    assert (known.find(), known.installed()) == (str(python), "1.2.3")


def test_an_install_that_fails_leaves_nothing_and_one_that_lies_is_told(folder: Path, monkeypatch: Any) -> None:
    bin_folder = folder.parent / "bin"
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    put(bin_folder / "npm", "#!/bin/sh\necho no such package >&2\nexit 1\n")
    with pytest.raises(HarnessError, match="exit code 1: no such package"):
        install(Npm("x", "1.0.0"), folder / "x")
    assert not (folder / "x").exists()
    put(bin_folder / "npm", "#!/bin/sh\nexit 0\n")
    with pytest.raises(HarnessError, match=r"x 1\.0\.0 was installed into .*, and nothing is there"):
        install(Npm("x", "1.0.0"), folder / "x")


def test_the_cache_is_where_the_variable_says_or_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert cache() == folder
    monkeypatch.delenv("LONGREIN_HARNESSES")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache() == Path("/somewhere/longrein/harnesses")
    assert PyPI("a-b", "1").installed(Path("/somewhere")) is None


def test_the_list_says_what_is_there(folder: Path) -> None:
    put(folder / "pi/node_modules/@earendil-works/pi-coding-agent/package.json", '{"version": "0.74.2"}')
    shown = CliRunner().invoke(app, ["harness", "list"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert all(name in shown.output for name in FILES)
    (line,) = [line for line in shown.output.splitlines() if " pi " in line]
    assert line.count("0.74.2") == 2
    again = CliRunner().invoke(app, ["harness", "install", "pi"])
    assert "pi 0.74.2 is there" in again.output
    with pytest.raises(HarnessError, match="It knows pi, codex"):
        CliRunner().invoke(app, ["harness", "install", "vi"], catch_exceptions=False)


def test_a_demonstration_learns_where_it_works_from_its_first_look() -> None:
    policy = Policy(harness("pi"), "    return a + b")
    tools = [{"type": "function", "function": {"name": "bash"}}]
    first = policy([{"role": "user", "content": "go"}], tools)
    seen = [{"role": "tool", "content": "/box/work\ndef add"}]
    second = policy(seen, tools)
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    arguments = json.loads(second["tool_calls"][0]["function"]["arguments"])
    assert arguments == {
        "path": "/box/work/calc.py",
        "edits": [{"oldText": "    return a - b", "newText": "    return a + b"}],
    }
    assert unique_tokens([[1, 2], [1, 2, 3], [2]]) == 4
