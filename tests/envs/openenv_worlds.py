"""Small environments written with OpenEnv's own classes, and OpenEnv's own server over them, on a thread of this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

import uvicorn
from openenv.core.env_server import Action, Environment, MCPEnvironment, Observation, State, create_app
from patience import PATIENCE
from pydantic import Field, RootModel


class GuessAction(Action):
    """Guess the number."""

    number: int = Field(description="From 0 to 9", ge=0, le=9)
    why: str = ""


class GuessObservation(Observation):
    hint: str


class Guess(Environment[GuessAction, GuessObservation, State]):
    """The number is the seed's last digit; a guess earns 0.1, the right one 1 more."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    made: ClassVar[list[Guess]] = []
    release = threading.Event()
    """What a guess of 7 waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.number: int | None = None
        self.closed = False
        Guess.made.append(self)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> GuessObservation:
        self.number = (seed or 0) % 10
        return GuessObservation(hint="I thought of a number.")

    def step(self, action: GuessAction, timeout_s: float | None = None, **kwargs: Any) -> GuessObservation:
        if action.number == 7:
            Guess.release.wait(PATIENCE)
        if action.number == 8:
            raise RuntimeError("the eight ball broke")
        assert self.number is not None, "never reset"
        right = action.number == self.number
        hint = "right" if right else "higher" if action.number < self.number else "lower"
        return GuessObservation(hint=hint, reward=1.1 if right else 0.1, done=right, metadata={"guessed": action.number})

    @property
    def state(self) -> State:
        return State()

    def close(self) -> None:
        self.closed = True


class Move(Action):
    """Go somewhere."""

    kind: Literal["move"] = "move"
    where: str


class Shout(Action):
    kind: Literal["shout"] = "shout"
    words: str


class MoveOrShout(RootModel[Annotated[Move | Shout, Field(discriminator="kind")]]):
    pass


class TalkObservation(Observation):
    heard: str
    count: int


class Talk(Environment[Any, TalkObservation, State]):
    """Says back what it was told, `words` times."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> TalkObservation:
        return TalkObservation(heard=f"hello {kwargs.get('name', 'you')}", count=0)

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> TalkObservation:
        action = getattr(action, "root", action)
        said = action.words if isinstance(action, Shout) else f"went to the {action.where}"
        return TalkObservation(heard=said, count=1, reward=float("!" in said), done="!" in said)

    @property
    def state(self) -> State:
        return State()


class Shop(MCPEnvironment):
    """Its actions are MCP tools."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        from fastmcp import FastMCP

        server = FastMCP("shop")

        @server.tool
        def price(item: str) -> str:
            """The price of an item."""
            return f"{item} costs {len(item)}"

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        return Observation(metadata={"ready": True})

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation(metadata={"error": "unknown action"})

    @property
    def state(self) -> State:
        return State()


@contextmanager
def running(app: Any, **settings: Any) -> Iterator[str]:
    """Serve an app with uvicorn on a free port of this machine; gives its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, **settings))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@contextmanager
def guessing(sessions: int = 16, **settings: Any) -> Iterator[str]:
    Guess.made.clear()
    Guess.release.clear()
    try:
        with running(create_app(Guess, GuessAction, GuessObservation, max_concurrent_envs=sessions), **settings) as url:
            yield url
    finally:
        Guess.release.set()
