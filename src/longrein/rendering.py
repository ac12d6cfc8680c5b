"""Messages to tokens and back, in two pieces: a prompt from nothing, and what new messages add after a sampled reply.

Always true: `close(prompt, reply) + extension(new messages)` is everything between a sampled reply and the next one, made
without looking at the reply's text. So a sampled token is never tokenised again, and the cost of a turn is the cost of its
own messages. Where it cannot be made exactly, `extension` says so with None and the caller renders in full.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from longrein.contract import LongreinError, Message, Tool
from longrein.tokenizer import LONG, FoldingTokenizer, PlainTokenizer, unfolded
from longrein.tool_calls import MistralToolParser, named_results, own_id, readable, with_object_arguments, with_short_ids

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Tokens = Sequence[int] | NDArray[np.int32]

logger = logging.getLogger(__name__)

OPENING = 64
"""Tokens of a prompt's end that matter to its reply: it may have opened the reasoning."""


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


class _Replies:
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


class FamilyRendering(_Replies):
    """A family that the `renderers` library knows."""

    keeps_prefixes = True
    _writer: Any
    """The family's renderer over a tokenizer that folds long texts, where the family lets it."""

    def __init__(self, tokenizer: Any, name: str, **template_kwargs: Any) -> None:
        from renderers import create_renderer
        from renderers.configs import _config_class_for

        if name not in _families():
            raise LongreinError(f"there is no renderer {name!r}; known: {', '.join(_families())}")
        self.name = name
        self._tokenizer = PlainTokenizer(tokenizer)
        try:
            # Reasoning stays in later context (`history="sampled"`): the tokens are what the model wrote.
            config = _config_class_for(name)(**{"thinking_retention": "all", **template_kwargs})  # type: ignore[arg-type]
            self._parser = create_renderer(self._tokenizer, config)  # type: ignore[arg-type]
            self._writer = create_renderer(FoldingTokenizer(self._tokenizer), config)  # type: ignore[arg-type]
        except Exception as error:  # an unknown setting, a missing special token: each family says it in its own way
            raise LongreinError(f"the renderer {name!r} does not fit: {error}") from error
        self._stops = list(self._parser.get_stop_token_ids())
        self.stop_ids = frozenset(self._stops)
        self._stub_prompt = self.prompt([_user("hi")])
        self._stub_reply = self._find_stub_reply()
        if not self._folds():
            self._writer = self._parser

    def matches_template(self) -> bool:
        """Whether the tokenizer's own chat template writes the same tokens."""
        from renderers.base import template_field_names

        config = self._parser.config
        kwargs = {field: getattr(config, field) for field in template_field_names(config)}
        for messages, tools in _PROBES:
            theirs = self._tokenizer.apply_chat_template(
                messages, tools=tools or None, add_generation_prompt=True, return_dict=False, **kwargs
            )
            if list(theirs) != self.prompt(messages, tools):
                return False
        return True

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        given = [_for_template(m) for m in messages]
        try:
            return unfolded(self._writer.render_ids(given, tools=list(tools) or None, add_generation_prompt=True))
        except Exception as error:  # a conversation the family does not know, said in its own way
            raise ConversationError(f"the renderer {self.name!r} refuses this conversation: {error}") from error

    def extension(
        self,
        reply: Message,
        new_messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        system: Sequence[Message] = (),
        stop_id: int | None = None,
    ) -> list[int] | None:
        # What a family writes after a closed reply depends on how it was closed, not on what came before, so a two-token
        # conversation stands in for the real one. Tool results carry the name of the tool for the families that write it.
        stub = self._stub_reply if stop_id is None else [*self._stub_reply[:-1], stop_id]
        return self._bridge(self._stub_prompt, stub, named_results(reply, new_messages), tools)

    def close(self, prompt_ids: Tokens, completion_ids: Tokens) -> list[int]:
        if len(completion_ids) and completion_ids[-1] in self.stop_ids:
            return []
        new = [_user("hi")]
        opening = [int(i) for i in prompt_ids[-OPENING:]]
        tail = self._bridge(opening, [int(i) for i in completion_ids], new)
        after_close = self._bridge(self._stub_prompt, self._stub_reply, new)
        if tail is None or after_close is None or tail[len(tail) - len(after_close) :] != after_close:
            return self._stub_reply[-1:]
        return tail[: len(tail) - len(after_close)]

    def encode_reply(self, reply: str | Message) -> list[int]:
        if not isinstance(reply, str):
            whole = self._parser.render_ids([_user("hi"), _for_template({"role": "assistant", **reply})])
            reply = self._after(self._stub_prompt, whole)
            if "</think>" not in reply:  # where the prompt opens the reasoning, a past reply is written without it
                reply = self.decode(self._stub_reply[:-1]) + reply
        return self._closed(reply, self._stub_reply[-1])

    def _bridge(
        self, prompt: list[int], completion: list[int], new: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> list[int] | None:
        """What the library puts after `prompt + completion`, or None if it would not keep them."""
        before, given = [*prompt, *completion], [_for_template(m) for m in new]
        try:
            rendered = self._writer.bridge_to_next_turn(prompt, completion, given, tools=list(tools) or None)
        except Exception:  # a turn the family does not know: `prompt` refuses it in words
            return None
        if rendered is None or list(rendered.token_ids[: len(before)]) != before:
            return None
        return unfolded(rendered.token_ids[len(before) :])

    def _folds(self) -> bool:
        """Whether the family takes a long text as one number, and writes what it writes of the text's own tokens."""
        text = "a long text " * LONG
        for messages, tools in _PROBES:
            given = [_for_template({**m, "content": text} if m["content"] else m) for m in messages]
            told = {"tools": tools or None}
            try:
                whole = self._parser.render_ids(given, **told, add_generation_prompt=True)
                written = self._writer.render_ids(given, **told, add_generation_prompt=True)
                after, new = [self._stub_prompt, self._stub_reply], [m for m in given if m["role"] in ("user", "tool")]
                turn = self._parser.bridge_to_next_turn(*after, new, **told)
                folded = self._writer.bridge_to_next_turn(*after, new, **told)
            except Exception:  # a family that looks into the text's tokens, each in its own way
                return False
            if unfolded(written) != list(whole) or (turn is None) != (folded is None):
                return False
            if turn is not None and folded is not None and unfolded(folded.token_ids) != list(turn.token_ids):
                return False
        return True

    def _find_stub_reply(self) -> list[int]:
        """The shortest reply that the family accepts as complete: a stop, after closing reasoning that the prompt opened."""
        for text in ("", "\n</think>\n\n"):
            for stop in self._stops:
                reply = [*self._encode(text), stop]
                if self._bridge(self._stub_prompt, reply, [_user("hi")]) is not None:
                    return reply
        raise LongreinError(f"the renderer {self.name!r} does not continue a closed reply; name another one")


class TemplateRendering(_Replies):
    """Any chat template, used as it is; what follows a reply is read off the template itself."""

    name = "template"
    _MARK = "Longrein0Mark1Longrein"

    def __init__(self, tokenizer: Any, **template_kwargs: Any) -> None:
        from renderers import DefaultRendererConfig, create_renderer
        from renderers.parsers import TOOL_PARSERS

        self._tokenizer = tokenizer
        self._kwargs = template_kwargs
        vocabulary = tokenizer.get_vocab()
        tool_parser = "qwen3" if "<tool_call>" in vocabulary and "</tool_call>" in vocabulary else None
        self._short_ids = MistralToolParser.MARK in vocabulary
        if self._short_ids:
            TOOL_PARSERS[MistralToolParser.name] = MistralToolParser
            tool_parser = MistralToolParser.name
        reasoning_parser = "think" if "</think>" in vocabulary else None
        self._parser = create_renderer(
            tokenizer, DefaultRendererConfig(tool_parser=tool_parser, reasoning_parser=reasoning_parser)
        )
        self._close, self._after_close = self._ending()
        eos = tokenizer.eos_token_id
        self.stop_ids = frozenset(self._close if eos is None else [*self._close, eos])
        if not self.stop_ids:
            raise LongreinError(
                "the chat template writes no token that ends a reply and the tokenizer has no eos token; set one of them"
            )
        self._hides_tools = False
        """Whether it is still to be said that the model is not shown its tools."""
        self._kept: dict[tuple[bool, bool], bool | None] = {}
        """By whether there is a system message, and whether there are tools; None where the template refuses to."""
        for system, tools in itertools.product([False, True], repeat=2):
            self._kept[system, tools] = True  # until shown otherwise
            self._kept[system, tools] = self._probe([_SYSTEM] if system else [], [_LOOK] if tools else [])
        self.keeps_prefixes = any(self._kept.values())
        self._hides_tools = self._ignores_tools()
        self._warn()

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        if tools and self._hides_tools:
            self._hides_tools = False  # said once
            logger.warning(
                "the chat template of %r has no place for tools: the model is not shown those it was given. Take a template "
                "that writes them (`tokenizer.chat_template`), or describe them in the prompt.",
                getattr(self._tokenizer, "name_or_path", "the tokenizer"),
            )
        return self._encode(self._text(messages, tools, generation=True))

    def extension(
        self,
        reply: Message,
        new_messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        system: Sequence[Message] = (),
        stop_id: int | None = None,
    ) -> list[int] | None:
        if not self._kept[bool(system), bool(tools)]:
            return None
        # A template may look at the system message and the reply's tool calls, never at words: those are replaced.
        answered = [*system, _user("hi"), {**reply, "role": "assistant", "content": self._MARK, "reasoning_content": None}]
        try:
            short = self._text(answered, tools)
            long = self._text([*answered, *named_results(reply, new_messages)], tools, generation=True)
        except LongreinError:  # a turn the template does not know: `prompt` refuses it in words
            return None
        if not (long.startswith(short) and short.endswith(self._after_close)):
            return None
        return self._encode(self._after_close + long[len(short) :])

    def close(self, prompt_ids: Tokens, completion_ids: Tokens) -> list[int]:
        return [] if len(completion_ids) and completion_ids[-1] in self.stop_ids else list(self._close)

    def encode_reply(self, reply: str | Message) -> list[int]:
        if not isinstance(reply, str):
            whole = self._encode(self._text([_user("hi"), {"role": "assistant", **reply}]))
            reply = self._after(self.prompt([_user("hi")]), whole)
        return self._closed(reply, *(self._close or sorted(self.stop_ids)[:1]))

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool] = (), generation: bool = False) -> str:
        given = [_for_template(m) for m in messages]
        if self._short_ids:
            given = [with_short_ids(m) for m in given]
        try:
            return self._tokenizer.apply_chat_template(
                given, tools=list(tools) or None, add_generation_prompt=generation, tokenize=False, **self._kwargs
            )
        except Exception as error:  # templates raise on conversations they do not know, each in its own way
            raise ConversationError(f"the chat template refuses this conversation: {error}") from error

    def _ending(self) -> tuple[list[int], str]:
        """The special token that closes a reply, and the text between it and the next message."""
        closing = self._text([_user("hi"), _said(self._MARK)]).partition(self._MARK)[2]
        ids = self._encode(closing)
        if not ids or ids[0] not in {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}:
            return [], ""
        return ids[:1], closing.removeprefix(self._tokenizer.convert_ids_to_tokens(ids[0]))

    def _ignores_tools(self) -> bool:
        """Whether tools make no difference to what the template writes; one that refuses them says so itself."""
        try:
            return self._text([_user("hi")], [_LOOK]) == self._text([_user("hi")])
        except ConversationError:
            return False

    def _probe(self, system: list[Message], tools: list[Tool]) -> bool | None:
        """Whether splicing turn after turn gives what rendering the whole conversation gives; None if it is refused."""
        if not self._close:
            return False
        turns = [(_said("two"), [_user("three")]), (_said("four"), [_user("five")])]
        if tools:
            turns.insert(1, ({**_said(""), "tool_calls": [_CALL]}, [_RESULT]))
        messages = [*system, _user("one")]
        try:
            spliced = self.prompt(messages, tools)
            for reply, new in turns:
                extension = self.extension(reply, new, tools, system=system)
                if extension is None:
                    return False
                spliced += [*self.encode_reply(reply), *extension]
                messages += [reply, *new]
            return self.decode(spliced) == self.decode(self.prompt(messages, tools))
        except LongreinError:
            return None

    def _warn(self) -> None:
        cases = {(False, False): "", (True, False): " with a system message", (False, True): " with tools"}
        broken = [words for case, words in cases.items() if self._kept[case] is False]
        if broken:
            logger.warning(
                "the chat template of %r does not keep prefixes%s: a longer conversation is not the shorter one plus new "
                "tokens. Rollouts train all the same, but each model call there becomes a row of its own.",
                getattr(self._tokenizer, "name_or_path", "the tokenizer"),
                "" if "" in broken else " or".join(broken),
            )


def _families() -> list[str]:
    from renderers.base import RENDERER_REGISTRY, _populate_registry

    _populate_registry()
    return [name for name in RENDERER_REGISTRY if name != "default"]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _for_template(message: Message) -> Message:
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
_SYSTEM: Message = {"role": "system", "content": "be brief"}
_PROBES: tuple[tuple[list[Message], list[Tool]], ...] = (
    ([_user("hi")], []),
    ([_SYSTEM, _user("hi")], []),
    ([_SYSTEM, _user("hi")], [_LOOK]),
    ([_user("hi"), _said("yes?"), _user("bye")], []),
    ([_user("hi"), {**_said(""), "tool_calls": [_CALL]}, _RESULT], [_LOOK]),
)
