"""A page of the docs as a script: its fenced blocks, in order, run by bash in a folder of their own.

Always true of a page that reads without an error: each of its blocks is a file that is written (it has a `title`), a `bash` or `python`
block that is run, a `text` block that only shows what is printed, or has a reason why it is not run. What a reader does not need to see
stands in a comment before the block:

    <!-- test: slow -->                        run by `make test-docs` alone
    <!-- test: background until "ready" -->    goes on beside the blocks after it, once it has printed that (or `until port 8000`)
    <!-- test: Ctrl-C at "step 2" -->          stopped as a person would, once it has printed that
    <!-- test: exit 2 -->                      ends with that exit code
    <!-- not run: installs from PyPI -->       the reason
    <!-- given: longrein train --smoke -->     no block: what the page takes as done (`given, slow:` for `make test-docs`)
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^<!-- given(?P<given_slow>, slow)?: (?P<given>[^\n]+) -->$|"
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?"
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.M | re.S,
)
MARK = re.compile(
    r'test: (?P<slow>slow)?(?:, )?(?P<how>background until port|background until|Ctrl-C at|exit)? ?(?P<what>"[^"]+"|\d+)?'
)
PROMPTS = re.compile(r"^(\$ |longrein |make |pip |python )", re.M)


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    title: str | None
    text: str
    slow: bool = False
    how: str | None = None
    what: str = ""
    not_run: str | None = None

    @property
    def shown_only(self) -> bool:
        return self.language == "text"

    def bash(self) -> str:
        """The block as lines of the page's script."""
        if self.title is not None:
            folder = shlex.quote(str(Path(self.title).parent))
            return f"mkdir -p {folder}\ncat > {shlex.quote(self.title)} <<'END OF FILE'\n{self.text}END OF FILE\n"
        run = self.text if self.language == "bash" else f"python - <<'END OF FILE'\n{self.text}END OF FILE\n"
        beside = f"background() {{\n{run}}}\nstart {shlex.quote(self.what)}\n"
        if self.how in ("background until", "background until port"):
            return beside
        if self.how == "Ctrl-C at":
            return f"{beside}stop\n"
        if self.how == "exit":
            return f'set +e\n( set -e\n{run})\ncode=$?\nset -e\n[ $code = {self.what} ] || {{ echo "exit code $code"; exit 1; }}\n'
        return run


# A background block is a process group (set -m) with all that it starts (set +m): Ctrl-C reaches that alone, and is not ignored.
PRELUDE = """\
set -eu -o pipefail -m
said() { if [[ $1 =~ ^[0-9]+$ ]]; then (: > /dev/tcp/127.0.0.1/$1) 2>/dev/null; else grep -qF -- "$1" "$log"; fi; }
start() {
  log=$(mktemp)
  (set +m; background) > "$log" 2>&1 < /dev/null &
  until said "$1"; do
    kill -0 $! 2>/dev/null || { cat "$log"; echo "it ended before it said: $1"; exit 1; }
    sleep 0.1
  done
  cat "$log"
}
stop() {
  kill -INT -- -$!
  code=0; wait $! || code=$?
  tail -n 3 "$log"
  [ $code = 130 ] || { echo "exit code $code after Ctrl-C"; exit 1; }
}
"""


@dataclass(frozen=True)
class Page:
    path: Path
    blocks: list[Block]

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    def to_run(self, *, slow: bool) -> list[Block]:
        """All that is run of the page; without `slow`, what is quick."""
        return [
            block for block in self.blocks if block.not_run is None and not block.shown_only and (slow or not block.slow)
        ]

    def script(self, *, slow: bool) -> str:
        blocks = self.to_run(slow=slow)
        return PRELUDE + "".join(f"echo '=== {self.name}, line {block.line}'\n{block.bash()}" for block in blocks)


def read(path: Path, text: str | None = None) -> Page:
    """The page with its blocks; refused where one is neither run nor has a reason."""
    text = path.read_text() if text is None else text
    blocks, end = [], 0
    for found in FENCE.finditer(text):
        assert "```" not in text[end : found.start()], (
            f"{path.name}: a fence that is not understood before {found[0][:80]!r}"
        )
        end = found.end()
        start = found.start("given") if found["given"] else found.start("language")
        blocks.append(_block(path, text.count("\n", 0, start) + 1, found))
    assert "```" not in text[end:], f"{path.name}: a fence that is not understood after its last block"
    return Page(path, blocks)


def _block(path: Path, line: int, found: re.Match[str]) -> Block:
    where = f"{path.name}, line {line}"
    if found["given"]:
        return Block(line, "bash", None, f"{found['given']}\n", slow=bool(found["given_slow"]))
    mark, language, title, text = found["mark"] or "", found["language"], found["title"], found["text"]
    if mark.startswith("not run: "):
        return Block(line, language, title, text, not_run=mark.removeprefix("not run: "))
    how = MARK.fullmatch(mark) if mark else None
    assert not mark or how, f"{where}: the comment {mark!r} is no way to run a block"
    if language == "text":
        assert not mark, f"{where}: what is only shown is not run"
        assert not PROMPTS.search(text), f"{where}: commands stand in a bash block, so that they are run"
    else:
        assert title or language in ("bash", "python"), (
            f"{where}: a {language or 'plain'} block has a title (a file), or is not run"
        )
    if how is None:
        return Block(line, language, title, text)
    return Block(line, language, title, text, bool(how["slow"]), how["how"], (how["what"] or "").strip('"'))
