"""Bodies of chat requests, right and wrong in every field."""

from __future__ import annotations

import json
from typing import Any

from conversations import ARGUMENTS, NAME, TEXT
from hypothesis import strategies as st

from longrein.proxy import chat

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | TEXT | st.sampled_from(["user", "text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type"]) | TEXT, inner),
    max_leaves=8,
)


def nearly(**fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    """An object with these fields, each right or wrong or absent."""
    return st.fixed_dictionaries({}, optional={name: field | ANYTHING for name, field in fields.items()})


FUNCTION = nearly(name=NAME, arguments=TEXT | ARGUMENTS.map(json.dumps), description=TEXT, parameters=ANYTHING)
MESSAGE = nearly(
    role=st.sampled_from(chat.ROLES),
    content=TEXT | st.lists(nearly(type=st.sampled_from(["text", "refusal"]), text=TEXT)),
    tool_calls=st.lists(nearly(id=TEXT, function=FUNCTION), max_size=2),
    tool_call_id=TEXT,
    name=TEXT,
    reasoning_content=TEXT,
)
BODY = nearly(
    model=TEXT,
    messages=st.lists(MESSAGE, min_size=1, max_size=3),
    tools=st.lists(nearly(type=st.just("function"), function=FUNCTION), max_size=2),
    tool_choice=st.sampled_from(["none", "auto", "required"]),
    stop=TEXT | st.lists(TEXT),
    max_tokens=st.integers(1, 9),
    stream=st.booleans(),
    stream_options=nearly(include_usage=st.booleans()),
    logprobs=st.booleans(),
    n=st.just(1),
    response_format=nearly(type=st.just("text")),
)
