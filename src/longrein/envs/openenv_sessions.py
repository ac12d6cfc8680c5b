"""Agent programs as OpenEnv's sessions: whoever trains from OpenEnv's `TrainingTrace` gets longrein's record of them.

Always true of a trace: each model call of the rollout stands in it once, with the ids the engine was given, those it drew and
their log-probabilities; a call follows the one whose tokens its prompt extends wherever a trainer that joins turns in order
needs it to; a token is trained there exactly if it is trained here. TRL's own `openenv_harness.HarnessRolloutWorker` takes it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Any

from longrein.agents import Agent
from longrein.contract import LongreinError, Message
from longrein.envs.harness import HarnessEnv
from longrein.harnesses.process import ProcessSession
from longrein.noise import derive
from longrein.rollout import Call, Rollout

try:
    from openenv.core.harness import (  # pyright: ignore[reportMissingImports]
        ResourceSession,
        ResourceSessionFactory,
        ToolResult,
        TrainingTrace,
        TrainingTurn,
        VerifyResult,
    )
except ImportError as error:
    raise LongreinError(f"openenv cannot be imported ({error}): run `pip install 'longrein[openenv]'`") from error


class HarnessSession(ResourceSession):
    """One agent program working on one task; an OpenEnv `TrainableSession`."""

    def __init__(self, session: ProcessSession, rollout: Rollout, on_close: Callable[[], Any]) -> None:
        self.session = session
        self.rollout = rollout
        self._on_close: Callable[[], Any] | None = on_close

    def initial_messages(self) -> list[Message]:
        """What the task says; the program makes its own prompt of it."""
        return messages_of(self.rollout.task)

    def list_tools(self) -> list[Any]:
        """None: the program has tools of its own, and nothing of ours is an agent's to call."""
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(error=f"there is no tool {name!r}: the program owns its loop and its tools")

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """Until the program has ended; its exit code. Raises `TimeoutError` for one that ran out of time."""
        try:
            outcome = self.session.wait(timeout_s)
        except FutureTimeout:
            raise TimeoutError(f"the program still runs after {timeout_s:g} s") from None
        if outcome.limit == "time":
            raise TimeoutError("the program ran into its own limit of time")
        return outcome.exit_code

    def fetch_training_trace(self) -> TrainingTrace:
        """What was captured; the program may call no more."""
        self.session.seal()
        return training_trace(self.rollout)

    def verify(self, transcript: Sequence[Message] = (), final_state: Any | None = None) -> VerifyResult:
        """The verdict on what the program left; what it said is read from the record, not from `transcript`."""
        verdict = self.session.verify()
        self.rollout.reward = float(verdict.env_reward)
        return VerifyResult(env_reward=self.rollout.reward, done=True, metrics=dict(verdict.info))

    def close(self) -> None:
        """End the program and its record. Any number of times."""
        self.session.close()
        finish, self._on_close = self._on_close, None
        if finish is not None:
            finish()


