"""OpenCode, an open coding agent for any model. https://www.npmjs.com/package/opencode-ai"""

from __future__ import annotations

import json

from longrein.harnesses.harness import Harness, Step
from longrein.harnesses.package import Npm

_SETTINGS = {
    "autoupdate": False,
    "share": "disabled",
    "permission": "allow",
    "model": "longrein/{model}",
    "small_model": "longrein/{model}",
    "provider": {
        "longrein": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "longrein",
            "options": {"baseURL": "{base_url}", "apiKey": "{key}"},
            "models": {"{model}": {"name": "{model}", "tool_call": True, "limit": {"context": 131072, "output": 16384}}},
        }
    },
}

HARNESS = Harness(
    name="opencode",
    dialect="chat",
    package=Npm("opencode-ai", "1.18.33"),
    executable="opencode",
    arguments=("run", "--format", "json", "{instruction}"),
    env={
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    },
    files={"~/.config/opencode/opencode.json": json.dumps(_SETTINGS)},
    side_calls="a title, without tools",
    demo=(
        Step("bash", {"command": "pwd && cat {file}", "description": "Look at the file"}),
        Step("read", {"filePath": "{folder}/{file}"}),
        Step("edit", {"filePath": "{folder}/{file}", "oldString": "{old}", "newString": "{new}"}),
    ),
)
