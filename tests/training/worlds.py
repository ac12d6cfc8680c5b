"""Small environments for the trainer's tests. Rows name them by path, so they stand in a module of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from longrein import Environment, Episode, Rollout, Step
from longrein.contract import Message
from longrein.envs import EnvConfig, class_path


def row(cls: type, config: dict[str, Any] | None = None, **task: Any) -> dict[str, Any]:
    """A dataset row for an environment of this module."""
    return {"env_class_path": class_path(cls), "env_config": config or {}, "task_data": task}


@dataclass(frozen=True, kw_only=True)
class TalkConfig(EnvConfig):
    max_turns: int = 3
    max_tokens: int = 256
    max_reply_tokens: int = 6
    bonus: float = 0.0


class TalkEpisode(Episode):
    """A few turns; a reply earns by its length, so an untrained policy gets all kinds of rewards."""

    turns = 2

    def start(self) -> Sequence[Message]:
        self.left = self.turns
        return [{"role": "user", "content": f"Say {self.task.get('word', 'something')}."}]

    def step(self, reply: Message) -> Step:
        self.left -= 1
        reward = len(reply.get("content") or "") % 5 / 4 + self.config.bonus
        return Step([{"role": "user", "content": "And more."}], reward=reward, done=not self.left)


class Talk(Environment):
    Config = TalkConfig
    episode_class = TalkEpisode


class AskEpisode(TalkEpisode):
    turns = 1

    def start(self) -> Sequence[Message]:
        self.left = self.turns
        return [{"role": "system", "content": "Answer."}, {"role": "user", "content": str(self.task)}]


class Ask(Environment):
    """One turn, with a system message."""

    Config = TalkConfig
    episode_class = AskEpisode


class MoodyEpisode(TalkEpisode):
    """Some of a task's rollouts break: those whose number is in `task["breaks"]`, counted over the process."""

    played = 0
    counting = threading.Lock()

    def start(self) -> Sequence[Message]:
        with MoodyEpisode.counting:
            number = MoodyEpisode.played % self.task["of"]
            MoodyEpisode.played += 1
        if number in self.task["breaks"]:
            raise RuntimeError(f"rollout {number} lost its sandbox")
        return super().start()


class Moody(Environment):
    Config = TalkConfig
    episode_class = MoodyEpisode


class Flat(Environment):
    """Every reply earns the same."""

    Config = TalkConfig

    class episode_class(AskEpisode):
        def step(self, reply: Message) -> Step:
            return Step(reward=0.5, done=True)


class Vowels(Environment):
    """The more vowels, the better: something an untrained policy can learn in a few steps."""

    Config = TalkConfig

    class episode_class(AskEpisode):
        def step(self, reply: Message) -> Step:
            text = reply.get("content") or ""
            return Step(reward=sum(letter in "aeiou" for letter in text) / max(1, len(text)), done=True)


class Recording:
    """A mock: no model, no agent; it keeps what it was built with and asked for, and returns arrays that say who made them.

    The reward of task `n`'s i-th rollout is `n + i / 10`, on its last token; a row has `3 + n` tokens, the last two its agent's.
    """

    built: ClassVar[list[tuple[str, Any, dict[str, Any]]]] = []
    trials: ClassVar[list[tuple[str, dict[str, Any], list[Any], Any, int]]] = []

    def __init__(self, *, tokenizer: Any, env_config: dict[str, Any]) -> None:
        self.config = env_config
        Recording.built.append((type(self).__name__, tokenizer, env_config))

    def run_trial(self, task_data_list: list[dict[str, Any]], agent: Any, num_rollouts: int) -> dict[str, Any]:
        Recording.trials.append((type(self).__name__, self.config, list(task_data_list), agent, num_rollouts))
        numbers = [(task["n"], i) for task in task_data_list for i in range(num_rollouts)]
        width = max(3 + n for n, _ in numbers)
        trial = {
            "padded_token_ids": [[10 + n] * (3 + n) + [0] * (width - 3 - n) for n, _ in numbers],
            "padded_attn_mask": [[1] * (3 + n) + [0] * (width - 3 - n) for n, _ in numbers],
            "padded_agent_mask": [[0] * (1 + n) + [1] * 2 + [0] * (width - 3 - n) for n, _ in numbers],
            "padded_rewards": [[0.0] * (2 + n) + [n + i / 10] + [0.0] * (width - 3 - n) for n, i in numbers],
            "final_rewards": [n + i / 10 for n, i in numbers],
        }
        return self.spoil(trial)

    def spoil(self, trial: dict[str, Any]) -> dict[str, Any]:
        return trial


class Recording2(Recording):
    pass


