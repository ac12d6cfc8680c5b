"""The seam between who runs an episode and who samples for it.

Everything here is plain data and protocols, on the standard library alone: a machine that only runs harnesses can import
it, and either side can be replaced without the other knowing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Message = dict[str, Any]
"""An OpenAI chat message: `role`, `content`, and `tool_calls`, `tool_call_id`, `reasoning_content` where they apply. A reply that
a program quotes may have `from_call`, the call it came from as far as the ids and signatures in it tell."""

Tool = dict[str, Any]
"""An OpenAI function schema: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


class LongreinError(Exception):
    """Everything longrein raises on purpose: what was given, what was expected, what to do."""


class ContextLengthError(LongreinError):
    """The prompt leaves no room for a reply in the model's context."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(f"the prompt has {tokens} tokens and the limit is {limit}: no room for a reply")
        self.tokens, self.limit = tokens, limit


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a reply is drawn.

    >>> Sampling(temperature=0.7, max_tokens=64).max_tokens
    64
    """

    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    max_tokens: int | None = None
    """Longest reply in tokens; None leaves it to the engine's context."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise LongreinError(f"Sampling.temperature is {self.temperature}; it must be 0 (greedy) or more, and finite.")
        if not 0 < self.top_p <= 1:
            raise LongreinError(f"Sampling.top_p is {self.top_p}; it must be above 0 and at most 1.")
        if self.top_k < 0:
            raise LongreinError(f"Sampling.top_k is {self.top_k}; it must be 0 (off) or more.")
        if not 0 <= self.min_p < 1:
            raise LongreinError(f"Sampling.min_p is {self.min_p}; it must be at least 0 and below 1.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise LongreinError(f"Sampling.max_tokens is {self.max_tokens}; it must be 1 or more, or None.")

    @property
    def truncated(self) -> bool:
        """Whether some tokens were cut from the distribution before drawing."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One reply asked of an engine. Same request, same weights: same reply, whatever else the engine is doing."""

    prompt_ids: Sequence[int] | NDArray[np.int32]
    """The recorder gives an array: long prompts are neither copied nor made into Python numbers."""
    sampling: Sampling
    stop_ids: frozenset[int]
    seed: int
    """Keys the noise of this reply together with each token's position in it."""
    rollout_id: str = ""
    messages: Sequence[Message] = ()
    """The conversation the prompt renders, for engines that answer from text."""
    tools: Sequence[Tool] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """One reply as an engine drew it."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    """Of `ids` under the policy at the sampling temperature, before any truncation."""
    finish_reason: str
    """`stop` (a stop id was drawn, and is the last id), `length` or `aborted`."""
    policy_version: int = 0
    """Of the oldest token."""
    sampler_logprobs: Sequence[float] | None = None
    """Under the truncated distribution, only when top-p, top-k or min-p were on; None too where the engine cannot tell."""
    versions: Sequence[int] | None = None
    """Of each token, only when the weights changed while the reply was drawn."""


class Engine(Protocol):
    """Who samples. Requests from any thread or event loop are answered as they come, batched inside.

    New weights go in between `pause` and `resume`, and so does the `policy_version` that stamps what is sampled from them.
    """

    policy_version: int

    async def sample(self, request: SampleRequest) -> Sampled: ...

    def cancel(self) -> None:
        """Refuse what waits and what runs; later requests are served again."""
        ...

    def pause(self) -> None:
        """Return once nothing is sampled; requests wait for `resume`."""
        ...

    def resume(self) -> None: ...

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Sample from these from now on: `(name, tensor)` of every parameter, as the trained model names it."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `verify` returns. Reward is made here and nowhere else."""

    env_reward: float
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RolloutMessages:
    """A finished rollout as messages; the exact tokens are with whoever answered its calls."""

    rollout_id: str
    messages: list[Message]
    reward: float | None


class Intercept(TypedDict):
    """A model call that an agent program made and that waits for its answer."""

    messages: list[Message]
    tools: list[Tool]
    request_id: str


@runtime_checkable
class GenerateAPI(Protocol):
    """The trainer's side of the seam: answers a model call and keeps its tokens under `(rollout_id, turn)`."""

    def generate(
        self, rollout_id: str, turn: int, messages: list[Message], tools: list[Tool] | None, sampling: Sampling
    ) -> str:
        """The reply to a rollout's next call, as the model wrote it."""
        ...


@runtime_checkable
class AgentSession(Protocol):
    """The harness's side of the seam: one agent program working on one task."""

    def next_request(self) -> Intercept | None:
        """The program's next model call, or None once it has ended."""
        ...

    def deliver(self, intercept: Intercept, completion_text: str) -> None:
        """Answer a call, so that the program goes on."""
        ...

    def verify(self) -> Verdict:
        """Judge what the program left, once it has ended."""
        ...

    def close(self) -> None:
        """End the program and all it started."""
        ...


@runtime_checkable
class CarefulSession(AgentSession, Protocol):
    """A session that can also refuse a call, and that knows which replies its program never got."""

    def refuse(self, intercept: Intercept, error: Exception) -> None:
        """Answer a call with an error (an overlong prompt, say) and let the program go on."""
        ...

    def undelivered(self) -> list[str]:
        """The `request_id`s of the calls whose reply was lost on its way."""
        ...


@runtime_checkable
class AgentSessionFactory(Protocol):
    """Starts sessions, one a rollout."""

    def create(self, *, task: Any, rollout_id: str) -> AgentSession:
        """A session that works on the task."""
        ...
