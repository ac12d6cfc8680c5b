"""Agent programs feed TRL's asynchronous trainer, on a CPU, with real weight updates between steps."""

from __future__ import annotations

import queue
import threading
from typing import Any

import numpy as np
import pytest
import torch
from patience import PATIENCE
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

from longrein import Agent, LongreinError, Sampling
from longrein.contract import ContextLengthError, Verdict
from longrein.engines.scripted import ScriptedEngine
from longrein.envs import TreasureHunt
from longrein.harnesses.process import ProcessSessionFactory
from longrein.proxy import CallLimits, InterceptionServer
from longrein.training.sync import EngineWeightTransfer
from longrein.training.worker import HarnessRolloutWorker, play_session, samples_of

REACT = ["{python}", "-m", "longrein.harnesses.react", "--rooms", "{rooms}"]
VERIFY = "longrein.harnesses.react.verify_hunt"


class Session:
    """A session in memory: two calls, then a reward by the task and the number of the rollout."""

    closed = 0

    def __init__(self, task: Any, rollout_id: str) -> None:
        self.task, self.id, self.turn, self.said = task, rollout_id, 0, []

    def next_request(self) -> Any:
        if self.task.get("hang") and self.turn:
            self.task["hung"].set()
            self.task["released"].wait()
            return None
        if self.turn == 2:
            return None
        self.turn += 1
        messages = [{"role": "user", "content": "go"}]
        for text in self.said:
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
        return {"messages": messages, "tools": [], "request_id": f"{self.id}-{self.turn}"}

    def deliver(self, intercept: Any, completion_text: str) -> None:
        if self.task.get("breaks") == self.id:
            raise RuntimeError("this session broke")
        self.said.append(completion_text)

    def verify(self) -> Verdict:
        return Verdict(self.task.get("rewards", {}).get(self.id[-1], float(self.id.endswith("-0"))))

    def close(self) -> None:
        Session.closed += 1
        if self.task.get("hang"):
            self.task["released"].set()


class Factory:
    def create(self, *, task: Any, rollout_id: str) -> Session:
        return Session(task, rollout_id)


@pytest.fixture
def scripted(tokenizer: Any, rendering: Any) -> Agent:
    return Agent(None, tokenizer("qwen3"), engine=ScriptedEngine(lambda m, t: "fine", rendering("qwen3")))


def take(worker: HarnessRolloutWorker, count: int) -> list[Any]:
    worker.start()
    try:
        return [worker.rollout_buffer.get(timeout=PATIENCE) for _ in range(count)]
    finally:
        worker.stop()


def test_a_group_becomes_samples_of_the_recorded_tokens(scripted: Agent) -> None:
    worker = HarnessRolloutWorker(Factory(), scripted, [{"task_data": {}}], num_generations=4, concurrency=2)
    samples = take(worker, 4)
    assert len({sample.group_id for sample in samples}) == 1  # a group is put whole; which of two is first is open
    by_reward = sorted(samples, key=lambda sample: sample.metrics["reward"])
    assert [sample.metrics["reward"] for sample in by_reward] == [0, 0, 0, 1]
    assert by_reward[-1].advantage == pytest.approx(0.75 / (0.5 + 1e-4))
    assert sum(sample.advantage for sample in samples) == pytest.approx(0, abs=1e-6)
    fine = scripted.rendering.encode_reply("fine")
    for sample in samples:
        assert sample.input_ids[sample.completion_mask == 1].tolist() == fine * 2
        assert len(sample.input_ids) == len(sample.completion_mask) == len(sample.old_log_probs)
        assert [message["role"] for message in sample.completion] == ["assistant", "user", "assistant"]


def test_turn_advantages_are_one_row_a_turn(scripted: Agent) -> None:
    worker = HarnessRolloutWorker(Factory(), scripted, [{}], num_generations=2, concurrency=1, advantages="turn")
    first, second = take(worker, 4)[:2]
    assert np.array_equal(first.input_ids, second.input_ids)
    assert not (first.completion_mask & second.completion_mask).any()


def test_one_failing_session_is_left_out_and_stops_nothing(scripted: Agent) -> None:
    worker = HarnessRolloutWorker(Factory(), scripted, [{"breaks": "g0-1"}], num_generations=3, concurrency=1)
    samples = take(worker, 5)
    assert [sample.group_id for sample in samples] == [0, 0, 1, 1, 1]
    worker_metrics = worker.metrics_queue.get_nowait()
    assert worker_metrics["rollout/failed"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None])
