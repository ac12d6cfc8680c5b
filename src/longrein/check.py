"""What training with an agent program would be like: run it once, and look at the record.

Always true: a report speaks of one rollout of the program itself, through the proxy and the recorder that training uses. A call
is token-exact when no token the model sampled before was tokenised again for its prompt; a conversation that the program started
anew is, one whose history it rewrote is not.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from longrein.contract import LongreinError, Message, Sampling, Tool
from longrein.digests import canonical
from longrein.engines.scripted import ScriptedEngine
from longrein.harnesses.catalog import FILES, harness
from longrein.harnesses.process import ProcessSessionFactory
from longrein.harnesses.program import with_paths
from longrein.harnesses.sandbox import chosen, folders_of
from longrein.proxy import CallLimits, InterceptionServer
from longrein.recorder import Recorder
from longrein.rendering import rendering_for
from longrein.rollout import Call, Rollout
from longrein.tokenizer import Lexicon

PROGRAMS = {
    "react": ["{python}", "-m", "longrein.harnesses.react", "--rooms", "attic,barn,cellar"],
    "shell": ["{python}", "-m", "longrein.harnesses.shell", "{instruction}"],
}
"""Programs that come with longrein, by name, besides those of `longrein harness list`."""
INSTRUCTION = "Say what is in this folder."
"""The task of a program that is named."""
ENV = {
    "OPENAI_API_BASE": "{base_url}",
    "ANTHROPIC_BASE_URL": "{url}",
    "ANTHROPIC_AUTH_TOKEN": "{key}",
    "ANTHROPIC_MODEL": "{model}",
    "GOOGLE_GEMINI_BASE_URL": "{url}",
    "GEMINI_API_KEY": "{key}",
}
"""How programs of every dialect are told of the proxy, besides what they are told anyway."""
NO_CALL = (
    "[red]It made no model call.[/red] It was told of the proxy by OPENAI_BASE_URL and OPENAI_API_KEY, ANTHROPIC_BASE_URL and\n"
    "ANTHROPIC_AUTH_TOKEN, GOOGLE_GEMINI_BASE_URL and GEMINI_API_KEY; `--env NAME={base_url}` and `--env NAME={key}` tell it more."
)
DIFF_LINES = 12
_LEFT = ".longrein-left.json"


@dataclass
class Report:
    """One run of a program, as training sees it."""

    command: list[str]
    exit_code: int = 0
    seconds: float = 0.0
    limit: str | None = None
    sandboxed: bool = False
    dialects: list[str] = field(default_factory=list)
    calls: int = 0
    streamed: int = 0
    tools: list[str] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    """The sampling it asks for; the run's own wins."""
    side_calls: int = 0
    conversations: int = 0
    """Started anew, the first among them, side calls not."""
    rewrites: int = 0
    """Of a history that held sampled replies."""
    first_rewrite: list[str] = field(default_factory=list)
    """A diff of the first, from what the model said or read to what came back."""
    sampled: int = 0
    trained: int = 0
    spliced: int = 0
    """Prompt tokens taken over from an earlier call as they were."""
    rendered_again: int = 0
    """Prompt tokens of rewritten histories."""
    undelivered: int = 0
    joined: int = 0
    errors: int = 0
    refusals: list[str] = field(default_factory=list)
    """What the errors said."""
    routes: list[str] = field(default_factory=list)
    """That it wanted and the server does not have."""
    processes_left: list[str] = field(default_factory=list)
    files_left: dict[str, list[str]] = field(default_factory=dict)
    failure: str | None = None
    last_words: str = ""

    @property
    def exact(self) -> bool:
        """Whether there were calls, and every one was token-exact."""
        return self.calls > 0 and self.rewrites == 0 and self.failure is None

    def as_json(self) -> str:
        return json.dumps({**asdict(self), "exact": self.exact}, ensure_ascii=False)


