"""The OpenAI Agents SDK, over the Responses API. https://pypi.org/project/openai-agents/"""

from __future__ import annotations

from longrein.harnesses.harness import LIBRARY_AGENTS, LIBRARY_DEMO, Harness
from longrein.harnesses.package import PyPI

HARNESS = Harness(
    name="openai-agents",
    dialect="responses",
    package=PyPI("openai-agents", "0.24.0"),
    executable="python",
    arguments=(LIBRARY_AGENTS, "openai-agents", "{instruction}"),
    env={"OPENAI_AGENTS_DISABLE_TRACING": "1"},
    demo=LIBRARY_DEMO,
)
