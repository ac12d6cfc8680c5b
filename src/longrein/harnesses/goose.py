"""goose, an open agent with extensions. https://www.npmjs.com/package/@aaif/goose-binary-linux-x64"""

from __future__ import annotations

from longrein.harnesses.harness import Compaction, Harness, Step, SubAgent
from longrein.harnesses.package import Npm

HARNESS = Harness(
    name="goose",
    dialect="chat",
    package=Npm("@aaif/goose-binary-linux-x64", "1.52.0"),
    executable="bin/goose",
    arguments=("run", "--no-session", "--quiet", "--with-builtin", "developer", "--text", "{instruction}"),
    env={
        "GOOSE_PROVIDER": "openai",
        "GOOSE_MODEL": "{model}",
        "GOOSE_MODE": "auto",
        "GOOSE_DISABLE_KEYRING": "1",
        "GOOSE_TELEMETRY_ENABLED": "false",
        "GOOSE_TELEMETRY_OFF": "1",
        "GOOSE_DISABLE_SESSION_NAMING": "true",
        "OPENAI_HOST": "{url}",
        "OPENAI_BASE_PATH": "v1/chat/completions",
    },
    side_calls="the list of models; a title, without tools",
    demo=(
        Step("shell", {"command": "pwd && cat {file}"}),
        Step("edit", {"path": "{folder}/{file}", "before": "{old}", "after": "{new}"}),
    ),
    compaction=Compaction(context_length=12000),
    sub_agent=SubAgent(starts=(Step("delegate", {"instructions": "{errand}"}),)),
)