def test_a_verdict_that_is_no_number_is_left_out_of_its_group(scripted: Agent, reward: Any) -> None:
    tasks = [{"rewards": {"1": reward}}]
    samples = take(HarnessRolloutWorker(Factory(), scripted, tasks, num_generations=3, concurrency=1), 2)
    assert {sample.metrics["reward"] for sample in samples} == {0.0, 1.0}
    assert np.isfinite([sample.advantage for sample in samples]).all()


def test_stop_ends_a_session_that_hangs_and_health_tells_the_truth(scripted: Agent) -> None:
    task = {"hang": True, "hung": threading.Event(), "released": threading.Event()}
    worker = HarnessRolloutWorker(Factory(), scripted, [task], num_generations=2, concurrency=2)
    with pytest.raises(LongreinError, match="the rollout worker is not running"):
        worker.check_health(10)
    worker.start()
    assert task["hung"].wait(PATIENCE)
    worker.check_health(1000)
    with pytest.raises(LongreinError, match=r"no session has ended for .* 2 are open"):
        worker.check_health(0)
    worker.stop()
    assert not any(thread.is_alive() for thread in worker._threads)


class CarefulMemory(Session):
    """A session that refuses and that lost its second reply."""

    refused: list[str]

    def refuse(self, intercept: Any, error: Exception) -> None:
        self.refused = [*getattr(self, "refused", []), str(error)]

    def undelivered(self) -> list[str]:
        return [f"{self.id}-2"]


def test_a_lost_reply_is_told_and_not_trained(scripted: Agent) -> None:
    factory = type("Careful", (), {"create": lambda self, *, task, rollout_id: CarefulMemory(task, rollout_id)})()
    worker = HarnessRolloutWorker(factory, scripted, [{}], num_generations=2, concurrency=1)
    for sample in take(worker, 2):
        fine = scripted.rendering.encode_reply("fine")
        assert sample.input_ids[sample.completion_mask == 1].tolist() == fine


class Titled(Session):
    """A session whose first call is a side call: no tools, another system prompt."""

    def next_request(self) -> Any:
        intercept = super().next_request()
        if intercept is None:
            return None
        if self.turn == 1:
            messages = [{"role": "system", "content": "Name it."}, {"role": "user", "content": "go"}]
            return {**intercept, "messages": messages}
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
        messages = [{"role": "system", "content": "Work."}, {"role": "user", "content": "go"}]
        return {**intercept, "messages": messages, "tools": [tool]}


def test_a_side_call_is_recorded_and_not_trained(scripted: Agent) -> None:
    factory = type("Titles", (), {"create": lambda self, *, task, rollout_id: Titled(task, rollout_id)})()
    worker = HarnessRolloutWorker(factory, scripted, [{}], num_generations=2, concurrency=1)
    for sample in take(worker, 2):
        assert sample.prompt[0]["content"] == "Work."
        assert sample.completion_mask.sum() == len(scripted.rendering.encode_reply("fine"))


def test_rollouts_older_than_the_limit_are_left_out_with_the_reason(scripted: Agent) -> None:
    rollouts = []
    for version, reward in ((1, 0.0), (3, 1.0)):
        scripted.engine.policy_version = version
        recorder = scripted.recorder()
        rollout = recorder.open(f"v{version}")
        recorder.generate(rollout.id, 0, [{"role": "user", "content": "go"}])
        rollout.reward = reward
        rollouts.append(rollout)
    samples = list(samples_of(rollouts, 0, "group", oldest=2))
    assert [sample.model_version for sample in samples] == [3]
    assert [call.excluded for rollout in rollouts for call in rollout.calls.values()] == ["stale", None]


def test_stale_calls_are_counted(scripted: Agent) -> None:
    worker = HarnessRolloutWorker(Factory(), scripted, [{}], num_generations=2, concurrency=1, max_staleness=1)
    worker._version = 2  # the trainer is two updates ahead of the engine, which samples with version 0
    worker.start()
    try:
        told = [worker.metrics_queue.get(timeout=PATIENCE) for _ in range(2)]
    finally:
        worker.stop()
    assert told == [{"rollout/failed": 0.0}, {"rollout/stale": 1.0}]


def test_an_overlong_prompt_is_refused_and_the_session_is_scored() -> None:
    class Overlong:
        def generate(self, rollout_id: str, turn: int, *request: Any) -> str:
            raise ContextLengthError(9, 8)

    careful, plain = CarefulMemory({}, "r-0"), Session({}, "r-0")
    for session in (careful, plain):
        assert play_session(session, Overlong(), "r", Sampling()).reward == 1.0
    assert careful.refused == ["the prompt has 9 tokens and the limit is 8: no room for a reply"] * 2


