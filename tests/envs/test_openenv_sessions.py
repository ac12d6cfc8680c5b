"""Agent programs as OpenEnv's sessions, and TRL's own OpenEnv worker training from longrein's record of them."""

from __future__ import annotations

import multiprocessing
import queue
import threading
from importlib.util import find_spec

import numpy as np
import pytest
from missing import missing
from patience import PATIENCE

from longrein import Agent, Sampling
from longrein.contract import LongreinError
from longrein.rollout import Call, Rollout

if find_spec("openenv") is None:
    missing("openenv is not installed; `make test` installs it")

from openenv.core.harness import ResourceSessionFactory, TrainableSession

from longrein.envs.openenv_sessions import HarnessSessionFactory, as_task, training_trace

REACT = {
    "command": ["{python}", "-m", "longrein.harnesses.react", "--rooms", "{rooms}"],
    "verify": "longrein.harnesses.react.verify_hunt",
    "max_turns": 4,
    "max_tokens": 512,
    "max_reply_tokens": 24,
    "max_seconds": 60,
    "sandbox": "none",
}
TASKS = [{"rooms": ["attic", "barn"]}, {"rooms": ["cellar", "den"]}]


@pytest.fixture(scope="module")
def agent(folder):
    return Agent.from_pretrained(str(folder("tiny")), sampling=Sampling(max_tokens=24))


def test_a_programs_session_is_openenvs_trainable_session(agent):
    factory = HarnessSessionFactory(REACT, agent=agent, tasks=TASKS)
    assert isinstance(factory, ResourceSessionFactory)
    session = factory.create("ignored", seed=3, episode_id="r1")
    try:
        assert isinstance(session, TrainableSession)
        assert session.rollout.task == TASKS[1]
        session.wait_for_completion()
        trace = session.fetch_training_trace()
        result = session.verify([])
        rollout = session.rollout
    finally:
        session.close()
        session.close()
    assert len(trace.turns) == rollout.turns > 1
    for turn, call in zip(trace.turns, rollout.calls.values(), strict=True):
        assert turn.prompt_token_ids == rollout.prompt(call.id).tolist()
        assert turn.completion_token_ids == call.completion_ids.tolist()
        assert turn.per_token_logps == pytest.approx(call.logprobs.tolist(), abs=1e-6)
        assert turn.loss_mask == [0] * len(turn.prompt_token_ids) + [1] * len(turn.completion_token_ids)
        assert turn.request["messages"][0]["role"] == "user"
        assert turn.response["choices"][0]["message"] == call.reply
    assert result.env_reward == rollout.reward in (0.0, 1.0)
    assert session.call_tool("look", {}).error
    with pytest.raises(LongreinError):
        factory.recorder.rollout("r1")


def test_how_a_program_ended_is_told(agent):
    failing = {**REACT, "command": ["sh", "-c", "exit 3"]}
    session = HarnessSessionFactory(failing, agent=lambda: agent).create({"rooms": ["attic"]})
    try:
        assert session.wait_for_completion(30) == 3
    finally:
        session.close()


def test_a_program_that_runs_out_of_time_is_told_and_what_it_said_is_kept(agent, tmp_path):
    waiting = {**REACT, "command": ["sleep", "30"], "verify": "longrein.harnesses.react.verify_hunt"}
    session = HarnessSessionFactory(waiting, agent=agent, tasks=TASKS).create(None, seed=0, episode_id="slow")
    try:
        with pytest.raises(TimeoutError, match="still runs after 0.1 s"):
            session.wait_for_completion(0.1)
        assert session.fetch_training_trace().turns == []
    finally:
        session.close()
    own = HarnessSessionFactory({**waiting, "max_seconds": 0.3}, agent=agent, tasks=TASKS).create(None, episode_id="own")
    try:
        with pytest.raises(TimeoutError, match="its own limit of time"):
            own.wait_for_completion()
    finally:
        own.close()


