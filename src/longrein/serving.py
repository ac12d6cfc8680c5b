"""A model behind the proxy and the splice, for using a program with it outside training: what `longrein serve` does.

Always true: a conversation that goes on is read as it was in training, its sampled tokens as they were sampled; one that was
forgotten is rendered in full, as any server would. What is remembered stays within `remember_tokens` and `remember_conversations`, save
for what is being answered right now; what was not used for longest is forgotten first.
"""

from __future__ import annotations

import itertools
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Self

from aiohttp import web

from longrein.digests import canonical, digest_of
from longrein.noise import derive
from longrein.proxy import InterceptionServer
from longrein.proxy.dialect import Dialect, ModelRequest
from longrein.proxy.marks import origin
from longrein.proxy.session import Session
from longrein.recorder import Recorder

FRONT = "front"
"""The session of requests that are no model calls."""


@dataclass
class _Conversation:
    """All requests that begin with the same words, and the calls that answered them."""

    session: Session
    answering: int = 0
    tokens: int = 0


class ModelServer(InterceptionServer):
    """Answers any number of programs with one model, under one key.

    >>> with ModelServer(agent.recorder()) as server:                                      # doctest: +SKIP
    ...     print(server.url + "/v1", server.key)
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        key: str | None = None,
        seed: int = 0,
        remember_tokens: int = 2_000_000,
        remember_conversations: int = 256,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.recorder = recorder
        self.key = key or f"sk-longrein-{secrets.token_urlsafe(24)}"
        self.remember_tokens, self.remember_conversations = remember_tokens, remember_conversations
        self.remembered: OrderedDict[bytes, _Conversation] = OrderedDict()
        """By how each begins; the one used last stands last."""
        self._seed, self._numbers = seed, itertools.count()

    def start(self) -> Self:
        super().start()
        self._sessions[FRONT] = self._keys[self.key] = self._opened(FRONT)
        return self

    def stop(self) -> None:
        for conversation in list(self.remembered.values()):
            conversation.session.end()
        super().stop()

    async def _answer(
        self, http: web.Request, session: Session, dialect: Dialect, request: ModelRequest
    ) -> web.StreamResponse:
        opening, conversation = self._conversation(request)
        self.remembered.move_to_end(opening)
        conversation.session.traffic.failure = None  # what broke once is tried again: nobody scores this
        conversation.answering += 1
        try:
            return await super()._answer(http, conversation.session, dialect, request)
        finally:
            conversation.answering -= 1
            calls = self.recorder.rollout(conversation.session.rollout_id).calls.values()
            conversation.tokens = sum(len(call.context_ids) + len(call.completion_ids) for call in calls)
            self._forget_oldest()

    async def _stored(self, http: web.Request, session: Session, dialect: Dialect) -> web.Response:
        return await super()._stored(http, self._holding(origin(http.match_info["id"])) or session, dialect)

    async def _forget(self, http: web.Request, session: Session, dialect: Dialect) -> web.Response:
        return await super()._forget(http, self._holding(origin(http.match_info["id"])) or session, dialect)

    def _conversation(self, request: ModelRequest) -> tuple[bytes, _Conversation]:
        if request.previous is not None:
            for opening, conversation in self.remembered.items():
                if request.previous in self.recorder.rollout(conversation.session.rollout_id).calls:
                    return opening, conversation
        before = itertools.takewhile(lambda message: message.get("role") != "assistant", request.messages)
        opening = digest_of(*(canonical(message).encode("utf-8", "surrogatepass") for message in before))
        if opening not in self.remembered:
            self.remembered[opening] = _Conversation(self._opened(f"conversation-{next(self._numbers)}"))
        return opening, self.remembered[opening]

    def _opened(self, name: str) -> Session:
        self.recorder.open(name, seed=derive(self._seed, name))
        return Session(name, self.key, self._running(), recorder=self.recorder)

    def _holding(self, call_id: str | None) -> Session | None:
        sessions = (conversation.session for conversation in self.remembered.values())
        return next((one for one in sessions if one.rollout is not None and call_id in one.rollout.calls), None)

    def _forget_oldest(self) -> None:
        tokens = sum(conversation.tokens for conversation in self.remembered.values())
        for opening, conversation in list(self.remembered.items()):
            if tokens <= self.remember_tokens and len(self.remembered) <= self.remember_conversations:
                return
            if not conversation.answering:
                tokens -= conversation.tokens
                del self.remembered[opening]
                self.recorder.finish(conversation.session.rollout_id)
