"""An engine that answers from a script: real tokens, no model.

Its replies are tokenised once, closed as the model would close them, and recorded with log-probability 0 (certain).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from longrein.contract import LongreinError, Message, Sampled, SampleRequest, Tool
from longrein.engines.at_once import AtOnce
from longrein.rendering import Rendering

Script = Callable[[Sequence[Message], Sequence[Tool]], str | Message]


class ScriptedEngine(AtOnce):
    """Answers with what a function says, or with a list of replies in order, from the start for every rollout.

    A reply is the model's own text, or an assistant message that is written in the model's format.
    """

    def __init__(self, script: Script | Sequence[str | Message], rendering: Rendering) -> None:
        self._script = script if callable(script) else _in_order(script)
        self._rendering = rendering

    async def sample(self, request: SampleRequest) -> Sampled:
        return self._sampled(self._script(request.messages, request.tools), request)

    def _sampled(self, reply: str | Message, request: SampleRequest) -> Sampled:
        ids = self._rendering.encode_reply(reply)
        limit = request.sampling.max_tokens
        cut = limit is not None and len(ids) > limit
        ids = ids[:limit] if cut else ids
        certain = [0.0] * len(ids)
        return Sampled(
            ids=ids,
            logprobs=certain,
            finish_reason="length" if cut else "stop",
            policy_version=self.policy_version,
            sampler_logprobs=certain if request.sampling.truncated else None,
        )


class TextAgentEngine(ScriptedEngine):
    """Any object with `get_action(messages, state) -> (text, state)`; each rollout has its own state, None at first.

    A conversation without a reply starts a rollout afresh, so that an agent can play many trials.
    """

    def __init__(self, agent: Any, rendering: Rendering) -> None:
        self._agent = agent
        self._rendering = rendering
        self._states: dict[str, Any] = {}

    async def sample(self, request: SampleRequest) -> Sampled:
        if not any(message.get("role") == "assistant" for message in request.messages):
            self._states.pop(request.rollout_id, None)
        answer = self._agent.get_action(list(request.messages), self._states.get(request.rollout_id))
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], str)):
            raise LongreinError(
                f"{type(self._agent).__name__}.get_action returned {answer!r}; it must return a pair (text, state)"
            )
        text, self._states[request.rollout_id] = answer
        return self._sampled(text, request)


def _in_order(replies: Sequence[str | Message]) -> Script:
    def script(messages: Sequence[Message], tools: Sequence[Tool]) -> str | Message:
        turn = sum(message.get("role") == "assistant" for message in messages)
        if turn >= len(replies):
            raise LongreinError(f"the script has {len(replies)} replies and was asked for one more")
        return replies[turn]

    return script
