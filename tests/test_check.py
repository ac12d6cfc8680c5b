"""`longrein check` on ReAct, and on small programs that are odd on purpose: each oddity is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longrein import LongreinError
from longrein.check import Report, check, show, uses_tools

ASKS = """
import http.client, json, os, subprocess, sys
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}
def post(path, body):
    connection = http.client.HTTPConnection(os.environ["OPENAI_BASE_URL"].split("/")[2], timeout=60)
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    return connection.getresponse().read()
def ask(messages, tools=(TOOL,), **more):
    body = {"model": "m", "messages": messages, **({"tools": list(tools)} if tools else {}), **more}
    return json.loads(post("/v1/chat/completions", body))["choices"][0]["message"]
def result(reply, text="ok"):
    return [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in reply.get("tool_calls") or ()]
task = [{"role": "system", "content": "Work."}, {"role": "user", "content": "Do it."}]
"""


def run(program: str, **options: Any) -> Report:
    return check([sys.executable, "-c", ASKS + program], timeout=240, **options)


def test_react_is_token_exact(capsys: pytest.CaptureFixture[str]) -> None:
    report = check(["react"])
    assert report.exact, report
    assert (report.calls, report.conversations, report.rewrites, report.side_calls) == (3, 1, 0, 0)
    assert (report.dialects, report.tools, report.streamed) == (["chat"], ["look", "answer"], 0)
    assert report.sampled == report.trained > 0
    assert report.spliced > 0 == report.rendered_again
    show(report)
    told = capsys.readouterr().out
    assert "Every call was token-exact." in told
    assert len(told.splitlines()) < 24


def test_streams_side_calls_sampling_and_routes_are_told() -> None:
    report = run(
        """
post("/v1/embeddings", {"input": "x"})
post("/v1/chat/completions", {"model": "m", "messages": task, "tools": [TOOL], "stream": True, "temperature": 0.2, "max_tokens": 99})
ask([{"role": "system", "content": "Give a title."}, {"role": "user", "content": "Do it."}], tools=())
""",
    )
    assert report.exact
    assert (report.calls, report.streamed, report.side_calls) == (2, 1, 1)
    assert report.trained < report.sampled
    assert report.routes == ["POST /v1/embeddings"]
    assert report.asked[0]["temperature"] == 0.2


def test_an_edited_history_is_a_rewrite_and_its_first_change_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    report = run(
        """
first = ask(task)
first["content"] = "I never said this."
ask([*task, first, *result(first)])
""",
    )
    assert not report.exact
    assert (report.rewrites, report.conversations, report.calls) == (1, 1, 2)
    assert report.rendered_again > 0 == report.spliced
    assert report.first_rewrite[0] == "message 2:"
    assert any(line.startswith("-") and "I look." in line for line in report.first_rewrite)
    assert any(line.startswith("+") and "I never said this." in line for line in report.first_rewrite)
    show(report)
    told = capsys.readouterr().out
    assert "1 of 2 calls came with a rewritten history" in told
    assert "I never said this." in told


def test_other_tools_in_the_middle_are_a_rewrite() -> None:
    other = '{"type": "function", "function": {"name": "list_more", "parameters": {"type": "object", "properties": {}}}}'
    report = run(f"first = ask(task)\nask([*task, first, *result(first)], tools=(TOOL, json.loads('''{other}''')))")
    assert (report.rewrites, report.first_rewrite) == (1, ["other tools: bash became bash, list_more"])


def test_a_new_conversation_is_no_rewrite_and_neither_are_replies_that_nobody_sampled() -> None:
    report = run(
        """
injected = [*task, {"role": "assistant", "content": "Understood."}, {"role": "user", "content": "Now."}]
first = ask(injected)
ask([*injected, first, *result(first)])
ask([{"role": "system", "content": "Work."}, {"role": "user", "content": "A summary of all that was."}])
""",
    )
    assert report.exact
    assert (report.conversations, report.rewrites, report.calls) == (2, 0, 3)


def test_what_is_left_is_told() -> None:
    report = run(
        """
