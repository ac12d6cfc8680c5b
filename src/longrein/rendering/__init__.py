"""Messages to tokens and back, in two pieces: a prompt from nothing, and what new messages add after a sampled reply.

Always true: `close(prompt, reply) + extension(new messages)` is everything between a sampled reply and the next one, made
without looking at the reply's text. So a sampled token is never tokenised again, and the cost of a turn is the cost of its
own messages. Where it cannot be made exactly, `extension` says so with None and the caller renders in full.
"""

from __future__ import annotations

from typing import Any

from longrein.contract import LongreinError
from longrein.rendering.family import FamilyRendering, families
from longrein.rendering.protocol import ConversationError, Rendering
from longrein.rendering.template import TemplateRendering

__all__ = ["ConversationError", "FamilyRendering", "Rendering", "TemplateRendering", "rendering_for"]


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
    for family in families():
        try:
            matches = FamilyRendering(tokenizer, family).matches_template()
        except Exception:  # a family asserts on special tokens the tokenizer lacks, in as many ways as there are families
            continue
        if matches:
            return FamilyRendering(tokenizer, family, **template_kwargs)
    return TemplateRendering(tokenizer, **template_kwargs)
