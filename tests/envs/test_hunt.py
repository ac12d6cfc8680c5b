"""The hunt is solved by reading its notes, and not otherwise."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from longrein import Agent
from longrein.engines.scripted import ScriptedEngine
from longrein.envs import TreasureHunt
from longrein.rooms import ROOMS, TOOLS


def follow_notes(messages: Any, tools: Any) -> dict[str, Any]:
    """Looks where the last note says, and answers where it saw the coin."""
    said = messages[-1]["content"]
    if "coin is here" in said:
        looked = json.loads(messages[-2]["tool_calls"][0]["function"]["arguments"])["room"]
        return call("answer", looked)
    return call("look", re.search(r'"(\w+)"', said)[1])


def call(name: str, room: str) -> dict[str, Any]:
    arguments = json.dumps({"room": room})
    return {"content": "", "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}]}


def play(tokenizer: Any, rendering: Any, script: Any, **config: Any) -> Any:
    agent = Agent(None, tokenizer, engine=ScriptedEngine(script, rendering))
    tasks = TreasureHunt.tasks(6, seed=3, env_config=config)
    return TreasureHunt(tokenizer=tokenizer, env_config=config).run_trial(tasks, agent, 1)


def test_following_the_notes_finds_the_coin(tokenizer: Any, rendering: Any) -> None:
    result = play(tokenizer("qwen3"), rendering("qwen3"), follow_notes)
    assert result["final_rewards"].tolist() == [1.0] * 6
    for rollout in result["rollouts"]:
        assert rollout.turns == len(rollout.task["rooms"]) + 1
        assert all(call.tools == TOOLS for call in rollout.calls.values())
        assert len(rollout.branches()) == 1


def test_answering_without_reading_finds_nothing(tokenizer: Any, rendering: Any) -> None:
    result = play(tokenizer("qwen3"), rendering("qwen3"), lambda m, t: call("answer", ROOMS[0]), min_hops=2)
    solved = [rollout.task["rooms"][-1] == ROOMS[0] for rollout in result["rollouts"]]
    assert result["final_rewards"].tolist() == [float(one) for one in solved]


def test_text_actions_for_models_without_tools(tokenizer: Any, rendering: Any) -> None:
    def script(messages: Any, tools: Any) -> str:
        said = messages[-1]["content"]
        if "coin is here" in said:
            return "I answer " + messages[-2]["content"].split()[-1]
        return "look into the " + re.search(r'"(\w+)"', said)[1]

    result = play(tokenizer("smollm2"), rendering("smollm2"), script, actions="text")
    assert result["final_rewards"].tolist() == [1.0] * 6
    assert all(rollout.turns == len(rollout.task["rooms"]) + 1 for rollout in result["rollouts"])


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "hello",
        '<tool_call>\n{"name": "look"\n</tool_call>',
        '<tool_call>\n{"name": "fly", "arguments": {}}\n</tool_call>',
    ],
)
def test_a_reply_that_is_no_action_earns_nothing(tokenizer: Any, rendering: Any, reply: str) -> None:
    result = play(tokenizer("qwen3"), rendering("qwen3"), lambda m, t: reply)
    assert result["final_rewards"].tolist() == [0.0] * 6
    assert all(rollout.failed is None for rollout in result["rollouts"])


def test_tasks_are_made_from_their_seed() -> None:
    assert TreasureHunt.tasks(5, seed=1) == TreasureHunt.tasks(5, seed=1) != TreasureHunt.tasks(5, seed=2)
    rows = TreasureHunt.get_train_dataset(3, env_config={"min_hops": 3})
    assert rows[0]["env_class_path"] == "longrein.envs.hunt.TreasureHunt"
    assert rows[0]["env_config"] == {"min_hops": 3}
    assert len(rows[0]["task_data"]["rooms"]) >= 3
