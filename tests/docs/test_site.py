"""The documentation as a site: built without a warning, and read without asking anybody else for anything."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from missing import missing
from page import ROOT

OUTSIDE = re.compile(r"^(https?:)?//")
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "object": "data", "embed": "src"}
"""What a browser fetches by itself, and the attribute that says from where; links of `rel` are told apart below."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None:
        missing("mkdocs is not installed; `make test` does so")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Fetches(HTMLParser):
    """The addresses that a browser fetches to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = dict(attrs)
        if tag == "link" and {"stylesheet", "preconnect", "preload", "icon"} & set((said.get("rel") or "").split()):
            self.found.append(said.get("href") or "")
        elif tag in FETCHED:
            self.found.append(said.get(FETCHED[tag]) or "")
        self.found += re.findall(r"url\(['\"]?([^'\")]+)", said.get("style") or "")


def fetched(page: str) -> list[str]:
    reader = Fetches()
    reader.feed(page)
    return reader.found


def test_no_page_asks_an_outside_address(site: Path) -> None:
    pages, styles = list(site.rglob("*.html")), list(site.rglob("*.css"))
    assert len(pages) > 20
    assert styles
    asked = {page.name: fetched(page.read_text()) for page in pages}
    asked |= {style.name: re.findall(r"url\(['\"]?([^'\")]+)", style.read_text()) for style in styles}
    assert all(asked[page.name] for page in pages), "a page has a stylesheet of its own at least"
    assert {name: outside for name, urls in asked.items() if (outside := [url for url in urls if OUTSIDE.match(url)])} == {}


def test_what_would_be_fetched_from_outside_is_seen() -> None:
    page = '<link rel="stylesheet" href="https://a/b.css"><script src="//c/d.js"></script><a href="https://e">f</a>'
    assert [url for url in fetched(page) if OUTSIDE.match(url)] == ["https://a/b.css", "//c/d.js"]


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    import longrein

    anchors = set(re.findall(r'id="([\w.]+)"', (site / "reference.html").read_text()))
    missing = [name for name in longrein.__all__ if not name.startswith("_") and f"longrein.{name}" not in anchors]
    assert missing == []
