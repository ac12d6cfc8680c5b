"""Random conversations for property tests: awkward text, JSON arguments, tool calls, replies as text and as raw ids."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from longrein.contract import Message, Tool
from longrein.rendering import Rendering

AWKWARD = [
    "", " ", "\n", "  two  spaces ", "a\n\nb\n", "é1 日本語 🙂 ﷽", "e\u0301", "{}", '{"name": 1}', '"quoted"', "\\n",
    "<|im_end|>", "<|im_start|>assistant\nhello", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
    "<|eot_id|>", "<|end_header_id|>", "[INST]", "</s>", "<|endoftext|>",
]  # fmt: skip
TEXT = st.sampled_from(AWKWARD) | st.text(max_size=12) | st.lists(st.sampled_from(AWKWARD), max_size=3).map("".join)
PLAIN = st.text(st.sampled_from("ab Z09.,é日🙂\n'{}[]:"), max_size=20)
"""Text without any token of a template's own."""
NUMBER = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBER | PLAIN,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(PLAIN, inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["room", "é", "b", "a", "10", "2"]), JSON, max_size=3)
NAME = st.sampled_from(["look", "move_to", "a-b.c"])

LOOK: Tool = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look into a room.",
        "parameters": {"type": "object", "properties": {"room": {"type": "string"}}, "required": ["room"]},
    },
}
MOVE: Tool = {
    "type": "function",
    "function": {"name": "move_to", "description": "é", "parameters": {"type": "object", "properties": {}}},
}
TOOLS = st.sampled_from([[], [LOOK], [LOOK, MOVE]])


def user(text: Any) -> Message:
    return {"role": "user", "content": text}


def system(text: Any) -> Message:
    return {"role": "system", "content": text}


def assistant(text: Any, *calls: tuple[str, dict[str, Any]]) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": f"callabc{index:02}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for index, (name, arguments) in enumerate(calls)
        ]
    return message


def result(text: Any, call_id: str = "callabc00") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def openings() -> st.SearchStrategy[list[Message]]:
    """How a conversation starts: perhaps a system message, then a user's."""
    return st.tuples(st.lists(TEXT.map(system), max_size=1), TEXT.map(user)).map(lambda pair: [*pair[0], pair[1]])


def next_messages(text: st.SearchStrategy[str] = TEXT) -> st.SearchStrategy[list[Message]]:
    """What a program may send after a reply: users, tool results with ids known and unknown, a system message."""
    message = text.map(user) | text.map(result) | text.map(lambda t: result(t, "nobody")) | text.map(system)
    return st.lists(message, min_size=1, max_size=3)


def reply_texts(name: str) -> st.SearchStrategy[str]:
    """What the model of that tokenizer may write: text, reasoning open and closed, tool calls sound and broken."""
    if name == "mistral_nemo":
        call = st.tuples(NAME, ARGUMENTS).map(lambda c: json.dumps({"name": c[0], "arguments": c[1], "id": "abcdefghi"}))
        calls = st.lists(call, max_size=2).map(lambda made: f"[TOOL_CALLS][{', '.join(made)}]")
        return TEXT | calls | calls.map(lambda text: text[:-1]) | PLAIN
    if name == "llama3_2":
        call = st.tuples(NAME, ARGUMENTS).map(lambda c: json.dumps({"name": c[0], "parameters": c[1]}))
        return TEXT | call | call.map(lambda text: text[:-1]) | PLAIN
    call = st.tuples(NAME, ARGUMENTS).map(
        lambda c: f"<tool_call>\n{json.dumps({'name': c[0], 'arguments': c[1]}, ensure_ascii=False)}\n</tool_call>"
    )
    broken = st.sampled_from(
        [
            "<tool_call>\n{'name': 1}\n</tool_call>",
            "<tool_call>",
            '<tool_call>{"name": "look", "arguments": [1]}</tool_call>',
        ]
    )
    thought = st.sampled_from(["", "<think>\nhm\n</think>\n\n", "<think>\nopen ", "<think></think>"])
    parts = st.lists(call | broken | PLAIN | TEXT, max_size=3).map("\n".join)
    return st.tuples(thought, parts).map("".join)


def replies(name: str, rendering: Rendering, vocabulary: int) -> st.SearchStrategy[list[int]]:
    """Sampled ids: a text's tokens or any ids, whole (a stop id last, any of them) or cut at any length."""
    stops = sorted(rendering.stop_ids)
    written = reply_texts(name).map(lambda text: rendering.encode_reply(text)[:-1])
    anything = st.lists(st.integers(0, vocabulary - 1), max_size=12)
    body = (written | anything).map(lambda ids: [token for token in ids if token not in rendering.stop_ids])
    whole = st.tuples(body, st.sampled_from(stops)).map(lambda pair: [*pair[0], pair[1]])
    cut = st.tuples(body, st.integers(1, 30)).map(lambda pair: pair[0][: pair[1]]).filter(len)
    return whole | cut
