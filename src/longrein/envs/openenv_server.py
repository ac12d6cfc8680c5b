"""A longrein environment behind OpenEnv's server.

Always true: an action is the policy's reply, an observation the messages that follow it, so whoever plays it over the network,
`longrein.envs.openenv.OpenEnv` among them, plays the episode that `run_trial` plays: same words, same rewards, same limits of turns
and time. Reward is made in the episode and only read by the server.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import pkgutil
import time
from typing import Any

from longrein.contract import LongreinError, Message
from longrein.envs.environment import Environment, Episode, class_path, settled
from longrein.envs.harness import HarnessEnv
from longrein.recorder import run_sync

try:
    from openenv.core.env_server import Environment as OpenEnvironment  # pyright: ignore[reportMissingImports]
    from openenv.core.env_server import create_app  # pyright: ignore[reportMissingImports]
    from openenv.core.env_server.types import (  # pyright: ignore[reportMissingImports]
        Action,
        ConcurrencyConfig,
        EnvironmentMetadata,
        Observation,
        State,
    )
    from pydantic import Field
except ImportError as error:
    raise LongreinError(f"openenv cannot be imported ({error}): run `pip install 'longrein[openenv]'`") from error

SPLIT = "train"


class ReplyAction(Action):
    """An assistant message: text, and tool calls in OpenAI's form."""

    content: str = Field(default="", description="What the policy says")
    tool_calls: list[dict[str, Any]] = Field(default_factory=list, description="Tools it calls, in OpenAI's form")
    reasoning_content: str | None = Field(default=None, description="What it thought")


class MessagesObservation(Observation):
    """What the policy reads next."""

    messages: list[dict[str, Any]] = Field(default_factory=list, description="OpenAI chat messages")
    tools: list[dict[str, Any]] = Field(default_factory=list, description="OpenAI function schemas; told at reset")
    success: bool | None = Field(default=None, description="Whether the task was solved, where the environment says so")
    info: dict[str, Any] = Field(default_factory=dict)
    limit: str | None = Field(default=None, description="The limit that ended the episode: turns or time")


class ServedEnvironment(OpenEnvironment[ReplyAction, MessagesObservation, State]):
    """One session: one episode at a time of a longrein environment."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, environment: Environment, tasks: list[dict[str, Any]]) -> None:
        super().__init__()
        self.environment = environment
        self.tasks = tasks
        self._episode: Episode | None = None
        self._state = State()
        self._started = 0.0

    async def reset_async(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        task: dict[str, Any] | None = None,
        index: int | None = None,
        split: str = SPLIT,
        **unknown: Any,
    ) -> MessagesObservation:
        """Begin an episode of `task`, or of the server's task number `index`, or of the one that `seed` draws from them."""
        if unknown:
            raise ValueError(f"reset takes task, index, split, seed and episode_id; it was given {', '.join(unknown)}")
        await self._let_go()
        self._episode = self.environment.episode(self._chosen(task, split, index, seed))
        self._state, self._started = State(episode_id=episode_id), time.monotonic()
        messages = await _called(self._episode.start)
        return MessagesObservation(messages=list(messages), tools=list(self._episode.tools))

    async def step_async(self, action: ReplyAction, timeout_s: float | None = None, **kwargs: Any) -> MessagesObservation:
        episode = self._episode
        if episode is None:
            raise RuntimeError("there is no episode: reset first (one that is done, and a session that ended, need it too)")
        reply: Message = {"role": "assistant", **action.model_dump(exclude={"metadata"}, exclude_none=True)}
        if not action.tool_calls:
            del reply["tool_calls"]
        step = await _called(episode.step, reply)
        self._state.step_count += 1
        reward, limit = float(step.reward), None if step.done else self._limit()
        if limit is not None:
            reward += float(await _called(episode.limit_reached, limit))
        if done := step.done or limit is not None:
            await self._let_go()
        return MessagesObservation(
            messages=list(step.messages), reward=reward, done=done, success=step.success, info=step.info, limit=limit
        )

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> MessagesObservation:
        return run_sync(self.reset_async(seed=seed, episode_id=episode_id, **kwargs))

    def step(self, action: ReplyAction, timeout_s: float | None = None, **kwargs: Any) -> MessagesObservation:
        return run_sync(self.step_async(action))

    @property
    def state(self) -> State:
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        cls = type(self.environment)
        about = (inspect.getdoc(cls) or "").partition("\n")[0]
        return EnvironmentMetadata(name=cls.__name__, description=about or f"The longrein environment {class_path(cls)}.")

    def close(self) -> None:
        run_sync(self._let_go())

    # ---- OpenEnv's task API

    def list_splits(self) -> list[str]:
        return [SPLIT]

    def num_tasks(self, split: str) -> int:
        return len(self._split(split))

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        return self._split(split)

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self._split(split)):
            raise IndexError(index)
        return self.tasks[index]

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        return self._split(split)[start:stop]

    def _split(self, split: str) -> list[dict[str, Any]]:
        if split != SPLIT:
            raise IndexError(f"there is no split {split!r}; there is {SPLIT!r}")
        return self.tasks

    def _chosen(self, task: dict[str, Any] | None, split: str, index: int | None, seed: int | None) -> dict[str, Any]:
        if task is not None:
            return task
        if not self.tasks:
            raise ValueError("this server has no tasks of its own: give reset a `task`")
        return self.get_task(split, index) if index is not None else self.tasks[(seed or 0) % len(self.tasks)]

    def _limit(self) -> str | None:
        config = self.environment.config
        if self._state.step_count >= config.max_turns:
            return "turns"
        late = config.max_seconds is not None and time.monotonic() - self._started > config.max_seconds
        return "time" if late else None

    async def _let_go(self) -> None:
        episode, self._episode = self._episode, None
        if episode is not None:
            await _called(episode.close)


def make_app(
    env_class: type[Environment] | str,
    env_config: dict[str, Any] | None = None,
    *,
    tasks: int | list[dict[str, Any]] = 256,
    seed: int = 0,
    max_sessions: int = 256,
    session_seconds: float | None = None,
) -> Any:
    """The FastAPI application of an environment (a class, or its dotted path).

    `tasks` are those of its task API: a number of the environment's own, drawn by `seed`, or a list. A session that is idle for
    `session_seconds` is ended.
    """
    cls = pkgutil.resolve_name(env_class) if isinstance(env_class, str) else env_class
    if not (isinstance(cls, type) and issubclass(cls, Environment)) or issubclass(cls, HarnessEnv):
        raise LongreinError(
            f"{env_class!r} cannot be served: it must be an Environment with episodes. A program that owns its loop goes to OpenEnv "
            "as sessions: longrein.envs.openenv_sessions.HarnessSessionFactory"
        )
    if isinstance(tasks, int):
        try:
            tasks = cls.tasks(tasks, seed=seed, env_config=env_config)
        except LongreinError:  # it has none of its own: they come with each reset
            if cls.tasks.__func__ is not Environment.tasks.__func__:  # type: ignore[attr-defined]
                raise
            tasks = []
    return create_app(
        functools.partial(ServedEnvironment, cls(tokenizer=None, env_config=env_config), tasks),
        ReplyAction,
        MessagesObservation,
        env_name=cls.__name__,
        concurrency_config=ConcurrencyConfig(max_concurrent_envs=max_sessions, session_timeout=session_seconds),
    )


async def _called(method: Any, *args: Any) -> Any:
    """A method's answer; one that is not async may compute for long, and does so on a thread."""
    return await settled(method(*args) if inspect.iscoroutinefunction(method) else await asyncio.to_thread(method, *args))
