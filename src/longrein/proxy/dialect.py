"""What every wire dialect speaks of: a request as the recorder takes it, an answer as any dialect can write it, an error.

A dialect is a file of pure functions between its wire's JSON and these three; no socket and no clock is ever in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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


class PromptTooLong(DialectError):
    """No room for a reply. Each dialect says it in the words by which its programs know that they are to compact."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(
            400,
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in {tokens} tokens. "
            "Please reduce the length of the messages.",
            param="messages",
            code="context_length_exceeded",
        )
        self.tokens, self.limit = tokens, limit


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
    previous: str | None = None
    """The call whose conversation the messages continue, where the program leaves it to the server to remember."""
    instructions: int = 0
    """How many messages at the start are for this call alone: whoever continues it starts with others."""
    store: bool = False
    """Whether a later request may continue from the answer by its id."""
    wire: dict[str, Any] = field(default_factory=dict)
    """What the dialect needs to know of the body when it writes the answer."""


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
    stop_word: str | None = None
    """The program's stop word that ended the reply."""


class Dialect(Protocol):
    """A file like `chat.py`: how one wire's programs ask and are answered."""

    @property
    def END(self) -> bytes:
        """What follows the last event of a stream."""
        ...

    @property
    def WAITING(self) -> bytes:
        """What a stream says now and then while there is no reply yet."""
        ...

    def parse(self, body: Any) -> ModelRequest:
        """The request in a decoded JSON body, or a `DialectError`."""
        ...

    def whole(self, answer: Answer, request: ModelRequest, *, created: int, model: str) -> dict[str, Any]:
        """The response body of a reply that is not streamed."""
        ...

    def events(self, answer: Answer, request: ModelRequest, *, created: int, model: str) -> Iterator[dict[str, Any]]:
        """The events of a streamed reply; one with a `type` is named by it."""
        ...

    def error_body(self, error: DialectError) -> dict[str, Any]: ...

    def error_event(self, error: DialectError) -> dict[str, Any]: ...


def answer_of(
    call: Call,
    rollout: Rollout,
    decode: Callable[[Sequence[int]], str] | None = None,
    *,
    logprobs: bool = False,
    stop: Sequence[str] = (),
) -> Answer:
    """A recorded call as an answer; `decode` names the tokens when log-probabilities or stop words were asked for."""
    tokens = word = None
    if logprobs and decode is not None:
        pairs = zip(call.completion_ids.tolist(), call.logprobs.tolist(), strict=True)
        tokens = tuple(TokenLogprob(decode([token]), logprob) for token, logprob in pairs)
    if stop and decode is not None:
        text = decode(call.completion_ids.tolist())
        word = min((w for w in stop if w in text), key=text.find, default=None)
    return Answer(
        id=call.id,
        message=call.reply,
        # An engine that was interrupted gives what it has: to a program that is a reply cut short.
        finish_reason="length" if call.finish_reason == "aborted" else call.finish_reason,
        prompt_tokens=rollout.prompt_length(call.id),
        completion_tokens=len(call.completion_ids),
        logprobs=tokens,
        stop_word=word,
    )