class Spoiled(Recording):
    """Returns something wrong, by `env_config["wrong"]`."""

    def spoil(self, trial: Any) -> Any:
        wrong = self.config["wrong"]
        if wrong == "ragged":
            trial["padded_rewards"][0] = trial["padded_rewards"][0][:-1]
        elif wrong == "width":
            trial["padded_agent_mask"] = [one[:-1] for one in trial["padded_agent_mask"]]
        elif wrong == "rows":
            trial = {key: value[:-1] for key, value in trial.items()} | {"final_rewards": trial["final_rewards"]}
        elif wrong == "finals":
            trial["final_rewards"] = trial["final_rewards"][:-1]
        elif wrong == "nan":
            trial["final_rewards"][1] = float("nan")
        elif wrong == "token_nan":
            trial["padded_rewards"][1][-1] = float("nan")
        elif wrong == "none":
            trial["final_rewards"][0] = None
        elif wrong == "no_agent":
            trial["padded_agent_mask"][1] = [0] * len(trial["padded_agent_mask"][1])
        elif wrong == "agent_first":
            trial["padded_agent_mask"][0][0] = 1
        elif wrong == "agent_on_padding":
            trial["padded_attn_mask"][2][-1] = 0
        elif wrong == "left_padded":
            trial["padded_attn_mask"][0][0] = 0
        elif wrong == "missing":
            del trial["padded_rewards"]
        elif wrong == "not_a_dict":
            trial = [trial]
        elif wrong == "records":
            trial["rollouts"] = [None]
        return trial


class Broken(Recording):
    """Says in its records that its second rollout failed, with agent tokens and a reward that must not count."""

    def spoil(self, trial: dict[str, Any]) -> dict[str, Any]:
        records = [Rollout(id=str(index), reward=reward) for index, reward in enumerate(trial["final_rewards"])]
        records[1].failed = "the sandbox died"
        trial["padded_rewards"][1][-1] = float("nan")
        return trial | {"rollouts": records}


class Forking:
    """Each rollout is three rows: the two replies of a conversation, and one on a branch of its own."""

    def __init__(self, *, tokenizer: Any, env_config: dict[str, Any]) -> None:
        self.rows = env_config.get("rows", 3)

    def run_trial(self, task_data_list: list[dict[str, Any]], agent: Any, num_rollouts: int) -> dict[str, Any]:
        rollouts = len(task_data_list) * num_rollouts
        rng = np.random.default_rng(len(task_data_list))
        count, width = rollouts * self.rows, 9
        ids = rng.integers(10, 200, (count, width))
        agent_mask = np.zeros((count, width), np.int64)
        for index in range(count):
            agent_mask[index, 3 : 5 + index % self.rows] = 1
        finals = rng.random(rollouts).astype(np.float32)
        owner = np.repeat(np.arange(rollouts), self.rows)
        tokens = np.bincount(owner, agent_mask.sum(1))
        return {
            "padded_token_ids": ids,
            "padded_attn_mask": np.ones((count, width), np.int64),
            "padded_agent_mask": agent_mask,
            "padded_rewards": agent_mask * (finals / tokens)[owner][:, None],
            "final_rewards": finals,
            "row_rollout": owner,
        }


class Uneven(Forking):
    """Only the first task's rollouts fork."""

    def run_trial(self, task_data_list: list[dict[str, Any]], agent: Any, num_rollouts: int) -> dict[str, Any]:
        trial = super().run_trial(task_data_list, agent, num_rollouts)
        kept = np.array([owner < num_rollouts or index % self.rows == 0 for index, owner in enumerate(trial["row_rollout"])])
        return {key: value if key == "final_rewards" else value[kept] for key, value in trial.items()}


class Raising(Recording):
    def run_trial(self, task_data_list: list[dict[str, Any]], agent: Any, num_rollouts: int) -> dict[str, Any]:
        raise RuntimeError("the game server is gone")


class Slow(Recording):
    def run_trial(self, task_data_list: list[dict[str, Any]], agent: Any, num_rollouts: int) -> dict[str, Any]:
        time.sleep(self.config["seconds"])
        return super().run_trial(task_data_list, agent, num_rollouts)


class Picky:
    """Not an `Environment`; its constructor refuses."""

    def __init__(self, *, tokenizer: Any, env_config: dict[str, Any]) -> None:
        raise KeyError("board")

    def run_trial(self, task_data_list: Any, agent: Any, num_rollouts: int) -> Any: ...


class NotAnEnvironment:
    pass


class Unheard(Environment):
    """Of every other rollout no reply arrives: its record says so, and nothing of it is trained."""

    Config = TalkConfig
    episode_class = AskEpisode

    async def _run(self, rollout: Rollout, recorder: Any) -> None:
        await super()._run(rollout, recorder)
        if int(rollout.id.rpartition("-")[2]) % 2:
            for call_id in list(rollout.calls):
                rollout.update(call_id, delivered=False)