def test_trls_worker_trains_from_the_record(agent):
    """TRL's rollout loop, as its worker runs it in its child process, on a thread here."""
    from accelerate.state import PartialState
    from datasets import Dataset
    from trl.experimental.async_grpo.openenv_harness import _HarnessRolloutLoop

    PartialState()
    kept: dict[str, Rollout] = {}
    agent.on_finish = lambda rollout: kept.setdefault(rollout.id, rollout)
    context = multiprocessing.get_context("spawn")
    samples: queue.Queue = queue.Queue()
    errors: queue.Queue = queue.Queue()
    loop = _HarnessRolloutLoop(
        harness_session_factory=lambda sampling: HarnessSessionFactory(REACT, agent=agent, tasks=TASKS, sampling=sampling),
        model_name="tiny",
        dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "Find the coin."}]}] * 4),
        reward_funcs=[],
        processing_class=agent.tokenizer,
        eos_token_ids=[agent.tokenizer.eos_token_id],
        rollout_buffer=samples,
        model_version_value=context.Value("i", 0),
        heartbeat_value=context.Value("d", 0.0),
        failed_event=context.Event(),
        exception_info_queue=errors,
        metrics_queue=queue.Queue(),
        num_generations=4,
        max_inflight_tasks=4,
        temperature=0.9,
        max_tokens=24,
    )
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        got = [samples.get(timeout=2 * PATIENCE) for _ in range(4)]
    finally:
        loop._loop.call_soon_threadsafe(loop._stop_event.set)
        thread.join(PATIENCE)
        agent.on_finish = None
    assert errors.empty()
    rows = [row for rollout in list(kept.values()) for row in rollout.rows()]
    assert len(got) >= 4
    for sample in got:
        (row,) = [row for row in rows if row.token_ids.tolist() == list(sample.input_ids)][:1]
        assert list(sample.completion_mask) == row.agent_mask.astype(int).tolist()
        assert np.allclose(sample.old_log_probs, row.logprobs * row.agent_mask, atol=1e-6)
    assert agent.sampling.temperature == 0.9


def call(call_id, parent, context, drawn, **more):
    ids = np.array(drawn, np.int32)
    return Call(call_id, parent, np.array(context, np.int32), ids, np.full(len(ids), -0.5, np.float32), "stop", **more)


def trained(rows):
    """Each trained token with all that stands before it."""
    return sorted(tuple(ids[: at + 1]) for ids, mask in rows for at, on in enumerate(mask) if on)


def test_a_forked_rollout_is_trained_exactly_once_by_trls_join():
    from trl.experimental.async_grpo.async_rollout_worker import _chain_to_sequences
    from trl.experimental.async_grpo.openenv_harness import _turns_from_training_trace

    rollout = Rollout(id="r")
    rollout.add(call("a", None, [1, 2], [3]))
    rollout.add(call("other", None, [50], [51]))  # another conversation, in between
    rollout.add(call("lost", "a", [4], [5, 6], delivered=False))
    rollout.add(call("b", "a", [4], [7]))
    rollout.add(call("c", "b", [8], [9, 10]))
    rollout.add(call("fork", "a", [40], [41]))
    rollout.add(call("d", "c", [11], [12]))
    trace = training_trace(rollout)
    assert sorted(turn.node_id for turn in trace.turns) == sorted(rollout.calls)
    assert {turn.node_id: turn.metadata["not_trained"] for turn in trace.turns}["lost"] == "undelivered"
    sequences, tally = _chain_to_sequences(_turns_from_training_trace(trace), "r", 0)
    rows = rollout.rows()
    assert sorted(s.input_ids for s in sequences) == sorted(row.token_ids.tolist() for row in rows)
    theirs = trained((s.input_ids, s.completion_mask) for s in sequences)
    assert theirs == trained((row.token_ids.tolist(), row.agent_mask) for row in rows)
    assert len(set(theirs)) == len(theirs) == rollout.agent_tokens
    assert tally["realign"] == 0


def test_a_prompt_as_a_task():
    assert as_task({"a": 1}) == {"a": 1}
    assert as_task("Fix it.") == {"instruction": "Fix it."}
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "Fix it."}]
    assert as_task(talk) == {"instruction": "Fix it."}
    with pytest.raises(LongreinError, match="is no task"):
        as_task([{"role": "system", "content": "s"}])


def test_settings_that_cannot_work_are_refused(agent, tokenizer):
    with pytest.raises(LongreinError, match="tasks is empty"):
        HarnessSessionFactory(REACT, agent=agent, tasks=[])
    cut = Agent(None, tokenizer("qwen3"), engine=agent.engine, sampling=Sampling(top_p=0.9))
    with pytest.raises(LongreinError, match="turn top-p, top-k and min-p off"):
        HarnessSessionFactory(REACT, agent=lambda: cut)
