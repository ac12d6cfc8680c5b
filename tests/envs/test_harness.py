"""White box equals black box: the same policy, seed and task give the same tokens through any door."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE, until
from processes import time_is_up

from longrein import Agent, LongreinError
from longrein.engines.scripted import ScriptedEngine
from longrein.envs import EnvConfigError, HarnessEnv, TreasureHunt
from longrein.harnesses.process import SESSION, ProcessSession
from longrein.rollout import padded
from longrein.rooms import TOOLS, look, opening
from longrein.training.rows import react_config
from longrein.training.trials import check_rows

TASKS = TreasureHunt.tasks(3, seed=11)


@pytest.fixture(scope="module")
def agent(folder: Any) -> Any:
    agent = Agent.from_pretrained(str(folder("tiny")), seed=5)
    yield agent
    agent.engine.close()


def harness(agent: Agent, *flags: str, **config: Any) -> HarnessEnv:
    settings = react_config({})
    return HarnessEnv(
        tokenizer=agent.tokenizer, env_config={**settings, "command": [*settings["command"], *flags], **config}
    )


async def by_recorder(agent: Agent) -> Any:
    """The hunts played by hand, calling the recorder and nothing else."""
    recorder = agent.recorder()
    rollouts = []
    for task in TASKS:
        for index in range(2):
            rollout = recorder.open(f"{len(rollouts)}", seed=agent.rollout_seed(task, 0, index), task=task)
            messages = opening(task["rooms"][0])
            for _ in range(6):
                call = await recorder.call(rollout.id, messages, TOOLS)
                asked = [
                    (c["function"]["name"], json.loads(c["function"]["arguments"]).get("room"), c["id"])
                    for c in call.reply.get("tool_calls", ())
                ]
                if not asked or any(name == "answer" for name, _, _ in asked):
                    break
                messages = [
                    *messages,
                    call.reply,
                    *(
                        {"role": "tool", "tool_call_id": i, "content": look(task["rooms"], str(room))}
                        for _, room, i in asked
                    ),
                ]
            rollout.reward = float(bool(asked) and asked[0][:2] == ("answer", task["rooms"][-1]))
            rollouts.append(recorder.finish(rollout.id))
    return padded(rollouts, pad_id=agent.tokenizer.pad_token_id)


def assert_same(one: Any, other: Any) -> None:
    for key in ("padded_token_ids", "padded_attn_mask", "padded_agent_mask"):
        assert np.array_equal(one[key], other[key]), key
    assert np.array_equal(one["final_rewards"], other["final_rewards"])
    assert np.abs(one["padded_logprobs"] - other["padded_logprobs"]).max() < 1e-5


def test_white_box_equals_black_box(agent: Agent) -> None:
    white = TreasureHunt(tokenizer=agent.tokenizer).run_trial(TASKS, agent, 2)
    assert sum(rollout.turns for rollout in white["rollouts"]) > len(white["rollouts"])  # something to compare
    assert_same(white, asyncio.run(by_recorder(agent)))
    assert_same(white, harness(agent).run_trial(TASKS, agent, 2))
    assert_same(white, harness(agent, "--stream").run_trial(TASKS, agent, 2))


def test_one_request_at_a_time_is_identical(agent: Agent) -> None:
    agent.engine.max_batch = 1
    try:
        white = TreasureHunt(tokenizer=agent.tokenizer).run_trial(TASKS, agent, 1)
        black = harness(agent).run_trial(TASKS, agent, 1)
    finally:
        agent.engine.max_batch = 256
    assert np.array_equal(white["padded_token_ids"], black["padded_token_ids"])
    assert np.array_equal(white["padded_logprobs"], black["padded_logprobs"])


PROGRAM = """
import os, requests, sys
def ask(messages):
    body = {"model": "policy", "messages": messages}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    answer = requests.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json=body, headers=headers, timeout=60)
    answer.raise_for_status()
    return answer.json()["choices"][0]["message"]
