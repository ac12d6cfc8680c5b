"""The treasure hunt of `make train`: notes lead from room to room, and only reading them leads to the coin.

The rooms of a task are drawn anew for each, so nothing can be learned by heart: a policy that does not read the replies
finds the coin about once in as many tries as there are rooms. A hunt of `hops` rooms needs `hops` looks and one answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from longrein.contract import LongreinError, Message, Tool
from longrein.envs.environment import EnvConfig, EnvConfigError, Environment, Episode, Step
from longrein.rooms import ROOMS, TOOLS, Action, actions_of, answered, opening, over, result


@dataclass(frozen=True, kw_only=True)
class HuntConfig(EnvConfig):
    max_turns: int = 6
    max_tokens: int = 512
    max_reply_tokens: int = 48
    min_hops: int = 2
    max_hops: int = 4
    actions: Literal["tools", "text"] = "tools"
    """Act by tool calls, or by lines like `look cellar` for models whose template has no tools."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.min_hops <= self.max_hops < len(ROOMS):
            raise EnvConfigError(
                f"min_hops is {self.min_hops} and max_hops {self.max_hops}; they must be in order, from 1 to {len(ROOMS) - 1}"
            )


class HuntEpisode(Episode):
    def __init__(self, task_data: dict[str, Any], config: HuntConfig) -> None:
        super().__init__(task_data, config)
        rooms = task_data.get("rooms")
        if not isinstance(rooms, list) or not rooms:
            raise LongreinError(f"task_data['rooms'] is {rooms!r}; a hunt needs the list of rooms its notes lead through")
        self.rooms: list[str] = rooms
        self.tools: Sequence[Tool] = TOOLS if config.actions == "tools" else ()

    def start(self) -> list[Message]:
        return opening(self.rooms[0], self.config.actions)

    def step(self, reply: Message) -> Step:
        actions = actions_of(reply) if self.config.actions == "tools" else _text_actions(reply)
        if over(actions):
            return Step(reward=float(answered(actions) == self.rooms[-1]), done=True)
        return Step(messages=[result(self.rooms, action) for action in actions])


class TreasureHunt(Environment):
    """Find the coin by following notes: `look` into rooms, then `answer`."""

    Config = HuntConfig
    episode_class = HuntEpisode

    @classmethod
    def tasks(cls, count: int, *, seed: int = 0, env_config: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        config = cls.check_config(env_config or {})
        assert isinstance(config, HuntConfig)
        rng = random.Random(f"hunt-{seed}")
        return [{"rooms": rng.sample(ROOMS, rng.randint(config.min_hops, config.max_hops))} for _ in range(count)]


def _text_actions(reply: Message) -> list[Action]:
    found = re.search(r"\b(look|answer)\b\W*(?:into|in|at)?\W*(?:the)?\W*([a-z]+)", reply.get("content") or "", re.I)
    return [Action(found[1].lower(), found[2].lower(), None)] if found else []
