"""An environment plays every task to its end, scores what ran into a limit, and loses nothing but the episode that broke."""

from __future__ import annotations

import asyncio
import re
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from longrein import Agent, Environment, Episode, LongreinError, Sampling, Step
from longrein.engines.scripted import ScriptedEngine
from longrein.envs import EnvConfigError, TreasureHunt


class CountEpisode(Episode):
    """Each reply earns what the task says for its turn; a word in the task makes it misbehave."""

    def start(self) -> list[dict[str, Any]]:
        self.turn = 0
        return [{"role": "user", "content": f"count {self.task['name']}"}]

    async def step(self, reply: dict[str, Any]) -> Step:
        await asyncio.sleep(0)
        rewards = self.task["rewards"]
        reward = rewards[self.turn]
        self.turn += 1
        if self.task.get("raises") == self.turn:
            raise RuntimeError("the episode broke")
        return Step([{"role": "user", "content": "on"}], reward, done=self.turn == len(rewards))

    def limit_reached(self, limit: str) -> float:
        return -0.5


class Count(Environment):
    episode_class = CountEpisode


def trial(tokenizer: Any, tasks: list[dict[str, Any]], repeats: int = 1, **config: Any) -> Any:
    agent = Agent(None, tokenizer, engine=ScriptedEngine(lambda m, t: "one two", rendering_of(tokenizer)))
    return Count(tokenizer=tokenizer, env_config=config).run_trial(tasks, agent, repeats)


def rendering_of(tokenizer: Any) -> Any:
    from longrein.rendering import rendering_for

    return rendering_for(tokenizer)


def test_rollouts_are_task_major_and_aligned(tokenizer: Any) -> None:
    tasks = [{"name": "a", "rewards": [0.25, 0.75]}, {"name": "b", "rewards": [1.0]}]
    result = trial(tokenizer("qwen3"), tasks, repeats=2)
    assert [r.task["name"] for r in result["rollouts"]] == ["a", "a", "b", "b"]
    assert result["final_rewards"].tolist() == [1, 1, 1, 1]
    assert result["row_rollout"].tolist() == [0, 1, 2, 3]
    for row, rollout in enumerate(result["rollouts"]):
        length = int(result["padded_attn_mask"][row].sum())
        last = list(rollout.calls)[-1]
        assert result["padded_token_ids"][row, :length].tolist() == rollout.tokens(last).tolist()
        assert result["padded_agent_mask"][row].sum() == rollout.agent_tokens
        assert result["padded_rewards"][row].sum() == pytest.approx(1.0)


