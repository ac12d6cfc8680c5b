"""What a rendering is: how one model family writes conversations, and what it says of one that it cannot write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from longrein.contract import LongreinError, Message, Tool

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Tokens = Sequence[int] | NDArray[np.int32]


class ConversationError(LongreinError):
    """The conversation cannot be written in the model's format: whoever sent it is to change it."""


class Rendering(Protocol):
    """How one model family writes conversations."""

    name: str
    stop_ids: frozenset[int]
    """Ids that end a reply; a reply that ended by itself has one as its last token."""
    keeps_prefixes: bool
    """Whether a longer conversation starts with the tokens of a shorter one. If not, every call is a new branch."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """The whole conversation, up to where the next reply starts."""
        ...

    def extension(
        self,
        reply: Message,
        new_messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        system: Sequence[Message] = (),
        stop_id: int | None = None,
    ) -> list[int] | None:
        """What follows a closed reply: the new messages, up to where the next reply starts. None: it can't be told.

        `system` are the messages before the first of a user, `stop_id` is what closed the reply (unsaid: the usual one).
        """
        ...

    def close(self, prompt_ids: Tokens, completion_ids: Tokens) -> list[int]:
        """The close that the model did not get to sample; empty when it sampled one."""
        ...

    def parse(self, completion_ids: Tokens, prompt_ids: Tokens = (), tools: Sequence[Tool] = ()) -> Message:
        """A sampled reply as an assistant message; its tool calls have the ids that the model gave them, if any."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens as text, special ones included."""
        ...

    def encode_reply(self, reply: str | Message) -> list[int]:
        """A reply that somebody else than the model wrote, as text or as a message, closed as the model would close it."""
        ...
