"""From tasks to played rollouts: environments found, built once and cached, run all at the same time, checked and merged.

Always true of what `collect` gives: the rollouts of task i stand at `i * generations` and after, whichever environment
played them; every array has passed the checks, so a wrong environment is named here and not in a loss.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longrein import envs
from longrein.agents import Agent
from longrein.contract import LongreinError, Message
from longrein.envs.datasets import checked_row
from longrein.envs.environment import EnvConfig, Environment
from longrein.rollout import Rollout

EnvironmentCache = dict[tuple[str, str], Any]
"""`(env_class_path, env_config as JSON)`: the environment built from it."""

ROW_KEYS: dict[str, type] = {
    "padded_token_ids": np.int64,
    "padded_attn_mask": np.int64,
    "padded_agent_mask": np.int64,
    "padded_rewards": np.float32,
    "padded_logprobs": np.float32,
}
"""The arrays of a trial that have one row a branch."""
REQUIRED = ("padded_token_ids", "padded_attn_mask", "padded_agent_mask", "padded_rewards", "final_rewards")


@dataclass(frozen=True, slots=True)
class Played:
    """One rollout as its environment returned it."""

    rows: Mapping[str, NDArray]
    """The arrays of `ROW_KEYS`, each of shape (rows of this rollout, tokens). Log-probabilities that the environment does
    not give are NaN; a failed rollout has no agent tokens."""
    final_reward: float
    """NaN when the rollout failed."""
    env: str
    rollout: Rollout | None
    """The record, where the environment gives one."""


@dataclass(frozen=True, slots=True)
class Collected:
    """The rollouts of a generation batch, task-major."""

    played: Sequence[Played]
    generations: int
    pad_id: int

    @property
    def final_rewards(self) -> NDArray[np.float32]:
        return np.array([one.final_reward for one in self.played], np.float32)

    @property
    def group(self) -> NDArray[np.int64]:
        """The task each rollout belongs to."""
        return np.arange(len(self.played)) // self.generations

    def with_groups(self, other: Collected, replaced: Mapping[int, int]) -> Collected:
        """This batch with some tasks' rollouts replaced by another batch's: `{task here: task there}`."""
        played = list(self.played)
        size = self.generations
        for here, there in replaced.items():
            played[here * size : (here + 1) * size] = other.played[there * size : (there + 1) * size]
        return dataclasses.replace(self, played=played)

    def without_stale(self, oldest: int) -> tuple[Collected, float]:
        """This batch with nothing trained in rows that hold tokens of a policy before `oldest`, and the share of those rows.

        They keep their place and their reward, so that their group's mean is what it was."""
        played, stale, rows = [], 0, 0
        for one in self.played:
            dropped = one.rollout.drop_stale(oldest) if one.rollout is not None and one.rollout.calls else []
            keep = np.ones((len(one.rows["padded_agent_mask"]), 1), np.int64)
            keep[: len(dropped), 0] = np.logical_not(dropped)
            stale, rows = stale + sum(dropped), rows + len(keep)
            mask = one.rows["padded_agent_mask"] * keep
            played.append(dataclasses.replace(one, rows={**one.rows, "padded_agent_mask": mask}))
        return dataclasses.replace(self, played=played), stale / max(1, rows)

    @property
    def truncated(self) -> NDArray[np.bool_]:
        """The rollouts that ended because tokens ran out, as far as their records say."""
        return np.array([one.rollout is not None and one.rollout.truncated for one in self.played])

    def arrays(self) -> dict[str, NDArray]:
        """Everything as right-padded arrays over all rows, with `row_rollout` saying whose row it is."""
        width = max(2, *(int(one.rows["padded_attn_mask"].sum(1).max()) for one in self.played))
        fill = dict.fromkeys(ROW_KEYS, 0) | {"padded_token_ids": self.pad_id}
        parts: dict[str, list[NDArray]] = {key: [] for key in ROW_KEYS}
        for one in self.played:
            for key in ROW_KEYS:
                rows = one.rows[key][:, :width]
                parts[key].append(np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=fill[key]))
        counts = [len(one.rows["padded_attn_mask"]) for one in self.played]
        return {key: np.concatenate(rows) for key, rows in parts.items()} | {
            "row_rollout": np.repeat(np.arange(len(self.played)), counts)
        }

    def metrics(self) -> dict[str, float]:
        """What a person watches: rewards overall and by environment, lengths, limits, failures."""
        rewards = self.final_rewards
        agent_tokens = [int(one.rows["padded_agent_mask"].sum()) for one in self.played]
        metrics = {
            "reward": _mean(rewards),
            "reward_std": _spread(rewards),
            "failed": float(np.isnan(rewards).mean()),
            "branches": float(np.mean([len(one.rows["padded_attn_mask"]) for one in self.played])),
            "completions/mean_length": float(np.mean(agent_tokens)),
            "completions/min_length": float(np.min(agent_tokens)),
            "completions/max_length": float(np.max(agent_tokens)),
        }
        names = np.array([one.env for one in self.played])
        for name in sorted(set(names)):
            metrics[f"rewards/{name}/mean"] = _mean(rewards[names == name])
            metrics[f"rewards/{name}/std"] = _spread(rewards[names == name])
        records = [one.rollout for one in self.played if one.rollout is not None]
        if records:
            solved = [record.success for record in records if record.success is not None]
            metrics["success"] = float(np.mean(solved)) if solved else float("nan")
            metrics["turns/mean"] = float(np.mean([record.turns for record in records]))
            metrics["turns/max"] = float(np.max([record.turns for record in records]))
            metrics["completions/clipped_ratio"] = float(np.mean([record.truncated for record in records]))
            metrics["limited"] = float(np.mean([record.limit is not None for record in records]))
        return metrics

    def versions(self) -> set[int]:
        """The weights that the recorded calls were sampled under."""
        calls = [call for one in self.played if one.rollout is not None for call in one.rollout.calls.values()]
        of_tokens = [call.versions for call in calls if call.versions is not None]
        return {call.policy_version for call in calls}.union(*(map(int, versions) for versions in of_tokens))

    def first_failure(self) -> str:
        causes = [one.rollout.failed for one in self.played if one.rollout is not None and one.rollout.failed]
        return causes[0] if causes else "no cause was recorded"

    def conversations(self) -> Iterator[tuple[list[Message], list[Message]]]:
        """Each rollout's opening messages and what followed, along its last call; empty where there is no record."""
        for one in self.played:
            calls = list(one.rollout.calls.values()) if one.rollout is not None else []
            if not calls:
                yield [], []
                continue
            assert one.rollout is not None
            path = one.rollout.path(calls[-1].id)
            yield list(path[0].messages), one.rollout.conversation(calls[-1].id)[len(path[0].messages) :]


