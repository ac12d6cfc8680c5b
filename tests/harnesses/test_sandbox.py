"""Programs in their sandbox, for real: what they cannot see, reach or use up, and what comes out.

Every attack here is bounded, so that it costs little where the sandbox is broken: it ends by the limit of time.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hunter import REACT, hunter
from missing import missing
from patience import PATIENCE, until
from processes import DAEMON, RABBIT, alive, marker, time_is_up

from longrein.engines.scripted import ScriptedEngine
from longrein.harnesses import HarnessError, Outcome, ProcessSessionFactory, sandbox
from longrein.harnesses.box import Box
from longrein.harnesses.sandbox import SandboxError, chosen, why_not
from longrein.proxy import InterceptionServer
from longrein.recorder import Recorder

if (trouble := why_not()) is not None:
    missing(f"no sandbox on this machine: {trouble}")

TASK = {"rooms": ["attic", "barn", "cellar"]}
SMALL = {"memory_mb": 160, "processes": 40, "disk_mb": 20}
Boxed = Callable[..., ProcessSessionFactory]


@pytest.fixture(scope="module")
def server() -> Iterator[InterceptionServer]:
    with InterceptionServer() as server:
        yield server


@pytest.fixture(scope="module")
def boxed(server: InterceptionServer) -> Boxed:
    """A factory for a program given as Python text, in a sandbox; judged by its exit code unless told otherwise."""

    def make(text: str, *arguments: str, **options: Any) -> ProcessSessionFactory:
        options = {
            "verify": lambda task, outcome: float(outcome.exit_code == 0),
            "timeout": PATIENCE,
            "sandbox": "bubblewrap",
            **options,
        }
        return ProcessSessionFactory(["{python}", "-c", text, *arguments], server=server, **options)

    return make


LOOK = """
import json, os, socket, subprocess, sys
asked = json.loads(sys.argv[1])
def tried(action):
    try:
        return repr(action())
    except Exception as error:
        return type(error).__name__
def reads(path):
    return os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(100)
def connects(family, address):
    with socket.socket(family) as sock:
        sock.settimeout(2)
        sock.connect(address)
        return "connected"
print(json.dumps({
    "read": {path: tried(lambda: reads(path)) for path in asked["paths"]},
    "written": {path: tried(lambda: open(path, "w")) for path in asked["writes"]},
    "settings": tried(lambda: open("/proc/sys/kernel/core_pattern", "r+")),
    "tcp": tried(lambda: connects(socket.AF_INET, ("127.0.0.1", asked["port"]))),
    "abstract": tried(lambda: connects(socket.AF_UNIX, chr(0) + asked["abstract"])),
    "proxy": tried(lambda: connects(socket.AF_INET, ("127.0.0.1", int(os.environ["OPENAI_BASE_URL"].split(":")[2][:-3])))),
    "processes": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
    "words": [open(f"/proc/{name}/cmdline").read() for name in os.listdir("/proc") if name.isdigit()],
    "namespace": subprocess.run(["unshare", "--user", "true"], capture_output=True).returncode,
    "user": os.getuid(),
    "capabilities": [line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")],
    "variables": dict(os.environ),
    "found": [[where, *names] for where in ("/", "/run", "/tmp", "/box", "/root", "/home", "/mnt", "/var") if os.path.isdir(where)
              for names in [sorted(os.listdir(where))]],
    "interfaces": [name for _, name in socket.if_nameindex()],
    "cwd": os.getcwd(),
}))
"""


@pytest.fixture(scope="module")
def seen(boxed: Boxed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What a program sees that looks for everything it should not, beside another session and a listener of our own."""
    run = tmp_path_factory.mktemp("run")
    answer, checkpoint = run / "answer.txt", run / "checkpoints/checkpoint-1/model.safetensors"
    checkpoint.parent.mkdir(parents=True)
    for path in (answer, checkpoint):
        path.write_text("secret-of-ours")
    name = f"longrein-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{name}")
        abstract.listen()
        other = boxed("import time; time.sleep(60)", sandbox="none").create(task=None, rollout_id="other")
        shared = Path(f"/dev/shm/{name}")
        shared.write_text("secret-of-ours")
        os.environ["HF_TOKEN"] = "secret-of-ours"
        try:
            hidden = [
                str(answer),
                str(checkpoint),
                str(run),
                __file__,
                str(Path(__file__).parents[2]),
                str(Path(__file__).parents[2] / ".git/config"),
                str(Path(sandbox.__file__).parents[1] / "envs/hunt.py"),
                str(Path.home() / ".bashrc"),
                str(Path.home() / ".gitconfig"),
                str(other.workdir.parent),
                str(other.workdir.parent / "home"),
                str(shared),
                "/etc/shadow",
                "/etc/passwd",
                "/sys/class/net",
                f"/proc/{os.getpid()}/environ",
            ]
            writes = [
                "/x",
                "/usr/x",
                "/etc/x",
                "/dev/x",
                "/run/longrein/x",
                "/run/longrein/relay.py",
                f"{sys.base_prefix}/x",
            ]
            asked = {"paths": hidden, "writes": writes, "port": listener.getsockname()[1], "abstract": name}
            text = "exec(open('look.py').read())"
            factory = boxed(text, "{asked}", files={"look.py": LOOK}, env={"OURS": "1"})
            with factory.create(task={"asked": asked}, rollout_id="looks") as session:
                outcome = session.wait()
                assert outcome.exit_code == 0, outcome.stderr
                found = json.loads(outcome.stdout)
                found |= {"other": other, "listeners": (listener, abstract), "text": outcome.stdout}
                yield found
        finally:
            other.close()
            shared.unlink()
            del os.environ["HF_TOKEN"]