def test_rollouts_wait_while_the_buffer_is_full(scripted: Agent) -> None:
    made: list[str] = []

    class Counting(Factory):
        def create(self, *, task: Any, rollout_id: str) -> Session:
            made.append(rollout_id)
            return super().create(task=task, rollout_id=rollout_id)

    worker = HarnessRolloutWorker(Counting(), scripted, [{}], num_generations=2, concurrency=1, buffer_size=1)
    put, seen = worker.rollout_buffer.put, queue.Queue[int]()

    def watched(sample: Any, timeout: float) -> None:
        try:
            put(sample, timeout=timeout)
        except queue.Full:
            seen.put(len(made))
            raise

    worker.rollout_buffer.put = watched  # type: ignore[method-assign]
    worker.start()
    try:
        waited = [seen.get(timeout=PATIENCE) for _ in range(3)]
        assert waited == [2, 2, 2]  # the first group fills the buffer, and no other is begun
        assert [worker.rollout_buffer.get(timeout=PATIENCE) for _ in range(4)]
    finally:
        worker.stop()


def test_settings_that_cannot_work_are_refused(scripted: Agent) -> None:
    for settings, message in (
        ({"num_generations": 1}, "a group needs 2 rollouts or more"),
        ({"advantages": "best"}, "advantages is 'best'"),
    ):
        with pytest.raises(LongreinError, match=message):
            HarnessRolloutWorker(Factory(), scripted, [{}], **settings)
    with pytest.raises(LongreinError, match="the dataset has no tasks"):
        HarnessRolloutWorker(Factory(), scripted, [])


def causal_varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *args: Any, **kwargs: Any) -> Any:
    """Flash attention's varlen function by plain attention: causal, aligned at the lower right."""
    outputs = []
    for index in range(len(cu_seqlens_q) - 1):
        rows, columns = slice(*cu_seqlens_q[index : index + 2].tolist()), slice(*cu_seqlens_k[index : index + 2].tolist())
        query, key, value = (x.transpose(0, 1)[None] for x in (q[rows], k[columns], v[columns]))
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=kwargs.get("softmax_scale"), enable_gqa=True
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def test_trls_async_trainer_trains_on_the_react_program(folder: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *a, **k: 1e12)
    monkeypatch.setattr(
        packing, "_flash_attn", lambda: type("F", (), {"flash_attn_varlen_func": staticmethod(causal_varlen)})
    )
    model = str(folder("tiny"))
    agent = Agent.from_pretrained(model)
    before = {name: tensor.clone() for name, tensor in agent.policy_model.named_parameters()}
    with InterceptionServer() as server:
        factory = ProcessSessionFactory(
            REACT,
            server=server,
            verify=VERIFY,
            limits=CallLimits(max_calls=6),
            rendering=agent.rendering,
            timeout=2 * PATIENCE,
        )
        dataset = TreasureHunt.get_train_dataset(16, env_config={"max_hops": 2})
        worker = HarnessRolloutWorker(factory, agent, dataset, num_generations=4, concurrency=4)
        transfer = EngineWeightTransfer(agent.engine)
        args = AsyncGRPOConfig(
            output_dir=str(tmp_path), max_steps=10, learning_rate=3e-4, per_device_train_batch_size=8, num_generations=4,
            token_budget=1024, logging_steps=1, report_to=[], bf16=False, use_cpu=True, save_strategy="no", disable_tqdm=True,
            weight_sync_steps=1, gradient_checkpointing=False, gradient_accumulation_steps=1,
        )  # fmt: skip
        trainer = AsyncGRPOTrainer(
            model, args=args, train_dataset=dataset.map(lambda row: {"prompt": "hunt"}), processing_class=agent.tokenizer,
            rollout_worker=worker, weight_transfer=transfer, reward_funcs=lambda **k: [0.0],
        )  # fmt: skip
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert history[0]["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    rewards = [entry["reward"] for entry in history]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.05, rewards
    assert any(not torch.equal(before[name], tensor) for name, tensor in agent.policy_model.named_parameters())
    trained = dict(trainer.model.named_parameters())
    for name, tensor in agent.policy_model.named_parameters():
        assert torch.equal(tensor, trained[name]), name
    assert agent.engine.policy_version >= 10
