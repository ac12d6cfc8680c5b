"""Pi: a coding agent with four tools and the smallest prompt. https://www.npmjs.com/package/@earendil-works/pi-coding-agent"""

from __future__ import annotations

import json

from longrein.harnesses.harness import Compaction, Harness, Step
from longrein.harnesses.package import Npm

_MODELS = {
    "providers": {
        "longrein": {
            "baseUrl": "{base_url}",
            "apiKey": "OPENAI_API_KEY",
            "api": "openai-completions",
            "models": [{"id": "{model}", "name": "{model}", "input": ["text"], "contextWindow": 131072, "maxTokens": 16384}],
        }
    }
}

HARNESS = Harness(
    name="pi",
    dialect="chat",
    package=Npm("@earendil-works/pi-coding-agent", "0.74.2"),
    executable="pi",
    arguments=("--provider", "longrein", "--model", "{model}", "--no-session", "--mode", "json", "-p", "{instruction}"),
    env={"PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1", "PI_CODING_AGENT_DIR": "{home}/.pi/agent"},
    files={"~/.pi/agent/models.json": json.dumps(_MODELS)},
    demo=(
        Step("bash", {"command": "pwd && cat {file}"}),
        Step("edit", {"path": "{folder}/{file}", "edits": [{"oldText": "{old}", "newText": "{new}"}]}),
    ),
    compaction=Compaction(
        files={"~/.pi/agent/settings.json": '{"compaction": {"keepRecentTokens": 1000}}'}, context_length=9000
    ),
)