@pytest.mark.parametrize("credit", ["spread", "last", "terminal"])
def test_a_steps_reward_goes_to_the_reply_that_earned_it(tokenizer: Any, credit: str) -> None:
    result = trial(tokenizer("qwen3"), [{"name": "a", "rewards": [0.25, 0.75]}], credit=credit)
    rewards, mask = result["padded_rewards"][0], result["padded_agent_mask"][0].astype(bool)
    turns = np.split(rewards[mask], [len(rewards[mask]) // 2])
    expected = {"spread": (0.25, 0.75), "last": (0.25, 0.75), "terminal": (0.0, 1.0)}[credit]
    assert [float(turn.sum()) for turn in turns] == pytest.approx(expected)
    if credit != "spread":
        assert np.count_nonzero(rewards) == sum(value > 0 for value in expected)
    assert not rewards[~mask].any()


def test_an_episode_that_raises_is_one_failed_rollout(tokenizer: Any) -> None:
    tasks = [{"name": "a", "rewards": [0.5, 1.0], "raises": 2}, {"name": "b", "rewards": [1.0]}]
    result = trial(tokenizer("qwen3"), tasks)
    broken, whole = result["rollouts"]
    assert broken.failed == "RuntimeError: the episode broke"
    assert broken.reward is None
    assert np.isnan(result["final_rewards"][0])
    assert result["padded_agent_mask"][0].sum() == 0
    assert (whole.failed, whole.reward) == (None, 1.0)


def test_a_nan_reward_fails_its_rollout(tokenizer: Any) -> None:
    result = trial(tokenizer("qwen3"), [{"name": "a", "rewards": [float("nan")]}])
    assert "gave the reward nan" in result["rollouts"][0].failed


@pytest.mark.parametrize(
    ("config", "limit"),
    [({"max_turns": 2}, "turns"), ({"max_tokens": 45}, "tokens"), ({"max_seconds": 1e-9}, "time")],
)
def test_an_episode_at_its_limit_is_scored(tokenizer: Any, config: dict[str, Any], limit: str) -> None:
    result = trial(tokenizer("qwen3"), [{"name": "a", "rewards": [0.25] * 10}], **config)
    (rollout,) = result["rollouts"]
    assert (rollout.limit, rollout.failed) == (limit, None)
    assert rollout.reward == pytest.approx(0.25 * rollout.turns - 0.5)


def test_a_prompt_that_leaves_no_room_fails(tokenizer: Any) -> None:
    (rollout,) = trial(tokenizer("qwen3"), [{"name": "a " * 50, "rewards": [1.0]}], max_tokens=20)["rollouts"]
    assert "no room for a reply" in rollout.failed


def test_a_reply_is_cut_at_its_limit(tokenizer: Any) -> None:
    result = trial(tokenizer("qwen3"), [{"name": "a", "rewards": [1.0]}], max_reply_tokens=1)
    (call,) = result["rollouts"][0].calls.values()
    assert (len(call.completion_ids), call.finish_reason) == (1, "length")


def test_the_same_task_twice_is_two_groups_with_their_own_noise(tokenizer: Any) -> None:
    tasks = [{"name": "a", "rewards": [1.0]}] * 2
    seeds = [rollout.seed for rollout in trial(tokenizer("qwen3"), tasks, repeats=2)["rollouts"]]
    assert len(set(seeds)) == 4
    assert seeds == [rollout.seed for rollout in trial(tokenizer("qwen3"), tasks, repeats=2)["rollouts"]]


def test_a_text_agent_keeps_its_state_by_rollout(tokenizer: Any) -> None:
    class Counting:
        def get_action(self, messages: list[dict[str, Any]], state: int | None) -> tuple[str, int]:
            return f"turn {state or 0}", (state or 0) + 1

    env = Count(tokenizer=tokenizer("qwen3"))
    result = env.run_trial([{"name": "a", "rewards": [0.0, 1.0]}], Counting(), 2)
    for rollout in result["rollouts"]:
        assert [call.reply["content"] for call in rollout.calls.values()] == ["turn 0", "turn 1"]


def test_an_agent_that_is_none_is_refused(tokenizer: Any) -> None:
    with pytest.raises(LongreinError, match=r"the agent is a int; it must be a longrein.Agent or have get_action"):
        Count(tokenizer=tokenizer("qwen3")).run_trial([], 3, 1)


def test_it_runs_inside_an_event_loop(tokenizer: Any) -> None:
    async def notebook() -> Any:
        return trial(tokenizer("qwen3"), [{"name": "a", "rewards": [1.0]}])

    assert asyncio.run(notebook())["final_rewards"].tolist() == [1.0]


def test_a_setting_that_is_not_there_is_refused_with_the_nearest(tokenizer: Any) -> None:
    with pytest.raises(EnvConfigError, match="Count has no setting 'max_turn'. Did you mean 'max_turns'?"):
        Count(tokenizer=tokenizer("qwen3"), env_config={"max_turn": 3})
    with pytest.raises(EnvConfigError, match="max_turns is 0; it must be a whole number of 1 or more"):
        Count(tokenizer=tokenizer("qwen3"), env_config={"max_turns": 0})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"min_hops": "three"}, "min_hops is 'three'; it must be a whole number"),
        ({"max_hops": True}, "max_hops is True; it must be a whole number"),
        ({"actions": "txt"}, "actions is 'txt'; it must be one of tools, text"),
        ({"credit": ["last"]}, "credit is ['last']; it must be one of spread, last, terminal"),
    ],
)
def test_a_value_of_another_kind_than_its_setting_says_is_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvConfigError) as refused:
        TreasureHunt.check_config(setting)
    assert str(refused.value) == f"TreasureHunt refuses its env_config: {message}"


def test_limits_beyond_the_models_context_are_refused(tokenizer: Any, random_model: Any) -> None:
    agent = Agent(random_model(), tokenizer("qwen3"), sampling=Sampling(max_tokens=4))
    reads = agent.context_length
    with pytest.raises(LongreinError, match=f"conversations of {reads + 1} tokens .* the model reads {reads}"):
        Count(tokenizer=tokenizer("qwen3"), env_config={"max_tokens": reads + 1}).run_trial([], agent, 1)


def test_rollouts_wait_rather_than_pile_up(tokenizer: Any) -> None:
    at_once: list[int] = []
    running = 0

    class Slow(Count):
        async def _run(self, rollout: Any, recorder: Any) -> None:
            nonlocal running
            running += 1
            at_once.append(running)
            try:
                await asyncio.sleep(0)
                await super()._run(rollout, recorder)
            finally:
                running -= 1

    found = tokenizer("qwen3")
    agent = Agent(None, found, engine=ScriptedEngine(lambda m, t: "one two", rendering_of(found)))
    env = Slow(tokenizer=found, env_config={"concurrency": 3})
    played = env.run_trial([{"name": "a", "rewards": [0.5, 0.5]}] * 4, agent, num_rollouts=2)["rollouts"]
    assert [rollout.reward for rollout in played] == [1.0] * len(at_once) == [1.0] * 8
    assert max(at_once) == 3


