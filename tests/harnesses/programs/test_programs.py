"""Every agent program that longrein knows, the real one: it mends a file by its own tools, and its record is exact."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from missing import missing

from longrein import Agent
from longrein.contract import Sampled, SampleRequest
from longrein.engines.scripted import ScriptedEngine
from longrein.envs import HarnessEnv
from longrein.harnesses.catalog import FILES, harness
from longrein.harnesses.demonstration import INSTRUCTION, Demonstration, demonstrate, episodes
from longrein.harnesses.harness import Harness
from longrein.harnesses.policies import BROKEN, ERRAND, FILE, FINDING, RIGHT, WRONG, Policy
from longrein.rollout import Call, Rollout

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


class Watched(ScriptedEngine):
    """Keeps what it was asked and what it drew."""

    drawn: list[tuple[list[int], list[int]]]

    async def sample(self, request: SampleRequest) -> Sampled:
        sampled = await super().sample(request)
        self.drawn.append((list(request.prompt_ids), list(sampled.ids)))
        return sampled


def watched() -> type[Watched]:
    return type("Watched", (Watched,), {"drawn": []})


def recorded(rollout: Rollout) -> list[tuple[list[int], list[int]]]:
    calls = [(rollout.tokens(call.id).tolist(), call.completion_ids.tolist()) for call in rollout.calls.values()]
    return sorted((tokens[: len(tokens) - len(ids)], ids) for tokens, ids in calls)


@pytest.mark.parametrize("name", NAMES)
def test_a_program_mends_a_file_and_its_record_is_exact(name: str, known: Harness, rendering: Any) -> None:
    engine = watched()
    played = demonstrate(known, rendering("qwen3"), engine=engine, timeout=600)
    rollout, traffic, outcome = played.rollout, played.traffic, played.outcome
    assert (played.reward, outcome.exit_code, outcome.limit) == (1.0, 0, None), told(played)
    assert (traffic.errors, traffic.failure, traffic.unknown_routes) == (0, None, []), told(played)
    trained = [call for call in rollout.calls.values() if call.excluded is None]
    assert len(trained) == len(known.demo) + known.closes
    assert all(call.delivered for call in rollout.calls.values())
    # Every token that was sampled is recorded, in the order it was sampled, and is in the rows exactly once.
    if name == "smolagents":  # its stop word ends a reply before the token that the script ends it with
        engine.drawn = [(prompt, ids[:-1]) for prompt, ids in engine.drawn]
    assert recorded(rollout) == sorted(engine.drawn)
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


QUICK = {"compaction": ("pi", "claude-code"), "sub-agent": ("codex", "gemini-cli")}
"""Again one a dialect."""


def shown(episode: str) -> list[Any]:
    """The programs that can play an episode, each marked as above."""
    able = [name for name in FILES if episode in episodes(harness(name))]
    return [name if name in QUICK[episode] else pytest.param(name, marks=pytest.mark.programs) for name in able]


def exact(played: Demonstration, engine: type[Watched]) -> Rollout:
    """The record of an episode that went well: every sampled token once, after the prompt that it was sampled after."""
    rollout, traffic, outcome = played.rollout, played.traffic, played.outcome
    assert (played.reward, outcome.exit_code, outcome.limit) == (1.0, 0, None), told(played)
    assert (traffic.failure, traffic.unknown_routes, traffic.undelivered) == (None, [], []), told(played)
    assert recorded(rollout) == sorted(engine.drawn)
    trained = [call.completion_ids.tolist() for call in rollout.calls.values() if call.excluded is None]
    rows = rollout.rows()
    own = [token for row in rows for token in row.token_ids[row.agent_mask.astype(bool)].tolist()]
    assert sorted(own) == sorted(token for ids in trained for token in ids)
    rollout.reward = played.reward
    assert sum(float(row.rewards.sum()) for row in rollout.rows()) == pytest.approx(1.0)
    return rollout


def text(call: Call) -> str:
    return "\n".join(message["content"] for message in call.messages)


@pytest.mark.parametrize("name", shown("compaction"))
def test_a_compaction_starts_a_branch_and_its_summary_is_trained(name: str, known: Harness, rendering: Any) -> None:
    engine = watched()
    played = demonstrate(known, rendering("qwen3"), episode="compaction", engine=engine, timeout=600)
    rollout = exact(played, engine)
    way = known.compaction
    assert way is not None
    assert played.traffic.errors == (way.context_length is not None), told(played)  # the prompt that was too long
    calls = list(rollout.calls.values())
    summaries = [call for call in calls if "Summary" in call.reply["content"] and call.excluded is None]
    steps = [call for call in calls if call not in summaries and call.excluded is None]
    resumed = bool(way.resumed)
    assert len(steps) == 3 + resumed + len(known.demo) + 1  # the logs, the word in between, the mending, the last word
    # Once: what came before goes on to the summary, what comes after starts from it, and neither breaks off on the way.
    roots = [call for call in steps if call.parent is None]
    assert [steps.index(root) for root in roots] in ([0, 3], [0, 4])
    last = summaries[-1].reply["content"].splitlines()[1]
    assert last in text(roots[1])
    assert not any("Summary" in text(call) for call in steps[: steps.index(roots[1])])
    for before, call in itertools.pairwise(steps):
        assert call.parent == (None if call is roots[1] else before.id)
    assert len(rollout.rows()) == 2 + len(summaries)


@pytest.mark.parametrize("name", shown("sub-agent"))
def test_a_sub_agent_is_a_branch_of_its_own(name: str, known: Harness, rendering: Any) -> None:
    engine = watched()
    played = demonstrate(known, rendering("qwen3"), episode="sub-agent", engine=engine, timeout=600)
    rollout = exact(played, engine)
    assert played.traffic.errors == 0, told(played)
    way = known.sub_agent
    assert way is not None
    trained = [call for call in rollout.calls.values() if call.excluded is None]
    sent = [call for call in trained if ERRAND in text(rollout.path(call.id)[0])]
    main = [call for call in trained if call not in sent]
    assert len(sent) == 1 + max(1, len(way.reports))
    assert len(main) == len(way.starts) + len(known.demo) + 1
    for conversation in (sent, main):
        assert [call.parent for call in conversation] == [None, *(call.id for call in conversation[:-1])]
    assert any(FINDING in text(call) for call in main)  # what it found came back
    assert len(rollout.rows()) == 2