def tasks_of(rows: Sequence[dict[str, Any]], generations: int) -> list[dict[str, Any]]:
    """The tasks of a batch. TRL's sampler gives each row `generations` times, one after the other."""
    rows = [checked_row(row, index) for index, row in enumerate(rows)]
    for start in range(0, len(rows), generations):
        repeats = {json.dumps(row, sort_keys=True, default=str) for row in rows[start : start + generations]}
        if len(repeats) > 1 or start + generations > len(rows):
            raise LongreinError(
                f"rows {start} to {min(start + generations, len(rows)) - 1} of the batch must be {generations} copies of one "
                "task (`num_generations`); they are not"
            )
    return rows[::generations]


def collect(
    tasks: Sequence[dict[str, Any]], cache: EnvironmentCache, tokenizer: Any, agent: Any, generations: int
) -> Collected:
    """Play every task `generations` times, each in its own environment, all environments at once."""
    groups: dict[tuple[str, str], list[int]] = {}
    for index, task in enumerate(tasks):
        key = (task["env_class_path"], json.dumps(task["env_config"], sort_keys=True, default=str))
        groups.setdefault(key, []).append(index)
    environments = {
        key: environment(cache, key, tasks[indices[0]]["env_config"], tokenizer) for key, indices in groups.items()
    }

    def play(key: tuple[str, str]) -> list[Played]:
        data = [tasks[index]["task_data"] for index in groups[key]]
        trial = environments[key].run_trial(task_data_list=data, agent=agent, num_rollouts=generations)
        return checked_trial(trial, len(data) * generations, type(environments[key]).__name__)

    if len(groups) == 1:
        results = [play(key) for key in groups]  # in this thread, so that Ctrl-C reaches it
    else:
        with ThreadPoolExecutor(len(groups), thread_name_prefix="longrein-trial") as pool:
            futures = [pool.submit(play, key) for key in groups]
            try:
                results = [future.result() for future in futures]
            except BaseException:  # Ctrl-C too: the other trials end with their next call, not with their last
                while wait(futures, timeout=0.05).not_done:
                    if isinstance(agent, Agent):
                        agent.engine.cancel()
                raise
    played: list[Played | None] = [None] * (len(tasks) * generations)
    for indices, result in zip(groups.values(), results, strict=True):
        for position, index in enumerate(indices):
            played[index * generations : (index + 1) * generations] = result[
                position * generations : (position + 1) * generations
            ]
    return Collected([one for one in played if one is not None], generations, tokenizer.pad_token_id)