class Odd(Environment):
    """An episode whose methods are what the task says."""

    class episode_class(CountEpisode):
        async def step(self, reply: dict[str, Any]) -> Any:
            return await self.task["step"]() if "step" in self.task else await super().step(reply)

        def start(self) -> Any:
            return self.task.get("start", [{"role": "user", "content": "go"}])

        async def limit_reached(self, limit: str) -> Any:
            return self.task["at_limit"]


def odd(tokenizer: Any, max_turns: int = 2, **task: Any) -> Any:
    agent = Agent(None, tokenizer, engine=ScriptedEngine(lambda m, t: "one two", rendering_of(tokenizer)))
    env = Odd(tokenizer=tokenizer, env_config={"max_turns": max_turns, "max_seconds": 0.3})
    (rollout,) = env.run_trial([task], agent)["rollouts"]
    return rollout


def giving(value: Any) -> Any:
    async def step() -> Any:
        return value

    return step


GO_ON = Step([{"role": "user", "content": "on"}])


@pytest.mark.parametrize(
    ("task", "cause"),
    [
        ({"step": giving(None)}, "step gave None; it must give a Step"),
        ({"step": giving(Step(reward=None, done=True))}, "step gave the reward None; it must be a number"),  # type: ignore
        ({"step": giving(Step(reward="1", done=True))}, "step gave the reward '1'; it must be a number"),  # type: ignore
        ({"step": giving(Step(reward=-np.inf, done=True))}, "step gave the reward -inf"),
        ({"step": giving(Step("on"))}, "step gave 'on'; it must give a list of messages"),  # type: ignore
        ({"start": "hello"}, "start gave 'hello'; it must give a list of messages"),
        ({"start": None}, "start gave None; it must give a list of messages"),
        ({"start": ["hello"]}, r"start gave \['hello'\]; it must give a list of messages"),
        ({"step": giving(GO_ON), "at_limit": np.nan}, "limit_reached gave the reward nan"),
        ({"step": giving(GO_ON), "at_limit": None}, "limit_reached gave the reward None"),
    ],
)
def test_an_episode_that_gives_something_odd_is_one_failed_rollout_that_says_so(
    tokenizer: Any, task: dict[str, Any], cause: str
) -> None:
    rollout = odd(tokenizer("qwen3"), **task)
    assert re.search(cause, rollout.failed or ""), rollout.failed
    assert (rollout.reward, rollout.success) == (None, None)


def test_an_episode_that_exits_is_one_failed_rollout(tokenizer: Any) -> None:
    async def leaves() -> Step:
        sys.exit("no licence")

    assert odd(tokenizer("qwen3"), step=leaves).failed == "SystemExit: no licence"


@pytest.mark.parametrize("reward", [True, np.float32(1), np.bool_(True), np.int64(1), Fraction(1)])
def test_any_number_is_a_reward(tokenizer: Any, reward: Any) -> None:
    rollout = odd(tokenizer("qwen3"), step=giving(Step(reward=reward, done=True, success=np.bool_(False))))  # type: ignore
    assert (rollout.failed, rollout.reward, type(rollout.reward)) == (None, 1.0, float)
    assert rollout.success is False


def test_an_episode_that_hangs_ends_at_its_limit_of_time_with_what_it_had_earned(tokenizer: Any) -> None:
    steps = iter([giving(Step(GO_ON.messages, reward=0.25)), lambda: asyncio.sleep(600)])
    rollout = odd(tokenizer("qwen3"), max_turns=9, step=lambda: next(steps)(), at_limit=-1)
    assert (rollout.limit, rollout.failed, rollout.reward, rollout.turns) == ("time", None, -0.75, 2)


def test_a_timeout_of_the_episodes_own_is_no_limit_of_time(tokenizer: Any) -> None:
    async def impatient() -> Step:
        raise TimeoutError("the game server")

    assert odd(tokenizer("qwen3"), step=impatient).failed == "TimeoutError: the game server"


@pytest.mark.parametrize(
    ("name", "value"), [("max_turns", True), ("max_seconds", 0), ("max_seconds", "60"), ("max_seconds", -1)]
)
def test_a_limit_that_is_none_is_refused(tokenizer: Any, name: str, value: Any) -> None:
    with pytest.raises(EnvConfigError, match=f"{name} is {value!r}"):
        Count(tokenizer=tokenizer("qwen3"), env_config={name: value})
