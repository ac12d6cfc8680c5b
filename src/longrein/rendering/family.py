"""The model families that the `renderers` library knows.

Always true: what follows a reply is what the library's own bridge puts there, and where it would not keep the tokens before, it is
not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from longrein.contract import LongreinError, Message, Tool
from longrein.rendering.probes import PROBES, user
from longrein.rendering.protocol import ConversationError
from longrein.rendering.replies import OPENING, Replies, for_template
from longrein.tokenizer import LONG, FoldingTokenizer, PlainTokenizer, unfolded
from longrein.tool_calls import named_results

if TYPE_CHECKING:
    from longrein.rendering.protocol import Tokens


def families() -> list[str]:
    from renderers.base import RENDERER_REGISTRY, _populate_registry

    _populate_registry()
    return [name for name in RENDERER_REGISTRY if name != "default"]


class FamilyRendering(Replies):
    """A family that the `renderers` library knows."""

    keeps_prefixes = True
    _writer: Any
    """The family's renderer over a tokenizer that folds long texts, where the family lets it."""

    def __init__(self, tokenizer: Any, name: str, **template_kwargs: Any) -> None:
        from renderers import create_renderer
        from renderers.configs import _config_class_for

        if name not in families():
            raise LongreinError(f"there is no renderer {name!r}; known: {', '.join(families())}")
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
        self._stub_prompt = self.prompt([user("hi")])
        self._stub_reply = self._find_stub_reply()
        if not self._folds():
            self._writer = self._parser

    def matches_template(self) -> bool:
        """Whether the tokenizer's own chat template writes the same tokens."""
        from renderers.base import template_field_names

        config = self._parser.config
        kwargs = {field: getattr(config, field) for field in template_field_names(config)}
        for messages, tools in PROBES:
            theirs = self._tokenizer.apply_chat_template(
                messages, tools=tools or None, add_generation_prompt=True, return_dict=False, **kwargs
            )
            if list(theirs) != self.prompt(messages, tools):
                return False
        return True

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        given = [for_template(m) for m in messages]
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
        new = [user("hi")]
        opening = [int(i) for i in prompt_ids[-OPENING:]]
        tail = self._bridge(opening, [int(i) for i in completion_ids], new)
        after_close = self._bridge(self._stub_prompt, self._stub_reply, new)
        if tail is None or after_close is None or tail[len(tail) - len(after_close) :] != after_close:
            return self._stub_reply[-1:]
        return tail[: len(tail) - len(after_close)]

    def encode_reply(self, reply: str | Message) -> list[int]:
        if not isinstance(reply, str):
            whole = self._parser.render_ids([user("hi"), for_template({"role": "assistant", **reply})])
            reply = self._after(self._stub_prompt, whole)
            if "</think>" not in reply:  # where the prompt opens the reasoning, a past reply is written without it
                reply = self.decode(self._stub_reply[:-1]) + reply
        return self._closed(reply, self._stub_reply[-1])

    def _bridge(
        self, prompt: list[int], completion: list[int], new: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> list[int] | None:
        """What the library puts after `prompt + completion`, or None if it would not keep them."""
        before, given = [*prompt, *completion], [for_template(m) for m in new]
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
        for messages, tools in PROBES:
            given = [for_template({**m, "content": text} if m["content"] else m) for m in messages]
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
                if self._bridge(self._stub_prompt, reply, [user("hi")]) is not None:
                    return reply
        raise LongreinError(f"the renderer {self.name!r} does not continue a closed reply; name another one")
