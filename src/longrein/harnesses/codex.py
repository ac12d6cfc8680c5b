"""Codex, OpenAI's coding agent. https://www.npmjs.com/package/@openai/codex"""

from __future__ import annotations

from longrein.harnesses.harness import Compaction, Harness, Step, SubAgent
from longrein.harnesses.package import Npm

MODEL = "gpt-5.5"
"""Codex gives a model the tools it knows it to have, its patch tool for one; by a name it does not know, the policy gets fewer."""

_CONFIG = f"""\
model = "{MODEL}"
model_provider = "longrein"
approval_policy = "never"
web_search = "disabled"
check_for_update_on_startup = false

[model_providers.longrein]
name = "longrein"
base_url = "{{base_url}}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
supports_websockets = false

[analytics]
enabled = false

[history]
persistence = "none"
"""

HARNESS = Harness(
    name="codex",
    dialect="responses",
    package=Npm("@openai/codex", "0.166.0"),
    executable="codex",
    arguments=(
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        "--json",
        "{instruction}",
    ),
    env={"CODEX_HOME": "{home}/.codex"},
    files={"~/.codex/config.toml": _CONFIG},
    demo=(
        Step("exec_command", {"cmd": "pwd && cat {file}"}),
        Step("apply_patch", {"input": "*** Begin Patch\n*** Update File: {file}\n@@\n-{old}\n+{new}\n*** End Patch\n"}),
    ),
    compaction=Compaction(files={"~/.codex/config.toml": f"model_auto_compact_token_limit = 14000\n{_CONFIG}"}),
    sub_agent=SubAgent(
        starts=(
            Step("collaboration__spawn_agent", {"task_name": "look", "message": "{errand}", "fork_turns": "none"}),
            Step("collaboration__wait_agent", {}),
        ),
        files={"~/.codex/config.toml": f"{_CONFIG}\n[features]\nmulti_agent_v2 = true\n"},
    ),
)
