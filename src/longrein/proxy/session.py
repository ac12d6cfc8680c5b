"""One rollout's model calls on the wire: which request is which call, who answers it, and when there are no more.

Always true:
- a request that repeats one whose reply was never written to the end joins that call; any other request is a new call;
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

from longrein.contract import Intercept, LongreinError, Message, Sampling
from longrein.digests import Digests, digest_of
from longrein.proxy import chat
from longrein.proxy.dialect import Answer, DialectError, ModelRequest, PromptTooLong, answer_of, minted
from longrein.proxy.text import parse_text
from longrein.recorder import ContextLengthError, Recorder, cut
from longrein.rendering import ConversationError, Rendering
from longrein.rollout import Rollout

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


@dataclass(frozen=True)
class Evidence:
    """What a request's headers say about being a repetition."""

    idempotency_key: str | None = None
    retries: int = 0
    """How many times the program's SDK says it has sent this request before."""


@dataclass(eq=False)
class Exchange:
    """One model call and the connections that wait for its reply."""

    turn: int
    request_id: str
    answer: asyncio.Future[Answer]
    idempotency_key: str | None = None
    call_id: str | None = None
    """Its name in the record, once it is there."""
    sampling: asyncio.Task[None] | None = None
    delivered: bool = False
    attempts: int = 0
    connections: list[Callable[[], bool]] = field(default_factory=list)
    """For each request that waits: whether its connection is still open."""

    @property
    def failed(self) -> bool:
        return self.answer.done() and (self.answer.cancelled() or self.answer.exception() is not None)

    @property
    def abandoned(self) -> bool:
        """Nobody has the reply, and nobody waits for it."""
        return not self.delivered and not any(is_open() for is_open in self.connections)


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
        self._exchanges: dict[bytes, list[Exchange]] = {}
        self._by_call: dict[str, Exchange] = {}
        self._stored: dict[str, tuple[ModelRequest, Answer]] = {}
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
        request = self._continued(request)
        digest = self._digest(request)
        exchange = self._repeated(digest, evidence)
        if exchange is None:
            exchange = self._new(request, evidence)
            self._exchanges.setdefault(digest, []).append(exchange)
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

    def stored(self, call_id: str | None) -> tuple[ModelRequest, Answer]:
        """A call that the program may come back to by its id."""
        if call_id not in self._stored:
            raise DialectError(404, "There is no stored response of that id.", code="not_found")
        return self._stored[call_id]

    def forget(self, call_id: str | None) -> None:
        self.stored(call_id)
        self._stored.pop(call_id or "", None)

    def count_tokens(self, request: ModelRequest) -> int:
        """How long a request's prompt is; a guess by its characters, where there is no rendering."""
        try:
            if self.rendering is not None:
                return len(self.rendering.prompt(request.messages, request.tools))
        except ConversationError as error:
            raise self._told(error) from None
        return len(json.dumps([request.messages, request.tools])) // 4 + 1

    def _continued(self, request: ModelRequest) -> ModelRequest:
        """The request with the conversation before it, where the program named that by an id."""
        if request.previous is None:
            return request
        if request.previous not in self._stored:
            message = "Previous response with that id not found: it was not stored, or is of another rollout."
            raise DialectError(400, message, param="previous_response_id", code="previous_response_not_found")
        before, answer = self._stored[request.previous]
        said = {**answer.message, "from_call": answer.id}
        own, new = request.messages[: request.instructions], request.messages[request.instructions :]
        return replace(request, messages=(*own, *before.messages[before.instructions :], said, *new), previous=None)

    def _remember(self, request: ModelRequest, answer: Answer) -> None:
        if request.store:
            self._stored[answer.id] = request, answer

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

    def _repeated(self, digest: bytes, evidence: Evidence) -> Exchange | None:
        alike = [exchange for exchange in self._exchanges.get(digest, ()) if not exchange.failed]
        if (key := evidence.idempotency_key) is not None:
            if same := [exchange for exchange in alike if exchange.idempotency_key == key]:
                return same[0]
            alike = [exchange for exchange in alike if exchange.idempotency_key is None]
        for exchange in alike:
            if exchange.abandoned:
                return exchange
        # The SDK says that it sent this before and got nothing: it knows better than our side of the connection.
        tried = [exchange for exchange in alike if exchange.attempts <= evidence.retries]
        return max(tried, key=lambda exchange: (not exchange.delivered, exchange.turn), default=None)

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
            _settle(exchange.answer, await self._answered(exchange, request, recorder))
        except (Exception, asyncio.CancelledError) as error:
            _settle(exchange.answer, _over() if self.ended else self._told(error))

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
        self._remember(request, answer)
        return answer

    def _allowed(self, request: ModelRequest) -> Sampling:
        """The run's sampling; a program can only ask for less, and the budget leaves what it leaves."""
        left = None if self.limits.max_tokens is None else max(1, self.limits.max_tokens - self.traffic.tokens)
        bounds = [bound for bound in (self.sampling.max_tokens, request.max_tokens, left) if bound is not None]
        return replace(self.sampling, max_tokens=min(bounds, default=None))

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
            call.setdefault("id", minted("call", f"turn{exchange.turn}", index))
        if self.rendering is not None:
            tokens = len(self.rendering.encode_reply(completion if isinstance(completion, str) else message))
        finish_reason = "tool_calls" if message.get("tool_calls") else "stop"
        self._find(intercept, take=True)
        self.traffic.tokens += tokens
        answer = Answer(f"turn{exchange.turn}", message, finish_reason, len(prompt_ids), tokens)
        self._remember(request, answer)
        self._loop.call_soon_threadsafe(_settle, exchange.answer, answer)

    def refuse(self, intercept: Intercept, error: Exception) -> None:
        """Answer with an error instead: too long a prompt as such, anything unknown as a failure of ours."""
        exchange, _ = self._find(intercept, take=True)
        self._loop.call_soon_threadsafe(_settle, exchange.answer, self._told(error))

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
        for exchange in (e for alike in self._exchanges.values() for e in alike):
            if exchange.sampling is not None:
                exchange.sampling.cancel()
            _settle(exchange.answer, _over())
        # The last reply may have reached the program, and the program may have ended, before we were told that it was sent.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._quiet.wait(), GRACE_SECONDS)
        done.set()

    def snapshot(self) -> Traffic:
        traffic = self.traffic
        exchanges = [e for alike in list(self._exchanges.values()) for e in list(alike)]
        lost = sorted(e.turn for e in exchanges if e.answer.done() and not e.failed and e.abandoned)
        return replace(traffic, unknown_routes=list(traffic.unknown_routes), asked=list(traffic.asked), undelivered=lost)


def _over() -> DialectError:
    return DialectError(409, "The rollout has ended; no call is answered any more.", code="rollout_ended")


def _settle(future: asyncio.Future[Answer], outcome: Answer | Exception) -> None:
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
        future.exception()  # the program may be gone: nobody has to look
    else:
        future.set_result(outcome)
