"""An environment: a loop we own. One `Episode` object plays one rollout, once; `run_trial` plays them all at the same time.

Always true of a trial: one rollout for each task and repeat, in task-major order; an episode that raises is one failed
rollout with its cause and takes no other with it; an episode that runs into a limit is scored like any other.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import json
import logging
import math
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, get_type_hints

from longrein.agents import Agent, as_agent
from longrein.contract import ContextLengthError, LongreinError, Message, Sampling, Tool
from longrein.envs.kinds import fits, in_words
from longrein.recorder import Recorder, run_sync
from longrein.rollout import Credit, Rollout, Trial, padded

logger = logging.getLogger(__name__)


class EnvConfigError(LongreinError):
    """An `env_config` that does not fit its environment."""


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """The settings every environment has; an environment adds its own by subclassing this as its `Config`."""

    max_turns: int = 16
    """Model calls in an episode."""
    max_tokens: int = 4096
    """Tokens of the whole conversation, read and written."""
    max_reply_tokens: int = 512
    """Tokens of one reply."""
    max_seconds: float | None = None
    """Wall-clock time of an episode."""
    concurrency: int = 256
    """Rollouts at a time; the others wait for one to end."""
    credit: Credit = "spread"
    """Where a step's reward goes: over the tokens of the reply that earned it, on its `last` token, or everything on the
    `terminal` token of the episode."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens", "max_reply_tokens", "concurrency"):
            if not isinstance(value := getattr(self, name), int) or isinstance(value, bool) or value < 1:
                raise EnvConfigError(f"{name} is {value!r}; it must be a whole number of 1 or more")
        if (seconds := self.max_seconds) is not None and not (isinstance(seconds, int | float) and seconds > 0):
            raise EnvConfigError(f"max_seconds is {seconds!r}; it must be a number of seconds above 0, or None")
        kinds = _kinds(type(self))
        for name in (one.name for one in fields(self) if one.name in kinds):
            if not fits(value := getattr(self, name), kind := kinds[name]):
                raise EnvConfigError(f"{name} is {value!r}; it must be {in_words(kind)}")


@dataclass(frozen=True, slots=True)
class Step:
    """What the environment answers to a reply."""

    messages: Sequence[Message] = ()
    """What the policy reads next."""
    reward: float = 0.0
    """Earned by the reply this answers."""
    done: bool = False
    success: bool | None = None
    """Whether the episode was solved; unsaid, it was when its reward reached 1."""
    info: dict[str, Any] = field(default_factory=dict)


class Episode(ABC):
    """One rollout of one task: made, started, stepped to its end, thrown away.

    Every method may be async, and should be where it waits: what is not holds up the rollouts beside it, and `max_seconds` too.
    """

    tools: Sequence[Tool] = ()
    """OpenAI function schemas offered to the policy."""

    def __init__(self, task_data: dict[str, Any], config: Any) -> None:
        self.task = task_data
        self.config = config

    @abstractmethod
    def start(self) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """The messages the policy reads first."""

    @abstractmethod
    def step(self, reply: Message) -> Step | Awaitable[Step]:
        """What follows the policy's reply (an assistant message with `content` and maybe `tool_calls`)."""

    def limit_reached(self, limit: str) -> float | Awaitable[float]:
        """The reward of an episode that was cut off (`turns`, `tokens`, `time`), added to what it has earned."""
        return 0.0

    def close(self) -> Awaitable[None] | None:
        """Let go of what the episode holds; called once, however it ended."""