def check_rows(rows: Iterable[dict[str, Any]], context: int | None = None) -> None:
    """Refuse rows that no rollout could be played of, by what their environments say. `context` is what the model can read."""
    configs: dict[tuple[str, str], EnvConfig] = {}
    for index, row in enumerate(rows):
        cls = environment_class(row["env_class_path"])
        if not issubclass(cls, Environment):
            continue
        key = (row["env_class_path"], json.dumps(row["env_config"], sort_keys=True, default=str))
        if key not in configs:
            configs[key] = cls.check_config(row["env_config"])
            if context is not None and (limit := configs[key].max_tokens) > context:
                raise LongreinError(
                    f"row {index}: {cls.__name__} allows conversations of {limit} tokens (`max_tokens`), the model reads "
                    f"{context}: lower `max_tokens` in env_config or use a model with a longer context"
                )
        try:
            cls.check_task(configs[key], row["task_data"])
        except LongreinError as error:
            raise LongreinError(f"row {index}: {error}") from None


def environment(cache: EnvironmentCache, key: tuple[str, str], env_config: dict[str, Any], tokenizer: Any) -> Any:
    """The environment of a row, built the first time it is asked for."""
    if key not in cache:
        cls = environment_class(key[0])
        try:
            cache[key] = cls(tokenizer=tokenizer, env_config=env_config)
        except LongreinError:
            raise
        except Exception as error:
            raise LongreinError(f"{key[0]} refuses env_config {env_config!r}: {type(error).__name__}: {error}") from error
    return cache[key]


def environment_class(path: str) -> type:
    """The class a row names, imported."""
    module, _, name = path.rpartition(".")
    if not module:
        raise LongreinError(
            f"env_class_path is {path!r}; it must be a dotted path such as 'longrein.envs.TreasureHunt'{_nearest(path)}"
        )
    try:
        found = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise LongreinError(f"env_class_path {path!r} cannot be imported: {error}{_nearest(path)}") from error
    except AttributeError:
        raise LongreinError(f"env_class_path {path!r}: the module {module!r} has no {name!r}{_nearest(path)}") from None
    if not isinstance(found, type) or not callable(getattr(found, "run_trial", None)):
        raise LongreinError(
            f"env_class_path {path!r} is no environment: it must be a class with `run_trial`, such as one that extends "
            "longrein.Environment"
        )
    return found


def _nearest(path: str) -> str:
    """The environment that was perhaps meant: of longrein's, or of the module that was named."""
    module, _, name = path.rpartition(".")
    places = {"longrein.envs": vars(envs), **({module: vars(sys.modules[module])} if module in sys.modules else {})}
    known = [
        f"{place}.{one}"
        for place, names in places.items()
        for one, found in names.items()
        if isinstance(found, type) and hasattr(found, "run_trial")
    ]
    near = difflib.get_close_matches(path, known, n=1) or difflib.get_close_matches(f"longrein.envs.{name}", known, n=1)
    return f". Did you mean {near[0]!r}?" if near else ""


