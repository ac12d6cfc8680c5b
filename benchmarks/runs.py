"""What keeping a run costs: the same training steps with and without it, and the bytes a token takes.

    python -m benchmarks.runs [--model .cache/tiny] [--steps 6] [--rounds 4]

Both sides play the same rollouts (one seed), so they do the same work; they alternate, and the best of the rounds counts. Processor
time is compared, since a busy machine disturbs it least; waiting for the disk is in `in_the_way_percent`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from longrein.agents import Agent
from longrein.contract import Sampling
from longrein.runs import Run
from longrein.runs.schema import FILE
from longrein.training.job import Settings, datasets_of, make_trainer
from longrein.training.keeper import RunKeeper


class Watched(RunKeeper):
    """A keeper that counts what it takes: of the playing threads' time, and of the writer thread's."""

    seconds = 0.0
    writer_seconds = 0.0

    def finished(self, rollout: Any) -> None:
        started = time.perf_counter()
        super().finished(rollout)
        self.seconds += time.perf_counter() - started

    def collected(self, batch: Any, arrays: Any) -> None:
        started, before = time.perf_counter(), self.seconds
        super().collected(batch, arrays)
        self.seconds = before + time.perf_counter() - started

    def close(self) -> None:
        if self.writer is not None:
            thread = self.writer._thread.ident
            assert thread is not None
            self.writer_seconds = time.clock_gettime(time.pthread_getcpuclockid(thread))
        super().close()


class Took(NamedTuple):
    wall: float
    processor: float
    in_the_way: float
    """Wall-clock time that playing and training waited for the keeper."""
    writer: float
    """Processor time of the writer's thread, most of it under the interpreter's lock."""


def train(settings: Settings, folder: Path, keep: bool) -> Took:
    agent = Agent.from_pretrained(settings.model, sampling=Sampling(temperature=settings.temperature), seed=settings.seed)
    rows, _ = datasets_of(settings)
    trainer = make_trainer(settings, agent, rows, folder)
    keeper = Watched(trainer, folder) if keep else None
    if keeper is not None:
        trainer.add_callback(keeper)
    wall, processor = time.perf_counter(), time.process_time()
    trainer.train()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    if keeper is not None:
        keeper.close()
    agent.engine.close()
    return Took(wall, processor, keeper.seconds if keeper else 0.0, keeper.writer_seconds if keeper else 0.0)


def sizes(folder: Path) -> dict[str, Any]:
    run = Run(folder)
    (totals,) = run.rows("SELECT count(*) AS rollouts, sum(tokens) AS tokens, sum(sampled) AS sampled FROM rollouts")
    (blobs,) = run.rows("SELECT sum(length(context) + length(completion) + length(logprobs)) AS bytes FROM calls")
    (texts,) = run.rows("SELECT sum(length(CAST(messages AS BLOB)) + length(CAST(reply AS BLOB))) AS bytes FROM calls")
    whole = (folder / FILE).stat().st_size
    return {
        **totals,
        "file_bytes": whole,
        "bytes_per_token": round(whole / totals["tokens"], 2),
        "of_which_ids_and_logprobs": round(blobs["bytes"] / totals["tokens"], 2),
        "of_which_messages": round(texts["bytes"] / totals["tokens"], 2),
        "bytes_per_rollout": round(whole / totals["rollouts"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=".cache/tiny")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    settings = Settings(model=options.model, steps=options.steps, learning_rate=3e-4, heldout=0)
    took: dict[bool, list[Took]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as place:
        for number in range(options.rounds):
            for keep in (True, False) if number % 2 else (False, True):
                took[keep].append(train(settings, Path(place) / f"{number}-{keep}", keep))
        best = {keep: min(one.processor for one in rounds) for keep, rounds in took.items()}
        result = {
            "steps": options.steps,
            "rounds": options.rounds,
            "processor_seconds_without": round(best[False], 3),
            "processor_seconds_with": round(best[True], 3),
            "processor_cost_percent": round(100 * (best[True] / best[False] - 1), 2),
            "in_the_way_percent": round(100 * statistics.median(one.in_the_way / one.wall for one in took[True]), 2),
            "writer_thread_percent": round(100 * statistics.median(one.writer / one.processor for one in took[True]), 2),
            **sizes(Path(place) / "0-True"),
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
