"""The trainer's side of the seam, small enough to read: one session in, one scored rollout out.

It is harness-agnostic (any `AgentSessionFactory`) and framework-neutral (any `GenerateAPI`). The tokens stay with whoever
generated them, under `(rollout_id, turn)`; the messages and the reward come back.
"""

from typing import Any

from longrein import AgentSessionFactory, GenerateAPI, RolloutMessages, Sampling


class HarnessRolloutWorker:
    def __init__(self, factory: AgentSessionFactory, api: GenerateAPI, sampling: Sampling) -> None:
        self.factory, self.api, self.sampling = factory, api, sampling

    def rollout(self, task: Any, rollout_id: str) -> RolloutMessages:
        session = self.factory.create(task=task, rollout_id=rollout_id)
        messages: list[dict] = []
        turn = 0
        try:
            while (intercept := session.next_request()) is not None:
                text = self.api.generate(rollout_id, turn, intercept["messages"], intercept["tools"], self.sampling)
                session.deliver(intercept, text)
                messages = [*intercept["messages"], {"role": "assistant", "content": text}]
                turn += 1
            return RolloutMessages(rollout_id, messages, session.verify().env_reward)
        finally:
            session.close()
