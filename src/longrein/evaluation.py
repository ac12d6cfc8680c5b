"""An evaluation from tasks to a run folder: what `longrein eval` does, without its display.

Always true of its folder: `run.sqlite` grows by every rollout as it ends, so that `longrein view` shows it and an evaluation that was
stopped, or killed, goes on with what it has; `eval.json` comes last and holds every task with its outcomes, the figures over them,
and whether all of it was played. All its rollouts are of one model, environment and seed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from longrein.agents import Agent
from longrein.contract import LongreinError
from longrein.envs.environment import Environment
from longrein.figures import Scored, Task, figures, task_from_json
from longrein.rollout import Rollout
from longrein.runs import Run, RunWriter
from longrein.runs.reader import Filter
from longrein.runs.schema import FILE
from longrein.training.trials import collect, environment_class

RESULTS = "eval.json"
CONFIG = "config.json"
SAME = ("model", "weights", "endpoint", "env", "env_config", "harness", "verify", "temperature", "seed")
"""What an evaluation must have in common with the one it goes on with; which tasks, and how many rollouts of each, may change."""
Row = dict[str, Any]


def evaluate(
    agent: Agent,
    rows: Sequence[Row],
    folder: Path,
    *,
    rollouts: int,
    pieces: Callable[[Iterable[int]], list[bytes]],
    about: Mapping[str, Any],
    earlier: Iterable[Rollout] = (),
    progress: Callable[[Rollout], None] = lambda rollout: None,
) -> dict[str, Any]:
    """Play every row `rollouts` times and write the results; what Ctrl-C cut off is written as far as it went. Rollouts of an
    `earlier` time are taken as they are."""
    started = time.perf_counter()
    planned = _seeds(agent, rows, rollouts)
    agent.played = {rollout.seed: rollout for rollout in earlier if rollout.seed in planned}
    ended = list(agent.played.values())
    for rollout in ended:
        progress(rollout)
    complete = False
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(dict(about), indent=2))
    with RunWriter(folder, pieces=pieces, seed=agent.seed) as writer:

        def finished(rollout: Rollout) -> None:
            if rollout.reward is not None or rollout.failed is not None:
                ended.append(rollout)
                writer.write(rollout, phase="eval")
                progress(rollout)

        agent.on_finish = finished
        try:
            played = collect(rows, {}, agent.tokenizer, agent, rollouts).played
            tasks = _tasks(
                [(row, [_scored(one) for one in played[at : at + rollouts]]) for row, at in _placed(rows, rollouts)]
            )
            complete = True
        finally:
            if not complete:
                tasks = _tasks(_by_group(rows, ended))
            results = _results(tasks, about, complete=complete, seconds=time.perf_counter() - started)
            (folder / RESULTS).write_text(json.dumps(results, indent=1))
    return results


def earlier_rollouts(folder: Path, about: Mapping[str, Any]) -> list[Rollout]:
    """What an evaluation that was stopped left in its folder; refused where it is another and has
    played something. Rollouts that failed are played again."""
    if not (folder / FILE).exists():
        return []
    try:
        known = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError):
        known = {}
    if not known.keys() >= set(SAME):
        raise LongreinError(f"{folder} holds a run that is no evaluation; give this one a folder of its own (--out)")
    played = list(Run(folder).rollouts(Filter(phase="eval", failed=False)))
    for name in SAME if played else ():
        if known[name] != (now := json.loads(json.dumps(about[name]))):
            raise LongreinError(
                f"{folder} holds an evaluation with another {name}: {known[name]!r}, now {now!r}; give this one a folder of its own (--out)"
            )
    return played


def read_results(path: Path) -> tuple[dict[str, Any], list[Task]]:
    """The results in a file or a folder that `longrein eval` wrote."""
    file = path / RESULTS if path.is_dir() else path
    if not file.is_file():
        raise LongreinError(f"{path} holds no results of `longrein eval`: there is no {file}")
    try:
        results = json.loads(file.read_text())
        return results, [task_from_json(task) for task in results["tasks"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LongreinError(f"{file} holds no results of `longrein eval`: {type(error).__name__}: {error}") from None


def with_concurrency(rows: Sequence[Row], concurrency: int | None) -> list[Row]:
    """The rows with this many rollouts at a time, where they do not say themselves."""
    if concurrency is None:
        return list(rows)
    ours = {path for path in {row["env_class_path"] for row in rows} if issubclass(environment_class(path), Environment)}
    own = {"concurrency": concurrency}
    return [{**row, "env_config": own | row["env_config"]} if row["env_class_path"] in ours else row for row in rows]


def _seeds(agent: Agent, rows: Sequence[Row], rollouts: int) -> set[int]:
    """What each rollout will be played with; without those that rollouts of two configurations share, which tell nothing."""
    times: Counter[str] = Counter()
    seeds: Counter[int] = Counter()
    for row in rows:
        key = json.dumps([row["env_class_path"], row["env_config"], row["task_data"]], sort_keys=True, default=str)
        seeds.update(agent.rollout_seed(row["task_data"], times[key], index) for index in range(rollouts))
        times[key] += 1
    return {seed for seed, count in seeds.items() if count == 1}


def _results(tasks: list[Task], about: Mapping[str, Any], *, complete: bool, seconds: float) -> dict[str, Any]:
    names = sorted({task.env for task in tasks})
    return {
        "complete": complete,
        "seconds": round(seconds, 1),
        "about": dict(about),
        "overall": figures(tasks),
        "by_env": {name: figures([task for task in tasks if task.env == name]) for name in names},
        "tasks": [asdict(task) for task in tasks],
    }


def _placed(rows: Sequence[Row], rollouts: int) -> Iterable[tuple[Row, int]]:
    return ((row, index * rollouts) for index, row in enumerate(rows))


def _tasks(played: Sequence[tuple[Row, list[Scored]]]) -> list[Task]:
    """Named by what is played and not by how it is set up; one that comes again has its number."""
    seen: Counter[str] = Counter()
    tasks = []
    for row, outcomes in played:
        text = json.dumps(row["task_data"], sort_keys=True, default=str)
        name = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        seen[name] += 1
        env = row["env_class_path"].rpartition(".")[2]
        tasks.append(Task(name if seen[name] == 1 else f"{name}#{seen[name]}", env, outcomes))
    return tasks


def _by_group(rows: Sequence[Row], ended: Sequence[Rollout]) -> list[tuple[Row, list[Scored]]]:
    groups: dict[str, list[Rollout]] = {}
    for rollout in ended:
        groups.setdefault(rollout.group, []).append(rollout)
    paths = {row["env_class_path"].rpartition(".")[2]: row["env_class_path"] for row in rows}
    return [
        ({"env_class_path": paths.get(one[0].env, one[0].env), "task_data": one[0].task}, [_of_rollout(r) for r in one])
        for one in groups.values()
    ]


def _scored(one: Any) -> Scored:
    if one.rollout is not None:
        return _of_rollout(one.rollout)
    failed = one.final_reward != one.final_reward
    reward = None if failed else one.final_reward
    return Scored(reward, not failed and one.final_reward >= 1, "the environment gave no record" if failed else None)


def _of_rollout(rollout: Rollout) -> Scored:
    return Scored(
        reward=None if rollout.failed else rollout.reward,
        success=bool(rollout.success) and not rollout.failed,
        failed=rollout.failed,
        limit=rollout.limit,
        turns=rollout.turns,
        tokens=sum(len(call.completion_ids) for call in rollout.calls.values()),
    )
