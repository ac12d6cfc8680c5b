"""Qwen Code, the coding agent of the Qwen models. https://www.npmjs.com/package/@qwen-code/qwen-code"""

from __future__ import annotations

import json

from longrein.harnesses.harness import Compaction, Harness, Step, SubAgent
from longrein.harnesses.package import Npm

_SETTINGS = {
    "security": {"auth": {"selectedType": "openai"}},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
    "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
    "model": {"name": "{model}", "skipNextSpeakerCheck": True},
}
_PATH = "~/.qwen/settings.json"
_SMALL_WINDOW = {"generationConfig": {"contextWindowSize": 32000}, "chatCompression": {"contextPercentageThreshold": 0.7}}

HARNESS = Harness(
    name="qwen-code",
    dialect="chat",
    package=Npm("@qwen-code/qwen-code", "0.15.10"),
    executable="qwen",
    arguments=("--yolo", "--auth-type", "openai", "--output-format", "json", "--prompt", "{instruction}"),
    files={_PATH: json.dumps(_SETTINGS)},
    side_calls="none; its history starts with a reply that no model wrote",
    demo=(
        Step(
            "run_shell_command", {"command": "pwd && cat {file}", "description": "Look at the file", "is_background": False}
        ),
        Step("read_file", {"file_path": "{folder}/{file}"}),
        Step("edit", {"file_path": "{folder}/{file}", "old_string": "{old}", "new_string": "{new}"}),
    ),
    compaction=Compaction(files={_PATH: json.dumps({**_SETTINGS, "model": {**_SETTINGS["model"], **_SMALL_WINDOW}})}),
    sub_agent=SubAgent(
        starts=(
            Step("agent", {"description": "Look at the file", "prompt": "{errand}", "subagent_type": "general-purpose"}),
        ),
    ),
)
