"""Loss and backward of a training step, ours against TRL's, on the same rows in one process: `python -m benchmarks.train_step`.

What is compared has the same gradient, which is checked before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.measure import alternate, machine, matrix_rate, peak_gib, timed
from benchmarks.passes import Ours, Trl, TrlTree, Values, make_model
from benchmarks.workloads import SIZES, WORKLOADS, Row, rows_of
from longrein.training.logprobs import PackedRows

BARS = {
    "cpu": {"group": 5.0, "long_prompt": 4.5, "harness": 7.0, "per_turn": 10.0, "none": 3.5},
    "cuda": {"group": 10.0, "harness": 19.0, "per_turn": 21.0, "none": 4.5},
}
MICRO_BATCHES = {"cpu": (16,), "cuda": (1, 2, 4)}
"""Rows a forward of TRL's; the fastest of them is taken."""
TOLERANCE = 1e-4
"""Of the gradient in float32: the norm of the difference over the norm, in all."""
SPREAD = 2.0
"""In bfloat16: so many times what rounding alone makes of TRL's own gradient."""
CUT = 3000
"""Tokens of the rows on which that is found, in float32 besides."""


class Floor(NamedTuple):
    """What must be computed at least, in floating-point operations."""

    tokens: int
    flops: float


def floor_of(rows: Sequence[Row], model: Any, *, checkpointing: bool) -> Floor:
    """Every unique token once through the layers, its attention over those it reads, every scored one through the head: forward,
    and twice that backward; with checkpointing the layers' forward a second time."""
    width = max(len(row.ids) for row in rows)
    ids, mask = (
        np.stack([np.pad(one, (0, width - len(one))) for one in part])
        for part in zip(*[row[:2] for row in rows], strict=True)
    )
    packed = PackedRows(ids, mask.astype(bool))
    config = model.config
    layers = sum(
        parameter.numel() for name, parameter in model.named_parameters() if ".layers." in name and parameter.dim() > 1
    )
    reads = float((packed.tree.positions + 1).sum())
    attention = 4 * reads * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    body = 2.0 * layers * len(packed.tree) + attention
    head = 2.0 * config.vocab_size * config.hidden_size * len(packed.targets)
    return Floor(len(packed.tree), body * (4 if checkpointing else 3) + head * 3)


