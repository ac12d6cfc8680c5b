"""A real browser over a real server: Chromium through Playwright, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import made
import pytest
from aiohttp import web
from missing import missing
from patience import PATIENCE
from playwright.sync_api import expect, sync_playwright

from longrein.runs import Run
from longrein.viewer.server import application

expect.set_options(timeout=PATIENCE * 1000)

Serve = Callable[[Path], contextlib.AbstractContextManager[str]]


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The page over a run, on a free port: its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[web.AppRunner, int]:
        runner = web.AppRunner(application(Run(folder)), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, runner.addresses[0][1]

    runner, port = asyncio.run_coroutine_threadsafe(start(), loop).result(PATIENCE)
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(PATIENCE)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="session")
def serve() -> Serve:
    return serving


@pytest.fixture(scope="session")
def folder_of_run(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return made.run(tmp_path_factory.mktemp("runs") / "hunts", tokenizer("qwen3"), long_tokens=100_000)


@pytest.fixture(scope="session")
def address(folder_of_run: Path) -> Iterator[str]:
    with serving(folder_of_run) as at:
        yield at


@pytest.fixture(scope="module")  # its event loop runs in this thread, where other modules' tests run theirs
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        missing("there is no Chromium; `make test` installs Debian's")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A fresh window. Whatever the page's script throws or the browser refuses fails the test, and so does any other address."""
    context = browser.new_context(viewport={"width": 1180, "height": 860})
    context.set_default_timeout(PATIENCE * 1000)
    window = context.new_page()
    wrong: list[str] = []
    window.on("pageerror", lambda error: wrong.append(str(error)))
    window.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    window.on(
        "request",
        lambda request: (
            wrong.append(request.url) if not request.url.startswith(("http://127.0.0.1:", "file:", "data:")) else None
        ),
    )
    yield window
    context.close()
    assert wrong == []
