"""What a proxy between a program and its model costs: `python -m benchmarks.proxy [--json]`.

Sessions of growing conversations call a model that answers at once, directly and through longrein's proxy; with `make
bench-peers` also through the proxies of OpenEnv, LiteLLM and verifiers, each in a virtual environment of its own. Every server
is a process of its own on loopback, and the client is the same for all; they take turns, and each rests before its own. Counts are
bounded: no cell sends more than a few thousand requests.

One object a line: `proxy`, `sessions`, `context` (tokens in the conversation when measuring starts), `rps`, `p50_ms`, `p99_ms`,
and `direct_rps`, `direct_p50_ms` of the stub called without a proxy, in turn with it. `engine_s` is how long the model takes
where it is not at once, `memory_mb` what a session has cost the server's process at its end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchmarks.measure import machine

ROOT = Path(__file__).parents[1]
SERVERS = Path(__file__).parent / "servers"
PEERS = {"openenv": ".venv-openenv", "litellm": ".venv-litellm", "verifiers": ".venv-verifiers"}
FIRST, ADDED = 1000, 300
"""Tokens of a conversation's first message, and of what a turn adds with its reply."""
REPLY = 32
"""Tokens of a reply, about."""
REST = 6.0
"""Seconds without a call before a round, as while a policy is trained: connections that are kept for five seconds are gone."""
WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "was",
    "on",
    "are",
    "as",
    "with",
    "they",
    "at",
    "be",
    "this",
    "from",
    "have",
    "or",
    "by",
    "one",
    "had",
    "not",
    "but",
    "what",
    "all",
    "were",
    "when",
    "we",
    "there",
    "can",
    "an",
    "your",
    "which",
    "their",
    "said",
    "if",
    "do",
    "will",
    "each",
    "about",
    "how",
    "up",
    "out",
    "them",
    "then",
    "she",
    "many",
    "some",
    "so",
    "these",
    "would",
    "other",
    "into",
    "has",
    "more",
    "her",
    "two",
    "like",
    "him",
    "see",
    "time",
    "could",
    "no",
    "make",
    "than",
    "first",
    "been",
    "its",
    "who",
    "now",
    "people",
    "my",
    "made",
    "over",
    "did",
    "down",
    "only",
]


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    sessions: int
    context: int = FIRST
    turns: int = 8
    added: int = ADDED
    seconds: float = 0.0
    memory: bool = False


@dataclass(frozen=True)
class Figures:
    rps: float
    p50_ms: float
    p99_ms: float


class Server:
    """A server script, run by the Python of its environment; it ends when its input does."""

    def __init__(self, name: str, python: Path, *, upstream: str | None = None, seconds: float = 0.0) -> None:
        command = [str(python), str(SERVERS / f"serve_{name}.py"), "--seconds", str(seconds)]
        command += ["--upstream", upstream] if upstream else []
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.used = 0.0
        """When it last had a call, by the clock that only goes on."""

    def rest(self, seconds: float) -> None:
        """Wait until it has had no call for so long."""
        time.sleep(max(0.0, self.used + seconds - time.monotonic()))

    def open(self, count: int) -> tuple[str, list[str]]:
        """Forget the sessions there are and open new ones: the server's address and their keys."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended with {self._process.wait()}")
        told = json.loads(line)
        return told["url"], told["keys"]

    def memory(self) -> int:
        """Bytes of the process that are in memory."""
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * 4096

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Session:
    """One program's conversation, growing by a reply and a message at every turn."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str, number: int) -> None:
        self._http, self._url = http, f"{url}/v1/chat/completions"
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._words = random.Random(number)
        self.messages: list[dict[str, Any]] = [self._says(FIRST)]
        self.seconds: list[float] = []

    async def turn(self, added: int) -> None:
        start = time.perf_counter()
        body = orjson.dumps({"model": "policy", "messages": self.messages})
        async with self._http.post(self._url, data=body, headers=self._headers) as response:
            told = await response.read()
            if response.status != 200:
                raise SystemExit(f"{self._url} answered {response.status}: {told[:300]!r}")
        reply = orjson.loads(told)["choices"][0]["message"]
        self.seconds.append(time.perf_counter() - start)
        self.messages += [{"role": "assistant", "content": reply["content"]}, self._says(added - REPLY)]

    def _says(self, tokens: int) -> dict[str, Any]:
        return {"role": "user", "content": " ".join(self._words.choices(WORDS, k=tokens))}


async def play(server: Server, cell: Cell) -> Figures:
    """Grow every session to the cell's context, then measure its turns."""
    url, keys = server.open(cell.sessions)
    unlimited = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=unlimited, timeout=aiohttp.ClientTimeout(total=300)) as http:
        sessions = [Session(http, url, key, number) for number, key in enumerate(keys)]

        async def turns(session: Session, count: int) -> None:
            for _ in range(count):
                await session.turn(cell.added)

        grown = (cell.context - FIRST) // cell.added
        await asyncio.gather(*(turns(session, grown) for session in sessions))
        start = time.perf_counter()
        await asyncio.gather(*(turns(session, cell.turns) for session in sessions))
        wall = time.perf_counter() - start
    server.used = time.monotonic()
    seconds = sorted(second for session in sessions for second in session.seconds[grown:])
    rank = min(len(seconds) - 1, int(0.99 * len(seconds)))
    return Figures(len(seconds) / wall, statistics.median(seconds) * 1000, seconds[rank] * 1000)


