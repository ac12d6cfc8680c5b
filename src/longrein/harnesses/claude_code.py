"""Claude Code, Anthropic's coding agent. https://www.npmjs.com/package/@anthropic-ai/claude-code"""

from __future__ import annotations

from longrein.harnesses.harness import Compaction, Harness, Step, SubAgent
from longrein.harnesses.package import Npm

HARNESS = Harness(
    name="claude-code",
    dialect="messages",
    package=Npm("@anthropic-ai/claude-code", "2.1.325"),
    executable="claude",
    arguments=("-p", "{instruction}", "--output-format", "json", "--dangerously-skip-permissions"),
    env={
        "ANTHROPIC_BASE_URL": "{url}",
        "ANTHROPIC_AUTH_TOKEN": "{key}",
        "ANTHROPIC_MODEL": "{model}",
        "ANTHROPIC_SMALL_FAST_MODEL": "{model}",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
        "CLAUDE_CODE_SUBAGENT_MODEL": "{model}",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_TERMINAL_TITLE": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "ENABLE_TOOL_SEARCH": "false",
        "IS_SANDBOX": "1",
    },
    side_calls="titles and summaries, without tools; a look whether anyone is there (`HEAD /`)",
    demo=(
        Step("Bash", {"command": "pwd && cat {file}", "description": "Look at the file"}),
        Step("Read", {"file_path": "{folder}/{file}"}),
        Step("Edit", {"file_path": "{folder}/{file}", "old_string": "{old}", "new_string": "{new}"}),
    ),
    compaction=Compaction(
        env={"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000", "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "30"},
        asks="CRITICAL: Respond with TEXT ONLY",
    ),
    sub_agent=SubAgent(
        starts=(
            Step(
                "Agent",
                {
                    "description": "Look at the file",
                    "prompt": "{errand}",
                    "subagent_type": "general-purpose",
                    "run_in_background": False,
                },
            ),
        ),
    ),
)
