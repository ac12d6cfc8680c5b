"""`HarnessRolloutWorker`: agent programs feed TRL's `AsyncGRPOTrainer`, through the seam of `longrein.contract`.

Always true: a sample's tokens, masks and old log-probabilities are the recorder's own; a group is pushed once all its sessions
have ended; a session that fails is left out of its group and stops nothing; after `stop()` no session is open.

TRL ships a class of the same name (`trl.experimental.async_grpo.openenv_harness`) that drives OpenEnv sessions against a vLLM
server from a child process. This one drives any `AgentSessionFactory`, samples from any longrein engine, and keeps what the
splice recorded, forks included.
"""

from __future__ import annotations

import logging
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from longrein.agents import Agent
from longrein.contract import (
    AgentSession,
    AgentSessionFactory,
    CarefulSession,
    ContextLengthError,
    GenerateAPI,
    LongreinError,
    RolloutMessages,
    Sampling,
)
from longrein.noise import derive
from longrein.proxy.auxiliary import mark_auxiliary
from longrein.recorder import Recorder
from longrein.rollout import Branch, Rollout, padded
from longrein.training.advantages import AdvantageName, Batch, advantages, turns_of

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Group:
    """The rollouts of one task, until the last of them has ended."""

    id: int
    waiting: int
    rollouts: list[Rollout]


