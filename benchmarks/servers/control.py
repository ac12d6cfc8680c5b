"""How the client talks to a server it started: a number on standard input opens that many sessions, its end ends the server.

The servers are scripts, each run by the Python of its own virtual environment: nothing here needs more than the standard
library.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--upstream", help="where the stub listens")
    parser.add_argument("--seconds", type=float, default=0.0, help="how long the engine takes")
    return parser.parse_args()


def serve(url: str, opened: Callable[[int], list[str]]) -> None:
    """Open sessions until there is nothing more to read; `opened` forgets the earlier ones and gives the new keys."""
    for line in sys.stdin:
        print(json.dumps({"url": url, "keys": opened(int(line))}), flush=True)
