"""Takes the pictures of docs/runs.md: `python scripts/screenshots.py RUN ROLLOUT OTHER`, on a machine with playwright and Chromium."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parent.parent / "docs/images"


def main(run: str, rollout: str, other: str) -> None:
    views = {
        "overview": "#/",
        "tokens": f"#/rollout/{rollout}?view=tokens&color=log-probability",
        "compare": f"#/compare/{rollout}/{other}",
    }
    command = [sys.executable, "-c", "from longrein.cli import main; main()", "view", run, "--no-browse"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        assert server.stdout is not None
        address = server.stdout.readline().split(" at ")[1].split()[0]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 800})
        for name, view in views.items():
            page.goto(address + view)
            page.locator(f"main[data-shown='{view}']").wait_for(state="attached")
            if name == "tokens":
                page.locator(".token").last.scroll_into_view_if_needed()
                page.locator(".token").last.hover()
            page.screenshot(path=IMAGES / f"{name}.png")
        browser.close()
        server.terminate()


if __name__ == "__main__":
    main(*sys.argv[1:])