class HarnessSessionFactory(ResourceSessionFactory[HarnessSession]):
    """Sessions of a harness environment, sampled by `agent` and recorded to the token.

        worker = HarnessRolloutWorker(                  # trl.experimental.async_grpo.openenv_harness
            harness_session_factory=functools.partial(
                HarnessSessionFactory,
                {"program": "codex", "verify": "my_project.verify"},
                agent=functools.partial(make_agent, "http://127.0.0.1:8000"),
            ),
            ...
        )

    `agent` may be a function that makes it: TRL's worker builds its factory in a process of its own. `sampling` is what it asks
    for there, and wins. The task is what `create` is told, or, with `tasks`, the one that its `seed` draws (the same for a group).
    """

    def __init__(
        self,
        env_config: Mapping[str, Any],
        *,
        agent: Agent | Callable[[], Agent],
        env_class: type[HarnessEnv] = HarnessEnv,
        tasks: Sequence[dict[str, Any]] | None = None,
        sampling: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        if tasks is not None and not tasks:
            raise LongreinError("tasks is empty; give some, or None to take the task from the dataset's prompt")
        self.agent = agent if isinstance(agent, Agent) else agent()
        if sampling:
            self.agent.sampling = replace(
                self.agent.sampling, temperature=float(sampling["temperature"]), top_p=1.0, top_k=0, min_p=0.0
            )
        elif self.agent.sampling.truncated:
            raise LongreinError(
                f"the agent samples with {self.agent.sampling}; OpenEnv's trace is of the whole distribution: turn top-p, top-k and min-p off"
            )
        self.env = env_class(tokenizer=self.agent.tokenizer, env_config=dict(env_config))
        self.recorder = self.agent.recorder()
        self.tasks = tasks
        self.seed = seed
        self._sessions = self.env.sessions(self.recorder)

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> HarnessSession:
        """Start the program on a task. Rollouts of one task differ by their `episode_id`."""
        rollout_id = episode_id or uuid.uuid4().hex
        chosen = as_task(task) if self.tasks is None else self.tasks[(seed or 0) % len(self.tasks)]
        rollout = self.recorder.open(
            rollout_id, seed=derive(self.seed, seed, rollout_id), task=chosen, env=type(self.env).__name__
        )
        try:
            session = self._sessions.create(task=chosen, rollout_id=rollout_id)
        except BaseException:
            self.recorder.finish(rollout_id)
            raise
        return HarnessSession(session, rollout, lambda: self.recorder.finish(rollout_id))


def training_trace(rollout: Rollout) -> TrainingTrace:
    """A rollout as OpenEnv's trace."""
    return TrainingTrace(turns=[_turn(rollout, call) for call in _in_order(rollout)])


def as_task(given: Any) -> dict[str, Any]:
    """A dataset's prompt as a program's task: `instruction` is the text that the user says last."""
    if isinstance(given, dict):
        return given
    if isinstance(given, str):
        return {"instruction": given}
    said = [message["content"] for message in given or () if message.get("role") == "user"]
    if not said:
        raise LongreinError(f"the prompt {given!r} is no task; it must be a dict, a text, or messages with one of a user's")
    return {"instruction": said[-1]}


def messages_of(task: Any) -> list[Message]:
    """A task as the messages of a dataset's prompt."""
    text = task.get("instruction") if isinstance(task, dict) else None
    return [{"role": "user", "content": str(text if text is not None else task)}]


def _in_order(rollout: Rollout) -> Iterator[Call]:
    """Every call after its parent, a branch at a time, those with something to train first: rows are joined from neighbours."""
    trained: set[str] = set()
    for call in reversed(rollout.calls.values()):  # children come after their parents
        if call.id in trained or rollout.reason(call) is None:
            trained.add(call.id)
            if call.parent is not None:
                trained.add(call.parent)
    waiting = _later_first(rollout.children(None), trained)
    while waiting:
        call_id = waiting.pop()
        yield rollout.calls[call_id]
        waiting += _later_first(rollout.children(call_id), trained)


def _later_first(call_ids: Sequence[str], trained: set[str]) -> list[str]:
    context = [call_id for call_id in call_ids if call_id not in trained]
    return context[::-1] + [call_id for call_id in reversed(call_ids) if call_id in trained]


def _turn(rollout: Rollout, call: Call) -> TrainingTurn:
    prompt, drawn, reason = rollout.prompt(call.id).tolist(), call.completion_ids.tolist(), rollout.reason(call)
    conversation = rollout.conversation(call.id)
    return TrainingTurn(
        node_id=call.id,
        prompt_token_ids=prompt,
        completion_token_ids=drawn,
        per_token_logps=[min(value, 0.0) for value in call.logprobs.tolist()],  # rounding may leave 1e-8 above
        loss_mask=[0] * len(prompt) + [int(reason is None)] * len(drawn),
        request={"messages": conversation[:-1], "tools": list(call.tools) or None},
        response={"choices": [{"message": call.reply, "finish_reason": call.finish_reason}]},
        metadata={"parent": call.parent, "policy_version": call.policy_version, "not_trained": reason},
    )
