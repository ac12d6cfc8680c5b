"""Sessions of real processes through a real server: what a program gets, how it ends, what is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from hunter import REACT, hunter
from patience import PATIENCE, until
from processes import BOMB, DAEMON, alive, marker, time_is_up

from longrein.contract import AgentSession, AgentSessionFactory, LongreinError, SampleRequest, Verdict
from longrein.engines.scripted import ScriptedEngine
from longrein.harnesses import HarnessError, Outcome, ProcessSessionFactory
from longrein.proxy import CallLimits, InterceptionServer
from longrein.recorder import Recorder
from longrein.rendering import Rendering

Named = Callable[[str], Rendering]
TASK = {"rooms": ["attic", "barn", "cellar"]}


@pytest.fixture(scope="module")
def server() -> Iterator[InterceptionServer]:
    with InterceptionServer() as server:
        yield server


@pytest.fixture
def python(server: InterceptionServer) -> Callable[..., ProcessSessionFactory]:
    """A factory for a program given as Python text, that is judged by its exit code unless told otherwise."""

    def make(text: str, *arguments: str, **options: Any) -> ProcessSessionFactory:
        options = {"verify": lambda task, outcome: float(outcome.exit_code == 0), "timeout": PATIENCE, **options}
        return ProcessSessionFactory(["{python}", "-c", text, *arguments], server=server, **options)

    return make


def folders(session: Any) -> Path:
    return session.workdir.parent


def test_the_seams_protocols_fit(python: Any) -> None:
    factory = python("pass")
    assert isinstance(factory, AgentSessionFactory)
    session = factory.create(task=None, rollout_id="protocol")
    assert isinstance(session, AgentSession)
    session.close()


def test_a_program_gets_a_stated_list_of_variables_and_no_secret(python: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "PYTHONPATH", "LONGREIN_SECRET"):
        monkeypatch.setenv(name, "secret-of-ours")
    text = "import json, os; print(json.dumps(dict(os.environ)))"
    factory = python(text, env={"LEVEL": "{level}", "OPENAI_MODEL": None}, sandbox="none")
    with factory.create(task={"level": 3}, rollout_id="env") as session:
        found = json.loads(session.wait().stdout)
        assert "secret-of-ours" not in found.values()
        ours = {"HOME", "TMPDIR", "PWD", "OPENAI_BASE_URL", "OPENAI_API_KEY", "LEVEL", "LONGREIN_PROGRAM", "LC_CTYPE"}
        assert set(found) - ours <= {
            "PATH",
            "LANG",
            "LC_ALL",
            "TERM",
            "TZ",
            "LD_LIBRARY_PATH",
            "SSL_CERT_FILE",
            "SSL_CERT_DIR",
        }
        assert found["LEVEL"] == "3"
        assert found["HOME"].startswith(str(folders(session)))
        assert found["PWD"] == str(session.workdir)


def test_config_files_are_filled_and_placed_in_the_fresh_home_and_working_folder(server: InterceptionServer) -> None:
    factory = ProcessSessionFactory(
        ["sh", "-c", "cat ~/.config/agent/x.toml notes/task.json; ls -A; ls -A ~"],
        server=server,
        verify=lambda *_: 1.0,
        sandbox="none",
        files={
            "~/.config/agent/x.toml": "url = {base_url}\nkey = {key}\nprompt = {{task}} {other}\n",
            "notes/task.json": '{"rooms": {rooms}}\n',
        },
    )
    with factory.create(task=TASK, rollout_id="files") as session:
        lines = session.wait().stdout.splitlines()
        assert lines[0] == f"url = {server.url}/v1"
        assert lines[1].startswith("key = ")
        assert len(lines[1]) > 20
        assert lines[2:] == ["prompt = {{task}} {other}", '{"rooms": ["attic", "barn", "cellar"]}', "notes", ".config"]


@pytest.mark.parametrize("path", ["/etc/x", "../x", "~/../x", "~", "", "~other/x"])
def test_a_file_outside_the_sessions_folders_is_refused(server: InterceptionServer, path: str) -> None:
    with pytest.raises(HarnessError, match="files names"):
        ProcessSessionFactory(["true"], server=server, verify=lambda *_: 1.0, files={path: "x"})


def test_what_cannot_run_is_refused_and_leaves_nothing(server: InterceptionServer) -> None:
    with pytest.raises(HarnessError, match="command is 'a b'"):
        ProcessSessionFactory("a b", server=server, verify=lambda *_: 1.0)
    with pytest.raises(HarnessError, match="timeout is 0"):
        ProcessSessionFactory(["true"], server=server, verify=lambda *_: 1.0, timeout=0)
    with pytest.raises(HarnessError, match="cannot be imported"):
        ProcessSessionFactory(["true"], server=server, verify="longrein.nothing.at_all")
    for _ in range(2):  # the rollout's name is free again
        with pytest.raises(HarnessError, match="no command '/no/such'"):
            ProcessSessionFactory(["/no/such"], server=server, verify=lambda *_: 1.0).create(task=None, rollout_id="none")
        with pytest.raises(LongreinError, match=r"command\[4\] has the placeholder \{rooms\}"):
            ProcessSessionFactory(REACT, server=server, verify=lambda *_: 1.0).create(task={}, rollout_id="none")


def test_the_folders_are_gone_after_close(python: Any) -> None:
    factory = python("import os; os.makedirs('a/b'); open('a/b/c', 'w').close(); os.chmod('a', 0o500)")
    session = factory.create(task=None, rollout_id="folders")
    session.wait()
    assert (session.workdir / "a/b/c").exists()
    session.close()
    assert not folders(session).exists()


def test_a_program_that_exits_early_wakes_the_puller_and_is_scored(python: Any) -> None:
    with python("import sys; print('sorry'); sys.exit(3)").create(task=None, rollout_id="early") as session:
        assert session.next_request() is None
        assert session.verify() == Verdict(0.0)
        assert session.wait().exit_code == 3
        assert session.wait().last_line() == "sorry"


def test_a_program_out_of_time_is_ended_and_scored(python: Any) -> None:
    seen: list[Outcome] = []

    def judge(task: Any, outcome: Outcome) -> float:
        seen.append(outcome)
        return 0.25

    factory = python("import time; print('working', flush=True); time.sleep(100)", verify=judge)
    with factory.create(task=None, rollout_id="time") as session:
        time_is_up(session._program)
        assert session.next_request() is None
        assert session.run() == Verdict(0.25)
    assert (seen[0].limit, seen[0].exit_code, seen[0].stdout) == ("time", 137, "working\n")


def test_the_limit_of_time_is_the_factorys(python: Any) -> None:
    with python("import time; time.sleep(100)", timeout=0.3).create(task=None, rollout_id="limit") as session:
        assert (session.wait().limit, session.wait().exit_code) == ("time", 137)


def test_output_is_bounded(python: Any) -> None:
    flood = "import sys; [sys.stderr.write('y' * 1_000_000) for _ in range(50)]"
    with python(flood).create(task=None, rollout_id="flood") as session:
        assert 900_000 < len(session.wait().stderr) < 1_100_000


def test_verify_judges_after_the_program_and_all_it_left_are_gone(python: Any) -> None:
    mark = marker()
    left: list[list[int]] = []
    factory = python(DAEMON, "0", mark, verify=lambda *_: left.append(alive(mark)) or 1)
    with factory.create(task=None, rollout_id="after") as session:
        assert session.run().env_reward == 1.0
    assert left == [[]]


def test_verify_ends_a_program_that_goes_on(python: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longrein.harnesses.process.ENDING_SECONDS", 0.3)
    mark = marker()
    with python("import time; time.sleep(100)", mark).create(task=None, rollout_id="goes-on") as session:
        assert session.verify() == Verdict(0.0)
        assert alive(mark) == []


@pytest.mark.parametrize(
    ("command", "reward"),
    [
        (["sh", "-c", "grep -q found {workdir}/result"], 1.0),
        (["sh", "-c", "grep -q lost {workdir}/result"], 0.0),
        (["sh", "-c", "echo some words; echo 0.75"], 0.75),
        (["sh", "-c", "echo 0.75; exit 1"], 0.0),
        (["{workdir_of_task}", "-c", "import json, os; print(len(json.load(open('{outcome}'))['stdout']))"], 6.0),
    ],
)
def test_a_command_judges(python: Any, command: list[str], reward: float) -> None:
    factory = python("print('hello'); open('result', 'w').write('found')", verify=command)
    with factory.create(task={"workdir_of_task": sys.executable}, rollout_id="command") as session:
        assert session.run().env_reward == reward


def test_a_judging_command_sees_neither_the_programs_home_nor_our_secrets(
    python: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-of-ours")
    check = ["sh", "-c", 'test -z "$HF_TOKEN$OPENAI_API_KEY" && test ! -e ~/trap && test ! -e trap']
    factory = python("import pathlib; [(p / 'trap').touch() for p in (pathlib.Path.home(), pathlib.Path())]", verify=check)
    with factory.create(task=None, rollout_id="trap") as session:
        assert session.run().env_reward == 1.0


@pytest.mark.parametrize("value", [True, 1, np.float32(1), np.bool_(True), Fraction(1)])
def test_any_number_is_a_verdict(python: Any, value: Any) -> None:
    with python("pass", verify=lambda task, outcome: value).create(task=None, rollout_id="number") as session:
        reward = session.run().env_reward
        assert (reward, type(reward)) == (1.0, float)


def _raises(task: Any, outcome: Outcome) -> float:
    raise KeyError("a bug of the verifier")


@pytest.mark.parametrize(
    ("verify", "words"),
    [
        (_raises, "KeyError: 'a bug of the verifier'"),
        (lambda *_: float("nan"), "finite"),
        (lambda *_: None, "must return a number"),
        (lambda *_: "1", "must return a number"),
        (["sh", "-c", "kill -SEGV $$"], "broke with 139"),
        (["sleep", "50"], "did not end within 0.5 seconds"),
    ],
)
def test_a_verifier_that_breaks_gives_no_reward(python: Any, verify: Any, words: str) -> None:
    factory = python("pass", verify=verify, verify_timeout=0.5 if verify == ["sleep", "50"] else PATIENCE)
    with factory.create(task=None, rollout_id="broken") as session, pytest.raises(HarnessError, match=words):
        session.run()


def test_an_engine_that_breaks_gives_no_reward(server: InterceptionServer, rendering: Named) -> None:
    class Broken(ScriptedEngine):
        async def sample(self, request: SampleRequest) -> Any:
            raise RuntimeError("the engine fell over")

    found = rendering("qwen3")
    recorder = Recorder(Broken([], found), found)
    recorder.open("engine")
    factory = ProcessSessionFactory(REACT, server=server, verify=lambda *_: 1.0, recorder=recorder, timeout=PATIENCE)
    with factory.create(task=TASK, rollout_id="engine") as session:
        assert session.wait().exit_code != 0
        with pytest.raises(HarnessError, match="the engine fell over"):
            session.verify()


def test_a_program_out_of_calls_is_scored(server: InterceptionServer, rendering: Named) -> None:
    found = rendering("qwen3")
    recorder = Recorder(ScriptedEngine(hunter, found), found)
    rollout = recorder.open("calls")
    outcomes: list[Outcome] = []
    factory = ProcessSessionFactory(
        REACT,
        server=server,
        verify=lambda task, outcome: outcomes.append(outcome) or 0.125,
        recorder=recorder,
        limits=CallLimits(max_calls=2),
        timeout=PATIENCE,
    )
    with factory.create(task=TASK, rollout_id="calls") as session:
        assert session.run() == Verdict(0.125)
    assert outcomes[0].limit == "calls"
    assert len(rollout.calls) == 2


def test_a_verified_rollout_takes_no_more_calls(server: InterceptionServer, rendering: Named) -> None:
    found = rendering("qwen3")
    recorder = Recorder(ScriptedEngine(hunter, found), found)
    rollout = recorder.open("sealed")
    factory = ProcessSessionFactory(
        ["sh", "-c", 'echo "$OPENAI_API_KEY"'], server=server, verify=lambda *_: 1.0, recorder=recorder
    )
    with factory.create(task=TASK, rollout_id="sealed") as session:
        key = session.wait().last_line()
        session.verify()
        body = {"model": "policy", "messages": [{"role": "user", "content": "one more"}]}
        late = requests.post(f"{server.url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        assert late.status_code == 409
        assert not rollout.calls


@pytest.mark.parametrize(("text", "arguments", "count"), [(DAEMON, ("100",), 3), (BOMB, ("16",), 30)])
def test_no_process_is_left_after_close(python: Any, text: str, arguments: tuple[str, ...], count: int) -> None:
    mark = marker()
    session = python(text, *arguments, mark).create(task=None, rollout_id="left")
    assert until(lambda: len(alive(mark)) >= count)
    session.close()
    assert alive(mark) == []


def test_close_works_in_any_state_and_more_than_once(python: Any) -> None:
    session = python("import time; time.sleep(100)").create(task=None, rollout_id="state")
    woken: list[Any] = []
    waiting = threading.Thread(target=lambda: woken.append(session.next_request()))
    waiting.start()
    time.sleep(0.1)
    closers = [threading.Thread(target=session.close) for _ in range(3)]
    for thread in closers:
        thread.start()
    for thread in [*closers, waiting]:
        thread.join(timeout=PATIENCE)
        assert not thread.is_alive()
    assert woken == [None]
    session.close()
    with pytest.raises(HarnessError, match="closed"):
        session.verify()
    with python("pass").create(task=None, rollout_id="state") as again:  # the name is free again
        assert again.run().env_reward == 1.0


def test_a_verifier_that_is_a_file_beside_us_is_found(python: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.py").write_text("print(0.25)")
    with python("pass", verify=["{python}", "judge.py"]).create(task=None, rollout_id="beside") as session:
        assert session.run().env_reward == 0.25


def test_close_ends_a_verifier_too(python: Any) -> None:
    mark = marker()
    session = python("pass", verify=["sh", "-c", "sleep 100; true", mark]).create(task=None, rollout_id="verifier")
    trouble: list[BaseException] = []

    def verify() -> None:
        try:
            session.verify()
        except HarnessError as error:
            trouble.append(error)

    verifying = threading.Thread(target=verify)
    verifying.start()
    assert until(lambda: len(alive(mark)) == 2)
    session.close()
    verifying.join(timeout=PATIENCE)
    assert alive(mark) == []
    assert "broke with 137" in str(trouble[0])


def test_a_cancelled_create_leaves_nothing(python: Any) -> None:
    mark = marker()
    factory = python("import time; time.sleep(100)", mark)

    async def cancelled() -> None:
        making = asyncio.create_task(factory.create_async(task=None, rollout_id="cancelled"))
        await asyncio.sleep(0)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making

    asyncio.run(cancelled())
    assert alive(mark) == []
    factory.create(task=None, rollout_id="cancelled").close()  # the name is free again


def test_killing_us_leaves_no_process_and_no_folder_behind() -> None:
    mark = marker()
    holder = (
        "import json, sys, time\n"
        "from longrein.harnesses import ProcessSessionFactory\n"
        "from longrein.proxy import InterceptionServer\n"
        "server = InterceptionServer(); server.start()\n"
        "command = ['{python}', '-c', sys.argv[1], '100', sys.argv[2]]\n"
        "factory = ProcessSessionFactory(command, server=server, verify=lambda *_: 1.0, sandbox='none')\n"
        "sessions = [factory.create(task=None, rollout_id=str(n)) for n in range(3)]\n"
        "print(json.dumps([s.workdir.parent.as_posix() for s in sessions]), flush=True)\n"
        "time.sleep(100)\n"
    )
    us = subprocess.Popen([sys.executable, "-c", holder, DAEMON, mark], stdout=subprocess.PIPE, text=True)
    assert us.stdout is not None
    roots = [Path(root) for root in json.loads(us.stdout.readline())]
    assert until(lambda: len(alive(mark)) == 1 + 3 * 3)
    assert all(root.exists() for root in roots)
    os.kill(us.pid, signal.SIGKILL)
    us.wait(timeout=PATIENCE)
    assert until(lambda: alive(mark) == [])
    assert until(lambda: not any(root.exists() for root in roots))


def test_the_async_way_waits_without_a_thread_of_its_own(python: Any) -> None:
    factory = python("import time; time.sleep(0.3); print('done')")

    async def one(number: int) -> tuple[str, float]:
        async with await factory.create_async(task=None, rollout_id=f"async-{number}") as session:
            outcome = await session.wait_async()
            return outcome.last_line(), (await session.run_async()).env_reward

    async def every() -> list[tuple[str, float]]:
        return await asyncio.gather(*[one(number) for number in range(8)])

    assert asyncio.run(every()) == [("done", 1.0)] * 8


def test_a_waiter_that_gives_up_ends_nothing_for_others(python: Any) -> None:
    async def give_up(session: Any) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.wait_async(), timeout=0.1)

    text = "import os, time\nwhile not os.path.exists('go'):\n    time.sleep(0.01)"
    with python(text, sandbox="none").create(task=None, rollout_id="give-up") as session:
        asyncio.run(give_up(session))
        (session.workdir / "go").touch()
        assert session.run().env_reward == 1.0