ask(task)
open(os.path.expanduser("~/.agent-history"), "w").write("x")
open("result.txt", "w").write("x")
subprocess.Popen(["sleep", "60"], start_new_session=True)
sys.exit(3)
""",
    )
    assert report.processes_left == ["sleep 60"]
    assert report.files_left == {"home": [".agent-history"], "work": ["result.txt"], "tmp": []}
    assert report.exit_code == 3


def test_many_files_that_were_there_before_are_not_left(tmp_path: Path) -> None:
    for number in range(250):
        (tmp_path / f"{number:03}").touch()
    report = run("open('000-new', 'w'); [open(f'z{n:03}', 'w') for n in range(220)]; sys.exit(1)", folder=tmp_path)
    assert report.files_left["work"] == ["000-new", *(f"z{number:03}" for number in range(199)), "and 21 more"]


def test_a_program_without_a_call_is_not_exact(capsys: pytest.CaptureFixture[str]) -> None:
    report = run("sys.exit('no model for me')")
    assert not report.exact
    show(report)
    told = capsys.readouterr().out
    assert "It made no model call." in told
    assert "--env NAME={base_url}" in told
    assert "no model for me" in told


def test_a_program_that_crashes_after_its_calls_is_heard(capsys: pytest.CaptureFixture[str]) -> None:
    report = run("ask(task)\nraise RuntimeError('boom: I cannot go on')")
    assert (report.exact, report.exit_code, report.calls) == (True, 1, 1)
    show(report)
    told = capsys.readouterr().out
    assert "exit code 1" in told
    assert "Its last words" in told
    assert "boom: I cannot go on" in told


def test_what_it_was_refused_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = 'post("/v1/chat/completions", {"messages": "no"})\n'
    report = run(f"{wrong}{wrong}ask(task)")
    assert (report.calls, report.errors, len(report.refusals)) == (1, 2, 1)
    show(report)
    assert "refused: messages is a string" in capsys.readouterr().out
    show(run(wrong))
    assert "None of its calls was answered." in capsys.readouterr().out


def test_a_program_that_hangs_or_never_stops_asking_is_ended() -> None:
    hangs = check([sys.executable, "-c", "import time; time.sleep(1000)"], timeout=3)
    assert (hangs.limit, hangs.exit_code) == ("time", 137)
    asks = "told = list(task)\nwhile True:\n    reply = ask(told)\n    told += [reply, *result(reply), {'role': 'user', 'content': 'again'}]"
    endless = run(asks, max_calls=5)
    assert (endless.limit, endless.calls, endless.rewrites) == ("calls", 5, 0)


def test_a_real_model_answers_in_place_of_the_script(folder: Any) -> None:
    report = run("ask(task)\nask([*task[:1], {'role': 'user', 'content': 'x' * 20_000}])", model=str(folder("tiny")))
    assert (report.exact, report.calls) == (True, 1)
    assert report.sampled == report.trained > 0
    (refusal,) = report.refusals  # a real model has a context that ends
    assert "maximum context length" in refusal


def test_a_script_and_a_folder_are_used_and_braces_stay(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("hello")
    report = run(
        "print(f'{task}'); assert open('notes').read() == 'hello'; assert ask(task)['content'] == 'As told.'",
        script=["As told."],
        folder=tmp_path,
    )
    assert report.exit_code == 0, report.last_words
    with pytest.raises(LongreinError, match="there is no command 'nowhere-at-all' to check"):
        check(["nowhere-at-all"])


def test_files_beside_the_caller_are_found_from_the_folder_that_the_program_runs_in(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(ASKS + "ask(task)\nprint(open(sys.argv[1]).read(), file=sys.stderr)\nsys.exit(3)")
    (tmp_path / "said.txt").write_text("beside")
    (tmp_path / "agent").write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import sys; sys.exit(5)'\n")
    (tmp_path / "agent").chmod(0o755)
    (tmp_path / "given").mkdir()
    report = check([sys.executable, "agent.py", "said.txt"])
    assert (report.exit_code, report.calls, report.last_words) == (3, 1, "beside")
    assert check(["./agent"]).exit_code == 5
    (tmp_path / "given/said.txt").write_text("in the folder that was given")
    report = check([sys.executable, "agent.py", "said.txt"], folder=tmp_path / "given")
    assert report.last_words == "in the folder that was given"


def test_the_scripted_model_fills_any_schema() -> None:
    schema = {
        "type": "object",
        "required": ["command", "n", "how", "deep", "sure", "path"],
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}},
            "n": {"type": "integer", "minimum": 4},
            "how": {"enum": ["fast", "slow"]},
            "deep": {"type": "object", "required": ["x"], "properties": {"x": {"anyOf": [{"type": "boolean"}, {}]}}},
            "sure": {"type": ["boolean", "null"]},
            "path": {"type": "string"},
        },
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("write", "exec_command")]
    (call,) = uses_tools([{"role": "user", "content": "x"}], tools)["tool_calls"]
    assert call["function"]["name"] == "exec_command"
    assert json.loads(call["function"]["arguments"]) == {
        "command": ["bash", "-lc", "echo check 0"],
        "n": 4,
        "how": "fast",
        "deep": {"x": False},
        "sure": False,
        "path": ".",
    }


def test_the_command_line(tmp_path: Path) -> None:
    def longrein(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from longrein.cli import main; main()", "check", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=480, cwd=tmp_path)

    exact = longrein("--json", "shell")
    assert exact.returncode == 0, exact.stderr
    assert json.loads(exact.stdout)["exact"] is True
    wrong = longrein("--", "sh", "-c", "exit 0")
    assert wrong.returncode == 1
    assert "It made no model call" in wrong.stdout
    assert longrein("--env", "x", "react").stderr.startswith("longrein: --env is 'x'; it must be NAME=VALUE")
