"""A run as one HTML file to send to somebody: the same page, with what it shows inside.

Always true: the file asks nothing of any server; no text in it can end the element it stands in; the browser is told, by their digests,
which script and which style are the page's own, and runs no others.
"""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path
from typing import Any

from longrein.runs import Run
from longrein.viewer import data
from longrein.viewer.server import static

ROLLOUTS = 200
"""Rollouts a file holds unless told otherwise; the first screen is of all of them."""


def write_page(run: Run, path: str | Path, *, rollouts: int = ROLLOUTS) -> int:
    """Write the page with the last `rollouts` rollouts of the run, and those that failed before others; returns how many."""
    path = Path(path)
    numbers = [
        row["number"]
        for row in run.rows("SELECT number FROM rollouts ORDER BY failed IS NULL, number DESC LIMIT ?", (rollouts,))
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.part")
    fresh.write_bytes(page(embedded(run, sorted(numbers, reverse=True))))
    os.replace(fresh, path)
    return len(numbers)


def embedded(run: Run, numbers: list[int]) -> dict[str, Any]:
    """Everything the page would have asked the server for. Tokens are kept by call, so that no branch repeats another's."""
    marks = ", ".join(str(int(number)) for number in numbers)
    used: set[int] = set()
    rollouts = {}
    for number in numbers:
        kept = data.one(run, number)
        kept["segments"] = data.segments_by_call(run, number)
        for of_call in kept["segments"]:
            used.update(token for segment in of_call for token in segment["ids"])
        rollouts[number] = kept
    return {
        "overview": {**data.overview(run), "live": False},
        "rows": run.rows(f"SELECT {data.LISTED} FROM rollouts WHERE number IN ({marks}) ORDER BY number DESC"),
        "rollouts": rollouts,
        "pieces": data.pieces(run, used),
    }


def page(content: dict[str, Any]) -> bytes:
    script, style = static("page.js"), static("page.css")
    policy = f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; base-uri 'none'; form-action 'none'"
    html = static("index.html")
    html = html.replace(
        '<meta charset="utf-8">',
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        1,
    )
    html = html.replace('<link rel="stylesheet" href="page.css">', f"<style>{style}</style>", 1)
    before, after = html.split('<script src="page.js" defer></script>', 1)
    # In JSON `<` stands only inside strings: escaped, no text of a model can close the element or open another.
    inside = (
        data.wire(content)
        .replace(b"<", b"\\u003c")
        .replace(b"\xe2\x80\xa8", b"\\u2028")
        .replace(b"\xe2\x80\xa9", b"\\u2029")
    )
    return b"".join(
        [
            before.encode(),
            after.encode().replace(
                b"</body>",
                b'<script type="application/json" id="run">'
                + inside
                + b"</script>\n<script>"
                + script.encode()
                + b"</script>\n</body>",
                1,
            ),
        ]
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
