"""Answers that a program may come back to by their id, with the conversation before each.

Always true: what an answer is stored with is what its request said; a message, a list of tools or any other part that was
stored before is not stored again, so that a conversation of many answers takes the memory of its messages, once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson

from longrein.digests import digest_of
from longrein.proxy.dialect import Answer, DialectError, ModelRequest


class StoredAnswers:
    """The stored answers of one rollout, by the call that gave them."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[ModelRequest, Answer]] = {}
        self._parts: dict[bytes, Any] = {}

    def keep(self, request: ModelRequest, answer: Answer) -> None:
        self._kept[answer.id] = self._shared(request), answer

    def find(self, call_id: str | None) -> tuple[ModelRequest, Answer]:
        if call_id not in self._kept:
            raise DialectError(404, "There is no stored response of that id.", code="not_found")
        return self._kept[call_id]

    def forget(self, call_id: str | None) -> None:
        self.find(call_id)
        self._kept.pop(call_id or "", None)

    def continued(self, request: ModelRequest) -> ModelRequest:
        """The request with the conversation before it, where the program named that by an id."""
        if request.previous is None:
            return request
        if request.previous not in self._kept:
            message = "Previous response with that id not found: it was not stored, or is of another rollout."
            raise DialectError(400, message, param="previous_response_id", code="previous_response_not_found")
        before, answer = self._kept[request.previous]
        said = {**answer.message, "from_call": answer.id}
        own, new = request.messages[: request.instructions], request.messages[request.instructions :]
        return replace(request, messages=(*own, *before.messages[before.instructions :], said, *new), previous=None)

    def _shared(self, request: ModelRequest) -> ModelRequest:
        wire = {name: self._part(value) for name, value in request.wire.items()}
        if isinstance(echo := request.wire.get("echo"), dict):
            wire["echo"] = {field: self._part(value) for field, value in echo.items()}
        return replace(
            request,
            messages=tuple(map(self._part, request.messages)),
            tools=tuple(map(self._part, request.tools)),
            asked=self._part(request.asked),
            wire=wire,
        )

    def _part(self, value: Any) -> Any:
        """The value, or its equal that is stored already."""
        try:
            name = digest_of(orjson.dumps(value))
        except TypeError:  # half of a surrogate pair, say
            return value
        return self._parts.setdefault(name, value)
