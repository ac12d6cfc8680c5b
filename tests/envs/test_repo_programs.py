"""Real coding agents on a repository task: the fix is rewarded, in their sandbox, with every sampled token in one place."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from missing import missing

from longrein import Agent
from longrein.engines.scripted import ScriptedEngine
from longrein.envs import RepoEnv
from longrein.envs.modules import MODULES
from longrein.envs.repo import make_task
from longrein.harnesses.catalog import FILES, harness

FIRST = ("pi", "codex")
"""Those that `make test` runs; the others have the marker `programs`."""
NAMES = [name if name in FIRST else pytest.param(name, marks=pytest.mark.programs) for name in FILES]
SHELLS = {"codex": "cmd"}
"""What a program's shell calls its command, where not `command`."""


def shell(tools: Sequence[dict[str, Any]]) -> str:
    names = [tool["function"]["name"] for tool in tools]
    known = ("bash", "Bash", "exec_command", "run_shell_command", "shell", "run")
    return next(name for name in known if name in names)


def coder(program: str, task: dict[str, Any], right: bool) -> Any:
    module = task["bug"]["module"]
    text = MODULES[module].source if right else task["files"][f"{module}.py"]
    encoded = base64.b64encode(text.encode()).decode()  # some programs refuse a command with backquotes in it
    commands = ["ls && git log --oneline", f"echo {encoded} | base64 -d > {module}.py && git diff --stat"]
    if program == "mini-swe-agent":
        commands.append("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")

    def reply(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str | dict[str, Any]:
        turn = sum(message["role"] == "assistant" for message in messages)
        if program == "smolagents":
            code = f"print(run(command={commands[turn]!r}))" if turn < len(commands) else 'final_answer("Done.")'
            return f"Thought: next.\n<code>\n{code}\n</code>"
        turn = sum(message["role"] == "tool" for message in messages)
        if not tools or turn >= len(commands):
            return {"role": "assistant", "content": "Done."}
        arguments = {SHELLS.get(program, "command"): commands[turn], **EXTRA.get(program, {})}
        function = {"name": shell(tools), "arguments": json.dumps(arguments)}
        return {"role": "assistant", "content": "", "tool_calls": [{"id": "", "type": "function", "function": function}]}

    return reply


EXTRA: dict[str, dict[str, Any]] = {
    "claude-code": {"description": "Work"},
    "opencode": {"description": "Work"},
    "gemini-cli": {"description": "Work"},
    "qwen-code": {"description": "Work", "is_background": False},
}


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_real_program_mends_a_repository(name: str, right: bool, tokenizer: Any, rendering: Any, monkeypatch: Any) -> None:
    if "LONGREIN_HARNESSES" not in os.environ:
        monkeypatch.setenv("LONGREIN_HARNESSES", str(Path(__file__).parents[2] / ".cache" / "harnesses"))
    if harness(name).installed() is None:
        missing(f"{name} is not in {harness(name).folder}; `longrein harness install {name}` puts it there")
    task = {**make_task("programs"), "seconds": 600}
    engine = ScriptedEngine(coder(name, task, right), rendering("qwen3"))
    env = RepoEnv(
        tokenizer=tokenizer("qwen3"),
        env_config={"program": name, "max_tokens": 200_000, "max_reply_tokens": 8000, "max_seconds": 600},
    )
    (rollout,) = env.run_trial([task], Agent(None, tokenizer("qwen3"), engine=engine), 1)["rollouts"]
    assert rollout.failed is None, rollout.failed
    assert (rollout.reward, rollout.success) == (float(right), right), rollout.info
    assert rollout.turns >= 3
    if name != "smolagents":  # it writes what it made of a reply into the reply
        assert sum(bool(branch.agent_mask.any()) for branch in rollout.branches()) == 1