def checked_trial(trial: Any, rollouts: int, env: str) -> list[Played]:
    """A trial's arrays, rollout by rollout; refused in words where they do not fit together."""
    if not isinstance(trial, Mapping):
        raise LongreinError(
            f"{env}.run_trial returned a {type(trial).__name__}; it must be a dict with {', '.join(REQUIRED)}"
        )
    if missing := [key for key in REQUIRED if key not in trial]:
        raise LongreinError(f"{env}.run_trial returned no {', '.join(missing)}; it returned {', '.join(trial)}")
    rows = {key: _array(trial, key, dtype, env) for key, dtype in ROW_KEYS.items() if key in trial}
    shape = rows["padded_token_ids"].shape
    rows.setdefault("padded_logprobs", np.full(shape, np.nan, np.float32))
    for key, value in rows.items():
        if value.ndim != 2 or value.shape != shape or not shape[1]:
            raise LongreinError(
                f"{env}.run_trial: {key} has shape {value.shape}, padded_token_ids {shape}; all must be (rows, tokens)"
            )
    final = _array(trial, "final_rewards", np.float32, env)
    owner = _array(trial, "row_rollout", np.int64, env) if "row_rollout" in trial else np.arange(shape[0])
    if final.shape != (rollouts,):
        raise LongreinError(
            f"{env}.run_trial gave {final.shape} final_rewards for {rollouts} rollouts; one each is expected"
        )
    if owner.shape != (shape[0],) or sorted(set(owner.tolist())) != list(range(rollouts)):
        raise LongreinError(
            f"{env}.run_trial gave {shape[0]} rows for {rollouts} rollouts, and row_rollout does not give each rollout its rows"
        )
    records = list(trial.get("rollouts") or [None] * rollouts)
    if len(records) != rollouts:
        raise LongreinError(f"{env}.run_trial gave {len(records)} rollouts; {rollouts} were asked for")
    played = []
    for index, record in enumerate(records):
        mine = {key: value[owner == index] for key, value in rows.items()}
        one = Played(mine, float(final[index]), env, record)
        _check_padding(one, index)
        if record is not None and record.failed is not None:
            mine["padded_agent_mask"] = np.zeros_like(mine["padded_agent_mask"])
            one = dataclasses.replace(one, final_reward=math.nan)
        else:
            _check_played(one, index)
        played.append(one)
    return played


def _array(trial: Mapping[str, Any], key: str, dtype: type, env: str) -> NDArray:
    try:
        return np.asarray(trial[key]).astype(dtype)
    except (TypeError, ValueError) as error:
        raise LongreinError(f"{env}.run_trial: {key} is no array of numbers with rows of one length: {error}") from None


def _check_padding(one: Played, index: int) -> None:
    attended = one.rows["padded_attn_mask"]
    if not attended[:, 0].all() or (np.diff(attended, axis=1) > 0).any():
        raise LongreinError(
            f"{one.env}.run_trial: rollout {index}: padded_attn_mask must be 1 on a row's tokens and 0 on the padding after them"
        )


def _check_played(one: Played, index: int) -> None:
    if not math.isfinite(one.final_reward):
        raise LongreinError(
            f"{one.env}.run_trial: rollout {index} has the reward {one.final_reward}; rewards must be numbers (a rollout that "
            "could not be scored is a failed one)"
        )
    token_rewards = one.rows["padded_rewards"]
    if not np.isfinite(token_rewards).all():
        wrong = token_rewards[~np.isfinite(token_rewards)][0]
        raise LongreinError(
            f"{one.env}.run_trial: rollout {index} has a token with the reward {wrong}; rewards must be numbers"
        )
    agent, attended = one.rows["padded_agent_mask"].astype(bool), one.rows["padded_attn_mask"].astype(bool)
    if not agent.any() and (one.rollout is None or one.rollout.agent_tokens):  # a record says why nothing is trained
        raise LongreinError(f"{one.env}.run_trial: rollout {index} has no agent token: padded_agent_mask is 0 all over")
    if (agent & ~attended).any():
        raise LongreinError(f"{one.env}.run_trial: rollout {index} has agent tokens where padded_attn_mask is 0")
    if agent[:, 0].any():
        raise LongreinError(f"{one.env}.run_trial: rollout {index} starts with an agent token; a prompt must come first")


def _mean(values: NDArray) -> float:
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else float("nan")


def _spread(values: NDArray) -> float:
    values = values[~np.isnan(values)]
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
