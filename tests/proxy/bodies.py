"""Bodies of requests in every dialect, right and wrong in every field."""

from __future__ import annotations

import json
from typing import Any

from conversations import ARGUMENTS, NAME, TEXT
from hypothesis import strategies as st

from longrein.proxy import chat, gemini, messages, responses
from longrein.proxy.marks import minted, sealed

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


# The other dialects

PART = nearly(
    type=st.sampled_from(["input_text", "output_text", "text", "encrypted_content"]), text=TEXT, encrypted_content=TEXT
)
ITEM = nearly(
    type=st.sampled_from(
        [
            "message",
            "agent_message",
            "reasoning",
            "function_call",
            "function_call_output",
            "custom_tool_call",
            "custom_tool_call_output",
        ]
    ),
    role=st.sampled_from(responses.ROLES),
    content=TEXT | st.lists(PART, max_size=2),
    summary=st.lists(PART, max_size=2),
    encrypted_content=TEXT | st.builds(sealed, TEXT, TEXT),
    id=TEXT | st.just(minted("msg", "0" * 16)),
    call_id=TEXT | st.just(minted("call", "0" * 16, 0)),
    name=NAME,
    namespace=NAME,
    arguments=TEXT | ARGUMENTS.map(json.dumps),
    input=TEXT,
    output=TEXT | st.lists(PART, max_size=2),
)
FLAT_TOOL = nearly(
    type=st.sampled_from(["function", "custom", "web_search", "namespace"]),
    name=NAME,
    description=TEXT,
    parameters=st.fixed_dictionaries({"type": st.just("object")}),
    format=nearly(type=st.just("grammar"), syntax=st.just("lark"), definition=TEXT),
    tools=st.lists(nearly(type=st.just("function"), name=NAME), max_size=2),
)
RESPONSES_BODY = nearly(
    model=TEXT,
    input=TEXT | st.lists(ITEM, min_size=1, max_size=3),
    instructions=TEXT,
    tools=st.lists(FLAT_TOOL, max_size=2),
    tool_choice=st.sampled_from(["none", "auto", "required"]),
    include=st.just(["reasoning.encrypted_content"]),
    previous_response_id=TEXT | st.just(minted("resp", "0" * 16)),
    store=st.booleans(),
    stream=st.booleans(),
    max_output_tokens=st.integers(1, 9),
    text=nearly(format=nearly(type=st.just("text"))),
)
BLOCK = nearly(
    type=st.sampled_from(["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "tool_reference"]),
    text=TEXT,
    thinking=TEXT,
    signature=TEXT | st.builds(sealed, TEXT, TEXT),
    data=TEXT,
    id=TEXT,
    name=NAME,
    input=ARGUMENTS,
    tool_use_id=TEXT,
    tool_name=NAME,
    content=TEXT | st.lists(nearly(type=st.just("text"), text=TEXT), max_size=2),
    cache_control=ANYTHING,
)
MESSAGES_BODY = nearly(
    model=TEXT,
    messages=st.lists(
        nearly(role=st.sampled_from(messages.ROLES), content=TEXT | st.lists(BLOCK, max_size=3)), min_size=1, max_size=3
    ),
    system=TEXT | st.lists(nearly(type=st.just("text"), text=TEXT), max_size=2),
    tools=st.lists(
        nearly(type=st.just("custom"), name=NAME, description=TEXT, input_schema=ANYTHING, defer_loading=st.booleans()),
        max_size=2,
    ),
    tool_choice=nearly(type=st.sampled_from(["auto", "any", "tool", "none"]), name=NAME),
    thinking=nearly(type=st.sampled_from(["enabled", "adaptive", "disabled"]), display=st.just("omitted")),
    stop_sequences=st.lists(TEXT),
    max_tokens=st.integers(1, 9),
    stream=st.booleans(),
)
GEMINI_PART = nearly(
    text=TEXT,
    thought=st.booleans(),
    thoughtSignature=TEXT | st.builds(sealed, TEXT, TEXT),
    functionCall=nearly(id=TEXT, name=NAME, args=ARGUMENTS),
    functionResponse=nearly(id=TEXT, name=NAME, response=ARGUMENTS | nearly(output=TEXT)),
)
GEMINI_BODY = nearly(
    contents=st.lists(
        nearly(role=st.sampled_from(["user", "model", "function"]), parts=st.lists(GEMINI_PART, max_size=3)),
        min_size=1,
        max_size=3,
    ),
    systemInstruction=nearly(parts=st.lists(nearly(text=TEXT), max_size=2)) | TEXT,
    tools=st.lists(
        nearly(
            functionDeclarations=st.lists(
                nearly(name=NAME, description=TEXT, parameters=ANYTHING, parametersJsonSchema=ANYTHING), max_size=2
            ),
            google_search=ANYTHING,
        ),
        max_size=2,
    ),
    tool_config=nearly(functionCallingConfig=nearly(mode=st.sampled_from(["AUTO", "ANY", "NONE"]))),
    generationConfig=nearly(
        maxOutputTokens=st.integers(1, 9), stopSequences=st.lists(TEXT), thinkingConfig=nearly(includeThoughts=st.booleans())
    ),
)
BODIES: dict[str, tuple[Any, str, st.SearchStrategy[Any]]] = {
    "chat": (chat, "/v1/chat/completions", BODY),
    "responses": (responses, "/v1/responses", RESPONSES_BODY),
    "messages": (messages, "/v1/messages", MESSAGES_BODY),
    "gemini": (gemini, "/v1beta/models/m:generateContent", GEMINI_BODY),
    "gemini, streamed": (gemini, "/v1beta/models/m:streamGenerateContent?alt=sse", GEMINI_BODY),
    "messages, counted": (messages, "/v1/messages/count_tokens", MESSAGES_BODY),
    "gemini, counted": (gemini, "/v1beta/models/m:countTokens", GEMINI_BODY),
}
"""By dialect: its file, a route of it, and its bodies."""
