"""The page's server: it reads, answers in words, and is nobody else's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from longrein.cli import main
from longrein.rollout import Rollout
from longrein.runs import Run, RunWriter
from longrein.viewer import data


def ask(url: str, **headers: str) -> tuple[int, Any, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as response:
            return response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def test_every_answer_forbids_other_addresses_and_guessing(address: str) -> None:
    for path in ("", "page.js", "page.css", "api/overview", "api/rollouts", "api/rollouts/1", "api/rollouts/999", "nowhere"):
        status, headers, _ = ask(address + path)
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert status == (404 if path in ("api/rollouts/999", "nowhere") else 200)


def test_a_page_of_another_site_cannot_read_a_run_under_its_own_name(address: str) -> None:
    port = address.rsplit(":", 1)[1].strip("/")
    status, _, body = ask(address + "api/overview", Host=f"evil.example:{port}")
    assert status == 403
    assert b"TreasureHunt" not in body
    assert ask(address + "api/overview", Host=f"localhost:{port}")[0] == 200


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("api/rollouts/999", "has no rollout 999"),
        ("api/rollouts/1/tokens?call=77", "rollout 1 has no call 77; it has 2"),
        ("api/rollouts?sort=task;drop", "sort is 'task;drop'; it must be one of number"),
        ("api/rollouts?page=99999999999999999999", "too large"),
        ("api/rollouts?step=two", "invalid literal"),
    ],
)
def test_a_question_that_makes_no_sense_is_answered_in_words(address: str, path: str, told: str) -> None:
    status, _, body = ask(address + path)
    assert status == 404
    assert told in json.loads(body)["error"]


def test_a_page_of_the_table_does_not_grow_with_the_run(address: str) -> None:
    answer = json.loads(ask(address + "api/rollouts?page=1")[2])
    assert (answer["total"], answer["pages"], len(answer["rows"])) == (65, 2, 15)
    assert json.loads(ask(address + "api/rollouts?page=7")[2])["rows"] == []


def test_what_did_not_change_is_not_sent_again(address: str) -> None:
    first = json.loads(ask(address + "api/overview")[2])
    assert json.loads(ask(f"{address}api/overview?known={first['state']}")[2]) == {"state": first["state"], "same": True}


def test_a_step_that_was_done_again_counts_as_it_was_done_last(tmp_path: Path) -> None:
    for reward in (0.0, 1.0):
        with RunWriter(tmp_path) as writer:
            writer.write(Rollout(id="r", env="E", reward=reward), step=1)
    (row,) = data.overview(Run(tmp_path))["series"]
    assert (row["n"], row["reward"]) == (1, 1.0)


def test_odd_values_reach_the_browser_as_json(tmp_path: Path) -> None:
    odd = {"nan": float("nan"), "big": 2**70, "half": "a\\ud800", "deep": [float("inf")], "text": "</script>"}
    with RunWriter(tmp_path) as writer:
        writer.write(Rollout(id="r", task=odd, info={"half": "x\ud800y"}, reward=1.0, seed=2**64 - 1))
    answer = json.loads(data.wire(data.one(Run(tmp_path), 1)))
    assert answer["task"] == {**odd, "nan": None, "big": str(2**70), "deep": [None]}
    assert answer["info"] == {"half": "x?y"}
    assert answer["seed"] == str(2**64 - 1)


def test_the_command_serves_until_ctrl_c(folder_of_run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from longrein.cli import main; main()", "view", str(folder_of_run), "--no-browse"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = process.stdout.readline()
        status, _, body = ask(told.split(" at ")[1].split()[0] + "api/overview")
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert status == 200
    assert json.loads(body)["name"] == "hunts"
    assert (process.returncode, errors) == (0, "")


def test_the_command_writes_a_file(folder_of_run: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    file = tmp_path / "run.html"
    monkeypatch.setattr(sys, "argv", ["longrein", "view", str(folder_of_run), "--export", str(file), "--rollouts", "8"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(f"{file}: 8 rollouts, ")
    html = file.read_text()
    assert html.count("<script") == 2
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "")
    assert list(tmp_path.iterdir()) == [file]
