"""A real server on loopback, and rollouts on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from programs import Gated, Program

from longrein.contract import Engine
from longrein.engines.scripted import ScriptedEngine
from longrein.proxy import InterceptionServer
from longrein.recorder import Recorder
from longrein.rendering import Rendering


@pytest.fixture(scope="session")
def server() -> Iterator[InterceptionServer]:
    with InterceptionServer() as server:
        yield server


@pytest.fixture
def gated(rendering: Callable[[str], Rendering]) -> Gated:
    return Gated(rendering("qwen3"))


_numbers = itertools.count()


@pytest.fixture
def program(server: InterceptionServer, rendering: Callable[[str], Rendering]) -> Callable[..., Program]:
    """A new rollout that is answered directly: `program(["yes", "no"])`, `program(engine)`, `program(script)`."""

    def make(answers: Any = None, on: InterceptionServer = server, recorder: Any = None, **settings: Any) -> Program:
        rollout_id = f"r{next(_numbers)}"
        found = rendering("qwen3")
        engine: Engine = answers if hasattr(answers, "sample") else ScriptedEngine(answers or (lambda m, t: "yes"), found)
        made = Recorder(engine, found, **(recorder or {}))
        rollout = made.open(rollout_id, seed=7)
        return Program(on, rollout_id, on.open(rollout_id, recorder=made, **settings), rollout)

    return make


@pytest.fixture
def pulled(server: InterceptionServer) -> Callable[..., Program]:
    """A new rollout whose calls wait for `deliver`."""

    def make(on: InterceptionServer = server, **settings: Any) -> Program:
        rollout_id = f"p{next(_numbers)}"
        return Program(on, rollout_id, on.open(rollout_id, **settings))

    return make


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool
