"""A session that runs an agent program as a process of this machine, with its model calls answered through the proxy.

Always true: the program sees a fresh home and working folder, a stated list of our environment's variables and nothing else
of it, and runs in a sandbox (see `sandbox.py`) unless that was turned off or cannot be had; after `close()` no process of its
tree and no folder of the session is left. A program that failed or ran into a limit is verified like any other; where our side
broke, `verify` raises, and the rollout has no reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from longrein.contract import Intercept, Message, Sampling, Verdict
from longrein.harnesses.box import report_of
from longrein.harnesses.outcome import HarnessError, Judge, Outcome, Verify, as_judge
from longrein.harnesses.program import Program
from longrein.harnesses.sandbox import HOME, TMP, URL, WORK, Sandbox, chosen
from longrein.harnesses.templates import fill
from longrein.proxy import CallLimits, InterceptionServer
from longrein.recorder import Recorder
from longrein.rendering import Rendering
from longrein.rollout import Rollout

PASSED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TERM", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""The variables of our environment that a program gets. No key, no token, no address of ours is among them."""

ENV: Mapping[str, str | None] = {
    "OPENAI_BASE_URL": "{base_url}",
    "OPENAI_API_KEY": "{key}",
    "OPENAI_MODEL": "{model}",
}
"""How a program is told of the proxy unless `env` says otherwise."""

SESSION = ("base_url", "url", "key", "model", "rollout_id", "home", "workdir", "python")
"""What `{name}` may be in a command, a variable or a file, besides the task's fields."""

ENDING_SECONDS = 10.0
"""How long `verify` waits for a program that is about to end (it ran out of calls) before it ends it."""


