"""One rollout's model calls on the wire: who answers them, what they may cost, and when there are no more.

Always true:
- a call is `delivered` once its whole reply went to a live connection, or the program quoted it in a later request;
- once the rollout ended no call is added, and once it is sealed nothing changes at all.

Everything runs on the server's loop, except what says otherwise: those methods take the lock and are for any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from longrein.contract import ContextLengthError, Intercept, LongreinError, Message, Sampling
from longrein.digests import Digests, digest_of
from longrein.proxy import chat
from longrein.proxy.dialect import Answer, DialectError, ModelRequest, PromptTooLong, answer_of
from longrein.proxy.exchange import Evidence, Exchange, Exchanges
from longrein.proxy.stored import StoredAnswers
from longrein.proxy.text import parse_text
from longrein.recorder import Recorder, cut
from longrein.rendering import ConversationError, Rendering
from longrein.rollout import Rollout
from longrein.tool_calls import call_id

logger = logging.getLogger(__name__)

MAX_UNKNOWN_ROUTES = 100
MAX_REFUSALS = 10
GRACE_SECONDS = 1.0
"""How long an ending rollout waits for a connection that does not take its reply."""


@dataclass(frozen=True)
class CallLimits:
    """How many model calls and how many sampled tokens a rollout may have; None is no limit."""

    max_calls: int | None = None
    max_tokens: int | None = None


@dataclass
class Traffic:
    """What a rollout's program asked of the server."""

    calls: int = 0
    """Well-formed model calls; a request that joined an earlier call is not counted again."""
    streamed: int = 0
    joined: int = 0
    """Requests that got the reply of an earlier one whose reply was lost."""
    errors: int = 0
    """Requests that were answered with an error."""
    refusals: list[str] = field(default_factory=list)
    """What they were told, each once; of routes that are not there see `unknown_routes`."""
    tokens: int = 0
    """Sampled tokens."""
    unknown_routes: list[str] = field(default_factory=list)
    dialects: list[str] = field(default_factory=list)
    """The dialects its model calls were in, in order."""
    limit: str | None = None
    """`calls` or `tokens`, once the program ran into that limit."""
    failure: str | None = None
    """The cause, when our side broke: such a rollout has no reward."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    """The different sampling settings the program asked for, in order."""
    undelivered: list[int] = field(default_factory=list)
    """Turns whose reply never reached the program: not to be trained."""


class Session:
    """The calls of one rollout. With a recorder they are answered at once, without one through `deliver`."""

    def __init__(
        self,
        rollout_id: str,
        key: str,
        loop: asyncio.AbstractEventLoop,
        *,
        recorder: Recorder | None = None,
        rendering: Rendering | None = None,
        limits: CallLimits | None = None,
        sampling: Sampling | None = None,
        max_length: int | None = None,
    ) -> None:
        self.rollout_id, self.key = rollout_id, key
        self.recorder = recorder
        self.rollout: Rollout | None = recorder.rollout(rollout_id) if recorder else None
        self.rendering = recorder.rendering if recorder else rendering
        self.limits = limits or CallLimits()
        self.sampling = sampling or (recorder.sampling if recorder else Sampling())
        self.max_length = max_length
        self.traffic = Traffic()
        self.sealed = False
        self.ended = False
        self._loop = loop
        self._digests = Digests()
        self._exchanges = Exchanges()
        self._by_call: dict[str, Exchange] = {}
        self.stored = StoredAnswers()
        self._handlers = 0
        self._quiet = asyncio.Event()
        """Set while no request of this rollout is being answered."""
        self._quiet.set()
        self._pulled = threading.Condition()
        self._waiting: deque[Intercept] = deque()
        self._unanswered: dict[str, tuple[Exchange, ModelRequest]] = {}
        if self.limits.max_tokens is not None and self.rendering is None:
            raise LongreinError(
                "CallLimits.max_tokens needs a recorder or a rendering: without one tokens cannot be counted"
            )

    # Calls as they arrive

    def exchange(self, request: ModelRequest, evidence: Evidence, is_open: Callable[[], bool]) -> Exchange:
        """The call this request is about: an earlier one it repeats, or a new one."""
        if self.ended:
            raise _over()
        request = self.stored.continued(request)
        digest = self._digest(request)
        exchange = self._exchanges.repeated(digest, evidence)
        if exchange is None:
            exchange = self._new(request, evidence)
            self._exchanges.add(digest, exchange)
        else:
            self.traffic.joined += 1
        exchange.attempts += 1
        exchange.connections.append(is_open)
        self._handlers += 1
        self._quiet.clear()
        self.traffic.streamed += request.stream
        if request.asked and request.asked not in self.traffic.asked:
            self.traffic.asked.append(request.asked)
        return exchange

    def count_tokens(self, request: ModelRequest) -> int:
        """How long a request's prompt is; a guess by its characters, where there is no rendering."""
        try:
            if self.rendering is not None:
                return len(self.rendering.prompt(request.messages, request.tools))
        except ConversationError as error:
            raise self._told(error) from None
        return len(json.dumps([request.messages, request.tools])) // 4 + 1

    def written(self, exchange: Exchange, is_open: Callable[[], bool], *, whole: bool) -> None:
        """A connection is done with a call: it took the whole reply, or it did not."""
        exchange.connections.remove(is_open)
        if whole:
            self._deliver_once(exchange)
        self._handlers -= 1
        if not self._handlers:
            self._quiet.set()

    def _digest(self, request: ModelRequest) -> bytes:
        """Of what the model is asked, streamed or not: programs fall back from one to the other."""
        asked = request.messages, request.tools
        conversation = self.recorder.digest(self.rollout_id, *asked) if self.recorder else self._digests.of(*asked)[-1]
        return digest_of(conversation, repr((request.stop, request.max_tokens, request.logprobs)).encode())

    def _new(self, request: ModelRequest, evidence: Evidence) -> Exchange:
        if self.traffic.failure is not None:
            raise DialectError(403, "This rollout has failed and takes no more calls.", type="server_error", code="failed")
        calls, tokens = self.limits.max_calls, self.limits.max_tokens
        if calls is not None and self.traffic.calls >= calls:
            raise self._exhausted("calls", f"all {calls} model calls")
        if tokens is not None and self.traffic.tokens >= tokens:
            raise self._exhausted("tokens", f"all {tokens} sampled tokens")
        turn = self.traffic.calls
        self.traffic.calls += 1
        exchange = Exchange(turn, f"{self.rollout_id}/{turn}", self._loop.create_future(), evidence.idempotency_key)
        if self.recorder is not None:
            exchange.sampling = self._loop.create_task(self._sample(exchange, request, self.recorder))
            return exchange
        intercept = Intercept(messages=list(request.messages), tools=list(request.tools), request_id=exchange.request_id)
        with self._pulled:
            self._unanswered[exchange.request_id] = exchange, request
            self._waiting.append(intercept)
            self._pulled.notify_all()
        return exchange

    def _exhausted(self, limit: str, what: str) -> DialectError:
        self._ran_into(limit)
        message = f"The budget of this task is exhausted: {what} were used. No further call will be answered."
        return DialectError(403, message, type="insufficient_quota", code="budget_exhausted")

    def _ran_into(self, limit: str) -> None:
        with self._pulled:
            self.traffic.limit = self.traffic.limit or limit
            self._pulled.notify_all()

    def _deliver_once(self, exchange: Exchange) -> None:
        if exchange.delivered or self.sealed:
            return
        exchange.delivered = True
        if self.rollout is not None and exchange.call_id is not None:
            self.rollout.update(exchange.call_id, delivered=True)

    # The direct way

    async def _sample(self, exchange: Exchange, request: ModelRequest, recorder: Recorder) -> None:
        """Settle a call's answer, whatever happens: a program waits for it."""
        try:
            exchange.settle(await self._answered(exchange, request, recorder))
        except (Exception, asyncio.CancelledError) as error:
            exchange.settle(_over() if self.ended else self._told(error))

    async def _answered(self, exchange: Exchange, request: ModelRequest, recorder: Recorder) -> Answer:
        call = await recorder.call(
            self.rollout_id,
            request.messages,
            request.tools,
            self._allowed(request),
            turn=exchange.turn,
            max_length=self.max_length,
            delivered=False,
            stop=request.stop,
        )
        assert self.rollout is not None
        exchange.call_id = call.id
        self._by_call[call.id] = exchange
        if call.parent in self._by_call:  # what the program quotes, it got
            self._deliver_once(self._by_call[call.parent])
        self.traffic.tokens += len(call.completion_ids)
        budget = self.limits.max_tokens
        if budget is not None and self.traffic.tokens >= budget and call.finish_reason == "length":
            self._ran_into("tokens")
        answer = answer_of(call, self.rollout, recorder.rendering.decode, logprobs=request.logprobs, stop=request.stop)
        if request.store:
            self.stored.keep(request, answer)
        return answer

    def _allowed(self, request: ModelRequest) -> Sampling:
        """The run's sampling; a program can only ask for less, and the budget leaves what it leaves."""
        left = None if self.limits.max_tokens is None else max(1, self.limits.max_tokens - self.traffic.tokens)
        bounds = [bound for bound in (self.sampling.max_tokens, request.max_tokens, left) if bound is not None]
        least = min(bounds, default=None)
        return self.sampling if least == self.sampling.max_tokens else replace(self.sampling, max_tokens=least)

    def _told(self, error: BaseException) -> DialectError:
        """The error as the program hears it."""
        if isinstance(error, DialectError):
            return error
        if isinstance(error, ContextLengthError):
            return PromptTooLong(error.tokens, error.limit)
        if isinstance(error, ConversationError):
            return DialectError(400, str(error), param="messages")
        return self.fail(error)

    def refused(self, error: DialectError) -> None:
        """A request was answered with an error."""
        self.traffic.errors += 1
        told = self.traffic.refusals
        if error.status != 404 and error.message not in told and len(told) < MAX_REFUSALS:
            told.append(error.message)

    def fail(self, error: BaseException) -> DialectError:
        """Our side broke: the rollout is not scored, and the program is told to give up."""
        logger.error("rollout %s: a model call failed", self.rollout_id, exc_info=error)
        self.traffic.failure = self.traffic.failure or f"{type(error).__name__}: {error}"
        return DialectError(500, "The model could not answer; this rollout has failed.", type="server_error", code="failed")

    # The pull way, from any thread

    def next_request(self) -> Intercept | None:
        """The next call that waits, or None once there will be none."""
        if self.recorder is not None:
            raise LongreinError(f"rollout {self.rollout_id!r} is answered by its recorder; it has no requests to pull")
        with self._pulled:
            self._pulled.wait_for(lambda: self._waiting or self.ended or self.traffic.limit is not None)
            return self._waiting.popleft() if self._waiting else None

    def deliver(self, intercept: Intercept, completion: str | Message) -> None:
        exchange, request = self._find(intercept)
        prompt_ids, tokens = self._prompt(request), 0
        message = self._read(completion, request, prompt_ids)
        for index, call in enumerate(message.get("tool_calls", ())):
            if isinstance(completion, str) or "id" not in call:
                call["id"] = call_id(f"turn{exchange.turn}", index, call.get("id"))
        if self.rendering is not None:
            tokens = len(self.rendering.encode_reply(completion if isinstance(completion, str) else message))
        finish_reason = "tool_calls" if message.get("tool_calls") else "stop"
        self._find(intercept, take=True)
        self.traffic.tokens += tokens
        answer = Answer(f"turn{exchange.turn}", message, finish_reason, len(prompt_ids), tokens)
        if request.store:
            self.stored.keep(request, answer)
        self._loop.call_soon_threadsafe(exchange.settle, answer)

    def refuse(self, intercept: Intercept, error: Exception) -> None:
        """Answer with an error instead: too long a prompt as such, anything unknown as a failure of ours."""
        exchange, _ = self._find(intercept, take=True)
        self._loop.call_soon_threadsafe(exchange.settle, self._told(error))

    def _find(self, intercept: Intercept, take: bool = False) -> tuple[Exchange, ModelRequest]:
        request_id = intercept["request_id"]
        with self._pulled:
            found = self._unanswered.pop(request_id, None) if take else self._unanswered.get(request_id)
        if found is None:
            raise LongreinError(
                f"no call {request_id!r} of rollout {self.rollout_id!r} waits for an answer: it was answered, or the "
                "rollout has ended"
            )
        return found

    def _prompt(self, request: ModelRequest) -> list[int]:
        with contextlib.suppress(ConversationError):  # whoever sampled the reply could read it otherwise
            return self.rendering.prompt(request.messages, request.tools) if self.rendering else []
        return []

    def _read(self, completion: str | Message, request: ModelRequest, prompt_ids: list[int]) -> Message:
        if isinstance(completion, str):
            text = cut(completion, request.stop)
            if self.rendering is None:
                return parse_text(text)
            return self.rendering.parse(self.rendering.encode_reply(text), prompt_ids, request.tools)
        return chat.parse({"messages": [{**completion, "role": "assistant"}]}).messages[0]

    # The end, from any thread

    def end(self) -> None:
        """Take no more calls, and wait until those that are being answered have been."""
        with self._pulled:
            self.ended = True
            self._waiting.clear()
            self._unanswered.clear()
            self._pulled.notify_all()
        done = threading.Event()
        if self._loop.is_closed():  # the server has stopped: nobody is being answered
            return
        with contextlib.suppress(RuntimeError):  # or stops right now
            asyncio.run_coroutine_threadsafe(self._wind_up(done), self._loop)
            while not done.wait(timeout=1) and not self._loop.is_closed():
                pass

    async def _wind_up(self, done: threading.Event) -> None:
        for exchange in self._exchanges:
            if exchange.sampling is not None:
                exchange.sampling.cancel()
            exchange.settle(_over())
        # The last reply may have reached the program, and the program may have ended, before we were told that it was sent.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._quiet.wait(), GRACE_SECONDS)
        done.set()

    def snapshot(self) -> Traffic:
        traffic = self.traffic
        lost = sorted(e.turn for e in self._exchanges if e.answer.done() and not e.failed and e.abandoned)
        return replace(traffic, unknown_routes=list(traffic.unknown_routes), asked=list(traffic.asked), undelivered=lost)


def _over() -> DialectError:
    return DialectError(409, "The rollout has ended; no call is answered any more.", code="rollout_ended")