class Environment(ABC):
    """A family of tasks with one way to play them.

    The smallest one:

    >>> class EchoEpisode(Episode):
    ...     def start(self):
    ...         return [{"role": "user", "content": f"Say {self.task['word']}."}]
    ...     def step(self, reply):
    ...         return Step(reward=float(self.task["word"] in reply["content"]), done=True)
    >>> class Echo(Environment):
    ...     episode_class = EchoEpisode
    """

    Config: ClassVar[type[EnvConfig]] = EnvConfig
    episode_class: ClassVar[type[Episode]]

    def __init__(self, *, tokenizer: Any, env_config: dict[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.config = self.check_config(env_config or {})

    @classmethod
    def check_config(cls, env_config: dict[str, Any]) -> EnvConfig:
        """The config as this environment's settings; refused with the name of the field that does not fit."""
        known = [f.name for f in fields(cls.Config)]
        for name in env_config:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise EnvConfigError(f"{cls.__name__} has no setting {name!r}.{hint} It has: {', '.join(known)}.")
        try:
            return cls.Config(**env_config)
        except EnvConfigError as error:
            raise EnvConfigError(f"{cls.__name__} refuses its env_config: {error}") from error
        except (TypeError, ValueError) as error:
            raise EnvConfigError(f"{cls.__name__} refuses env_config {env_config!r}: {error}") from error

    @classmethod
    def check_task(cls, config: Any, task_data: dict[str, Any]) -> None:
        """Raise `LongreinError` for a task that cannot be played with these settings; asked of every task before a run begins."""

    @classmethod
    def tasks(cls, count: int, *, seed: int = 0, env_config: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """`count` tasks of this environment, the same for the same seed."""
        raise LongreinError(f"{cls.__name__} makes no tasks of its own; give `longrein` a dataset of them")

    @classmethod
    def get_train_dataset(cls, count: int = 256, *, seed: int = 0, env_config: dict[str, Any] | None = None) -> Any:
        """`tasks` as a dataset of `{env_class_path, env_config, task_data}` rows."""
        from longrein.envs.datasets import task_dataset

        path, config = class_path(cls), dict(env_config or {})
        tasks = cls.tasks(count, seed=seed, env_config=config)
        return task_dataset([{"env_class_path": path, "env_config": config, "task_data": task} for task in tasks])

    def episode(self, task_data: dict[str, Any]) -> Episode:
        """A fresh episode of a task."""
        return self.episode_class(task_data, self.config)

    def run_trial(self, task_data_list: Sequence[dict[str, Any]], agent: Any, num_rollouts: int = 1) -> Trial:
        """Play every task `num_rollouts` times, all at once."""
        agent = as_agent(agent, self.tokenizer)
        self._check_context(agent)
        rollouts = run_sync(self.play(task_data_list, agent, num_rollouts))
        return padded(rollouts, pad_id=self._pad_id(), credit=self.config.credit)

    async def play(self, tasks: Sequence[dict[str, Any]], agent: Agent, num_rollouts: int) -> list[Rollout]:
        recorder = agent.recorder()
        trial = uuid.uuid4().hex[:12]
        seen: Counter[str] = Counter()
        turns = asyncio.Semaphore(self.config.concurrency)
        episodes = []
        for number, task in enumerate(tasks):
            key = json.dumps(task, sort_keys=True, default=str)
            occurrence = seen[key]
            seen[key] += 1
            seeds = [agent.rollout_seed(task, occurrence, index) for index in range(num_rollouts)]
            group = next((agent.played[seed].group for seed in seeds if seed in agent.played), f"{trial}-g{number}")
            for seed in seeds:
                if seed in agent.played:
                    episodes.append(settled(agent.played[seed]))
                    continue
                rollout = recorder.open(
                    f"{trial}-{len(episodes)}", seed=seed, task=task, env=type(self).__name__, group=group
                )
                episodes.append(self._play_one(rollout, recorder, turns))
        return await asyncio.gather(*episodes)

    async def _play_one(self, rollout: Rollout, recorder: Recorder, turns: asyncio.Semaphore) -> Rollout:
        try:
            async with turns:
                await self._run(rollout, recorder)
        except (Exception, SystemExit) as error:  # an episode that exits ends itself, not the run
            rollout.failed = f"{type(error).__name__}: {error}"
            rollout.reward, rollout.success = None, None
            logger.warning("%s: a rollout failed: %s", type(self).__name__, rollout.failed, exc_info=True)
        finally:
            recorder.finish(rollout.id)
        return rollout

    async def _run(self, rollout: Rollout, recorder: Recorder) -> None:
        """Play one rollout to its end and score it; whatever is raised here makes it a failed one."""
        episode = self.episode(rollout.task)
        try:
            await self._run_episode(episode, rollout, recorder)
        finally:
            await settled(episode.close())

    async def _run_episode(self, episode: Episode, rollout: Rollout, recorder: Recorder) -> None:
        earned: list[float] = []
        async with _limited(rollout, self.config.max_seconds) as clock:
            await self._take_turns(episode, rollout, recorder, earned, clock)
        if rollout.limit is not None:
            earned.append(
                _number(await settled(episode.limit_reached(rollout.limit)), f"{type(episode).__name__}.limit_reached")
            )
        rollout.reward = math.fsum(earned)
        if rollout.success is None:
            rollout.success = rollout.reward >= 1.0

    async def _take_turns(
        self, episode: Episode, rollout: Rollout, recorder: Recorder, earned: list[float], clock: asyncio.Timeout
    ) -> None:
        """Until the episode is done or a limit is reached; `earned` grows by what each reply earns."""
        name, sampling = type(episode).__name__, self._sampling(recorder)
        messages = _messages(await settled(episode.start()), f"{name}.start")
        while True:
            if len(rollout.calls) >= self.config.max_turns:
                rollout.limit = "turns"
                return
            if (end := clock.when()) is not None and asyncio.get_running_loop().time() >= end:  # nothing has waited so far
                rollout.limit = "time"
                return
            try:
                call = await recorder.call(rollout.id, messages, episode.tools, sampling, max_length=self.config.max_tokens)
            except ContextLengthError:
                if not rollout.calls:
                    raise
                rollout.limit = "tokens"
                return
            step = await settled(episode.step(call.reply))
            if not isinstance(step, Step):
                raise LongreinError(f"{name}.step gave {step!r}; it must give a Step")
            earned.append(_number(step.reward, f"{name}.step"))
            rollout.update(call.id, reward=earned[-1])
            rollout.info |= step.info
            rollout.success = rollout.success if step.success is None else bool(step.success)
            if step.done:
                return
            if not step.messages:
                raise LongreinError(f"{name}.step gave no messages and was not done; give one of them")
            messages += [call.reply, *_messages(step.messages, f"{name}.step")]

    def _sampling(self, recorder: Recorder) -> Sampling:
        """The agent's sampling within this environment's limit on a reply."""
        longest = recorder.sampling.max_tokens or self.config.max_reply_tokens
        return replace(recorder.sampling, max_tokens=min(self.config.max_reply_tokens, longest))

    def _pad_id(self) -> int:
        if (pad := self.tokenizer.pad_token_id) is None:
            raise LongreinError("the tokenizer has no pad token; set `tokenizer.pad_token` (often to `eos_token`)")
        return pad

    def _check_context(self, agent: Agent) -> None:
        if agent.context_length is not None and self.config.max_tokens > agent.context_length:
            raise LongreinError(
                f"{type(self).__name__} allows conversations of {self.config.max_tokens} tokens (`max_tokens`), the model "
                f"reads {agent.context_length}: lower `max_tokens` in env_config or use a model with a longer context"
            )


def _kinds(config: type[EnvConfig]) -> dict[str, Any]:
    try:
        return get_type_hints(config)
    except NameError:  # an annotation that only a type checker can read
        return {}


def class_path(cls: type) -> str:
    """The dotted path a dataset row names a class by."""
    return f"{cls.__module__}.{cls.__qualname__}"


@asynccontextmanager
async def _limited(rollout: Rollout, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Ends what is waited for in here once the time is up, and says so in the rollout."""
    clock = asyncio.timeout(seconds)
    try:
        async with clock:
            yield clock
    except TimeoutError:
        if not clock.expired():  # the episode's own
            raise
        rollout.limit = "time"


def _number(reward: Any, of: str) -> float:
    try:
        number = math.nan if isinstance(reward, str) else float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise LongreinError(f"{of} gave the reward {reward!r}; it must be a number")
    return number


def _messages(given: Any, of: str) -> list[Message]:
    messages: list[Any] = [] if isinstance(given, str | Mapping) else list(given or ())
    if not messages or not all(isinstance(message, Mapping) for message in messages):
        raise LongreinError(f"{of} gave {given!r}; it must give a list of messages: [{{'role': 'user', 'content': '...'}}]")
    return messages


async def settled(value: Any) -> Any:
    """The value, awaited where it has to be."""
    return await value if inspect.isawaitable(value) else value
