"""Messages as templates take them and replies as they are read: the same for every rendering."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from longrein.contract import Message, Tool
from longrein.rendering.protocol import ConversationError
from longrein.tool_calls import own_id, readable, with_object_arguments

if TYPE_CHECKING:
    from longrein.rendering.protocol import Tokens

OPENING = 64
"""Tokens of a prompt's end that matter to its reply: it may have opened the reasoning."""


class Replies:
    """Reading and writing replies, the same for every family."""

    _tokenizer: Any
    _parser: Any
    stop_ids: frozenset[int]

    def parse(self, completion_ids: Tokens, prompt_ids: Tokens = (), tools: Sequence[Tool] = ()) -> Message:
        ids = [int(i) for i in completion_ids]
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        opening = [int(i) for i in prompt_ids[-OPENING:]]
        try:
            parsed = self._parser.parse_response(ids, tools=list(tools) or None, prompt_ids=opening)
        except (ValueError, RecursionError):  # numbers too long and lists too deep for `json`
            return {"role": "assistant", "content": self.decode(ids)}
        content, calls = [parsed.content], []
        for call in parsed.tool_calls:
            function = readable(call.name, call.arguments) if call.status == "ok" else None
            if function is not None:
                own = {"id": call.id} if isinstance(call.id, str) else {}
                calls.append({**own, "type": "function", "function": function})
            else:  # a call that a program could not read stays in the text, as the model wrote it
                content.append(self.decode(ids[slice(*call.token_span)]) if call.token_span else call.raw)
        message: Message = {"role": "assistant", "content": "\n".join(filter(None, content))}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        if calls:
            message["tool_calls"] = calls
        return message

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _after(self, prompt: list[int], whole: list[int]) -> str:
        """The text of `whole` after `prompt`; a family may write a past reply otherwise than it opens a new one."""
        text, opening = self.decode(whole), self.decode(prompt)
        if text.startswith(opening):
            return text[len(opening) :]
        common = next(i for i, (a, b) in enumerate(itertools.zip_longest(whole, prompt)) if a != b)
        return self.decode(whole[common:])

    def _closed(self, text: str, close: int) -> list[int]:
        ids = [*self._encode(text), close]
        return ids[: next(i + 1 for i, token in enumerate(ids) if token in self.stop_ids)]


def for_template(message: Message) -> Message:
    """The message as templates expect it: text content, tool arguments as objects, the model's own ids, the one name for a
    system role."""
    message = {key: value for key, value in message.items() if value is not None}
    content = message.get("content", "")
    if isinstance(content, list):
        content = "".join(_part_text(part) for part in content)
    message["content"] = content
    if message.get("role") == "developer":
        message["role"] = "system"
    if message.get("tool_calls"):
        calls = [with_object_arguments(call) for call in message["tool_calls"]]
        message["tool_calls"] = [{**call, "id": own_id(call["id"])} if call.get("id") else call for call in calls]
    else:
        message.pop("tool_calls", None)
    if isinstance(answered := message.get("tool_call_id"), str):
        message["tool_call_id"] = own_id(answered)
    return message


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or "text" not in part:
        kind = part.get("type") if isinstance(part, dict) else part
        raise ConversationError(f"a message has a content part of type {kind!r}; only text can be rendered")
    return part["text"] or ""
