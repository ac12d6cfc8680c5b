"""The agent programs that longrein knows: a name, and the file that describes it. Adding one is a file and a line here."""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longrein.harnesses.harness import Harness

FILES = {
    "pi": "pi",
    "codex": "codex",
    "claude-code": "claude_code",
    "gemini-cli": "gemini_cli",
    "opencode": "opencode",
    "qwen-code": "qwen_code",
    "goose": "goose",
    "mini-swe-agent": "mini_swe_agent",
    "smolagents": "smolagents",
    "openai-agents": "openai_agents",
    "pydantic-ai": "pydantic_ai",
    "langgraph": "langgraph",
}


def harness(name: str) -> Harness:
    """The program of that name."""
    if name not in FILES:
        from longrein.harnesses.outcome import HarnessError

        near = difflib.get_close_matches(name, FILES, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"It knows {', '.join(FILES)}."
        raise HarnessError(f"there is no program {name!r} that longrein knows. {hint}")
    return importlib.import_module(f"longrein.harnesses.{FILES[name]}").HARNESS


def harnesses() -> list[Harness]:
    return [harness(name) for name in FILES]
