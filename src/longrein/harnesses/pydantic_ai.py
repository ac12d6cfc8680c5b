"""Pydantic AI, over chat completions. https://pypi.org/project/pydantic-ai-slim/"""

from __future__ import annotations

from longrein.harnesses.harness import LIBRARY_AGENTS, LIBRARY_DEMO, Harness
from longrein.harnesses.package import PyPI

HARNESS = Harness(
    name="pydantic-ai",
    dialect="chat",
    package=PyPI("pydantic-ai-slim", "2.66.0", extras="[openai]"),
    executable="python",
    arguments=(LIBRARY_AGENTS, "pydantic-ai", "{instruction}"),
    demo=LIBRARY_DEMO,
)
