"""OpenCode, an open coding agent for any model. https://www.npmjs.com/package/opencode-ai"""

from __future__ import annotations

import json

from longrein.harnesses.harness import Compaction, Harness, Step, SubAgent
from longrein.harnesses.package import Npm


def _settings(context: int = 131072, output: int = 16384, **compaction: int) -> str:
    model = {"name": "{model}", "tool_call": True, "limit": {"context": context, "output": output}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "longrein",
        "options": {"baseURL": "{base_url}", "apiKey": "{key}"},
        "models": {"{model}": model},
    }
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
        "model": "longrein/{model}",
        "small_model": "longrein/{model}",
        "provider": {"longrein": provider},
        "compaction": compaction,
    }
    return json.dumps(settings)


_PATH = "~/.config/opencode/opencode.json"

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
    files={_PATH: _settings()},
    side_calls="a title, without tools",
    demo=(
        Step("bash", {"command": "pwd && cat {file}", "description": "Look at the file"}),
        Step("read", {"filePath": "{folder}/{file}"}),
        Step("edit", {"filePath": "{folder}/{file}", "oldString": "{old}", "newString": "{new}"}),
    ),
    compaction=Compaction(files={_PATH: _settings(16000, 4000, preserve_recent_tokens=500)}),
    sub_agent=SubAgent(
        starts=(Step("task", {"description": "Look at the file", "prompt": "{errand}", "subagent_type": "general"}),),
    ),
)
