"""A conversation in each dialect, held by the vendor's own SDK: the same steps, whatever the wire."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import anthropic
from google import genai
from patience import PATIENCE
from programs import Program

from longrein.contract import Tool


class Asked(NamedTuple):
    """A tool call as the SDK shows it."""

    id: str
    name: str
    arguments: dict[str, Any]


class Turn(NamedTuple):
    """A reply as the SDK shows it."""

    text: str
    reasoning: str
    calls: list[Asked]
    raw: Any


class Client:
    """One conversation. `user` and `result` add to it, `ask` gets the reply and adds that."""

    def __init__(self, there: Program, tools: Sequence[Tool] = (), system: str | None = None) -> None:
        self.functions = [tool["function"] for tool in tools]
        self.system = system
        self.history: list[Any] = []
        self.open(there)

    def open(self, there: Program) -> None: ...

    def user(self, text: str) -> None:
        raise NotImplementedError

    def result(self, call: Asked, text: str) -> None:
        raise NotImplementedError

    def ask(self, stream: bool = False, **settings: Any) -> Turn:
        raise NotImplementedError


class ChatClient(Client):
    def open(self, there: Program) -> None:
        self.sdk = there.sdk
        if self.system is not None:
            self.history.append({"role": "system", "content": self.system})

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def result(self, call: Asked, text: str) -> None:
        self.history.append({"role": "tool", "tool_call_id": call.id, "content": text})

    def ask(self, stream: bool = False, **settings: Any) -> Turn:
        tools = [{"type": "function", "function": function} for function in self.functions]
        fields = {"model": "m", "messages": self.history, **({"tools": tools} if tools else {}), **settings}
        if stream:
            with self.sdk.chat.completions.stream(**fields) as events:
                made = events.get_final_completion()
        else:
            made = self.sdk.chat.completions.create(**fields)
        message = made.choices[0].message
        self.history.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        calls = [Asked(c.id, c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or ()]
        return Turn(message.content or "", (message.model_extra or {}).get("reasoning_content", ""), calls, made)


class ResponsesClient(Client):
    """`remembered` leaves the history to the server; else all items are sent back."""

    remembered = False
    previous: str | None = None

    def open(self, there: Program) -> None:
        self.sdk = there.sdk

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def result(self, call: Asked, text: str) -> None:
        self.history.append({"type": "function_call_output", "call_id": call.id, "output": text})

    def ask(self, stream: bool = False, **settings: Any) -> Turn:
        tools = [{"type": "function", **function} for function in self.functions]
        fields = {"model": "m", "input": self.history, "tools": tools, "instructions": self.system, **settings}
        fields = {name: value for name, value in fields.items() if value}
        fields |= {"previous_response_id": self.previous} if self.previous else {}
        fields |= {} if self.remembered else {"store": False, "include": ["reasoning.encrypted_content"]}
        if stream:
            with self.sdk.responses.stream(**fields) as events:
                made = events.get_final_response()
        else:
            made = self.sdk.responses.create(**fields)
        items = [item.model_dump(exclude_none=True) for item in made.output]
        if self.remembered:
            self.history, self.previous = [], made.id
        else:
            self.history += [{k: v for k, v in item.items() if k not in ("status", "parsed_arguments")} for item in items]
        reasoning = "".join(part["text"] for item in items if item["type"] == "reasoning" for part in item["content"])
        calls = [
            Asked(item["call_id"], item["name"], json.loads(item["arguments"]))
            for item in items
            if item["type"] == "function_call"
        ]
        return Turn(made.output_text, reasoning, calls, made)


class RememberedClient(ResponsesClient):
    remembered = True


class MessagesClient(Client):
    thinking: dict[str, Any] | None = None

    def open(self, there: Program) -> None:
        self.sdk = anthropic.Anthropic(base_url=there.server.url, api_key=there.key, timeout=PATIENCE)
        self.omit = anthropic.omit

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def result(self, call: Asked, text: str) -> None:
        block = {"type": "tool_result", "tool_use_id": call.id, "content": text}
        if self.history[-1]["role"] == "user":
            self.history[-1]["content"].append(block)
        else:
            self.history.append({"role": "user", "content": [block]})

    def ask(self, stream: bool = False, **settings: Any) -> Turn:
        tools = [
            {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in self.functions
        ]
        system = [{"type": "text", "text": self.system, "cache_control": {"type": "ephemeral"}}] if self.system else None
        fields = {"system": system, "tools": tools, "thinking": self.thinking, **settings}
        fields = {"max_tokens": 4096, **{name: value for name, value in fields.items() if value}}
        if stream:
            with self.sdk.messages.stream(model="m", messages=self.history, **fields) as events:
                made = events.get_final_message()
        else:
            made = self.sdk.messages.create(model="m", messages=self.history, **fields)
        blocks = [block.model_dump(exclude_none=True) for block in made.content]
        self.history.append({"role": "assistant", "content": [{k: b[k] for k in b if k != "parsed_output"} for b in blocks]})
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        reasoning = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
        calls = [Asked(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
        return Turn(text, reasoning, calls, made)


class ThinkingClient(MessagesClient):
    thinking = {"type": "enabled", "budget_tokens": 1024}  # noqa: RUF012


class GeminiClient(Client):
    def open(self, there: Program) -> None:
        self.types = genai.types
        self.sdk = genai.Client(
            api_key=there.key, http_options={"base_url": there.server.url, "timeout": int(PATIENCE * 1000)}
        )

    def user(self, text: str) -> None:
        self.history.append(self.types.Content(role="user", parts=[self.types.Part(text=text)]))

    def result(self, call: Asked, text: str) -> None:
        response = self.types.FunctionResponse(id=call.id, name=call.name, response={"output": text})
        part = self.types.Part(function_response=response)
        if self.history[-1].role == "user":
            self.history[-1].parts.append(part)
        else:
            self.history.append(self.types.Content(role="user", parts=[part]))

    def ask(self, stream: bool = False, **settings: Any) -> Turn:
        declared = [
            {"name": f["name"], "description": f["description"], "parameters_json_schema": f["parameters"]}
            for f in self.functions
        ]
        config = {
            "system_instruction": self.system,
            "tools": [{"function_declarations": declared}] if declared else None,
            "automatic_function_calling": {"disable": True},
            "thinking_config": {"include_thoughts": True},
            **settings,
        }
        asked = {"model": "m", "contents": self.history, "config": config}
        if stream:
            chunks = list(self.sdk.models.generate_content_stream(**asked))
        else:
            chunks = [self.sdk.models.generate_content(**asked)]
        parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts or ()]
        self.history.append(self.types.Content(role="model", parts=[part for part in parts if not part.thought]))
        text = "".join(part.text or "" for part in parts if not part.thought)
        reasoning = "".join(part.text for part in parts if part.thought)
        found = [part.function_call for part in parts if part.function_call]
        return Turn(text, reasoning, [Asked(c.id, c.name, c.args or {}) for c in found], chunks[-1])


CLIENTS: dict[str, type[Client]] = {
    "chat": ChatClient,
    "responses": ResponsesClient,
    "responses, remembered": RememberedClient,
    "messages": MessagesClient,
    "messages, thinking": ThinkingClient,
    "gemini": GeminiClient,
}