"""


def scripted(agent: Agent, program: str, reply: Any = "yes", **config: Any) -> Any:
    engine = ScriptedEngine((lambda m, t: reply) if isinstance(reply, str) else reply, agent.rendering)
    settings = {"command": ["{python}", "-c", PROGRAM + program], "verify": "longrein.envs.test_verify", **config}
    env = HarnessEnv(tokenizer=agent.tokenizer, env_config=settings)
    return env.run_trial([{}], Agent(None, agent.tokenizer, engine=engine), 1)


@pytest.fixture(autouse=True)
def verifier(monkeypatch: Any) -> None:
    import longrein.envs

    def test_verify(task: Any, outcome: Any) -> float:
        return float(outcome.last_line() or "nan")

    monkeypatch.setattr(longrein.envs, "test_verify", test_verify, raising=False)


def test_a_rewritten_history_gives_rows_of_one_rollout(agent: Agent) -> None:
    result = scripted(
        agent,
        """
first = ask([{"role": "user", "content": "one"}])
ask([{"role": "user", "content": "one"}, first, {"role": "user", "content": "two"}])
ask([{"role": "user", "content": "a summary of it all"}])
print(1.0)
""",
    )
    (rollout,) = result["rollouts"]
    assert rollout.failed is None
    assert result["row_rollout"].tolist() == [0, 0]
    assert result["final_rewards"].tolist() == [1.0]
    assert (
        result["padded_agent_mask"].sum()
        == rollout.agent_tokens
        == sum(len(c.completion_ids) for c in rollout.calls.values())
    )
    assert result["padded_rewards"].sum() == pytest.approx(1.0)


def test_a_program_at_its_limit_is_scored(agent: Agent, monkeypatch: Any) -> None:
    loop = 'print(0.25, flush=True)\nfor turn in range(9):\n    ask([{"role": "user", "content": str(turn)}])\n'
    (rollout,) = scripted(agent, loop, max_turns=2)["rollouts"]
    assert (rollout.limit, rollout.reward, rollout.failed, rollout.turns) == ("turns", 0.25, None, 2)

    wait = ProcessSession.wait_async

    async def until_it_has_written(session: ProcessSession) -> Any:
        await asyncio.to_thread(time_is_up, session._program)
        return await wait(session)

    monkeypatch.setattr(ProcessSession, "wait_async", until_it_has_written)
    hangs = 'ask([{"role": "user", "content": "x"}])\nprint(0.5, flush=True)\nimport time\ntime.sleep(100)'
    (rollout,) = scripted(agent, hangs)["rollouts"]
    assert (rollout.limit, rollout.reward, rollout.failed) == ("time", 0.5, None)


def test_where_our_side_broke_there_is_no_reward(agent: Agent) -> None:
    def broken(messages: Any, tools: Any) -> str:
        raise RuntimeError("the engine broke")

    (rollout,) = scripted(agent, 'ask([{"role": "user", "content": "x"}])', broken)["rollouts"]
    assert "the engine broke" in rollout.failed
    assert rollout.reward is None


def test_a_program_that_never_calls_is_a_failed_rollout_with_its_words(agent: Agent) -> None:
    (rollout,) = scripted(agent, 'print(1.0)\nsys.exit("no model for me")')["rollouts"]
    assert "made no model call and ended with exit code 1" in rollout.failed
    assert "no model for me" in rollout.failed


def test_a_config_that_does_not_fit_is_refused(agent: Agent) -> None:
    for config, message in (
        ({}, "HarnessEnv refuses env_config"),
        ({"command": "codex", "verify": "x"}, "command is 'codex'; it must be a list of texts"),
        ({"command": ["x"], "program": "codex", "verify": "x"}, "or the name of a program"),
        ({"verify": "x"}, "command is \\(\\) and program is None"),
        ({"command": [sys.executable], "verify": "x", "concurrency": 0}, "concurrency is 0"),
        (
            {"command": [sys.executable], "verify": "longrein.harnesses.react.verify"},
            "verify is .*, which cannot be imported",
        ),
        (
            {"command": [sys.executable], "verify": ["nowhere-at-all"]},
            "verify names the command 'nowhere-at-all', which is not",
        ),
        (
            {"program": "codexx", "verify": ["true"]},
            "there is no program 'codexx' that longrein knows. Did you mean 'codex'?",
        ),
        ({"command": [sys.executable], "verify": ["true"], "files": ["a"]}, "files is \\['a'\\]; it must be a table"),
    ):
        with pytest.raises(EnvConfigError, match=message):
            HarnessEnv(tokenizer=agent.tokenizer, env_config=config)
    with pytest.raises(LongreinError, match="a harness plays its own loop"):
        harness(agent).episode({})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"command": ["my-agent", "{instructoin}"]}, "command[1] has the placeholder {instructoin}, and neither the session nor "
         "the task has it: did you mean {instruction}?"),
        ({"env": {"A": None, "B": "{base_ulr}"}}, "env['B'] has the placeholder {base_ulr}"),
        ({"verify": ["true", "{outcom}"]}, "verify[1] has the placeholder {outcom}"),
        ({"command": [], "program": "codex", "env": {"A": "{nobody}"}}, "env['A'] has the placeholder {nobody}"),
    ],
)  # fmt: skip
def test_a_name_that_nobody_has_is_refused_before_anything_is_played(config: dict[str, Any], message: str) -> None:
    names = [f"{{{name}}}" for name in (*SESSION, "instruction", "task")]
    fits = {"command": ["my-agent", *names], "verify": ["true", "{outcome}"]}
    row = {"env_class_path": "longrein.envs.HarnessEnv", "env_config": fits, "task_data": {"instruction": "Do it."}}
    with pytest.raises(LongreinError) as refused:
        check_rows([row, {**row, "env_config": {**fits, **config}}])
    assert f"row 1: {message}" in str(refused.value)


def test_a_task_without_what_its_program_is_told_is_refused() -> None:
    config = {"program": "codex", "verify": ["true"]}
    with pytest.raises(LongreinError, match=r"row 0: command\[\d+\] has the placeholder {instruction}"):
        check_rows([{"env_class_path": "longrein.envs.HarnessEnv", "env_config": config, "task_data": {"prompt": "Do it."}}])


def test_every_name_that_is_let_in_is_filled(agent: Agent) -> None:
    names = " ".join(f"{{{name}}}" for name in SESSION)
    (rollout,) = scripted(agent, 'print(1.0)\nsys.exit(os.environ["NAMES"])', env={"NAMES": names})["rollouts"]
    assert rollout.failed.endswith(f"{sys.executable}\n")
    assert "{" not in rollout.failed


def test_killing_the_trainer_leaves_no_process(tmp_path: Any, folder: Any) -> None:
    """A process that plays a harness is killed outright in the middle of its rollouts."""
    marker = f"longrein-orphan-{os.getpid()}"
    started = tmp_path / "started"
    code = f"""
from longrein import Agent
from longrein.engines.scripted import ScriptedEngine
from longrein.envs import HarnessEnv
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(folder("tiny"))!r})
from longrein.rendering import rendering_for
agent = Agent(None, tokenizer, engine=ScriptedEngine(["x"], rendering_for(tokenizer)))
program = "import sys, time; open({str(started)!r} + sys.argv[2], 'w'); time.sleep(120)"
env = HarnessEnv(tokenizer=tokenizer, env_config={{
    "command": [{sys.executable!r}, "-c", program, {marker!r}, "{{n}}"], "verify": ["true"], "max_seconds": 100, "sandbox": "none"}})
env.run_trial([{{"n": 0}}, {{"n": 1}}], agent, 1)
"""
    trainer = subprocess.Popen([sys.executable, "-c", code])
    try:
        assert until(lambda: len(list(tmp_path.glob("started*"))) == 2, 2 * PATIENCE)
    finally:
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()

    def alive() -> list[str]:
        result = subprocess.run(["pgrep", "-f", f"{marker} [01]"], capture_output=True, text=True)
        return result.stdout.split()

    assert until(lambda: not alive()), alive()
