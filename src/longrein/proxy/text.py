"""A reply as text to an assistant message, without a tokenizer: `<think>` reasoning and `<tool_call>{json}</tool_call>`.

The pull way uses it when no rendering is given. It reads what the Qwen3 family writes as that family's own parser does: the
content ends where the tool calls begin, and a call that a program could not read stays in the text.
"""

from __future__ import annotations

import json
import re

from longrein.contract import Message
from longrein.tool_calls import readable

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def parse_text(text: str) -> Message:
    """
    >>> parse_text('<think>\\nhm\\n</think>\\n\\n<tool_call>\\n{"name": "look", "arguments": {}}\\n</tool_call>')["content"]
    ''
    """
    reasoning, text = _reasoning(text)
    before, mark, after = text.partition("<tool_call>")
    content, calls = [before.strip()], []
    for found in _CALL.finditer(mark + after):
        call = _call(found.group(1)) if found.group(0).endswith("</tool_call>") else None
        if call is None:
            content.append(found.group(0))
        else:
            calls.append({"type": "function", "function": call})
    message: Message = {"role": "assistant", "content": "\n".join(filter(None, content))}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _reasoning(text: str) -> tuple[str, str]:
    """The reasoning at the start, and the rest. A prompt may have opened it; a reply cut short leaves it open."""
    start = text.lstrip()
    if "</think>" in text and (start.startswith("<think>") or "<think>" not in text.partition("</think>")[0]):
        thought, _, rest = text.partition("</think>")
        return thought.strip().removeprefix("<think>").strip(), rest
    if start.startswith("<think>"):
        thought, mark, rest = start.removeprefix("<think>").partition("<tool_call>")
        return thought.strip(), mark + rest
    return "", text


def _call(text: str) -> dict[str, str] | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return readable(call.get("name"), call.get("arguments")) if isinstance(call, dict) else None
