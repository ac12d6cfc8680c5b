"""What every wire dialect speaks of: a request as the recorder takes it, an answer as any dialect can write it, an error.

A dialect is a file of pure functions between its wire's JSON and these three; no socket and no clock is ever in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from longrein.contract import LongreinError, Message, Tool
from longrein.rollout import Call, Rollout


class DialectError(LongreinError):
    """A request that is not answered with a reply: how a provider would say so."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.type, self.message, self.param, self.code = status, type, message, param, code


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One model call as a program asked for it."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    """Those the model is shown."""
    tool_choice: str | dict[str, Any] = "auto"
    model: str | None = None
    """The name the program uses for the model; whatever it is, the policy answers."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with the token counts."""
    logprobs: bool = False
    asked: dict[str, Any] = field(default_factory=dict)
    """Every sampling setting the program sent, as it sent it; the run's own settings win."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token as a program that asked for `logprobs` sees it."""

    token: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Answer:
    """One reply on its way to the program. It holds no token ids."""

    id: str
    message: Message
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Only when the program asked."""


def answer_of(
    call: Call, rollout: Rollout, decode: Callable[[Sequence[int]], str] | None = None, *, logprobs: bool = False
) -> Answer:
    """A recorded call as an answer; `decode` names the tokens when log-probabilities were asked for."""
    tokens = None
    if logprobs and decode is not None:
        pairs = zip(call.completion_ids.tolist(), call.logprobs.tolist(), strict=True)
        tokens = tuple(TokenLogprob(decode([token]), logprob) for token, logprob in pairs)
    return Answer(
        id=call.id,
        message=call.reply,
        # An engine that was interrupted gives what it has: to a program that is a reply cut short.
        finish_reason="length" if call.finish_reason == "aborted" else call.finish_reason,
        prompt_tokens=len(rollout.prompt(call.id)),
        completion_tokens=len(call.completion_ids),
        logprobs=tokens,
    )
