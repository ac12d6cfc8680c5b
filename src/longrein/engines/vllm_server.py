"""Starts a vLLM server as training needs it, and ends it with everything it started.

Always true: the server and its children are gone once `close` returns, and also when this process is killed: a supervisor
holds them (`longrein.harnesses.supervisor`). What the server says goes to a log file, whose end is in every error.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from longrein.contract import LongreinError
from longrein.harnesses import supervisor

INSIDE = Path(__file__).parent / "inside_vllm"
EXECUTABLE = "LONGREIN_VLLM"
"""The environment variable that names the `vllm` command."""
POLITE_SECONDS = 10.0
"""How long a server that is asked to end may take before it is killed."""
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause, resume and change weights
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def find_vllm(given: str | Path | None = None) -> Path:
    """The `vllm` command: as given, as `LONGREIN_VLLM` says, on the PATH, beside this Python, or in `.venv-vllm`."""
    for source, named in (("--vllm", given), (EXECUTABLE, os.environ.get(EXECUTABLE))):
        if named:
            found = shutil.which(named)
            if found is None:
                raise LongreinError(f"{source} is {str(named)!r}, which is no command that can be run")
            return Path(found).absolute()
    folders = [*os.get_exec_path(), str(Path(sys.executable).parent), ".venv-vllm/bin"]
    found = shutil.which("vllm", path=os.pathsep.join(folders))
    if found is None:
        raise LongreinError(
            "vLLM is not installed here: no `vllm` command on the PATH or in .venv-vllm. Install it (`pip install vllm` in an "
            f"environment of its own) and name its command with --vllm or {EXECUTABLE}"
        )
    return Path(found).absolute()


def command(
    vllm: Path,
    model: str,
    *,
    host: str,
    port: int,
    dtype: str = "auto",
    max_model_len: int | None = None,
    lora_rank: int = 0,
    nccl: bool = False,
    extra: Sequence[str] = (),
) -> list[str]:
    """What is run. `extra` comes last, so that it can say otherwise."""
    flags = ["serve", model, "--host", host, "--port", str(port), "--dtype", dtype]
    flags += ["--enable-scale-out"]  # the route that takes and gives token ids
    flags += ["--logprobs-mode", "processed_logprobs"]  # of the distribution that is sampled from, temperature included
    flags += ["--generation-config", "vllm"]  # the model's own file would bring its top-p and top-k
    flags += ["--worker-extension-cls", "longrein_vllm.WeightUpdates"]
    flags += ["--disable-uvicorn-access-log"]
    if max_model_len is not None:
        flags += ["--max-model-len", str(max_model_len)]
    if lora_rank:  # two at once: calls that began with the adapter before, and those with the newest
        flags += ["--enable-lora", "--max-lora-rank", str(lora_rank), "--max-loras", "2", "--max-cpu-loras", "4"]
    if nccl:
        flags += ["--weight-transfer-config", '{"backend": "nccl"}']
    return [str(vllm), *flags, *extra]


class VLLMServer:
    """A running server, until it is closed.

    >>> with VLLMServer("Qwen/Qwen3-0.6B") as server:                                           # doctest: +SKIP
    ...     engine = VLLMEngine(server.url)

    `options` are those of `command`. `port` 0 takes a free one.
    """

    def __init__(
        self,
        model: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        vllm: str | Path | None = None,
        log: str | Path | None = None,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        if port and not _free(host, port):
            raise LongreinError(f"something already listens on {host}:{port}; say another --port")
        self.port = port or _free_port(host)
        self.url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '') else host}:{self.port}"
        self.log = Path(log) if log is not None else Path(f"vllm-{self.port}.log")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if Path(model).is_dir():
            model = str(Path(model).absolute())
        environ = {**os.environ, **ENVIRONMENT, **(environment or {})}
        environ["PYTHONPATH"] = os.pathsep.join(part for part in (str(INSIDE), os.environ.get("PYTHONPATH")) if part)
        if Path(model).is_dir():
            environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is missing from a folder
        if host == "127.0.0.1":
            environ.setdefault("VLLM_HOST_IP", host)
        served = command(find_vllm(vllm), model, host=host, port=self.port, **options)
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(supervisor.__file__), "-", *served],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,  # Ctrl-C is for us, and reaches the server through `close`
            )

    def wait(self, seconds: float = 600.0) -> None:
        """Return once the server answers; an error says why it does not."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise LongreinError(f"vLLM ended with status {self._process.returncode} before it was ready: {self._said()}")
            if self.healthy():
                return
            time.sleep(0.2)
        raise LongreinError(f"vLLM was not ready after {seconds:g} s: {self._said()}")

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def run(self) -> None:
        """Wait for as long as the server runs; that it ends by itself is an error."""
        status = self._process.wait()
        raise LongreinError(f"vLLM ended by itself with status {status}: {self._said()}")

    def close(self) -> None:
        """End the server and its children. It is asked first; shared memory that it leaves all the same is removed."""
        left: set[Path] = set()
        if self._process.poll() is None:
            family = supervisor.descendants(self._process.pid)
            left = _shared_memory(family)
            for pid, group in family.items():
                if pid == group:  # the server itself, which leads the session it was started in
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(POLITE_SECONDS)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(supervisor.STOP)
            self._process.stdin.close()
        self._process.wait()
        for path in left:
            path.unlink(missing_ok=True)

    def __enter__(self) -> VLLMServer:
        try:
            self.wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _said(self) -> str:
        """The lines of the log that tell what went wrong: the last error, else the end."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"[Ee]rror: ", line) and not re.search(r" (WARNING|INFO) ", line)]
        return f"{(errors or lines or ['it said nothing'])[-1][-500:]} (all of it: {self.log})"


def _shared_memory(pids: Iterable[int]) -> set[Path]:
    """What Python's multiprocessing made for these processes, which outlives them when they are killed."""
    mapped: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # by inode: a semaphore is mapped under another name than it then gets
            mapped |= set(re.findall(r" (\d+) +/dev/shm/", Path(f"/proc/{pid}/maps").read_text()))
    made = [*Path("/dev/shm").glob("psm_*"), *Path("/dev/shm").glob("sem.mp-*")]
    return {path for path in made if path.exists() and str(path.stat().st_ino) in mapped}


def _free(host: str, port: int) -> bool:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError:
            return False
        return True


def _free_port(host: str) -> int:
    with socket.socket() as trial:
        trial.bind((host, 0))
        return trial.getsockname()[1]