def gradient_of(model: Any) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def difference(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """The norm of the difference of two gradients over the norm."""
    apart = sum(float((a.float() - b.float()).norm() ** 2) for a, b in zip(one, other, strict=True))
    return (apart / sum(float(b.float().norm() ** 2) for b in other)) ** 0.5


def cut(row: Row) -> Row:
    """The beginning of a row, up to the last token in it that is trained."""
    trained = np.flatnonzero(row.mask[:CUT])
    end = int(trained[-1]) + 1 if len(trained) else 0
    return row._replace(ids=row.ids[:end], mask=row.mask[:end])


class Bench:
    def __init__(self, device: str, rounds: int, sizes: dict[str, int], *, compiled: bool | None = None) -> None:
        self.device, self.rounds, self.sizes = device, rounds, sizes
        self.base = make_model(device)
        folder = tempfile.mkdtemp()
        self.ours, self.trl = Ours(self.base, folder, device, compiled=compiled), Trl(self.base, folder, device)
        self.tree: TrlTree | None = None
        self.micro: int | None = None
        self.rounding: dict[str, float] = {}
        # one thread is timed by its own clock, which other programs on the machine do not move
        self.clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
        self.rate = matrix_rate(device, self.base.dtype, self.clock)
        self.vocabulary = self.base.config.vocab_size

    def workload(self, name: str) -> dict[str, Any]:
        rows = rows_of(name, self.device, self.vocabulary, **self.sizes)
        values = Values(rows, self.vocabulary)
        batch = self.ours.prepare(rows, values)
        self.micro = self.micro or self._fastest(rows, values)
        batches, by_length = (self.trl.prepare(rows, values, self.micro, by_length=order) for order in (False, True))
        jobs = {
            "ours": lambda: self.ours.run(batch),
            "trl": lambda: self.trl.run(batches),
            "trl_sorted": lambda: self.trl.run(by_length),
        }
        peak, seconds, gradients = {}, {}, {}
        for who, job in jobs.items():  # the first run of each: its memory, its gradient, and the warming up
            peak[who] = peak_gib(lambda who=who, job=job: seconds.update({who: timed(job)}))
            gradients[who] = gradient_of((self.ours if who == "ours" else self.trl).model)
        apart, spread = (difference(gradients[who], gradients["trl"]) for who in ("ours", "trl_sorted"))
        del gradients
        allowed = TOLERANCE if self.base.dtype == torch.float32 else SPREAD * self._rounding()["trl"]
        if not apart <= allowed:
            raise AssertionError(f"{name}: the gradients differ by {apart:.2g}; {allowed:.2g} is allowed")
        # on a GPU TRL's runs are long and steady: their first is taken, once the search for its micro-batch has warmed it up
        again = {"ours": jobs["ours"]} if self.device == "cuda" else jobs
        seconds |= alternate(again, self.rounds, self.clock)
        floor = floor_of(rows, self.base, checkpointing=self.device == "cuda")
        raw = sum(len(row.ids) for row in rows)
        result = {
            "workload": name,
            "device": self.device,
            "ratio_trl": seconds["trl"] / seconds["ours"],
            "ratio_trl_sorted": seconds["trl_sorted"] / seconds["ours"],
            "bar": BARS[self.device].get(name),
            "seconds": seconds["ours"],
            "seconds_trl": seconds["trl"],
            "peak_gib": peak["ours"],
            "peak_gib_trl": peak["trl"],
            "floor_share": floor.flops / self.rate / seconds["ours"],
            "rows": len(rows),
            "tokens": raw,
            "unique_tokens": floor.tokens,
            "forwarded_trl": self.trl.forwarded(batches) / floor.tokens,
            "micro_batch_trl": self.micro,
            "agent_share": sum(row.mask.sum() for row in rows) / raw,
            "gradient_difference": apart,
            "gradient_spread_trl": spread,
        }
        return result | (self._tree(rows, values, seconds["ours"]) if self.device == "cuda" else {})

    def check(self) -> dict[str, Any]:
        """On a GPU: a small model in float32 has TRL's gradient to rounding."""
        model, folder = make_model(self.device, small=True), tempfile.mkdtemp()
        ours, trl = Ours(model, folder, self.device, compiled=False, backend="sdpa"), Trl(model, folder, self.device)
        rows = rows_of("harness", "cpu", model.config.vocab_size)
        values = Values(rows, model.config.vocab_size)
        ours.run(ours.prepare(rows, values))
        trl.run(trl.prepare(rows, values, 4))
        apart = difference(gradient_of(ours.model), gradient_of(trl.model))
        if not apart <= TOLERANCE:
            raise AssertionError(f"in float32 the gradients differ by {apart:.2g}; {TOLERANCE} is allowed")
        rounding = self._rounding()
        if not rounding["ours"] <= 1.25 * rounding["trl"]:
            raise AssertionError(
                f"rounding to bfloat16 moves our gradient by {rounding['ours']:.2g}, TRL's by {rounding['trl']:.2g}"
            )
        return {"workload": "check", "device": self.device, "gradient_difference": apart, "rounding": rounding}

    def _rounding(self) -> dict[str, float]:
        """How far bfloat16 takes our gradient and TRL's from the one in float32, on a few rows."""
        if not self.rounding:
            rows = [row for row in map(cut, rows_of("harness", self.device, self.vocabulary)[:3]) if row.mask.any()]
            values = Values(rows, self.vocabulary)
            exact = Trl(self.base.float(), tempfile.mkdtemp(), self.device)
            self.base.to(torch.bfloat16)
            exact.run(exact.prepare(rows, values, 1))
            self.ours.run(self.ours.prepare(rows, values))
            self.trl.run(self.trl.prepare(rows, values, 1))
            reference = gradient_of(exact.model)
            for who, one in (("ours", self.ours), ("trl", self.trl)):
                self.rounding[who] = difference(gradient_of(one.model), reference)
        return self.rounding

    def _fastest(self, rows: Sequence[Row], values: Values) -> int:
        """The rows a forward with which TRL is fastest; found once, on half of the first workload."""
        choices = MICRO_BATCHES[self.device]
        seconds = {}
        for micro in choices if len(choices) > 1 else ():
            batches = self.trl.prepare(rows[: len(rows) // 2], values, micro)
            try:
                self.trl.run(batches[:1])
                seconds[micro] = timed(lambda batches=batches: self.trl.run(batches))
            except torch.OutOfMemoryError:
                self.trl.model.zero_grad()
                torch.cuda.empty_cache()
                break
        return min(seconds, key=seconds.__getitem__) if seconds else choices[0]

    def _tree(self, rows: Sequence[Row], values: Values, ours: float) -> dict[str, Any]:
        """TRL's own tree, where it runs."""
        try:
            self.tree = self.tree or TrlTree(self.base, self.device)
            packed = self.tree.prepare(rows, values)
            self.tree.run(packed)
            apart = difference(gradient_of(self.tree.model), gradient_of(self.ours.model))
            seconds = alternate({"tree": lambda: self.tree and self.tree.run(packed)}, 2)["tree"]
            return {"ratio_trl_tree": seconds / ours, "gradient_difference_trl_tree": apart}
        except Exception as error:
            traceback.print_exc()
            torch.cuda.empty_cache()
            return {"ratio_trl_tree": None, "trl_tree": f"{type(error).__name__}: {error}"[:200]}

    def growth(self) -> dict[str, Any]:
        """Seconds a unique token, from small groups to large ones; TRL is not run."""
        result = {}
        for rollouts in (8, 32, 128):
            rows = rows_of("group", self.device, self.vocabulary, rollouts=rollouts)
            batch = self.ours.prepare(rows, Values(rows, self.vocabulary))
            if rollouts == 8:
                self.ours.run(batch)
            seconds = alternate({"ours": lambda batch=batch: self.ours.run(batch)}, 1, self.clock)["ours"]
            result[rollouts] = 1e6 * seconds / floor_of(rows, self.base, checkpointing=False).tokens
        spread = max(result.values()) / min(result.values())
        return {"workload": "growth", "device": self.device, "microseconds_a_unique_token": result, "spread": spread}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=[*WORKLOADS, "growth", "check"])
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, help="our layers; unsaid, on a GPU")
    parser.add_argument("--reply", type=int, help="tokens that the agent writes in a turn, in the mean")
    parser.add_argument("--observation", type=int, help="tokens that it reads after each, in the mean")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU")
    asked = parser.parse_args(arguments)
    if asked.device == "cpu":
        torch.set_num_threads(asked.threads)
    sizes = {name: getattr(asked, name) for name in ("reply", "observation") if getattr(asked, name) is not None}
    bench = Bench(asked.device, asked.rounds, sizes, compiled=asked.compiled)
    about = machine() | {"matrix_gflops": f"{bench.rate / 1e9:.0f}"}
    if not asked.json:
        print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
        print("workload      seconds   TRL   sorted  bar   GiB (TRL)     tokens/unique   TRL's   floor", flush=True)
    failed = False
    for name in asked.only or [*(["check"] if asked.device == "cuda" else []), *SIZES[asked.device], "growth"]:
        special = {"growth": bench.growth, "check": bench.check}
        try:
            result = special[name]() if name in special else bench.workload(name)
        except Exception as error:  # one workload that fails hides no other
            traceback.print_exc()
            result = {"workload": name, "device": asked.device, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result | {"machine": about}) if asked.json else line(result), flush=True)
        failed = failed or "error" in result
    sys.exit(failed)