class ProcessSession:
    """One agent program working on one task; made by `ProcessSessionFactory.create`.

    Pulled (the factory has no recorder): `next_request` and `deliver` until None, then `verify`, then `close`.
    Direct (it has one): the calls are answered by themselves; `run` waits for the end and verifies.
    """

    def __init__(
        self,
        *,
        task: Any,
        rollout_id: str,
        server: InterceptionServer,
        program: Program,
        folder: tempfile.TemporaryDirectory[str],
        judge: Judge,
        rollout: Rollout | None,
    ) -> None:
        self.task = task
        self.rollout_id = rollout_id
        self.workdir = Path(folder.name, "work")
        self._server = server
        self._program = program
        self._folder = folder
        self._judge = judge
        self._rollout = rollout
        self._pulled: list[Message] = []
        self._verdict: Verdict | None = None
        self._verifier: Program | None = None
        self._verifying, self._closing = threading.Lock(), threading.Lock()
        self._closed = False

    def next_request(self) -> Intercept | None:
        """The program's next model call; None once it has ended, or may call no more."""
        return self._server.next_request(self.rollout_id)

    def deliver(self, intercept: Intercept, completion_text: str | Message) -> None:
        """Answer a call with the model's text, or with an assistant message."""
        self._server.deliver(self.rollout_id, intercept, completion_text)
        text = isinstance(completion_text, str)
        reply: Message = {"role": "assistant", "content": completion_text} if text else dict(completion_text)
        self._pulled = [*intercept["messages"], reply]

    def refuse(self, intercept: Intercept, error: Exception) -> None:
        """Answer a call with an error; an overlong prompt is told in the provider's words, so that programs compact."""
        self._server.refuse(self.rollout_id, intercept, error)

    def undelivered(self) -> list[str]:
        """The calls whose reply the program never got, by `request_id`."""
        return [f"{self.rollout_id}/{turn}" for turn in self._server.traffic(self.rollout_id).undelivered]

    def wait(self, timeout: float | None = None) -> Outcome:
        """Until the program has ended; what it left. Raises `TimeoutError` should it still run after `timeout` seconds."""
        self._program.ended.result(timeout)
        return self._outcome()

    async def wait_async(self) -> Outcome:
        await asyncio.wrap_future(self._program.ended)
        return self._outcome()

    def seal(self) -> None:
        """The program may call the model no more, and its record stays as it is."""
        self._server.seal(self.rollout_id)

    def run(self) -> Verdict:
        """The direct way from here to the verdict."""
        self.wait()
        return self.verify()

    async def run_async(self) -> Verdict:
        """`run` for hundreds at a time: only the verifier takes a thread."""
        await self.wait_async()
        return await asyncio.to_thread(self.verify)

    def verify(self) -> Verdict:
        """Judge what the program left; the same verdict however often it is asked for."""
        with self._verifying:
            if self._verdict is None:
                self._verdict = self._verified()
            return self._verdict

    def _verified(self) -> Verdict:
        if self._closed:
            raise HarnessError(f"rollout {self.rollout_id!r} is closed; verify it before")
        self.seal()
        try:
            self._program.ended.result(timeout=ENDING_SECONDS)
        except TimeoutError:
            self._program.stop()
        outcome = self._outcome()
        if trouble := report_of(self._folder.name)[1]:
            raise HarnessError(
                f"the sandbox of rollout {self.rollout_id!r} broke: {trouble} {outcome.stderr[-500:].strip()}"
            )
        if (failure := self._server.traffic(self.rollout_id).failure) is not None:
            raise HarnessError(f"rollout {self.rollout_id!r} has no verdict: {failure}")
        try:
            return self._judge(self.task, outcome, self._verifier_started)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise HarnessError(f"the verifier of rollout {self.rollout_id!r} failed: {cause}") from error

    def _verifier_started(self, program: Program) -> None:
        self._verifier = program
        if self._closed:
            program.stop()

    def _outcome(self) -> Outcome:
        if self._closed:
            raise HarnessError(f"rollout {self.rollout_id!r} is closed")
        program, traffic = self._program, self._server.traffic(self.rollout_id)
        return Outcome(
            stdout=program.stdout.text(),
            stderr=program.stderr.text(),
            exit_code=program.ended.result(),
            workdir=self.workdir,
            limit="time" if program.timed_out else report_of(self._folder.name)[0] or traffic.limit,
            messages=self._messages(),
        )

    def _messages(self) -> list[Message]:
        if self._rollout is None:
            return self._pulled
        calls = [call for call in self._rollout.calls.values() if call.excluded is None]
        return (
            [message for call in self._rollout.path(calls[-1].id) for message in (*call.messages, call.reply)]
            if calls
            else []
        )

    def close(self) -> None:
        """End the program and all it started, and remove its folders. Any number of times, in any state."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            with contextlib.ExitStack() as last_first:
                last_first.callback(self._folder.cleanup)
                last_first.callback(self._server.close, self.rollout_id)
                last_first.callback(self._program.stop)
                if self._verifier is not None:
                    last_first.callback(self._verifier.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(asyncio.to_thread(self.close))


class ProcessSessionFactory:
    """Starts a command for each task, told of the proxy by environment variables and config files.

    `{name}` in `command`, `env` and `files` is filled with a field of the task, the `task` itself, or one of `base_url`,
    `url`, `key`, `model`, `rollout_id`, `home`, `workdir` and `python`.

        with InterceptionServer() as server:
            factory = ProcessSessionFactory(
                ["{python}", "-m", "longrein.harnesses.react", "--rooms", "{rooms}"],
                server=server,
                verify="longrein.harnesses.react.verify_hunt",
                timeout=60,
            )
            with factory.create(task={"rooms": ["attic", "barn"]}, rollout_id="r1") as session:
                while (intercept := session.next_request()) is not None:
                    session.deliver(intercept, my_model(intercept["messages"], intercept["tools"]))
                print(session.verify().env_reward)
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        server: InterceptionServer,
        verify: Verify | str | Sequence[str],
        env: Mapping[str, str | None] | None = None,
        files: Mapping[str, str] | None = None,
        prepare: Callable[[Any, Path], None] | None = None,
        passed: Sequence[str] = PASSED,
        limits: CallLimits | None = None,
        timeout: float | None = 600.0,
        verify_timeout: float | None = 600.0,
        recorder: Recorder | None = None,
        sampling: Sampling | None = None,
        max_length: int | None = None,
        rendering: Rendering | None = None,
        sandbox: str | Mapping[str, Any] | Sandbox = "auto",
    ) -> None:
        """`env` is added to `ENV` (None takes a name out of it); `files` are by path, `~/...` in the home and others in the
        working folder, which `prepare` fills for a task before them. `sandbox` is `auto` (where it works), `bubblewrap`, `none`,
        or its settings by name. With a `recorder` its rollout must be open before `create`, and calls are answered at once."""
        if not sys.platform.startswith("linux"):
            raise HarnessError(
                f"programs run as processes on Linux only (this is {sys.platform}): their end is made sure there"
            )
        if isinstance(command, str) or not command or not all(isinstance(part, str) for part in command):
            raise HarnessError(f"command is {command!r}; it must be a list of strings, one for each argument")
        for name, seconds in (("timeout", timeout), ("verify_timeout", verify_timeout)):
            if seconds is not None and not seconds > 0:
                raise HarnessError(f"{name} is {seconds!r}; it must be a number of seconds above 0, or None")
        self.command = list(command)
        self.server = server
        self.recorder = recorder
        self.env = {**ENV, **(env or {})}
        self.files = dict(files or {})
        for path in self.files:
            _place(path, Path("/home"), Path("/work"))
        self.prepare = prepare
        self.limits = limits or CallLimits()
        self.timeout = timeout
        self._passed = {name: os.environ[name] for name in passed if name in os.environ}
        self.sandbox = chosen(sandbox)
        self._judge = as_judge(verify, env=self._passed, timeout=verify_timeout)
        self._hidden = _verifiers_file(verify, self.command) if self.sandbox is not None else ()
        self._calls = {"sampling": sampling, "max_length": max_length, "rendering": rendering}

    def create(self, *, task: Any, rollout_id: str) -> ProcessSession:
        """Start the program on a task."""
        key = self.server.open(rollout_id, recorder=self.recorder, limits=self.limits, **self._calls)
        folder = tempfile.TemporaryDirectory(prefix="longrein-", ignore_cleanup_errors=True)
        try:
            program = self._start(task, rollout_id, key, Path(folder.name))
        except BaseException:
            self.server.close(rollout_id)
            folder.cleanup()
            raise
        return ProcessSession(
            task=task,
            rollout_id=rollout_id,
            server=self.server,
            program=program,
            folder=folder,
            judge=self._judge,
            rollout=None if self.recorder is None else self.recorder.rollout(rollout_id),
        )

    async def create_async(self, *, task: Any, rollout_id: str) -> ProcessSession:
        """`create` without blocking the loop; who is cancelled meanwhile leaves no program behind."""
        making = asyncio.ensure_future(asyncio.to_thread(self.create, task=task, rollout_id=rollout_id))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # it may have failed to start as well
                await asyncio.to_thread((await making).close)
            raise

    def _start(self, task: Any, rollout_id: str, key: str, root: Path) -> Program:
        outside = root if self.sandbox is None else root / "seed"
        home, workdir = outside / "home", outside / "work"
        for folder in (home, workdir, root / "tmp", root / "work"):
            folder.mkdir(parents=True, exist_ok=True)
        url = self.server.url if self.sandbox is None else URL
        values = {
            "base_url": f"{url}/v1",
            "url": url,
            "key": key,
            "model": self.server.model_name,
            "rollout_id": rollout_id,
            "home": str(home) if self.sandbox is None else HOME,
            "workdir": str(workdir) if self.sandbox is None else WORK,
            "python": sys.executable,
        }
        if self.prepare is not None:
            self.prepare(task, workdir)
        for path, template in self.files.items():
            place = _place(path, home, workdir)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(fill(template, task, values, f"files[{path!r}]", strict=False))
        command = [fill(part, task, values, f"command[{index}]") for index, part in enumerate(self.command)]
        scratch = str(root / "tmp") if self.sandbox is None else TMP
        env = {**self._passed, "HOME": values["home"], "TMPDIR": scratch, "PWD": values["workdir"]}
        for name, template in self.env.items():
            if template is not None:
                env[name] = fill(template, task, values, f"env[{name!r}]")
        if shutil.which(command[0], path=env.get("PATH")) is None and not (workdir / command[0]).exists():
            raise HarnessError(f"there is no command {command[0]!r} to run; give its path, or put it on PATH")
        box = None
        if self.sandbox is not None:
            socket = root / "proxy.sock"
            self.server.listen(rollout_id, socket)
            box = self.sandbox.write_down(folder=root, program=self.command, env=env, socket=socket, hidden=self._hidden)
        return Program(
            command,
            env=env,
            cwd=root / "work",
            box=box,
            timeout=self.timeout,
            folder=root,
            on_end=lambda: self.server.end(rollout_id),
        )


def _verifiers_file(verify: Verify | str | Sequence[str], command: Sequence[str]) -> tuple[str, ...]:
    """Where the verifier is written, for the program not to read; unless the program is that file itself."""
    module = verify.rpartition(".")[0] if isinstance(verify, str) else getattr(verify, "__module__", None)
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return () if file is None or module in command or file in command else (file,)


def _place(path: str, home: Path, workdir: Path) -> Path:
    inside = path.removeprefix("~/")
    if not inside or inside.startswith(("/", "~")) or ".." in Path(inside).parts:
        raise HarnessError(f"files names {path!r}; a path is `~/...` in the home or relative to the working folder")
    return (home if path.startswith("~/") else workdir) / inside
