"""Every command and file that README and docs show is run, in the order and the words in which they stand there.

A page runs in a new folder (README in a copy of this checkout), in a network of its own (so its ports are free, and no address outside
is there), with the tools of this environment. Stand-ins, because the real ones would have to be fetched: `./my-model` and `Qwen/Qwen3-0.6B` are a small random model with
Qwen3's tokenizer; the small policy, the agent programs and vLLM are those that the Makefile has put into the cache.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from missing import missing
from page import PAGES, ROOT, Page, read

NOT_RUN_AT_MOST = 6
"""Blocks that are not run, in all of README and docs."""


@pytest.fixture(scope="session")
def my_model(random_model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a real vocabulary and room for an agent program's prompt."""
    folder = tmp_path_factory.mktemp("models") / "my-model"
    words = tokenizer("qwen3")
    random_model(vocab_size=len(words), max_position_embeddings=40960).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def run(page: Page, folder: Path, my_model: Path, policy: Path, *, slow: bool) -> None:
    """Run the page's blocks; what it printed is shown where one of them fails."""
    work, home = folder / "work", folder / "home"
    if page.name == "README.md" and slow:
        check_out(work)
    stand_ins = {
        work / "my-model": my_model,
        work / "Qwen/Qwen3-0.6B": my_model,
        work / ".cache/tiny": policy,
        home / ".cache/longrein/tiny": policy,
    }
    for link, target in stand_ins.items():
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(target)
    variables = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "TMPDIR": str(folder),
        "BROWSER": "true",  # a page that is opened is opened nowhere
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
        "LONGREIN_HARNESSES": str(ROOT / ".cache/harnesses"),
        "LONGREIN_VLLM": str(ROOT / ".venv-vllm/bin/vllm"),
        "LONGREIN": str(ROOT),
        "PYTHONPATH": "",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    # Ctrl-C works in a page also where these tests run in the background, which ignores it
    command = [
        "env",
        "--default-signal=INT",
        "bwrap",
        "--dev-bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "--unshare-net",
        "--unshare-pid",
        "--die-with-parent",
    ]
    done = subprocess.run(
        [*command, "bash", "-c", page.script(slow=slow)],
        cwd=work,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3600 if slow else 900,
    )
    assert done.returncode == 0, f"exit code {done.returncode} after:\n{done.stdout[-6000:]}"


def check_out(folder: Path) -> None:
    """This repository's files, with what `make` has set up already: all of them are older than that."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
        os.utime(folder / name, (0, 0))
    for name in (".venv", ".cache"):
        (folder / name).symlink_to(ROOT / name)


@pytest.fixture
def runs(my_model: Path, folder: Any, tmp_path: Path) -> Any:
    if shutil.which("bwrap") is None:
        missing("bubblewrap is not installed; `make test` does so")
    return lambda page, **how: run(page, tmp_path, my_model, folder("tiny"), **how)


READ = {str(path.relative_to(ROOT)): read(path) for path in PAGES}
QUICK = [name for name, page in READ.items() if page.to_run(slow=False)]
SLOW = [name for name, page in READ.items() if page.to_run(slow=False) != page.to_run(slow=True)]


@pytest.mark.parametrize("name", QUICK)
def test_the_page_runs_as_it_stands(name: str, runs: Any) -> None:
    runs(READ[name], slow=False)


@pytest.mark.docs
@pytest.mark.parametrize("name", SLOW)
def test_the_page_runs_to_its_end(name: str, runs: Any) -> None:
    runs(READ[name], slow=True)


def test_what_is_not_run_has_a_reason_and_is_little(record_property: Any) -> None:
    left = [
        f"{name}, line {block.line}: {block.not_run}"
        for name, page in READ.items()
        for block in page.blocks
        if block.not_run
    ]
    print("not run:", *left, sep="\n  ")
    assert len(left) <= NOT_RUN_AT_MOST, "\n".join(left)


@pytest.mark.parametrize("name", READ)
def test_a_command_within_a_sentence_can_be_given(name: str) -> None:
    import typer.main

    from longrein.cli import app

    text = re.sub(r"```.*?^```", "", READ[name].path.read_text(), flags=re.M | re.S)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    for words in (
        shlex.split(code) for code in re.findall(r"`((?:longrein|make|python -m) [^`]+)`", text) if "..." not in code
    ):
        if words[0] == "make":
            assert words[1] in targets, f"make has no {words[1]}"
        elif words[0] == "python":
            path = words[2].replace(".", "/")
            assert any((ROOT / where / f"{path}{end}").exists() for where in ("", "src") for end in (".py", "/__main__.py"))
        else:
            command: Any = typer.main.get_command(app)
            words = words[1 : words.index("|") if "|" in words else None]
            while words and words[0] in getattr(command, "commands", {}):
                command, words = command.commands[words[0]], words[1:]
            assert not hasattr(command, "commands") or not words or words == ["--help"], f"longrein has no {' '.join(words)}"
            if words and words != ["--help"]:
                command.make_context("longrein", words)


@pytest.mark.parametrize("name", [*READ, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name: str) -> None:
    text = re.sub(r"```.*?^```", "", (ROOT / name).read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = (ROOT / name).parent / path if path else ROOT / name
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def anchors(path: Path) -> set[str]:
    """What the headings of a page are called in a link."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_what_troubleshooting_quotes_is_what_longrein_says() -> None:
    page = ROOT / "docs/troubleshooting.md"
    quoted = re.findall(r"^\*\*`([^`]+)`\*\*$", page.read_text(), re.M)
    assert len(quoted) > 30
    said = "\n".join(text for path in (ROOT / "src").rglob("*.py") for text in strings(ast.parse(path.read_text())))
    for words in quoted:
        assert re.search(".*?".join(re.escape(part) for part in words.split("…")), said), words


