"""Gemini CLI, Google's coding agent. https://www.npmjs.com/package/@google/gemini-cli"""

from __future__ import annotations

import json

from longrein.harnesses.harness import Compaction, Harness, Step, SubAgent
from longrein.harnesses.package import Npm

_SETTINGS = {
    "security": {"auth": {"selectedType": "gemini-api-key"}},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False, "disableAutoUpdate": True},
    "model": {"skipNextSpeakerCheck": True},
}
_PATH = "~/.gemini/settings.json"

HARNESS = Harness(
    name="gemini-cli",
    dialect="gemini",
    package=Npm("@google/gemini-cli", "0.61.0"),
    executable="gemini",
    arguments=("--yolo", "--model", "{model}", "--output-format", "json", "--prompt", "{instruction}"),
    env={
        "GOOGLE_GEMINI_BASE_URL": "{url}",
        "GEMINI_API_KEY": "{key}",
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
    },
    files={_PATH: json.dumps(_SETTINGS)},
    side_calls="a look for loops after many turns; it asks for JSON, is refused, and goes on without",
    demo=(
        Step("run_shell_command", {"command": "pwd && cat {file}", "description": "Look at the file"}),
        Step(
            "replace",
            {"file_path": "{folder}/{file}", "instruction": "Mend it.", "old_string": "{old}", "new_string": "{new}"},
        ),
    ),
    compaction=Compaction(
        files={_PATH: json.dumps({**_SETTINGS, "model": {**_SETTINGS["model"], "compressionThreshold": 0.0125}})},
        log_lines=400,
        resumed=("--yolo", "--model", "{model}", "--resume", "latest", "--prompt", "Mend it now."),
    ),
    sub_agent=SubAgent(
        starts=(Step("invoke_agent", {"agent_name": "generalist", "prompt": "{errand}"}),),
        reports=(Step("complete_task", {"result": {"response": "{finding}"}}),),
    ),
)
