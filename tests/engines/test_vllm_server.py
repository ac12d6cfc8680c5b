"""Starting and ending a server, with a small program in vLLM's place; the real one is in `tests/with_vllm`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

from longrein.contract import LongreinError
from longrein.engines.vllm_server import EXECUTABLE, INSIDE, VLLMServer, command, find_vllm
from longrein.harnesses.supervisor import descendants

GOOD = """
import http.server, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(" ".join([os.environ["VLLM_SERVER_DEV_MODE"], os.environ["PYTHONPATH"]]).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()
"""


@pytest.fixture
def program(tmp_path: Path) -> Any:
    def write(code: str) -> Path:
        path = tmp_path / "vllm"
        path.write_text(f"#!{sys.executable}\n{code}")
        path.chmod(0o755)
        return path

    return write


def gone(pids: Any) -> bool:
    return not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_server_is_ready_when_it_answers_and_leaves_nothing_behind(program: Any, tmp_path: Path) -> None:
    with VLLMServer("some-model", vllm=program(GOOD), log=tmp_path / "log") as server:
        assert server.healthy()
        family = descendants(server._process.pid)
        assert len(family) == 2
        assert not gone(family)
    assert gone(family)
    assert not server.healthy()


def test_a_server_ends_with_the_process_that_started_it(program: Any, tmp_path: Path) -> None:
    code = f"""
import os, signal
from longrein.engines.vllm_server import VLLMServer
from longrein.harnesses.supervisor import descendants
server = VLLMServer("m", vllm={str(program(GOOD))!r}, log={str(tmp_path / "log")!r})
server.wait(60)
print(*descendants(os.getpid()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=2 * PATIENCE)
    pids = started.stdout.split()
    assert len(pids) == 3
    for pid in pids:  # each is waited for: a process descriptor is readable once its process has ended
        try:
            descriptor = os.pidfd_open(int(pid))
        except ProcessLookupError:
            continue
        import select

        assert select.select([descriptor], [], [], PATIENCE)[0]
        os.close(descriptor)


def test_a_server_that_ends_before_it_is_ready_says_why(program: Any, tmp_path: Path) -> None:
    server = VLLMServer("m", vllm=program("import sys; sys.exit('ValueError: no such model')"), log=tmp_path / "log")
    with pytest.raises(
        LongreinError, match=r"ended with status 1 before it was ready: ValueError: no such model .all of it"
    ):
        server.wait(60)
    server.close()


def test_a_server_that_is_never_ready_is_given_up(program: Any, tmp_path: Path) -> None:
    server = VLLMServer("m", vllm=program("import time; time.sleep(600)"), log=tmp_path / "log")
    with pytest.raises(LongreinError, match=r"not ready after 0.3 s: it said nothing"):
        server.wait(0.3)
    server.close()


def test_a_port_that_is_taken_is_refused(program: Any, tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LongreinError, match=f"already listens on 127.0.0.1:{port}"):
            VLLMServer("m", port=port, vllm=program(GOOD), log=tmp_path / "log")


def test_the_command_is_found_or_named(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = program("")
    monkeypatch.delenv(EXECUTABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_vllm(path) == path
    with pytest.raises(LongreinError, match="vLLM is not installed here"):
        find_vllm()
    with pytest.raises(LongreinError, match="--vllm is 'nothing'"):
        find_vllm("nothing")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_vllm() == path
    monkeypatch.setenv(EXECUTABLE, "/nowhere/vllm")
    with pytest.raises(LongreinError, match=f"{EXECUTABLE} is '/nowhere/vllm'"):
        find_vllm()


def test_what_is_said_last_wins_and_nothing_is_switched_on_unasked() -> None:
    plain = command(Path("vllm"), "m", host="127.0.0.1", port=1)
    assert plain[:3] == ["vllm", "serve", "m"]
    assert not {"--enable-lora", "--weight-transfer-config", "--max-model-len"} & set(plain)
    full = command(Path("vllm"), "m", host="h", port=1, lora_rank=4, nccl=True, max_model_len=9, extra=["--seed", "1"])
    assert {"--enable-lora", "--weight-transfer-config", "--max-model-len"} <= set(full)
    assert full[-2:] == ["--seed", "1"]


def test_what_vllm_loads_of_longrein_stands_alone() -> None:
    assert [path.name for path in INSIDE.glob("*.py")] == ["longrein_vllm.py"]
    source = (INSIDE / "longrein_vllm.py").read_text()
    assert "import longrein" not in source
    assert "from longrein" not in source