def middle(figures: Sequence[Figures]) -> Figures:
    """The median round, figure by figure."""
    return Figures(*(statistics.median(values) for values in zip(*(asdict(f).values() for f in figures), strict=True)))


@contextmanager
def running(names: Sequence[str], seconds: float) -> Iterator[dict[str, Server]]:
    """The stub, as `direct`, and the proxies in front of it."""
    with ExitStack() as stack:
        stub = Server("stub", Path(sys.executable), seconds=seconds)
        stack.callback(stub.close)
        upstream, _ = stub.open(0)
        servers = {"direct": stub}
        for name in names:
            python = Path(sys.executable) if name == "longrein" else ROOT / PEERS[name] / "bin/python"
            servers[name] = Server(name, python, upstream=upstream, seconds=seconds)
            stack.callback(servers[name].close)
        yield servers


def measure(cells: Sequence[Cell], names: Sequence[str], rounds: int, rest: float) -> Iterator[dict[str, Any]]:
    for seconds, memory in sorted({(cell.seconds, cell.memory) for cell in cells}):  # memory is told by a process of its own
        with running(names, seconds) as servers:
            for name, server in servers.items():  # what is imported or compiled at the first request is not measured
                if name != "direct":
                    asyncio.run(play(server, Cell(sessions=2, turns=3)))
            for cell in (cell for cell in cells if (cell.seconds, cell.memory) == (seconds, memory)):
                yield from measured_memory(cell, servers) if cell.memory else measured(cell, servers, rounds, rest)


def measured(cell: Cell, servers: dict[str, Server], rounds: int, rest: float) -> Iterator[dict[str, Any]]:
    found: dict[str, list[Figures]] = {name: [] for name in servers}
    for _ in range(rounds):
        for name, server in servers.items():
            server.rest(rest)
            found[name].append(asyncio.run(play(server, cell)))
    direct = middle(found.pop("direct"))
    for name, figures in found.items():
        told = {"proxy": name, "sessions": cell.sessions, "context": cell.context, **asdict(middle(figures))}
        told |= {"direct_rps": direct.rps, "direct_p50_ms": direct.p50_ms}
        yield rounded(told | ({"engine_s": cell.seconds} if cell.seconds else {}))


def measured_memory(cell: Cell, servers: dict[str, Server]) -> Iterator[dict[str, Any]]:
    for name, server in servers.items():
        if name != "direct":
            before = server.memory()
            figures = asyncio.run(play(server, replace(cell, turns=1)))
            grown = (server.memory() - before) / 1024**2
            yield rounded({"proxy": name, "sessions": 1, "context": cell.context, **asdict(figures), "memory_mb": grown})


def rounded(told: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 2) if isinstance(value, float) else value for key, value in told.items()}


CELLS = [
    *(Cell(sessions) for sessions in (1, 16, 64, 256)),
    *(Cell(1, context=context, turns=16) for context in (4000, 16_000, 64_000)),
    Cell(256, turns=2, seconds=2.0),
    Cell(1, context=98_000, added=650, memory=True),
]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The lines as a Markdown table."""
    columns = [
        "proxy",
        "sessions",
        "context",
        "engine_s",
        "rps",
        "p50_ms",
        "p99_ms",
        "direct_rps",
        "direct_p50_ms",
        "memory_mb",
    ]
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(str(row.get(column, '')) for column in columns)} |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    installed = [name for name, folder in PEERS.items() if (ROOT / folder / "bin/python").exists()]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proxy", description="What a proxy costs.")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rest", type=float, default=REST, help="seconds without a call before each round of a server")
    parser.add_argument("--proxies", default=",".join(["longrein", *installed]), help="which to measure, with commas")
    parser.add_argument("--sessions", type=int, nargs="+", help="only the cells of so many sessions")
    parser.add_argument("--context", type=int, help="only the cells of so many tokens")
    parser.add_argument("--quick", action="store_true", help="only a model that answers at once")
    options = parser.parse_args()
    cells = [
        cell
        for cell in CELLS
        if (options.sessions is None or cell.sessions in options.sessions)
        and options.context in (None, cell.context)
        and not (options.quick and (cell.seconds or cell.memory))
    ]
    names = [name for name in options.proxies.split(",") if name]
    if unknown := [name for name in names if name not in ("longrein", *installed)]:
        parser.error(f"{', '.join(unknown)}: not installed; `make bench-peers` installs {', '.join(PEERS)}")
    rows = []
    for row in measure(cells, names, options.rounds, options.rest):
        rows.append(row)
        if options.json:
            print(json.dumps(row), flush=True)
    if not options.json:
        print(" ".join(f"{key}={value}" for key, value in machine().items()))
        print(table(rows))


if __name__ == "__main__":
    main()
