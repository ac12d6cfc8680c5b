"""Every agent program that longrein knows, the real one: it mends a file by its own tools, and its record is exact."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from longrein.contract import Sampled, SampleRequest
from longrein.engines.scripted import ScriptedEngine
from longrein.harnesses.catalog import FILES, harness
from longrein.harnesses.demonstration import WRONG, Demonstration, demonstrate
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
        message = f"{name} is not in {found.folder}; `longrein harness install {name}` puts it there"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(message)
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

    played = demonstrate(known, rendering("qwen3"), engine=Engine)
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
    played = demonstrate(known, rendering("qwen3"), line=WRONG)
    assert (played.reward, played.outcome.exit_code, played.traffic.failure) == (0.0, 0, None), told(played)
    assert len(played.rollout.calls) >= 3
