"""smolagents: a `CodeAgent`, whose actions are Python that it writes into its replies. https://pypi.org/project/smolagents/"""

from __future__ import annotations

from longrein.harnesses.harness import LIBRARY_AGENTS, Harness
from longrein.harnesses.package import PyPI

HARNESS = Harness(
    name="smolagents",
    dialect="chat",
    package=PyPI("smolagents", "1.26.0", extras="[openai]"),
    executable="python",
    arguments=(LIBRARY_AGENTS, "smolagents", "{instruction}"),
    demo=(
        "Thought: I look.\n<code>\nprint(run(command='cat {file}'))\n</code>",
        "Thought: I write.\n<code>\nprint(write(path='{file}', text={quoted}))\n</code>",
        'Thought: I am done.\n<code>\nfinal_answer("It is mended.")\n</code>',
    ),
    closes=False,
)