def test_nothing_of_ours_can_be_read(seen: dict[str, Any]) -> None:
    read = seen["read"]
    passwd = read.pop("/etc/passwd")
    assert "agent:x:1000" in passwd
    assert "root" not in passwd
    repository = read.pop(str(Path(__file__).parents[2]), "[]")  # on the way to the interpreter or to this package's source
    assert set(eval(repository)) <= {".venv", "src"} or repository == "FileNotFoundError"
    assert set(read.values()) <= {"FileNotFoundError", "PermissionError"}, read
    assert "secret-of-ours" not in seen["text"]


def test_the_listeners_of_this_machine_are_not_reached_and_the_proxy_is(seen: dict[str, Any]) -> None:
    assert (seen["tcp"], seen["abstract"]) == ("ConnectionRefusedError",) * 2
    assert seen["proxy"] == "'connected'"
    assert seen["interfaces"] == ["lo"]
    for listener in seen["listeners"]:
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_nothing_but_its_own_folders_can_be_written(seen: dict[str, Any]) -> None:
    assert set(seen["written"].values()) == {"OSError"}  # a read-only file system
    assert seen["settings"] == "OSError"


def test_no_process_but_its_own_is_there_and_no_power_over_the_kernel(seen: dict[str, Any]) -> None:
    assert len(seen["processes"]) == 3
    assert max(seen["processes"]) < 10
    assert (seen["user"], seen["capabilities"]) == (1000, ["0000000000000000"])
    assert seen["namespace"] != 0
    assert [words.split("\0")[0].rpartition("/")[2][:6] for words in seen["words"]] == ["bwrap", "python", "python"]