def line(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{result['workload']:<12}  {result['error']}"
    if result["workload"] == "check":
        ours, trl = (result["rounding"][who] for who in ("ours", "trl"))
        return (
            f"in float32 the gradient differs from TRL's by {result['gradient_difference']:.1g}; "
            f"rounding to bfloat16 moves it by {ours:.2g}, TRL's by {trl:.2g}"
        )
    if result["workload"] == "growth":
        by_size = ", ".join(f"{size}: {value:.1f}" for size, value in result["microseconds_a_unique_token"].items())
        return f"microseconds a unique token by rollouts a group: {by_size} (spread {result['spread']:.2f})"
    tree = f"   TRL's tree {result['ratio_trl_tree']:.2f}x" if result.get("ratio_trl_tree") else ""
    return (
        f"{result['workload']:<12}  {result['seconds']:6.3f}  {result['ratio_trl']:5.2f}x {result['ratio_trl_sorted']:5.2f}x  "
        f"{result['bar'] or 0:4.1f}  {result['peak_gib']:5.2f} ({result['peak_gib_trl']:5.2f})   "
        f"{result['tokens'] / result['unique_tokens']:8.2f}   {result['forwarded_trl']:9.2f}   {result['floor_share']:6.0%}{tree}"
    )


if __name__ == "__main__":
    main()