def strings(tree: ast.AST) -> list[str]:
    """Every text of a module, on a line of its own; `…` stands for what is filled in."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            found.append("".join(map(str, parts)).replace("\n", " "))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value.replace("\n", " "))
    return found


MADE = """
<!-- test: slow, exit 2 -->
```bash
longrein tain
```
"""


def test_a_block_is_run_shown_or_has_a_reason() -> None:
    where = Path("made.md")
    (block,) = read(where, MADE).blocks
    assert (block.slow, block.how, block.what, block.line) == (True, "exit", "2", 3)
    for refused in (
        "```\nlongrein train\n```\n",
        "```text\n$ longrein train\n```\n",
        "```toml\nsteps = 3\n```\n",
        "<!-- test: quick -->\n```bash\ntrue\n```\n",
        "   ```bash\ntrue\n```\n",
    ):
        with pytest.raises(AssertionError):
            read(where, refused)


WAITS = "python -c \"import time; print('up', flush=True); time.sleep(600)\""


@pytest.mark.parametrize(
    ("blocks", "fails"),
    [
        ("```bash\ncd /\n```\n```bash\n[ $PWD = / ]\n```\n", False),
        ('```python title="a/b.py"\nprint("b" + str(1))\n```\n```bash\npython a/b.py | grep b1\n```\n', False),
        ("```bash\nfalse | true\ntrue\n```\n", True),
        ("```python\nraise SystemExit(3)\n```\n", True),
        ("<!-- test: exit 3 -->\n```python\nraise SystemExit(3)\n```\n", False),
        ("<!-- test: exit 3 -->\n```bash\nfalse\n```\n", True),
        ('<!-- test: background until "up" -->\n```bash\npython -c "print(\'up\')"\n```\n', False),
        ('<!-- test: background until "up" -->\n```bash\necho down\n```\n', True),
        (f'<!-- test: Ctrl-C at "up" -->\n```bash\ntrue\n{WAITS}\n```\n', False),
        (
            f'<!-- test: Ctrl-C at "up" -->\n```bash\n{WAITS.replace("import time;", "import signal, sys, time; signal.signal(2, lambda *_: sys.exit(3));")}\n```\n',
            True,
        ),
        ("<!-- not run: no reason -->\n```bash\nfalse\n```\n", False),
    ],
)
def test_a_block_that_fails_fails_its_page(blocks: str, fails: bool, runs: Any) -> None:
    page = read(ROOT / "made.md", blocks)
    if fails:
        with pytest.raises(AssertionError, match="exit code"):
            runs(page, slow=True)
    else:
        runs(page, slow=True)
