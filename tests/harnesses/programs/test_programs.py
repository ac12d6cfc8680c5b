"""Every agent program that longrein knows, the real one: it mends a file by its own tools, and its record is exact."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from missing import missing

from longrein import Agent
from longrein.contract import Message, Sampled, SampleRequest, Tool
from longrein.engines.scripted import ScriptedEngine
from longrein.envs import HarnessEnv
from longrein.harnesses.catalog import FILES, harness
from longrein.harnesses.demonstration import BROKEN, FILE, INSTRUCTION, OLD, RIGHT, WRONG, Demonstration, Policy, demonstrate
from longrein.harnesses.harness import Harness

FIRST = ("pi", "codex", "claude-code", "gemini-cli")
"""One a dialect: those that `make test` runs. The others have the marker `programs`."""
NAMES = [name if name in FIRST else pytest.param(name, marks=pytest.mark.programs) for name in FILES]
BRANCHES = {"smolagents": 3}
"""It writes what it made of a reply into the reply: each of its calls has another history than the one before."""


@pytest.fixture
def known(name: str, monkeypatch: pytest.MonkeyPatch) -> Harness:
    """The program, installed: `make test` puts it beside the other things it fetches."""
    if "LONGREIN_HARNESSES" not in os.environ:
        monkeypatch.setenv("LONGREIN_HARNESSES", str(Path(__file__).parents[3] / ".cache" / "harnesses"))
    found = harness(name)
    if found.installed() != found.package.version:
        missing(f"{name} is not in {found.folder}; `longrein harness install {name}` puts it there")
    return found


def told(played: Demonstration) -> str:
    return f"{played.traffic}\n{played.outcome.stdout[-2000:]}\n{played.outcome.stderr[-2000:]}"


@pytest.mark.parametrize("name", NAMES)
def test_a_program_mends_a_file_and_its_record_is_exact(name: str, known: Harness, rendering: Any) -> None:
    drawn: list[list[int]] = []

    class Engine(ScriptedEngine):
        async def sample(self, request: SampleRequest) -> Sampled:
            sampled = await super().sample(request)
            drawn.append(list(sampled.ids))
            return sampled

    played = demonstrate(known, rendering("qwen3"), engine=Engine, timeout=600)
    rollout, traffic, outcome = played.rollout, played.traffic, played.outcome
    assert (played.reward, outcome.exit_code, outcome.limit) == (1.0, 0, None), told(played)
    assert (traffic.errors, traffic.failure, traffic.unknown_routes) == (0, None, []), told(played)
    trained = [call for call in rollout.calls.values() if call.excluded is None]
    assert len(trained) == len(known.demo) + known.closes
    assert all(call.delivered for call in rollout.calls.values())
    # Every token that was sampled is recorded, in the order it was sampled, and is in the rows exactly once.
    if name == "smolagents":  # its stop word ends a reply before the token that the script ends it with
        drawn = [ids[:-1] for ids in drawn]
    assert sorted(call.completion_ids.tolist() for call in rollout.calls.values()) == sorted(drawn)
    rows = rollout.rows()
    assert len(rows) == BRANCHES.get(name, 1)
    own = [token for call in trained for token in call.completion_ids.tolist()]
    assert [token for row in rows for token in row.token_ids[row.agent_mask.astype(bool)].tolist()] == own


@pytest.mark.parametrize("name", NAMES)
def test_a_program_that_is_led_wrong_gets_nothing(name: str, known: Harness, rendering: Any) -> None:
    played = demonstrate(known, rendering("qwen3"), line=WRONG, timeout=600)
    assert (played.reward, played.outcome.exit_code, played.traffic.failure) == (0.0, 0, None), told(played)
    assert len(played.rollout.calls) >= 3


@pytest.mark.parametrize("name", ["pi"])
def test_a_row_of_a_dataset_names_a_program(name: str, known: Harness, rendering: Any, tokenizer: Any) -> None:
    config = {"program": name, "verify": "longrein.harnesses.demonstration.verify", "files": {FILE: BROKEN}}
    engine = ScriptedEngine(Policy(known, RIGHT), rendering("qwen3"))
    agent = Agent(None, tokenizer("qwen3"), engine=engine)
    env = HarnessEnv(tokenizer=agent.tokenizer, env_config=config)
    result = env.run_trial([{"instruction": INSTRUCTION}], agent, 1)
    (rollout,) = result["rollouts"]
    assert (rollout.failed, rollout.reward, rollout.turns) == (None, 1.0, 3)
    assert result["padded_agent_mask"].sum() == rollout.agent_tokens


def call(tool: str, **arguments: Any) -> Message:
    function = {"name": tool, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.parametrize("name", ["claude-code"])
def test_a_sub_agent_is_a_branch_of_its_own(name: str, known: Harness, rendering: Any) -> None:
    errand = "Look around for me."

    def policy(messages: Sequence[Message], tools: Sequence[Tool]) -> Message:
        done = sum(message["role"] == "tool" for message in messages)
        if any(errand in message["content"] for message in messages if message["role"] == "user"):
            look = call("Bash", command="cat calc.py", description="Look")
            return look if done == 0 else {"role": "assistant", "content": "It subtracts."}
        (folder,) = {found for m in messages for found in re.findall(r"Primary working directory: (\S+)", m["content"])}
        path = f"{folder}/calc.py"
        steps = [
            call("Agent", description="Look", prompt=errand, subagent_type="general-purpose", run_in_background=False),
            call("Read", file_path=path),
            call("Edit", file_path=path, old_string=OLD, new_string=RIGHT),
            {"role": "assistant", "content": "It adds now."},
        ]
        return steps[done]

    played = demonstrate(known, rendering("qwen3"), policy=policy, timeout=600)
    assert (played.reward, played.traffic.errors, played.outcome.exit_code) == (1.0, 0, 0), told(played)
    rows = played.rollout.rows()
    assert (len(rows), len(played.rollout.calls)) == (2, 6)
    assert sum(row.agent_mask.sum() for row in rows) == played.rollout.agent_tokens == played.traffic.tokens


@pytest.mark.parametrize("name", ["codex"])
def test_a_compaction_starts_a_branch_and_its_summary_is_trained(name: str, known: Harness, rendering: Any) -> None:
    limited = {path: f"model_auto_compact_token_limit = 1000\n{text}" for path, text in known.files.items()}
    summary = "calc.py subtracts."
    patch = f"*** Begin Patch\n*** Update File: calc.py\n@@\n-{OLD}\n+{RIGHT}\n*** End Patch\n"
    steps = iter([call("exec_command", cmd="cat calc.py"), call("apply_patch", input=patch)])

    def policy(messages: Sequence[Message], tools: Sequence[Tool]) -> Message:
        if not tools:  # the compaction
            return {"role": "assistant", "content": summary}
        return next(steps, {"role": "assistant", "content": "It adds now."})

    played = demonstrate(replace(known, files=limited), rendering("qwen3"), policy=policy, timeout=600)
    assert (played.reward, played.traffic.errors, played.outcome.exit_code) == (1.0, 0, 0), told(played)
    calls = list(played.rollout.calls.values())
    compactions = [one for one in calls if one.reply["content"] == summary]
    assert compactions
    assert all(one.excluded is None and one.parent is None for one in compactions)
    assert len(played.rollout.rows()) > len(compactions)
    assert played.rollout.agent_tokens == played.traffic.tokens
