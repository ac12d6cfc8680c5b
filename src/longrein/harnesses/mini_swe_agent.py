"""mini-swe-agent: a hundred lines that fix issues with a shell. https://pypi.org/project/mini-swe-agent/"""

from __future__ import annotations

from longrein.harnesses.harness import Harness, Step
from longrein.harnesses.package import PyPI

HARNESS = Harness(
    name="mini-swe-agent",
    dialect="chat",
    package=PyPI("mini-swe-agent", "2.4.6", besides=("mcp",)),
    executable="mini",
    arguments=("-m", "openai/{model}", "-t", "{instruction}", "-y", "--exit-immediately", "-l", "0"),
    env={
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "OPENAI_API_BASE": "{base_url}",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
    demo=(
        Step("bash", {"command": "pwd && cat {file}"}),
        Step("bash", {"command": "sed -i 's/^{old}$/{new}/' {file}"}),
        Step("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
    ),
    closes=False,
)
