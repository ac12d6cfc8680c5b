"""Messages to tokens and back, in two pieces: a prompt from nothing, and what new messages add after a sampled reply.

Always true: `close(prompt, reply) + extension(new messages)` is everything between a sampled reply and the next one, made
without looking at the reply's text. So a sampled token is never tokenised again, and the cost of a turn is the cost of its
own messages.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from longrein.contract import LongreinError, Message, Tool

logger = logging.getLogger(__name__)


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
        self, reply: Message, new_messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> list[int] | None:
        """What follows a closed reply: the new messages, up to where the next reply starts. None: it can't be told."""
        ...

    def close(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[int]:
        """The close that the model did not get to sample; empty when it sampled one."""
        ...

    def parse(
        self, completion_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools: Sequence[Tool] = ()
    ) -> Message:
        """A sampled reply as an assistant message; its tool calls have no ids yet."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens as text, special ones included."""
        ...

    def encode_reply(self, reply: str | Message) -> list[int]:
        """A reply that somebody else than the model wrote, as text or as a message, closed as the model would close it."""
        ...


def rendering_for(tokenizer: Any, renderer: str | None = None, **template_kwargs: Any) -> Rendering:
    """The rendering of a tokenizer's chat template.

    The `renderers` library knows the main families; a tokenizer belongs to one when both write the same tokens for a set of
    probe conversations, whatever its name. Any other template is used as it is. `renderer` names a family outright (and is
    needed for a tokenizer without a chat template); `template_kwargs` go to the template (`enable_thinking=False`).
    """
    if renderer is not None:
        return FamilyRendering(tokenizer, renderer, **template_kwargs)
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise LongreinError(
            f"the tokenizer {name!r} has no chat template. Use an instruct model, set `tokenizer.chat_template`, or name "
            "a renderer (`renderer='qwen3'`)."
        )
    for family in _families():
        try:
            matches = FamilyRendering(tokenizer, family).matches_template()
        except Exception:  # a family asserts on special tokens the tokenizer lacks, in as many ways as there are families
            continue
        if matches:
            return FamilyRendering(tokenizer, family, **template_kwargs)
    return TemplateRendering(tokenizer, **template_kwargs)


class FamilyRendering:
    """A family that the `renderers` library knows."""

    keeps_prefixes = True

    def __init__(self, tokenizer: Any, name: str, **template_kwargs: Any) -> None:
        from renderers import create_renderer
        from renderers.configs import _config_class_for

        try:
            config_class = _config_class_for(name)
        except (KeyError, ValueError):
            raise LongreinError(f"there is no renderer {name!r}; known: {', '.join(_families())}") from None
        self.name = name
        self._tokenizer = tokenizer
        # Reasoning stays in later context (`history="sampled"`): the tokens are what the model wrote.
        self._renderer = create_renderer(tokenizer, config_class(thinking_retention="all", **template_kwargs))
        self._stops = list(self._renderer.get_stop_token_ids())
        self.stop_ids = frozenset(self._stops)
        self._stub_prompt = self._renderer.render_ids([_user("hi")], add_generation_prompt=True)
        self._stub_reply = self._find_stub_reply()

    def matches_template(self) -> bool:
        """Whether the tokenizer's own chat template writes the same tokens."""
        from renderers.base import template_field_names

        config = self._renderer.config
        kwargs = {field: getattr(config, field) for field in template_field_names(config)}
        for messages, tools in _PROBES:
            theirs = self._tokenizer.apply_chat_template(
                messages, tools=tools or None, add_generation_prompt=True, return_dict=False, **kwargs
            )
            if list(theirs) != self.prompt(messages, tools):
                return False
        return True

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        rendered = self._renderer.render_ids(
            [_for_template(m) for m in messages], tools=list(tools) or None, add_generation_prompt=True
        )
        return list(rendered)

    def extension(
        self, reply: Message, new_messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> list[int] | None:
        # What a family writes after a closed reply does not depend on what came before it, so a two-token
        # conversation stands in for the real one. Tool results carry the name of the tool for the families that write it.
        return self._bridge(self._stub_prompt, self._stub_reply, _named_results(reply, new_messages), tools)

    def close(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[int]:
        if len(completion_ids) and completion_ids[-1] in self.stop_ids:
            return []
        new = [_user("hi")]
        tail = self._bridge(list(prompt_ids), list(completion_ids), new)
        after_close = self._bridge(self._stub_prompt, self._stub_reply, new)
        if tail is None or after_close is None or tail[len(tail) - len(after_close) :] != after_close:
            return self._stops[:1]
        return tail[: len(tail) - len(after_close)]

    def parse(
        self, completion_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools: Sequence[Tool] = ()
    ) -> Message:
        # Only the end of the prompt matters: it may have opened the reasoning.
        parsed = self._renderer.parse_response(
            [int(i) for i in completion_ids], tools=list(tools) or None, prompt_ids=[int(i) for i in prompt_ids[-64:]]
        )
        return _reply(parsed)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def encode_reply(self, reply: str | Message) -> list[int]:
        if isinstance(reply, str):
            return [*self._tokenizer.encode(reply, add_special_tokens=False), self._stops[0]]
        whole = self._renderer.render_ids([_user("hi"), _for_template({"role": "assistant", **reply})])
        return _up_to_stop(whole[_common_prefix(whole, self._stub_prompt) :], self.stop_ids)

    def _bridge(
        self, prompt: list[int], completion: list[int], new: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> list[int] | None:
        """What the library puts after `prompt + completion`, or None if it would not keep them."""
        rendered = self._renderer.bridge_to_next_turn(
            prompt, completion, [_for_template(m) for m in new], tools=list(tools) or None
        )
        before = [*prompt, *completion]
        if rendered is None or list(rendered.token_ids[: len(before)]) != before:
            return None
        return list(rendered.token_ids[len(before) :])

    def _find_stub_reply(self) -> list[int]:
        """The shortest reply that the family accepts as complete: a stop, after closing reasoning that the prompt opened."""
        for text in ("", "\n</think>\n\n"):
            for stop in self._stops:
                reply = [*self._tokenizer.encode(text, add_special_tokens=False), stop] if text else [stop]
                if self._bridge(self._stub_prompt, reply, [_user("hi")]) is not None:
                    return reply
        raise LongreinError(f"the renderer {self.name!r} does not continue a closed reply; name another one")


class TemplateRendering:
    """Any chat template, used as it is; what follows a reply is read off the template itself."""

    name = "template"
    _MARK = "Longrein0Mark1Longrein"

    def __init__(self, tokenizer: Any, **template_kwargs: Any) -> None:
        from renderers import DefaultRendererConfig, create_renderer

        self._tokenizer = tokenizer
        self._kwargs = template_kwargs
        vocabulary = tokenizer.get_vocab()
        tool_parser = "qwen3" if "<tool_call>" in vocabulary and "</tool_call>" in vocabulary else None
        reasoning_parser = "think" if "</think>" in vocabulary else None
        self._parser = create_renderer(
            tokenizer, DefaultRendererConfig(tool_parser=tool_parser, reasoning_parser=reasoning_parser)
        )
        closing = self._closing_ids()
        self._close, self._after_close = closing[:1], closing[1:]
        eos = tokenizer.eos_token_id
        self.stop_ids = frozenset([*self._close, *([] if eos is None else [eos])])
        if not self.stop_ids:
            raise LongreinError(
                "the chat template writes no token that ends a reply and the tokenizer has no eos token; set one of them"
            )
        self.keeps_prefixes = bool(self._close) and self._probe_prefixes()
        if not self.keeps_prefixes:
            logger.warning(
                "the chat template of %r does not keep prefixes: a longer conversation is not the shorter one plus new "
                "tokens. Rollouts train all the same, but each model call becomes a row of its own.",
                getattr(tokenizer, "name_or_path", "the tokenizer"),
            )

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        return self._encode(self._text(messages, tools, generation=True))

    def extension(
        self, reply: Message, new_messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> list[int] | None:
        if not self._close:
            return None
        # A template may look at the reply's tool calls (ids, names), never at its words: those are replaced.
        before = [_user("hi"), {**reply, "role": "assistant", "content": self._MARK}]
        try:
            short = self._text(before, tools)
            long = self._text([*before, *_named_results(reply, new_messages)], tools, generation=True)
        except Exception as error:  # templates raise on conversations they do not know, each in its own way
            raise LongreinError(f"the chat template refuses this conversation: {error}") from error
        if not long.startswith(short):
            return None
        return [*self._after_close, *self._encode(long[len(short) :])]

    def close(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[int]:
        return [] if len(completion_ids) and completion_ids[-1] in self.stop_ids else list(self._close)

    def parse(
        self, completion_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools: Sequence[Tool] = ()
    ) -> Message:
        ids = [int(i) for i in completion_ids]
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        return _reply(self._parser.parse_response(ids, prompt_ids=[int(i) for i in prompt_ids[-64:]]))

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def encode_reply(self, reply: str | Message) -> list[int]:
        if isinstance(reply, str):
            return [*self._encode(reply), *(self._close or sorted(self.stop_ids)[:1])]
        whole = self._encode(self._text([_user("hi"), {"role": "assistant", **reply}]))
        return _up_to_stop(whole[_common_prefix(whole, self.prompt([_user("hi")])) :], self.stop_ids)

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool] = (), generation: bool = False) -> str:
        return self._tokenizer.apply_chat_template(
            [_for_template(m) for m in messages],
            tools=list(tools) or None,
            add_generation_prompt=generation,
            tokenize=False,
            **self._kwargs,
        )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _closing_ids(self) -> list[int]:
        text = self._text([_user("hi"), {"role": "assistant", "content": self._MARK}])
        return self._encode(text.partition(self._MARK)[2])

    def _probe_prefixes(self) -> bool:
        """Whether splicing a second turn gives what rendering the whole conversation gives."""
        first, reply, second = _user("one"), {"role": "assistant", "content": "two"}, _user("three")
        extension = self.extension(reply, [second])
        if extension is None:
            return False
        spliced = [*self.prompt([first]), *self._encode("two"), *self._close, *extension]
        return self._tokenizer.decode(spliced) == self._tokenizer.decode(self.prompt([first, reply, second]))


def _families() -> list[str]:
    from renderers.base import RENDERER_REGISTRY, _populate_registry

    _populate_registry()
    return [name for name in RENDERER_REGISTRY if name != "default"]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _up_to_stop(ids: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(ids) if token in stop_ids), len(ids))
    return list(ids[:end])


def _for_template(message: Message) -> Message:
    """The message as templates expect it: text content, tool arguments as objects."""
    message = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = "".join(part if isinstance(part, str) else part.get("text", "") for part in content)
    elif content is None:
        message["content"] = ""
    if message.get("tool_calls"):
        message["tool_calls"] = [_with_object_arguments(call) for call in message["tool_calls"]]
    else:
        message.pop("tool_calls", None)
    return message


def _with_object_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except ValueError:
            pass
    return {**call, "function": function}


def _named_results(reply: Message, messages: Sequence[Message]) -> list[Message]:
    """Tool results with the name of the tool that gave them."""
    names = {call.get("id"): call["function"]["name"] for call in reply.get("tool_calls") or ()}
    return [
        {**m, "name": names[m.get("tool_call_id")]}
        if m.get("role") == "tool" and not m.get("name") and m.get("tool_call_id") in names
        else m
        for m in messages
    ]


def _reply(parsed: Any) -> Message:
    """A parsed reply as an OpenAI message. A tool call that does not parse stays in the text, where its reader sees it."""
    good, broken = [], []
    for call in parsed.tool_calls:
        if call.status == "ok" and call.name:
            arguments = call.arguments
            text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
            good.append({"type": "function", "function": {"name": call.name, "arguments": text}})
        else:
            broken.append(call.raw)
    message: Message = {"role": "assistant", "content": "\n".join(filter(None, [parsed.content, *broken]))}
    if parsed.reasoning_content:
        message["reasoning_content"] = parsed.reasoning_content
    if good:
        message["tool_calls"] = good
    return message


_LOOK: Tool = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"room": {"type": "string"}}, "required": ["room"]},
    },
}
_CALL = {"id": "callabcde", "type": "function", "function": {"name": "look", "arguments": {"room": "é 1"}}}
_RESULT = {"role": "tool", "tool_call_id": "callabcde", "name": "look", "content": "dark"}
_PROBES: tuple[tuple[list[Message], list[Tool]], ...] = (
    ([_user("hi")], []),
    ([{"role": "system", "content": "be brief"}, _user("hi")], []),
    ([{"role": "system", "content": "be brief"}, _user("hi")], [_LOOK]),
    ([_user("hi"), {"role": "assistant", "content": "yes?"}, _user("bye")], []),
    ([_user("hi"), {"role": "assistant", "content": "", "tool_calls": [_CALL]}, _RESULT], [_LOOK]),
)