def test_the_variables_are_the_stated_ones(seen: dict[str, Any]) -> None:
    variables = seen["variables"]
    ours = {"OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL", "OURS", "HOME", "TMPDIR", "PWD", "LONGREIN_PROGRAM"}
    system = {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "TERM", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"}
    assert set(variables) - ours <= system
    assert [variables[name] for name in ("HOME", "TMPDIR", "PWD")] == ["/box/home", "/tmp", "/box/work"]
    assert seen["cwd"] == "/box/work"


def test_a_verifier_beside_the_program_is_empty_to_it(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "node_modules/agent"
    package.mkdir(parents=True)
    (package / "judging.py").write_text("def verify(task, outcome):\n    return float(outcome.stdout == '0\\n')\n")
    (package / "agent").write_text('#!/bin/sh\nwc -c < "$(dirname "$0")/judging.py"\n')
    (package / "agent").chmod(0o755)
    monkeypatch.syspath_prepend(package)
    factory = ProcessSessionFactory(
        [str(package / "agent")], server=server, verify="judging.verify", sandbox="bubblewrap", timeout=PATIENCE
    )
    with factory.create(task=None, rollout_id="beside") as session:
        assert session.run().env_reward == 1.0, session.wait()


def test_a_command_that_names_a_folder_or_a_device_shows_nothing_more(server: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret-of-ours")
    command = ["sh", "-c", 'ls "$1"; echo fine > "$2"; ls "$3"', "sh", str(tmp_path), "/dev/null", "/"]
    factory = ProcessSessionFactory(command, server=server, verify=lambda *_: 1.0, sandbox="bubblewrap", timeout=PATIENCE)
    with factory.create(task=None, rollout_id="names") as session:
        outcome = session.wait()
        assert outcome.exit_code == 0
        assert "Permission denied" not in outcome.stderr
        assert "secret" not in outcome.stdout


FORKS = "import os, time\nfor _ in range(300):\n    if os.fork() == 0:\n        time.sleep(99)\n        os._exit(0)\ntime.sleep(99)"
DOUBLES = """
import os, time
for _ in range(8):
    os.fork()
    os.setsid() if os.getpid() != os.getpgid(0) else None
time.sleep(99)
"""
THREADS = "import threading, time\nfor _ in range(200):\n    threading.Thread(target=time.sleep, args=(99,)).start()"
HOARDS = "import time\nheld = []\nfor _ in range(30):\n    held.append(bytearray(b'x' * 10_000_000))\ntime.sleep(99)"
FILLS = """
import sys, time
with open(sys.argv[1], "wb") as file:
    for _ in range(200):
        file.write(b"x" * 1_000_000)
        file.flush()
time.sleep(99)
"""
STREWS = "import os, time\nos.mkdir('d')\nfor n in range(20_000):\n    open('d/' + str(n), 'w').close()\ntime.sleep(99)"


@pytest.mark.parametrize(
    ("text", "arguments", "limit"),
    [
        (FORKS, (), "processes"),
        (DOUBLES, (), "processes"),
        (THREADS, (), "processes"),
        (HOARDS, (), "memory"),
        (FILLS, ("filler",), "disk"),
        (FILLS, ("/box/home/filler",), "disk"),
        (FILLS, ("/tmp/filler",), "disk"),
        (FILLS, ("/dev/shm/filler",), "disk"),
        (STREWS, (), "disk"),
    ],
)
def test_a_bomb_ends_its_own_rollout_only_and_says_why(
    boxed: Boxed, text: str, arguments: tuple[str, ...], limit: str
) -> None:
    judged: list[Outcome] = []
    mark = marker()
    factory = boxed(text, *arguments, mark, sandbox=SMALL, verify=lambda task, outcome: judged.append(outcome) or 0.25)
    beside = boxed("import sys; sys.stdin.read(); import time; time.sleep(0.3); print('fine')", sandbox=SMALL)
    with beside.create(task=None, rollout_id="beside") as other, factory.create(task=None, rollout_id="bomb") as session:
        assert session.run().env_reward == 0.25
        assert alive(mark) == []
        assert (other.wait().exit_code, other.wait().stdout) == (0, "fine\n")
    assert judged[0].limit == limit


def test_a_page_that_processes_share_is_counted_once(boxed: Boxed) -> None:
    text = "import os, time\nheld = b'x' * 70_000_000\nfor _ in range(4):\n    os.fork() or (time.sleep(0.6), os._exit(0))\ntime.sleep(0.7)"
    with boxed(text, sandbox=SMALL).create(task=None, rollout_id="shared") as session:
        outcome = session.wait()
        assert (outcome.exit_code, outcome.limit) == (0, None)


@pytest.mark.parametrize("text", [DAEMON, RABBIT])
def test_nothing_is_left_of_what_moves_away(boxed: Boxed, text: str) -> None:
    mark = marker()
    session = boxed(text, "100", mark).create(task=None, rollout_id="left")
    assert until(lambda: session._program.stdout.text() == "started\n")
    session.close()
    assert alive(mark) == []
    assert not session.workdir.parent.exists()


HOLDER = """
import json, sys, time
from longrein.harnesses import ProcessSessionFactory
from longrein.proxy import InterceptionServer
server = InterceptionServer().start()
command = ["{python}", "-c", sys.argv[1], "100", sys.argv[2]]
factory = ProcessSessionFactory(command, server=server, verify=lambda *_: 1.0, sandbox="bubblewrap")
sessions = [factory.create(task=None, rollout_id=str(n)) for n in range(2)]
print(json.dumps([str(s.workdir.parent) for s in sessions]), flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("whom", ["us", "supervisors"])
def test_killing_us_or_the_supervisors_leaves_nothing(whom: str) -> None:
    mark = marker()
    us = subprocess.Popen([sys.executable, "-c", HOLDER, DAEMON, mark], stdout=subprocess.PIPE, text=True)
    try:
        assert us.stdout is not None
        roots = [Path(root) for root in json.loads(us.stdout.readline())]
        assert until(lambda: len(alive(mark)) == 1 + 2 * 6)  # each: supervisor, bubblewrap twice, relay, program, daemon
        if whom == "supervisors":
            for pid in alive(mark, "supervisor.py"):
                os.kill(pid, signal.SIGKILL)
            assert until(lambda: alive(mark) == [us.pid])
    finally:
        us.kill()
        us.wait(timeout=PATIENCE)
    assert until(lambda: alive(mark) == [])
    if whom == "us":
        assert until(lambda: not any(root.exists() for root in roots))
    for root in roots:
        shutil.rmtree(root, ignore_errors=True)


LEAVES = """
import os, sys
os.makedirs("a/b/c")
open("a/b/c/text", "w").write("found")
os.chmod("a/b/c/text", 0o000)
os.chmod("a/b", 0o000)
open("run.sh", "w").write("#!/bin/sh")
os.chmod("run.sh", 0o6755)
for name, target in (("inside", "a"), ("absolute", "/box/work/run.sh"), ("system", "/usr/bin/env"), ("out", sys.argv[1]),
                     ("up", "../box"), ("step", "a/../.."), ("chain", "step/report"), ("dangling", "nowhere"), ("beside", "../workshop")):
    os.symlink(target, name)
os.mkfifo("pipe")
with open("claims", "wb") as file:
    file.truncate(1 << 50)
with open("holes", "wb") as file:
    file.truncate(10_000_000)
    file.seek(5_000_000)
    file.write(b"middle")
deep = "d"
for _ in range(200):
    os.mkdir(deep)
    os.chdir(deep)
"""


def test_the_work_folder_comes_out_and_no_link_leads_away(boxed: Boxed, tmp_path: Path) -> None:
    secret = tmp_path / "answer"
    secret.write_text("secret-of-ours")
    with boxed(LEAVES, str(secret / "..")).create(task=None, rollout_id="leaves") as session:
        outcome = session.wait()
        assert outcome.exit_code == 0, outcome.stderr
        work = outcome.workdir
        found = {path.name for path in work.iterdir()}
        assert found == {"a", "run.sh", "inside", "absolute", "system", "dangling", "holes", "d"}
        assert (work / "inside/b/c/text").read_text() == "found"
        assert (work / "absolute").read_text() == "#!/bin/sh"
        assert (work / "run.sh").stat().st_mode & 0o7777 == 0o755
        holes = (work / "holes").read_bytes()
        assert (len(holes), holes[5_000_000:5_000_006]) == (10_000_000, b"middle")
        assert (work / "holes").stat().st_blocks * 512 < 1_000_000
        assert len(list((work / "d").rglob("*"))) in range(40, 70)


def test_many_links_to_one_file_are_not_many_files_outside(boxed: Boxed) -> None:
    text = "import os\nopen('one', 'wb').write(b'x' * 5_000_000)\nfor n in range(50):\n    os.link('one', 'link' + str(n))"
    with boxed(text, sandbox=SMALL).create(task=None, rollout_id="links") as session:
        outcome = session.wait()
        assert (outcome.exit_code, outcome.limit) == (0, "disk")
        assert sum(path.stat().st_size for path in outcome.workdir.iterdir()) <= 20 << 20


HOSTILE = """
import os
for n in range(30):
    with open("hole" + str(n), "wb") as file:
        file.truncate(5_000_000)
os.utime("hole0", ns=(-(1 << 62), 1 << 62))
os.utime("hole1", (1 << 62, 1 << 62))
open("odd\\nname \\udcff", "w").close()
work = os.getcwd()
for _ in range(40):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
    os.symlink("/etc", "link")
"""


def test_no_file_name_time_or_size_breaks_what_comes_out(boxed: Boxed) -> None:
    with boxed(HOSTILE, sandbox=SMALL).create(task=None, rollout_id="hostile") as session:
        assert session.run().env_reward == 1.0  # judged: no file of its own breaks the judging
        outcome = session.wait()
        assert outcome.limit == "disk"
        assert sum(path.stat().st_size for path in outcome.workdir.glob("hole*")) <= 20 << 20
        assert max(len(str(path)) for path in outcome.workdir.rglob("*")) < 2000
        assert (outcome.workdir / os.fsdecode(b"odd\nname \xff")).is_file()
        assert not list(outcome.workdir.rglob("link"))
        shutil.copytree(outcome.workdir, outcome.workdir.parent / "copied")  # and it can be worked with


KEYS = """
import ctypes
def keyctl(*arguments):
    return ctypes.CDLL(None).syscall(250, *arguments)
found = keyctl(10, -3, b"user", b"longrein-test", 0)
print(found > 0)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="system calls have other numbers here")
def test_the_keys_of_our_session_are_not_the_programs(server: InterceptionServer) -> None:
    holder = (
        "import ctypes, sys\nfrom longrein.harnesses.isolated import isolated\nfrom pathlib import Path\nimport tempfile\n"
        "libc = ctypes.CDLL(None)\nassert libc.syscall(250, 1, None) > 0\n"
        "assert libc.syscall(248, b'user', b'longrein-test', b'secret', 6, -3) > 0\nexec(sys.argv[1])\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    with isolated(['{python}', '-c', sys.argv[1]], folder=Path(folder), timeout=240) as ended:\n"
        "        print(ended.stdout, ended.stderr)\n"
    )
    ended = subprocess.run([sys.executable, "-c", holder, KEYS], capture_output=True, text=True, timeout=480)
    if "AssertionError" in ended.stderr:
        pytest.skip("the kernel keeps no keys for us")
    assert ended.stdout.split() == ["True", "False"], ended.stderr


def test_memory_that_a_program_has_the_relay_take_is_counted(tmp_path: Path) -> None:
    made = Box({"memory": 100 << 20, "processes": 4, "disk": 1 << 20})
    page = os.sysconf("SC_PAGESIZE")

    def process(pid: int, threads: int, megabytes: int) -> None:
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        fields = ["S", *["0"] * 16, str(threads), "0", "0", "0", str((megabytes << 20) // page)]
        (tmp_path / f"{pid}/stat").write_text(f"{pid} (py) thon) {' '.join(fields)}")
        (tmp_path / f"{pid}/smaps_rollup").write_text(f"Rss: 0 kB\nPss: {megabytes << 10} kB\n")

    made._proc = os.open(tmp_path, os.O_RDONLY)
    try:
        for pid in (1, 2, 3, 4):
            process(pid, threads=2 if pid > 2 else 1, megabytes=20)
        assert made._overrun() is None
        process(2, threads=1, megabytes=90)
        assert made._overrun() == "memory"
        process(2, threads=2, megabytes=20)
        assert made._overrun() == "processes"
    finally:
        os.close(made._proc)


def test_a_supervisor_that_is_lost_is_no_empty_work_folder(boxed: Boxed) -> None:
    with boxed("import time; time.sleep(60)").create(task=None, rollout_id="lost") as session:
        session._program._process.kill()
        with pytest.raises(HarnessError, match="ended before the work folder was brought out"):
            session.run()


def test_without_a_sandbox_nothing_is_read_as_its_report(boxed: Boxed) -> None:
    with boxed("open('../report', 'w').write('disk\\nbroke')", sandbox="none").create(
        task=None, rollout_id="forged"
    ) as session:
        assert session.run().env_reward == 1.0
        assert session.wait().limit is None


def test_a_program_out_of_time_has_its_work_judged(boxed: Boxed) -> None:
    text = "import time\nopen('half', 'w').write('done')\nprint('half done', flush=True)\ntime.sleep(100)"
    judge = lambda task, outcome: float((outcome.workdir / "half").read_text() == "done")  # noqa: E731
    with boxed(text, verify=judge).create(task=None, rollout_id="time") as session:
        time_is_up(session._program)
        assert session.run().env_reward == 1.0
        assert session.wait().limit == "time"


def test_config_files_are_there_and_paths_are_the_same_for_every_rollout(server: InterceptionServer) -> None:
    printed = []
    for number in range(2):
        factory = ProcessSessionFactory(
            ["sh", "-c", "cat ~/.config/agent/x.toml notes/task.json; pwd; ls -A . ~ {home} {workdir}; touch ~/new"],
            server=server,
            verify=lambda *_: 1.0,
            sandbox="bubblewrap",
            files={"~/.config/agent/x.toml": "url = {base_url}\n", "notes/task.json": '{"rooms": {rooms}}\n'},
        )
        with factory.create(task=TASK, rollout_id=f"files-{number}") as session:
            outcome = session.wait()
            assert outcome.exit_code == 0, outcome.stderr
            printed.append(outcome.stdout)
    assert printed[0] == printed[1]
    assert printed[0].startswith('url = http://127.0.0.1:41900/v1\n{"rooms": ["attic", "barn", "cellar"]}\n/box/work\n')


def test_a_program_that_cannot_start_is_told_apart_from_a_sandbox_that_cannot(
    boxed: Boxed, server: Any, tmp_path: Path
) -> None:
    with ProcessSessionFactory(
        ["sh", "-c", "exit 3"], server=server, verify=lambda task, outcome: outcome.exit_code, sandbox="bubblewrap"
    ).create(task=None, rollout_id="three") as session:
        assert session.run().env_reward == 3
    folder = tmp_path / "gone"
    folder.mkdir()
    factory = boxed("pass", sandbox={"readable": [str(folder)]})
    folder.rmdir()
    with (
        factory.create(task=None, rollout_id="gone") as session,
        pytest.raises(HarnessError, match="sandbox .* broke.*gone"),
    ):
        session.run()


@pytest.mark.parametrize("kind", ["node", "venv", "file"])
def test_where_a_program_lives_is_found(server: InterceptionServer, tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret-of-ours")
    if kind == "node":  # as npm installs: a link into the package, whose files it reads
        package = tmp_path / "node_modules/agent"
        (tmp_path / "node_modules/.bin").mkdir(parents=True)
        package.mkdir()
        (package / "said").write_text("hello from its package")
        script, said = package / "cli.sh", 'cat "$(dirname "$(readlink -f "$0")")/said"'
        script.write_text(f"#!/usr/bin/env sh\n{said}\ncat {secret}\n")
        command = tmp_path / "node_modules/.bin/agent"
        command.symlink_to("../agent/cli.sh")
    elif kind == "venv":  # as pip installs: a script whose first line names the environment's interpreter
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
        command = script = tmp_path / "venv/bin/agent"
        script.write_text(
            f"#!{tmp_path}/venv/bin/python\nimport sys\nassert sys.prefix != sys.base_prefix\n"
            f"print('hello from its package')\nopen({str(secret)!r})\n"
        )
    else:
        command = script = tmp_path / "agent"
        script.write_text(f"#!/bin/sh\necho hello from its package\ncat {secret}\n")
    script.chmod(0o755)
    factory = ProcessSessionFactory([str(command)], server=server, verify=lambda *_: 1.0, sandbox="bubblewrap")
    with factory.create(task=None, rollout_id=kind) as session:
        outcome = session.wait()
        assert outcome.stdout.strip() == "hello from its package", outcome.stderr
        assert outcome.exit_code == 1
        assert "No such file" in outcome.stderr


@pytest.mark.parametrize("flags", [(), ("--stream",)])
def test_react_samples_the_same_tokens_inside_as_outside(server: InterceptionServer, rendering: Any, flags: Any) -> None:
    found = rendering("qwen3")
    recorder = Recorder(ScriptedEngine(hunter, found), found)
    rollouts = {}
    for box in ("none", "bubblewrap"):
        rollouts[box] = recorder.open(f"{box}{flags}", seed=3)
        factory = ProcessSessionFactory(
            [*REACT, *flags],
            server=server,
            verify="longrein.harnesses.react.verify_hunt",
            recorder=recorder,
            sandbox=box,
            timeout=PATIENCE,
        )
        with factory.create(task=TASK, rollout_id=f"{box}{flags}") as session:
            assert session.run().env_reward == 1.0, session.wait().stderr
    outside, inside = (list(rollout.calls.values()) for rollout in rollouts.values())
    assert len(inside) == 4
    for one, other in zip(outside, inside, strict=True):
        assert one.context_ids.tolist() == other.context_ids.tolist()
        assert one.completion_ids.tolist() == other.completion_ids.tolist()
        assert other.delivered


ASKS = """
import http.client, json, os, sys
def ask(content, wait=True):
    host = os.environ["OPENAI_BASE_URL"].split("/")[2]
    connection = http.client.HTTPConnection(host, timeout=480)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]})
    connection.request("POST", "/v1/chat/completions", body, {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    if wait:
        return json.loads(connection.getresponse().read())["choices"][0]["message"]["content"]
    connection.close()
"""


def test_the_relay_carries_large_bodies_both_ways(boxed: Boxed) -> None:
    large = "x" * 8_000_000
    with boxed(ASKS + "print(len(ask('x' * 8_000_000)))").create(task=None, rollout_id="large") as session:
        intercept = session.next_request()
        assert intercept is not None
        assert intercept["messages"][0]["content"] == large
        session.deliver(intercept, large + "y")
        assert session.wait().stdout == "8000001\n"


def test_a_reply_that_the_program_did_not_wait_for_is_not_delivered(boxed: Boxed) -> None:
    with boxed(ASKS + "ask('one', wait=False)\nask('two')\nprint(ask('three'))").create(
        task=None, rollout_id="leaves"
    ) as session:
        asked = {}
        for _ in range(2):
            intercept = session.next_request()
            assert intercept is not None
            asked[intercept["messages"][0]["content"]] = intercept
        session.deliver(asked["two"], "second")
        third = session.next_request()
        assert third is not None
        session.deliver(asked["one"], "first")
        session.deliver(third, "third")
        assert session.wait().stdout == "third\n"
        assert until(lambda: session.undelivered() == [asked["one"]["request_id"]])


@pytest.fixture
def without_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "why_not", lambda: "there is no `bwrap` on PATH")
    monkeypatch.setattr(sandbox, "_warn", functools.cache(sandbox._warn.__wrapped__))


def test_without_bubblewrap_there_is_a_warning_or_a_refusal(without_bubblewrap: None, caplog: Any) -> None:
    assert chosen("auto") is None
    assert "without a sandbox, as bubblewrap does not work here: there is no `bwrap`" in caplog.text
    for asked in ("bubblewrap", SMALL):
        with pytest.raises(SandboxError, match="bubblewrap does not work here"):
            chosen(asked)


def test_turning_it_off_warns_once(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(sandbox, "_warn", functools.cache(sandbox._warn.__wrapped__))
    assert chosen("none") is chosen("none") is None
    assert caplog.text.count("they can read and write what you can") == 1


def test_why_not_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt-get install bubblewrap" in (why_not.__wrapped__() or "")
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho no permission to make a namespace >&2; exit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    assert why_not.__wrapped__() == "no permission to make a namespace"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("docker", "sandbox is 'docker'; it must be one of auto, bubblewrap, none"),
        ({"memory": 3}, "sandbox has no setting memory; it has disk_mb"),
        ({"memory_mb": 0}, "memory_mb of the sandbox is 0"),
        ({"readable": "/opt"}, "readable of the sandbox is '/opt'; it must be a list"),
        ({"readable": ["relative"]}, "names 'relative', which is no absolute path"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused(setting: Any, words: str) -> None:
    with pytest.raises(SandboxError, match=words):
        chosen(setting)
