"""`RunKeeper`: what a trainer plays and logs, kept on disk by `longrein.runs`.

Always true: a rollout is handed to the writer when it ends, not when its batch does; no step is trained on rollouts that are not
on disk; only the main process writes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import TrainerCallback

from longrein.rollout import Call, Rollout
from longrein.runs import RunWriter
from longrein.runs.pieces import Pieces
from longrein.training.advantages import turns_of
from longrein.training.trainer import GRPOEnvTrainer
from longrein.training.trials import Collected, Played

USED = ("padded_token_ids", "advantages", "padded_agent_mask")


class RunKeeper(TrainerCallback):
    """Keeps a training run in a folder.

    >>> trainer = GRPOEnvTrainer(agent=agent, tokenizer=agent.tokenizer, train_dataset=rows)     # doctest: +SKIP
    >>> trainer.add_callback(RunKeeper(trainer, "runs/mine"))                                    # doctest: +SKIP
    """

    def __init__(self, trainer: GRPOEnvTrainer, folder: str | Path) -> None:
        self._phase, self._step = "train", 0
        self._written: set[str] = set()
        self.writer: RunWriter | None = None
        if not trainer.accelerator.is_main_process:
            return
        self.writer = RunWriter(folder, pieces=Pieces(trainer.tokenizer), seed=trainer.args.seed)
        if not (config := self.writer.folder / "config.json").exists():
            config.write_text(json.dumps(trainer.args.to_dict(), indent=2, default=str))
        trainer._sampler.on_finish = self.finished
        trainer.on_collect, trainer.on_batch = self.collecting, self.collected

    @contextlib.contextmanager
    def phase(self, phase: str, step: int) -> Iterator[None]:
        """Rollouts that end in here belong to this phase and step; all of them are on disk when it is left."""
        self.collecting(phase, step)
        yield
        self.flush()

    def collecting(self, phase: str, step: int) -> None:
        """What is played from now on belongs to this step."""
        self._phase, self._step = phase, step
        self._written.clear()

    def finished(self, rollout: Rollout) -> None:
        """Keep a rollout that has ended; one that was cut off by Ctrl-C has neither reward nor cause, and is not finished."""
        if self.writer is not None and (rollout.reward is not None or rollout.failed is not None):
            self._written.add(rollout.id)
            self.writer.write(rollout, phase=self._phase, step=self._step)

    def collected(self, batch: Collected, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep what the batch makes of its rollouts, and those no recorder told of; return once all are on disk."""
        if self.writer is None:
            return
        owner = arrays["row_rollout"]
        for index, one in enumerate(batch.played):
            record = one.rollout if one.rollout is not None else _from_rows(one, f"{self._phase}-{self._step}-{index}")
            if record.id not in self._written:
                record.group = record.group or f"{self._phase}-{self._step}-g{batch.group[index]}"
                self.finished(record)
            self.writer.credit(record.id, *_by_call(record, {key: arrays[key][owner == index] for key in USED}))
        self.flush()

    def flush(self) -> None:
        if self.writer is not None:
            self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.writer is not None and logs:
            self.writer.metrics(state.global_step, logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.flush()


def _by_call(record: Rollout, rows: Mapping[str, NDArray[Any]]) -> tuple[dict[str, NDArray[Any]], dict[str, str | None]]:
    """Advantages and reasons of a record's calls, from its rows as the trainer has them."""
    advantages: dict[str, NDArray[Any]] = {}
    for ids, value, mask in zip(*(rows[key] for key in USED), strict=True):
        for call, start, end in _along(record, ids, advantages):
            if call.id not in advantages and mask[start:end].any():
                advantages[call.id] = value[start:end]
    excluded: dict[str, str | None] = {}
    for call in record.calls.values():
        if call.excluded is not None:
            excluded[call.id] = call.excluded
        elif call.id not in advantages and record.truncated and record.reason(call) is None:
            excluded[call.id] = "truncated"  # `mask_truncated_completions`
    return advantages, excluded


def _along(record: Rollout, ids: NDArray[Any], credited: Mapping[str, Any]) -> Iterator[tuple[Call, int, int]]:
    """The calls whose tokens a row holds, root first, each with where its sampled tokens start and end in it."""
    at, end = None, 0
    while at is None or record.children(at):
        fitting = []
        for call in (record.calls[call_id] for call_id in record.children(at)):
            start = end + len(call.context_ids)
            last = start + len(call.completion_ids)
            if np.array_equal(ids[end:start], call.context_ids) and np.array_equal(ids[start:last], call.completion_ids):
                fitting.append((call, start, last))
        if not fitting:
            return  # the row ends here, or its environment made it of something else
        # Of two that are the same to the token, each is trained in a row of its own.
        call, start, end = next((one for one in fitting if one[0].id not in credited), fitting[0])
        yield call, start, end
        at = call.id


def _from_rows(one: Played, name: str) -> Rollout:
    """A record of a rollout whose environment gave arrays alone: a root a row, a call a run of agent tokens."""
    failed = "the environment gave no record" if np.isnan(one.final_reward) else None
    record = Rollout(id=name, env=one.env, reward=None if failed else one.final_reward, failed=failed)
    ends: dict[int, tuple[int, str]] = {}
    for number, turn in enumerate(turns_of(one.rows["padded_agent_mask"])):
        start, parent = ends.get(turn.row, (0, None))
        ids = one.rows["padded_token_ids"][turn.row].astype(np.int32)
        logprobs = one.rows["padded_logprobs"][turn.row, turn.start : turn.end].astype(np.float32)
        call = Call(f"{name}-{number}", parent, ids[start : turn.start], ids[turn.start : turn.end], logprobs, "stop")
        record.add(call)
        ends[turn.row] = (turn.end, call.id)
    for row, (end, parent) in ends.items():  # what was read after the last reply
        rest = one.rows["padded_token_ids"][row, end : int(one.rows["padded_attn_mask"][row].sum())].astype(np.int32)
        if len(rest):
            nothing = np.zeros(0, np.int32)
            record.add(Call(f"{parent}-end", parent, rest, nothing, nothing.astype(np.float32), "stop"))
    return record
