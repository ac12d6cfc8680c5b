"""Episodes of an agent program with a scripted policy: what training with the program is like, without a model.

Always true: the program is the real one, in its sandbox, and all of its calls go through the proxy and the recorder; only the
replies are written beforehand (see `policies.py`).
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longrein.engines.scripted import ScriptedEngine
from longrein.harnesses.harness import Harness
from longrein.harnesses.outcome import Outcome
from longrein.harnesses.policies import BROKEN, FILE, OLD, RIGHT, Compacting, Delegating, Policy, logs
from longrein.harnesses.process import ProcessSessionFactory
from longrein.harnesses.sandbox import why_not
from longrein.proxy import CallLimits, InterceptionServer, Traffic
from longrein.recorder import Recorder
from longrein.rendering import Rendering
from longrein.rollout import Rollout

INSTRUCTION = f"The function add in {FILE} is wrong. Mend it."
MAX_CALLS = 20
POLICIES = {"mending": Policy, "compaction": Compacting, "sub-agent": Delegating}
"""The episodes there are, and who plays them."""


def episodes(harness: Harness) -> list[str]:
    """The episodes that a program can play."""
    able = {"mending": harness.demo, "compaction": harness.compaction, "sub-agent": harness.sub_agent}
    return [name for name in POLICIES if able[name]]


@dataclass(frozen=True, slots=True)
class Demonstration:
    """An episode that was played."""

    harness: Harness
    episode: str
    version: str
    reward: float
    rollout: Rollout
    traffic: Traffic
    outcome: Outcome
    seconds: float

    def summary(self) -> dict[str, Any]:
        """A line of `longrein harness bench`."""
        rows = [row.token_ids.tolist() for row in self.rollout.rows()]
        calls = list(self.rollout.calls.values())
        return {
            "program": self.harness.name,
            "version": self.version,
            "dialect": self.harness.dialect,
            "episode": self.episode,
            "streamed": self.traffic.streamed > 0,
            "reward": self.reward,
            "calls": len(calls),
            "side_calls": sum(call.excluded is not None for call in calls),
            "branches": len(rows),
            "sampled_tokens": sum(len(call.completion_ids) for call in calls),
            "trained_tokens": self.rollout.agent_tokens,
            "forwarded_tokens": sum(map(len, rows)),
            "unique_tokens": unique_tokens(rows),
            "seconds": round(self.seconds, 2),
        }


def demonstrate(
    harness: Harness,
    rendering: Rendering,
    *,
    episode: str = "mending",
    line: str = RIGHT,
    timeout: float = 600.0,
    engine: type[ScriptedEngine] = ScriptedEngine,
) -> Demonstration:
    """Play an episode; `line` is what the policy puts in place of the broken one."""
    settings = harness.settings()
    settings["files"][FILE] = BROKEN
    context_length = None
    if episode == "compaction" and (way := harness.compaction):
        settings["env"].update(way.env)
        settings["files"].update({**way.files, **logs(way.log_lines)})
        context_length = way.context_length
        if way.resumed:
            again = [settings["command"][0], *way.resumed]
            both = f'"$0" "$@" && {shlex.join(again)}'
            settings["command"] = ["sh", "-c", both, *settings["command"]]
            settings["sandbox"] = {"readable": [str(harness.folder)]} if why_not() is None else "auto"
    if episode == "sub-agent" and harness.sub_agent:
        settings["files"].update(harness.sub_agent.files)
    recorder = Recorder(engine(POLICIES[episode](harness, line), rendering), rendering, context_length=context_length)
    with InterceptionServer() as server:
        factory = ProcessSessionFactory(
            **settings,
            server=server,
            verify=verify,
            recorder=recorder,
            timeout=timeout,
            limits=CallLimits(max_calls=MAX_CALLS),
        )
        rollout = recorder.open("demonstration")
        began = time.perf_counter()
        with factory.create(task={"instruction": INSTRUCTION}, rollout_id=rollout.id) as session:
            outcome = session.wait()
            seconds = time.perf_counter() - began
            reward = session.verify().env_reward
            traffic = server.traffic(rollout.id)
    rollout = recorder.finish(rollout.id)
    version = harness.installed() or "on PATH"
    return Demonstration(harness, episode, version, reward, rollout, traffic, outcome, seconds)


def unique_tokens(rows: Sequence[list[int]]) -> int:
    """How many tokens a forward pass reads that reads a shared beginning once.

    >>> unique_tokens([[1, 2, 3], [1, 2, 4, 5], [1, 2, 3]])
    5
    """
    total, before = 0, np.array([], np.int64)
    for row in sorted(rows):
        now = np.asarray(row, np.int64)
        common = min(len(before), len(now))
        differ = np.flatnonzero(before[:common] != now[:common])
        total += len(now) - (int(differ[0]) if len(differ) else common)
        before = now
    return total


def verify(task: Any, outcome: Outcome) -> float:
    """The file is read, not run: it was written by a script of ours, or by a program gone astray."""
    left = outcome.workdir / FILE
    return float(left.is_file() and left.read_text() == BROKEN.replace(OLD, RIGHT))
