"""A small coding agent as a program of its own: one tool, a shell in its working folder, over OpenAI's chat API.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python -m longrein.harnesses.shell "Fix the bug in text.py."

It ends when the model answers without a tool call. Standard library alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

SYSTEM = (
    "You work on a git repository in the current folder. Use the tool to look around and to change files. Stop when done."
)
TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command in the working folder; gives its output and exit code.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
SHOWN = 4000
"""Characters of a command's output that the model reads."""


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The model's next message."""
    body = {"model": os.environ.get("OPENAI_MODEL", "policy"), "messages": messages, "tools": [TOOL]}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = f"{os.environ['OPENAI_BASE_URL'].rstrip('/')}/chat/completions"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=600) as response:
            return json.load(response)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        sys.exit(f"the model answered {error.code}: {error.read().decode('utf-8', 'replace')}")


def run(call: dict[str, Any], seconds: float) -> str:
    """What a call of the tool gives; one that does not fit is told so."""
    try:
        command = json.loads(call["function"]["arguments"])["command"]
        ended = subprocess.run(
            ["sh", "-c", command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=seconds,
        )
    except (ValueError, KeyError, TypeError):
        return 'error: the arguments must be {"command": "..."}'
    except subprocess.TimeoutExpired:
        return f"error: it did not end within {seconds:g} seconds"
    output = ended.stdout.decode("utf-8", "replace")
    if len(output) > SHOWN:
        output = f"{output[: SHOWN // 2]}\n[{len(output) - SHOWN} characters left out]\n{output[-SHOWN // 2 :]}"
    return f"{output}[exit code {ended.returncode}]"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m longrein.harnesses.shell", description="Do a task by a shell.")
    parser.add_argument("task")
    parser.add_argument("--max-turns", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30, help="for each command")
    options = parser.parse_args()
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": options.task}]
    for _ in range(options.max_turns):
        reply = ask(messages)
        calls = reply.get("tool_calls") or ()
        if not calls:
            print(reply.get("content") or "", flush=True)
            return
        messages.append(reply)
        for call in calls:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": run(call, options.seconds)})


if __name__ == "__main__":
    main()
