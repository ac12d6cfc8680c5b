"""An environment of your own: the policy reads a few words, and is to say which of them comes first in the alphabet.

An `Episode` plays one rollout of one task: `start` gives the messages the policy reads first, `step` answers each of its replies with
messages and a reward. Change this file to what your agent is to learn; `pytest` and `longrein train run.toml` go on working.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from longrein.envs import EnvConfig, Environment, Episode, Step

WORDS = ("attic", "barn", "cellar", "den", "hall", "kitchen", "library", "pantry", "study", "tower")


@dataclass(frozen=True, kw_only=True)
class FirstWordConfig(EnvConfig):
    """What a run file may say under [env_config], besides `max_turns` and the other limits that every environment has."""

    partial_reward: float = 0.2
    """For any word of the list, so that there is something to learn from before the first right answer."""
    max_turns: int = 3
    max_tokens: int = 256
    max_reply_tokens: int = 12


class FirstWordEpisode(Episode):
    config: FirstWordConfig

    def start(self) -> list[dict[str, Any]]:
        words = ", ".join(self.task["words"])
        return [{"role": "user", "content": f"Which of these comes first in the alphabet: {words}? Say that word alone."}]

    def step(self, reply: dict[str, Any]) -> Step:
        said = reply["content"].lower()
        named = [word for word in self.task["words"] if word in said]
        if named == [min(self.task["words"])]:
            return Step(reward=1.0, done=True)
        if len(named) == 1:
            return Step(reward=self.config.partial_reward, done=True, success=False)
        return Step([{"role": "user", "content": "Say one of the words, and nothing else."}])


class FirstWord(Environment):
    Config = FirstWordConfig
    episode_class = FirstWordEpisode

    @classmethod
    def tasks(cls, count: int, *, seed: int = 0, env_config: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Used where a run file names no `tasks`; the same for the same seed."""
        rng = random.Random(seed)
        return [{"words": rng.sample(WORDS, 3)} for _ in range(count)]
