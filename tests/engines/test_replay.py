"""What was recorded plays again without the model, bit for bit; what was not says where it differs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longrein.agents import Agent
from longrein.contract import SampleRequest, Sampling
from longrein.engines.replay import ReplayEngine, ReplayError
from longrein.envs.harness import HarnessEnv
from longrein.envs.hunt import HuntEpisode, TreasureHunt
from longrein.recorder import Recorder
from longrein.rendering import Rendering
from longrein.rollout import Call, Rollout

Named = Callable[[str], Any]
TASKS = [{"rooms": ["attic", "barn", "cellar"]}, {"rooms": ["shed", "attic"]}]
REACT = {
    "command": ["{python}", "-m", "longrein.harnesses.react", "--rooms", "{rooms}"],
    "verify": "longrein.harnesses.react.verify_hunt",
    "max_tokens": 512,
    "max_reply_tokens": 48,
}


@pytest.fixture(scope="module")
def agent(folder: Callable[[str], Path]) -> Agent:
    return Agent.from_pretrained(str(folder("tiny")), seed=3)


def again(agent: Agent, rollouts: list[Rollout], **settings: Any) -> Agent:
    """The agent without its model."""
    engine = ReplayEngine(rollouts, decode=agent.tokenizer.decode)
    return Agent(None, agent.tokenizer, engine=engine, **{"seed": agent.seed, **settings})


def record(rollout: Rollout) -> list[Any]:
    calls = [[getattr(call, field.name) for field in fields(Call)] for call in rollout.calls.values()]
    values = [value.tobytes() if isinstance(value, np.ndarray) else value for call in calls for value in call]
    return [rollout.task, rollout.seed, rollout.reward, rollout.success, rollout.failed, rollout.limit, values]


@pytest.mark.parametrize("kind", [TreasureHunt, HarnessEnv])
def test_a_trial_plays_again_without_the_model(kind: Any, agent: Agent) -> None:
    env = kind(tokenizer=agent.tokenizer, env_config=REACT if kind is HarnessEnv else None)
    played = env.run_trial(TASKS, agent, num_rollouts=2)["rollouts"]
    assert sum(len(rollout.calls) for rollout in played) > 4
    replayed = env.run_trial(TASKS, again(agent, played[::-1]), num_rollouts=2)["rollouts"]
    assert [record(rollout) for rollout in replayed] == [record(rollout) for rollout in played]


def test_a_changed_environment_gives_the_first_difference(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    env = TreasureHunt(tokenizer=agent.tokenizer)
    played = env.run_trial(TASKS[:1], agent)["rollouts"]
    begin = HuntEpisode.start
    monkeypatch.setattr(
        HuntEpisode, "start", lambda self: [{**m, "content": m["content"].replace("attic", "moon")} for m in begin(self)]
    )
    (rollout,) = env.run_trial(TASKS[:1], again(agent, played))["rollouts"]
    assert rollout.failed is not None
    assert "was not recorded: its prompt differs from the nearest recorded prompt at token" in rollout.failed
    expected, got = rollout.failed.partition("expected ")[2].split(", got ")
    assert "attic" in expected
    assert "moon" in got
    assert rollout.reward is None


def test_rollouts_under_other_seeds_take_the_calls_in_order(rendering: Named) -> None:
    found = rendering("tiny")
    recorded = [_rollout(f"r{number}", f"reply {number}", found) for number in range(3)]
    replay = Recorder(ReplayEngine(recorded), found)
    for turn, number in enumerate([0, 1, 2, 0]):  # and from the start, once all were given
        replay.open(f"again {turn}", seed=99)
        call = asyncio.run(replay.call(f"again {turn}", [{"role": "user", "content": "hi"}]))
        assert call.reply["content"] == f"reply {number}"
        assert call.id not in recorded[number].calls


def test_a_sibling_too_many_is_refused(rendering: Named) -> None:
    found = rendering("tiny")
    for seed in (0, 99):
        replay = Recorder(ReplayEngine(_rollout("r", "reply", found)), found)
        replay.open("again", seed=seed)
        asyncio.run(replay.call("again", [{"role": "user", "content": "hi"}]))
        with pytest.raises(ReplayError, match="was sampled 1 times in the record, and is asked for once more"):
            asyncio.run(replay.call("again", [{"role": "user", "content": "hi"}]))


def test_differences_in_length_and_limits_are_named() -> None:
    one = np.array([7], np.int32)
    rollout = Rollout("r")
    rollout.add(Call("c", None, np.array([1, 2, 3], np.int32), one, np.array([-0.5], np.float32), "stop"))
    engine = ReplayEngine(rollout)

    def asked(ids: list[int], **sampling: Any) -> Any:
        return asyncio.run(engine.sample(SampleRequest(ids, Sampling(**sampling), frozenset([7]), seed=0)))

    with pytest.raises(ReplayError, match=r"ends after 2 tokens, where the nearest recorded prompt goes on with \[3\]"):
        asked([1, 2])
    with pytest.raises(ReplayError, match=r"goes on after all 3 tokens of the nearest recorded prompt, with \[4\]"):
        asked([1, 2, 3, 4])
    with pytest.raises(ReplayError, match=r"at token 1: expected \[2, 3\], got \[9, 3\]; both follow \[1\]"):
        asked([1, 9, 3])
    assert asked([1, 2, 3], max_tokens=1).ids == [7]
    with pytest.raises(ReplayError, match="have no calls"):
        ReplayEngine([])


def _rollout(rollout_id: str, text: str, rendering: Rendering) -> Rollout:
    from longrein.engines.scripted import ScriptedEngine

    recorder = Recorder(ScriptedEngine([text], rendering), rendering)
    rollout = recorder.open(rollout_id)
    asyncio.run(recorder.call(rollout_id, [{"role": "user", "content": "hi"}]))
    return rollout
