"""A harness as an environment: an agent program that owns its loop, its model calls answered by the policy in training.

Always true: a rollout here is what any environment's is, the same record, rows and limits; a program that rewrote its history
gives its branches as rows of one rollout. Reward comes from the verifier, which runs after the program is gone.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longrein.contract import LongreinError
from longrein.envs.environment import EnvConfig, EnvConfigError, Environment, Episode
from longrein.harnesses.catalog import harness
from longrein.harnesses.outcome import VERIFIER, HarnessError, as_judge
from longrein.harnesses.process import SESSION, ProcessSessionFactory
from longrein.harnesses.sandbox import SandboxError, chosen
from longrein.harnesses.templates import fill
from longrein.proxy import CallLimits, InterceptionServer
from longrein.recorder import Recorder
from longrein.rollout import Rollout


@dataclass(frozen=True, kw_only=True)
class HarnessConfig(EnvConfig):
    """The settings of `HarnessEnv`, besides those of every environment."""

    command: Sequence[str] = ()
    """The program and its arguments; `{name}` is a field of the task, or `base_url`, `key`, `model`, `home`, `workdir`, `python`."""
    program: str | None = None
    """In place of `command`: a program by its name (`longrein harness list`). It is told the task's `instruction`."""
    verify: str | Sequence[str]
    """The dotted path of a function `(task, outcome) -> reward`, or a command, with `{outcome}` (a JSON file), `{workdir}` and
    `{python}`. It is trusted: it runs as you, in no sandbox, and runs what the program left, if at all, through
    `longrein.harnesses.isolated`."""
    env: Mapping[str, str | None] = field(default_factory=dict)
    """More variables for the program, with the same placeholders."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Config files to write for it, by path: `~/...` in its home, others in its working folder."""
    sandbox: str | Mapping[str, Any] = "auto"
    """`auto` (bubblewrap where it works), `bubblewrap`, `none`, or settings: `memory_mb`, `processes`, `disk_mb`, `readable`."""
    max_seconds: float | None = 300.0
    concurrency: int = 8
    """Programs at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.command) == (self.program is not None):
            raise EnvConfigError(
                f"command is {self.command!r} and program is {self.program!r}; give a command as a list of strings, one for each "
                "argument, or the name of a program"
            )
        try:
            chosen(self.sandbox)
            as_judge(self.verify, env=os.environ, timeout=None)
            if self.program is not None:
                harness(self.program)
        except (SandboxError, HarnessError) as error:
            raise EnvConfigError(str(error)) from None


class HarnessEnv(Environment):
    """Plays each rollout by running a program through the proxy.

    >>> HarnessEnv(tokenizer=tokenizer, env_config={                                             # doctest: +SKIP
    ...     "command": ["{python}", "-m", "longrein.harnesses.react", "--rooms", "{rooms}"],
    ...     "verify": "longrein.harnesses.react.verify_hunt"})
    """

    Config = HarnessConfig
    config: HarnessConfig

    def __init__(self, *, tokenizer: Any, env_config: dict[str, Any] | None = None) -> None:
        super().__init__(tokenizer=tokenizer, env_config=env_config)
        self._lock = threading.Lock()
        self._server: InterceptionServer | None = None

    @property
    def server(self) -> InterceptionServer:
        """The proxy of all this environment's rollouts, started when it is first needed."""
        with self._lock:
            if self._server is None:
                self._server = InterceptionServer().start()
                weakref.finalize(self, self._server.stop)
            return self._server

    @classmethod
    def check_task(cls, config: HarnessConfig, task_data: dict[str, Any]) -> None:
        """Every `{name}` of its commands and variables is one that the session or the task has."""
        command = config.command if config.program is None else harness(config.program).arguments
        verify = () if isinstance(config.verify, str) else config.verify
        told = {name: template for name, template in config.env.items() if template is not None}
        for what, templates, names in (
            ("command", dict(enumerate(command)), SESSION),
            ("env", told, SESSION),
            ("verify", dict(enumerate(verify)), VERIFIER),
        ):
            for key, template in templates.items():
                fill(template, task_data, dict.fromkeys(names, ""), f"{what}[{key!r}]")

    def episode(self, task_data: dict[str, Any]) -> Episode:
        raise LongreinError("a harness plays its own loop; it has no Episode")

    def prepare(self, task_data: dict[str, Any], workdir: Path) -> None:
        """Fill the program's working folder before it starts; it is empty unless a subclass does so."""

    def sessions(self, recorder: Recorder) -> ProcessSessionFactory:
        """Makes the sessions of this environment's rollouts, their calls answered and recorded by `recorder`."""
        config = self.config
        known = {} if config.program is None else harness(config.program).settings()
        return ProcessSessionFactory(
            known.get("command", config.command),
            server=self.server,
            verify=config.verify,
            env={**known.get("env", {}), **config.env},
            files={**known.get("files", {}), **config.files},
            prepare=self.prepare,
            limits=CallLimits(max_calls=config.max_turns),
            timeout=config.max_seconds,
            recorder=recorder,
            sampling=self._sampling(recorder),
            max_length=config.max_tokens,
            sandbox=config.sandbox,
        )

    async def _run(self, rollout: Rollout, recorder: Recorder) -> None:
        session = await self.sessions(recorder).create_async(task=rollout.task, rollout_id=rollout.id)
        async with session:
            outcome = await session.wait_async()
            verdict = await session.run_async()
        if not rollout.calls:
            raise LongreinError(
                f"the program made no model call and ended with exit code {outcome.exit_code}: {outcome.stderr[-500:]}"
            )
        rollout.limit = {"calls": "turns"}.get(outcome.limit or "", outcome.limit)
        rollout.info |= {"exit_code": outcome.exit_code, **verdict.info}
        rollout.reward = float(verdict.env_reward)
        rollout.success = bool(verdict.info.get("success", rollout.reward >= 1.0))
