"""longrein's environments behind OpenEnv's server."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from missing import missing

from longrein import Agent, Sampling
from longrein.contract import LongreinError
from longrein.envs import Calculator, HarnessEnv, TreasureHunt
from longrein.envs.environment import Environment, Episode, Step
from longrein.envs.openenv import OpenEnv, app

if find_spec("openenv") is None:
    missing("openenv is not installed; `make test` installs it")

from openenv.core import GenericEnvClient
from openenv_worlds import running


def test_an_environment_played_over_the_network_gives_the_rollouts_it_gives_here(folder):
    agent = Agent.from_pretrained(str(folder("tiny")), sampling=Sampling(max_tokens=24))
    tasks = TreasureHunt.tasks(3, seed=5)
    here = TreasureHunt(tokenizer=agent.tokenizer).run_trial(tasks, agent, 2)["rollouts"]
    with running(app(TreasureHunt)) as url:
        config = {"url": url, "max_turns": 6, "max_tokens": 512, "max_reply_tokens": 48}
        there = OpenEnv(tokenizer=agent.tokenizer, env_config=config).run_trial(tasks, agent, 2)["rollouts"]
    assert sum(rollout.turns for rollout in here) > 6
    for one, other in zip(here, there, strict=True):
        assert other.failed is None
        assert (other.reward, other.success) == (one.reward, one.success)
        assert [row.token_ids.tolist() for row in other.rows()] == [row.token_ids.tolist() for row in one.rows()]
        assert [row.agent_mask.tolist() for row in other.rows()] == [row.agent_mask.tolist() for row in one.rows()]


def look(room):
    return {"tool_calls": [{"id": "c", "function": {"name": "look", "arguments": f'{{"room": "{room}"}}'}}]}


def answer(room):
    return {"tool_calls": [{"id": "c", "function": {"name": "answer", "arguments": f'{{"room": "{room}"}}'}}]}


def test_openenvs_own_client_plays_it():
    served = app("longrein.envs.TreasureHunt", {"max_turns": 2}, tasks=[{"rooms": ["attic", "barn"]}])
    with running(served) as url, GenericEnvClient(base_url=url).sync() as client:
        first = client.reset(index=0)
        assert [tool["function"]["name"] for tool in first.observation["tools"]] == ["look", "answer"]
        assert "attic" in first.observation["messages"][0]["content"]
        seen = client.step(look("attic"))
        assert (seen.done, seen.reward) == (False, 0.0)
        assert "barn" in seen.observation["messages"][0]["content"]
        won = client.step(answer("barn"))
        assert (won.done, won.reward) == (True, 1.0)
        with pytest.raises(RuntimeError, match="reset first"):
            client.step(look("attic"))

        client.reset(task={"rooms": ["cellar", "den"]})
        client.step(look("cellar"))
        cut = client.step(look("den"))
        assert (cut.done, cut.reward, cut.observation["limit"]) == (True, 0.0, "turns")
        with pytest.raises(RuntimeError, match="it was given room"):
            client.reset(room="attic")


def test_its_tasks_are_openenvs_tasks():
    import requests

    with running(app(Calculator, tasks=5, seed=3)) as url:
        tasks = Calculator.tasks(5, seed=3)
        assert requests.get(f"{url}/calculator/splits").json() == [{"name": "train", "type": "train"}]
        assert requests.post(f"{url}/calculator/num_tasks", json={"split": "train"}).json() == {"num_tasks": 5}
        assert requests.post(f"{url}/calculator/task", json={"split": "train", "index": 4}).json() == {"task": tasks[4]}
        assert requests.post(f"{url}/calculator/task", json={"split": "train", "index": 5}).status_code == 400
        begun = requests.post(f"{url}/reset", json={"seed": 7}).json()
        assert str(tasks[2]["delivery"]) in begun["observation"]["messages"][0]["content"]
        assert requests.get(f"{url}/metadata").json()["name"] == "Calculator"


class SlowEpisode(Episode):
    closed: list[str] = []  # noqa: RUF012

    async def start(self):
        return [{"role": "user", "content": "Well?"}]

    async def step(self, reply):
        return Step(messages=[{"role": "user", "content": reply["content"]}], info={"reply": reply})

    async def limit_reached(self, limit):
        return -0.5

    async def close(self):
        self.closed.append(self.task["name"])


class Slow(Environment):
    episode_class = SlowEpisode


def test_async_episodes_their_limits_and_their_end():
    SlowEpisode.closed.clear()
    with running(app(Slow, {"max_turns": 2})) as url, GenericEnvClient(base_url=url).sync() as client:
        with pytest.raises(RuntimeError, match="give reset a `task`"):
            client.reset()
        client.reset(task={"name": "one"})
        told = client.step({"content": "hm", "reasoning_content": "so"})
        assert told.observation["info"]["reply"] == {"role": "assistant", "content": "hm", "reasoning_content": "so"}
        cut = client.step({"content": "hm"})
        assert (cut.done, cut.reward) == (True, -0.5)
        client.reset(task={"name": "two"})
    assert SlowEpisode.closed == ["one", "two"]


def test_what_cannot_be_served_is_said_so():
    with pytest.raises(LongreinError, match="HarnessSessionFactory"):
        app(HarnessEnv, {"command": ["true"], "verify": "a.b"})
    with pytest.raises(LongreinError, match="must be an Environment"):
        app("json.JSONDecoder")