def check(
    command: Sequence[str],
    *,
    model: str | None = None,
    script: Sequence[str | Message] | None = None,
    sandbox: str = "auto",
    readable: Sequence[str] = (),
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    max_calls: int = 30,
) -> Report:
    """Run a program once against a scripted model, or a real one from a folder, and report."""
    known: dict[str, Any] = {}
    if len(command) == 1 and command[0] in FILES:
        known = harness(command[0]).settings()
    elif len(command) == 1 and command[0] in PROGRAMS:
        known = {"command": PROGRAMS[command[0]]}
    command = list(known["command"]) if known else with_paths(command, folder)
    recorder = _recorder(model, script)
    rollout = recorder.open("check", seed=0)
    box = chosen(sandbox)
    setting = "none" if box is None else {"readable": [*folders_of(command), *readable]}
    report = Report(command=command, sandboxed=box is not None)
    began = time.monotonic()
    with InterceptionServer() as server:
        factory = ProcessSessionFactory(
            ["{python}", "-m", "longrein.harnesses.leftovers", _LEFT, *command],
            server=server,
            verify=lambda task, outcome: 0.0,
            env={**ENV, **known.get("env", {}), **(env or {})},
            files=known.get("files"),
            prepare=None if folder is None else lambda _, workdir: _fill(folder, workdir),
            limits=CallLimits(max_calls=max_calls),
            timeout=timeout,
            recorder=recorder,
            sandbox=setting,
        )
        if shutil.which(command[0]) is None and command[0] != "{python}":
            raise LongreinError(
                f"there is no command {command[0]!r} to check; give its path, or one of {', '.join(PROGRAMS)}"
            )
        braces = {name: f"{{{name}}}" for part in command for name in re.findall(r"\{([A-Za-z_][A-Za-z0-9_]*)\}", part)}
        task = {**braces, **({"instruction": INSTRUCTION} if known else {})}
        with factory.create(task=task, rollout_id="check") as session:  # what is no placeholder of ours stays as it is
            outcome = session.wait()
            report.seconds = round(time.monotonic() - began, 2)
            left = outcome.workdir / _LEFT
            told = json.loads(left.read_text()) if left.is_file() and not left.is_symlink() else {}
            server.seal("check")
            traffic = server.traffic("check")
    report.exit_code, report.limit = outcome.exit_code, outcome.limit
    report.last_words = _end(outcome.stderr.strip() or outcome.stdout.strip()) if outcome.exit_code else ""
    report.processes_left, report.files_left = told.get("processes", []), told.get("files", {})
    report.dialects, report.streamed, report.joined = traffic.dialects, traffic.streamed, traffic.joined
    report.errors, report.routes, report.asked = traffic.errors, traffic.unknown_routes, traffic.asked
    report.refusals = traffic.refusals
    report.failure, report.undelivered = traffic.failure, len(traffic.undelivered)
    _read(rollout, report)
    recorder.finish("check")
    recorder.engine.close()
    return report


def _read(rollout: Rollout, report: Report) -> None:
    """What the record says."""
    calls = list(rollout.calls.values())
    report.calls = len(calls)
    report.side_calls = sum(call.excluded == "auxiliary" for call in calls)
    report.sampled = sum(len(call.completion_ids) for call in calls)
    report.trained = rollout.agent_tokens
    report.tools = list(dict.fromkeys(_tool_name(tool) for call in calls for tool in call.tools))
    for number, call in enumerate(calls):
        if call.parent is not None:
            report.spliced += len(rollout.tokens(call.parent))
        elif call.excluded != "auxiliary":
            earlier = [other for other in calls[:number] if other.excluded != "auxiliary"]
            if _continues(earlier, call):
                report.rewrites += 1
                report.rendered_again += len(call.context_ids)
                report.first_rewrite = report.first_rewrite or _difference(rollout, earlier, call)
            else:
                report.conversations += 1


def _continues(earlier: Sequence[Call], call: Call) -> bool:
    """Whether a conversation that begins anew goes on with an earlier one: it quotes replies, and has its tool calls or its
    first words. One with replies that nobody here sampled does not."""
    quoted = [message for message in call.messages if message["role"] == "assistant"]
    known = {made["id"] for other in earlier for made in other.reply.get("tool_calls") or ()}
    if any(made.get("id") in known for message in quoted for made in message.get("tool_calls") or ()):
        return True
    return bool(quoted) and _opening(call) in [_opening(other) for other in earlier if other.parent is None]


def _opening(call: Call) -> str | None:
    return next((canonical(message) for message in call.messages if message["role"] == "user"), None)


def _difference(rollout: Rollout, earlier: Sequence[Call], call: Call) -> list[str]:
    """Where a conversation leaves the earlier one that it has most in common with."""
    new = list(call.messages)
    tools = [_tool_name(tool) for tool in call.tools]
    best: tuple[int, list[Message], list[str]] = (-1, [], [])
    for other in earlier:
        old = rollout.conversation(other.id)
        same = next(
            (at for at, (one, two) in enumerate(zip(old, new, strict=False)) if canonical(one) != canonical(two)), None
        )
        same = min(len(old), len(new)) if same is None else same
        if same > best[0]:
            best = (same, old, [_tool_name(tool) for tool in other.tools])
    at, old, had = best
    if had != tools:
        return [f"other tools: {', '.join(had) or 'none'} became {', '.join(tools) or 'none'}"]
    was, now = (_lines(messages[at]) if at < len(messages) else [] for messages in (old, new))
    lines = [line for line in difflib.unified_diff(was, now, lineterm="", n=1) if not line.startswith(("---", "+++"))]
    return [f"message {at}:", *(line[:160] for line in lines[:DIFF_LINES])]


def _lines(message: Message) -> list[str]:
    return json.dumps(message, indent=1, sort_keys=True, ensure_ascii=False).replace("\\n", "\n").splitlines()


def _tool_name(tool: Tool) -> str:
    return str(tool.get("function", tool).get("name", "?"))


def _fill(folder: Path, workdir: Path) -> None:
    shutil.copytree(folder, workdir, symlinks=True, dirs_exist_ok=True)


def _end(text: str, longest: int = 300) -> str:
    """The last lines of a text, whole where they are not too long."""
    return text if len(text) <= longest else f"...{text[-longest:].partition(chr(10))[2] or text[-longest:]}"