class HarnessRolloutWorker:
    """Runs sessions of agent programs, `num_generations` a task, and pushes scored rows for the trainer.

    >>> worker = HarnessRolloutWorker(factory, agent, dataset, num_generations=8)                # doctest: +SKIP
    >>> AsyncGRPOTrainer(model, args=args, train_dataset=dataset, rollout_worker=worker,
    ...     weight_transfer=EngineWeightTransfer(agent.engine))                                # doctest: +SKIP

    `dataset` holds tasks: rows with `task_data`, or the tasks themselves. `advantages` is `group` or `leave_one_out` (one row a
    branch), or `turn` (one row a turn, each with its own mask and advantage; TRL's packing forwards what they share once).
    """

    def __init__(
        self,
        factory: AgentSessionFactory,
        agent: Agent,
        dataset: Sequence[Any] | Any,
        *,
        num_generations: int = 8,
        concurrency: int = 16,
        advantages: Literal["group", "leave_one_out", "turn"] = "group",
        max_staleness: int | None = None,
        buffer_size: int = 1024,
        seed: int = 0,
    ) -> None:
        if num_generations < 2:
            raise LongreinError(f"num_generations is {num_generations}; a group needs 2 rollouts or more to compare")
        if advantages not in ("group", "leave_one_out", "turn"):
            raise LongreinError(f"advantages is {advantages!r}; it must be 'group', 'leave_one_out' or 'turn'")
        self.tasks = [row["task_data"] if isinstance(row, dict) and "task_data" in row else row for row in dataset]
        if not self.tasks:
            raise LongreinError("the dataset has no tasks")
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(buffer_size)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self.factory = factory
        self.agent = agent
        self.recorder: Recorder = agent.recorder()
        self.num_generations = num_generations
        self.concurrency = concurrency
        self.advantages: AdvantageName = advantages
        self.max_staleness = max_staleness
        self.seed = seed
        self._version = 0
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._work: Iterator[tuple[_Group, Any, int]] = self._rollouts()
        self._threads: list[threading.Thread] = []
        self._sessions: set[Any] = set()
        self._broken: BaseException | None = None
        self._last_end = time.monotonic()

    # ---- TRL's RolloutWorkerProtocol

    def start(self) -> None:
        """Begin producing rollouts."""
        self._last_end = time.monotonic()
        self._threads = [
            threading.Thread(target=self._run, name=f"longrein-session-{index}", daemon=True)
            for index in range(self.concurrency)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End every session and its processes, then the threads that drove them."""
        self._stopping.set()
        with self._lock:
            open_sessions = list(self._sessions)
        for session in open_sessions:
            session.close()
        for thread in self._threads:
            while thread.is_alive():
                self._drain_one()  # a thread may wait for room in the buffer
                thread.join(timeout=0.05)

    def update_model_version(self, model_version: int) -> None:
        """The policy that samples from now on."""
        self._version = model_version
        self.agent.engine.policy_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise if a thread broke, none is left, or no session ended for `stale_after_s` seconds."""
        if self._broken is not None:
            raise LongreinError(
                f"the rollout worker stopped: {type(self._broken).__name__}: {self._broken}"
            ) from self._broken
        if not any(thread.is_alive() for thread in self._threads):
            raise LongreinError("the rollout worker is not running: call `start()`, or it was stopped")
        idle = time.monotonic() - self._last_end
        if idle > stale_after_s:
            raise LongreinError(
                f"no session has ended for {idle:.0f} s (limit {stale_after_s:.0f} s); {len(self._sessions)} are open"
            )

    # ---- sessions

    def _rollouts(self) -> Iterator[tuple[_Group, Any, int]]:
        """Every task, `num_generations` times, epoch after epoch in a new order."""
        rng = random.Random(self.seed)
        group = 0
        while True:
            for index in rng.sample(range(len(self.tasks)), len(self.tasks)):
                of_task = _Group(group, self.num_generations, [])
                for number in range(self.num_generations):
                    yield of_task, self.tasks[index], number
                group += 1

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                with self._lock:
                    group, task, number = next(self._work)
                rollout = self._play(group, task, number)
                self._last_end = time.monotonic()
                with self._lock:
                    group.rollouts.append(rollout)
                    group.waiting -= 1
                    complete = group.waiting == 0
                if complete and not self._stopping.is_set():
                    self._push(group)
        except BaseException as error:
            self._broken = error
            logger.exception("the rollout worker broke")

    def _play(self, group: _Group, task: Any, number: int) -> Rollout:
        rollout_id = f"g{group.id}-{number}"
        seed = derive(self.seed, group.id, number)
        rollout = self.recorder.open(rollout_id, seed=seed, task=task, env="harness", group=f"g{group.id}")
        session = None
        try:
            session = self.factory.create(task=task, rollout_id=rollout_id)
            with self._lock:
                self._sessions.add(session)
            if self._stopping.is_set():
                raise LongreinError("the worker was stopped")
            told = play_session(session, self.recorder, rollout_id, self.agent.sampling, lose=self._lose)
            mark_auxiliary(rollout)
            if told.reward is None or not math.isfinite(told.reward):
                raise LongreinError(f"the session's verdict was the reward {told.reward}; it must be a finite number")
            rollout.reward = float(told.reward)
            rollout.success = rollout.reward >= 1
        except Exception as error:
            rollout.failed = f"{type(error).__name__}: {error}"
            if not self._stopping.is_set():
                logger.warning("session %s failed: %s", rollout_id, rollout.failed)
        finally:
            if session is not None:
                session.close()
                with self._lock:
                    self._sessions.discard(session)
            self.recorder.finish(rollout_id)
        return rollout

    def _lose(self, rollout_id: str, turn: int) -> None:
        call = self.recorder.recorded(rollout_id, turn)
        self.recorder.rollout(rollout_id).update(call.id, delivered=False)

    # ---- from rollouts to samples

    def _push(self, group: _Group) -> None:
        scored = [rollout for rollout in group.rollouts if rollout.failed is None and rollout.calls]
        self.metrics_queue.put({"rollout/failed": 1 - len(scored) / len(group.rollouts)})
        if len(scored) < 2:
            return  # nothing to compare with
        samples = list(samples_of(scored, group.id, self.advantages, self._oldest_allowed()))
        calls = [call for rollout in scored for call in rollout.calls.values()]
        self.metrics_queue.put({"rollout/stale": sum(call.excluded == "stale" for call in calls) / len(calls)})
        for sample in samples:
            while not self._stopping.is_set():
                try:
                    self.rollout_buffer.put(sample, timeout=0.2)
                    break
                except queue.Full:
                    self._last_end = time.monotonic()  # waiting for the trainer, not stuck

    def _oldest_allowed(self) -> int | None:
        return None if self.max_staleness is None else self._version - self.max_staleness

    def _drain_one(self) -> None:
        try:
            self.rollout_buffer.get_nowait()
        except queue.Empty:
            return


def play_session(
    session: AgentSession,
    api: GenerateAPI,
    rollout_id: str,
    sampling: Sampling,
    lose: Callable[[str, int], None] = lambda rollout_id, turn: None,
) -> RolloutMessages:
    """The seed's loop: answer a session's model calls until its program ends, then have the environment score it.

    `lose` is told of each turn whose reply the program never got, where the session knows.
    """
    messages: list[Any] = []
    turns: dict[str, int] = {}
    while (intercept := session.next_request()) is not None:
        try:
            text = api.generate(rollout_id, len(turns), intercept["messages"], intercept["tools"], sampling)
        except ContextLengthError as error:
            if not isinstance(session, CarefulSession):
                break  # the policy can read no more: what the program has is what is scored
            session.refuse(intercept, error)
            continue
        turns[intercept["request_id"]] = len(turns)
        session.deliver(intercept, text)
        messages = [*intercept["messages"], {"role": "assistant", "content": text}]
    verdict = session.verify()
    if isinstance(session, CarefulSession):
        for request_id in session.undelivered():
            if request_id in turns:
                lose(rollout_id, turns[request_id])
    return RolloutMessages(rollout_id, messages, verdict.env_reward)


def samples_of(
    rollouts: Sequence[Rollout], group_id: int, name: AdvantageName, oldest: int | None = None
) -> Iterator[RolloutSample]:
    """A task's rollouts as TRL's samples, each sampled token in exactly one; rows older than `oldest` are left out."""
    trial = padded(rollouts, pad_id=0)
    batch = Batch(
        agent_mask=trial["padded_agent_mask"],
        rewards=trial["padded_rewards"],
        row_rollout=trial["row_rollout"],
        final_rewards=trial["final_rewards"],
        group=np.zeros(len(rollouts), np.int64),
    )
    values = advantages(name, batch)
    rows = [(rollout, row) for rollout in rollouts for row in rollout.rows()]
    turns: dict[int, list[tuple[int, int]]] = {}
    for turn in turns_of(trial["padded_agent_mask"]):
        turns.setdefault(turn.row, []).append((turn.start, turn.end))
    spread = float(np.nanstd(trial["final_rewards"]))
    stale = [was for rollout in rollouts for was in rollout.drop_stale(oldest or 0)]
    for index, (rollout, row) in enumerate(rows):
        if stale[index]:
            continue
        version = min(rollout.calls[call_id].policy_version for call_id in row.calls)
        spans = turns.get(index, [])
        for start, end in spans if name == "turn" else [(0, len(row.token_ids))] if spans else []:
            mask = row.agent_mask.copy()
            mask[:start], mask[end:] = False, False
            first = int(np.flatnonzero(mask)[0])
            yield _sample(rollout, row, mask, float(values[index, first]), version, group_id, spread)


def _sample(
    rollout: Rollout, row: Branch, mask: np.ndarray, advantage: float, version: int, group_id: int, spread: float
) -> RolloutSample:
    first, *rest = [rollout.calls[call_id] for call_id in row.calls]
    completion = [first.reply, *(message for call in rest for message in (*call.messages, call.reply))]
    return RolloutSample(
        prompt=list(first.messages),
        completion=completion,
        input_ids=row.token_ids.astype(np.int64),
        completion_mask=mask.astype(np.int64),
        old_log_probs=(row.logprobs * mask).astype(np.float32),
        advantage=advantage,
        model_version=version,
        group_id=group_id,
        metrics={"reward": float(rollout.reward or 0.0), "reward_std": spread},
        enqueued_at=time.time(),
    )
