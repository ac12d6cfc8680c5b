"""Any other chat template, used as it is.

Always true: what follows a reply is read off the template itself, and used only where splicing turn after turn was seen to give what
the template writes for the whole conversation. Where it does not, the log says so at the start.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from longrein.contract import LongreinError, Message, Tool
from longrein.rendering.probes import CALL, LOOK, RESULT, SYSTEM, said, user
from longrein.rendering.protocol import ConversationError
from longrein.rendering.replies import Replies, for_template
from longrein.tool_calls import MistralToolParser, named_results, with_short_ids

if TYPE_CHECKING:
    from longrein.rendering.protocol import Tokens

logger = logging.getLogger(__name__)


class TemplateRendering(Replies):
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
            self._kept[system, tools] = self._probe([SYSTEM] if system else [], [LOOK] if tools else [])
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
        answered = [*system, user("hi"), {**reply, "role": "assistant", "content": self._MARK, "reasoning_content": None}]
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
            whole = self._encode(self._text([user("hi"), {"role": "assistant", **reply}]))
            reply = self._after(self.prompt([user("hi")]), whole)
        return self._closed(reply, *(self._close or sorted(self.stop_ids)[:1]))

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool] = (), generation: bool = False) -> str:
        given = [for_template(m) for m in messages]
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
        closing = self._text([user("hi"), said(self._MARK)]).partition(self._MARK)[2]
        ids = self._encode(closing)
        if not ids or ids[0] not in {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}:
            return [], ""
        return ids[:1], closing.removeprefix(self._tokenizer.convert_ids_to_tokens(ids[0]))

    def _ignores_tools(self) -> bool:
        """Whether tools make no difference to what the template writes; one that refuses them says so itself."""
        try:
            return self._text([user("hi")], [LOOK]) == self._text([user("hi")])
        except ConversationError:
            return False

    def _probe(self, system: list[Message], tools: list[Tool]) -> bool | None:
        """Whether splicing turn after turn gives what rendering the whole conversation gives; None if it is refused."""
        if not self._close:
            return False
        turns = [(said("two"), [user("three")]), (said("four"), [user("five")])]
        if tools:
            turns.insert(1, ({**said(""), "tool_calls": [CALL]}, [RESULT]))
        messages = [*system, user("one")]
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