# The model


def _recorder(model: str | None, script: Sequence[str | Message] | None) -> Recorder:
    if model is None:
        rendering = rendering_for(Lexicon(), "qwen3")
        return Recorder(ScriptedEngine(list(script) if script else uses_tools, rendering), rendering)
    from longrein.agents import Agent

    return Agent.from_pretrained(model, sampling=Sampling(max_tokens=512)).recorder()


def uses_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> Message:
    """A model that calls a harmless tool twice, where there is one, and then is done."""
    turn = sum(message["role"] == "assistant" for message in messages)
    if not tools or turn >= 2:
        return {"role": "assistant", "content": "Done."}
    tool = min((tool.get("function", tool) for tool in tools), key=_eagerness)
    arguments = json.dumps(_example(tool.get("parameters") or {}, "", turn))
    call = {"id": "", "type": "function", "function": {"name": tool["name"], "arguments": arguments}}
    return {"role": "assistant", "content": "I look." if turn == 0 else "", "tool_calls": [call]}


def _eagerness(tool: Mapping[str, Any]) -> int:
    """Shells first: every program knows what to do with `echo`; then whatever reads."""
    name = str(tool["name"]).lower()
    liked = (("bash", "shell", "exec", "command", "terminal"), ("list", "ls", "look", "read", "glob"))
    return next((place for place, words in enumerate(liked) if any(word in name for word in words)), len(liked))


def _example(schema: Mapping[str, Any], name: str, turn: int) -> Any:
    """A value that fits a JSON schema."""
    for kind in ("enum", "anyOf", "oneOf"):
        if schema.get(kind):
            return schema[kind][0] if kind == "enum" else _example(schema[kind][0], name, turn)
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object" or "properties" in schema:
        properties = schema.get("properties") or {}
        return {key: _example(properties.get(key) or {}, key, turn) for key in schema.get("required") or ()}
    if kind == "array":
        return (
            ["bash", "-lc", f"echo check {turn}"] if name == "command" else [_example(schema.get("items") or {}, name, turn)]
        )
    if kind in ("integer", "number"):
        return schema.get("minimum", 1)
    if kind == "boolean":
        return False
    return f"echo check {turn}" if name in ("command", "cmd") else "." if "path" in name or "dir" in name else "check"


# One screen


def show(report: Report) -> None:
    """Print a report as a table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if os.isatty(1) else 120)
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _rows(report):
        table.add_row(name, escape(value))
    console.print(" ".join(" ".join(report.command).split())[:100], style="italic", markup=False, highlight=False)
    console.print(table)
    if report.last_words:
        console.print(f"[yellow]Its last words:[/yellow] {escape(report.last_words)}")
    if report.exact:
        console.print("[green]Every call was token-exact.[/green]")
    elif report.failure is not None:
        console.print(f"[red]Our side broke:[/red] {escape(report.failure)}")
    elif report.calls == 0:
        console.print("[red]None of its calls was answered.[/red]" if report.refusals else NO_CALL)
    else:
        again = f"{report.rewrites} of {report.calls} calls came with a rewritten history"
        console.print(f"[yellow]{again}: each starts a branch, and its sampled tokens were rendered again.[/yellow]")


def _rows(report: Report) -> list[tuple[str, str]]:
    ended = f"exit code {report.exit_code} after {report.seconds:g} s" + (f", out of {report.limit}" if report.limit else "")
    streamed = {0: "not streamed", report.calls: "streamed"}.get(report.streamed, f"{report.streamed} of them streamed")
    per = f"{report.calls}, {streamed}" if report.calls else "none"
    left = [
        f"{name}: {', '.join(files[:4])}{' ...' if len(files) > 4 else ''}"
        for name, files in report.files_left.items()
        if files
    ]
    asked = "; ".join(json.dumps(one) for one in report.asked if one)
    trouble = [f"{count} {what}" for count, what in ((report.undelivered, "undelivered"), (report.joined, "repeated"),
                                                     (report.errors, "answered with an error")) if count]  # fmt: skip
    return [
        ("program", ended + ("" if report.sandboxed else ", without a sandbox")),
        ("dialect", ", ".join(report.dialects) or "none"),
        ("calls", "\n".join([", ".join([per, *trouble]), *(f"refused: {said[:160]}" for said in report.refusals[:3])])),
        ("tools", f"{len(report.tools)}: {', '.join(report.tools)}"[:200] if report.tools else "none"),
        ("asks for", asked[:200] or "nothing"),
        ("side calls", f"{report.side_calls}, not trained" if report.side_calls else "none"),
        ("conversations", str(report.conversations)),
        ("history rewrites", "\n".join([str(report.rewrites), *report.first_rewrite])),
        ("sampled tokens", f"{report.sampled}, {report.trained} of them trained"),
        ("prompt tokens", f"{report.spliced} spliced, {report.rendered_again} rendered again"),
        ("other routes", ", ".join(report.routes) or "none"),
        ("processes left", "; ".join(report.processes_left[:4]) or "none"),
        ("files left", "\n".join(left) or "none"),
    ]
