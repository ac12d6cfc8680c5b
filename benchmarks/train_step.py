"""Loss and backward of a training step, ours against TRL's, on the same rows in one process: `python -m benchmarks.train_step`.

What is compared has the same gradient, which is checked before anything is timed.
"""

from __future__ import annotations

import argparse
import functools
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
USUAL = 8
"""Rows a forward of TRL's, unless one is told."""
BEFORE = range(94, 100)
"""Seeds of steps that go before those that are timed on a GPU: what is planned by then is planned for the rest of a training."""
SEEDS = {"cpu": (0, 1, 2), "cuda": (0,)}
"""A workload is drawn from each: of one draw of a few rows, luck alone moves the ratio by a fifth."""
MINUTES = {"cpu": 5, "cuda": 4}
"""What a round of one draw of all workloads takes, about, on the machines of docs/training-speed.md."""
KEYS = ("workload", "device", "ratio_trl", "ratio_trl_sorted", "seconds", "peak_gib", "floor_share")
"""Of an object that is printed with `--json`."""
ON_A_GPU = ("ratio_trl_unseen", "ratio_trl_usual", "ratio_trl_tree", "gradient_difference")
"""Besides: rows of lengths not seen before; TRL at 8 rows a forward; TRL's own tree; how far bfloat16 takes the two apart."""
TOLERANCE = 1e-4
"""Of the gradient in float32: the norm of the difference over the norm, in all."""
ROUNDED = 0.25
"""In bfloat16, where rounding alone takes either a tenth from the gradient in float32 (see `check`): what is wrong differs by the
size of the gradient itself."""
CUT = 3000
"""Tokens of the rows on which that is found, in float32 besides."""


class Floor(NamedTuple):
    """What must be computed at least, in floating-point operations."""

    tokens: int
    flops: float


def floor_of(rows: Sequence[Row], model: Any) -> Floor:
    """Every unique token once through the layers, its attention over those it reads, every scored one through the head; of the
    last layer only keys and values for those that score nothing. Forward, and twice that backward; what checkpointing computes
    again is not counted."""
    width = max(len(row.ids) for row in rows)
    ids, mask = (
        np.stack([np.pad(one, (0, width - len(one))) for one in part])
        for part in zip(*[row[:2] for row in rows], strict=True)
    )
    packed = PackedRows(ids, mask.astype(bool))
    config, tokens, scoring = model.config, len(packed.tree), np.unique(packed.index)
    layer = model.model.layers[-1]
    matrices = sum(parameter.numel() for parameter in layer.parameters() if parameter.dim() > 1)
    read = sum(one.weight.numel() for one in (layer.self_attn.k_proj, layer.self_attn.v_proj))
    before = config.num_hidden_layers - 1
    reads = packed.tree.positions + 1
    attention = 4.0 * config.num_attention_heads * config.head_dim * (before * reads.sum() + reads[scoring].sum())
    body = 2.0 * (before * matrices * tokens + read * tokens + (matrices - read) * len(scoring)) + attention
    head = 2.0 * config.vocab_size * config.hidden_size * len(packed.targets)
    return Floor(tokens, 3 * (body + head))


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
    def __init__(
        self,
        device: str,
        rounds: int,
        seeds: Sequence[int],
        sizes: dict[str, int],
        *,
        micro: int | None = None,
        backend: str = "auto",
        compiled: bool | None = None,
    ) -> None:
        self.device, self.rounds, self.seeds, self.sizes = device, rounds, seeds, sizes
        self.base = make_model(device)
        folder = tempfile.mkdtemp()
        self.ours = Ours(self.base, folder, device, compiled=compiled, backend=backend)
        self.trl = Trl(self.base, folder, device)
        self.tree: TrlTree | None = None
        self.micro = micro
        self.rounding: dict[str, float] = {}
        # one thread is timed by its own clock, which other programs on the machine do not move
        self.clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
        self.rate = matrix_rate(device, self.base.dtype, self.clock)
        self.vocabulary = self.base.config.vocab_size
        rows = rows_of("none", "cpu", self.vocabulary)[:2]  # warming up
        values = Values(rows, self.vocabulary)
        self.ours.run(self.ours.prepare(rows, values))
        self.trl.run(self.trl.prepare(rows, values, 2))

    def workload(self, name: str) -> dict[str, Any]:
        """A workload drawn from each of its seeds: seconds and operations are the sums, memory is the most."""
        if self.device == "cuda":
            self._see(name)
        drawn = [self._drawn(name, seed) for seed in self.seeds]
        total = {key: sum(one[key] for one in drawn) for key in drawn[0] if not key.startswith("peak_gib")}
        peak = {key: max(one[key] for one in drawn) for key in ("peak_gib", "peak_gib_trl")}
        result = {
            "workload": name,
            "device": self.device,
            "ratio_trl": total["trl"] / total["ours"],
            "ratio_trl_sorted": total["trl_sorted"] / total["ours"],
            "seconds": total["ours"] / len(drawn),
            "peak_gib": peak["peak_gib"],
            "floor_share": total["flops"] / self.rate / total["ours"],
            "bar": BARS[self.device].get(name),
            "peak_gib_trl": peak["peak_gib_trl"],
            "gradient_difference": max(one["gradient_difference"] for one in drawn),
            "by_seed": [one["trl"] / one["ours"] for one in drawn],
            "row_tokens": total["row_tokens"] / total["unique_tokens"],
            "forwarded_trl": total["forwarded_trl"] / total["unique_tokens"],
        }
        if self.device == "cpu":
            return result
        rows = rows_of(name, self.device, self.vocabulary, seed=self.seeds[0], **self.sizes)
        values = Values(rows, self.vocabulary)
        unseen = {"ratio_trl_unseen": total["trl_unseen"] / total["ours_unseen"], "seconds_unseen": total["ours_unseen"]}
        unseen["ratio_trl_usual"] = result["ratio_trl"] * self._usual(rows)
        return result | unseen | self._tree(rows, values, drawn[0]["ours"])

    def _see(self, name: str) -> None:
        """Steps that are not timed. Of TRL's, which plans for every length anew, one does; its micro-batch is found on it."""
        for seed in BEFORE:
            rows = rows_of(name, self.device, self.vocabulary, seed=seed, **self.sizes)
            values = Values(rows, self.vocabulary)
            self.ours.run(self.ours.prepare(rows, values))
        self.micro = self.micro or self._fastest(rows, values)
        self.trl.run(self.trl.prepare(rows, values, self.micro)[: len(rows) // 4])

    def _drawn(self, name: str, seed: int) -> dict[str, float]:
        rows = rows_of(name, self.device, self.vocabulary, seed=seed, **self.sizes)
        values = Values(rows, self.vocabulary)
        batch = self.ours.prepare(rows, values)
        micro = self.micro or MICRO_BATCHES[self.device][0]
        batches, by_length = (self.trl.prepare(rows, values, micro, by_length=order) for order in (False, True))
        jobs = {"ours": lambda: self.ours.run(batch), "trl": lambda: self.trl.run(batches)}
        if micro > 1:
            jobs["trl_sorted"] = lambda: self.trl.run(by_length)
        peak, first, gradients = {}, {}, {}
        for who, job in jobs.items():  # the first round: memory and gradient besides
            peak[who] = peak_gib(lambda who=who, job=job: first.update({who: timed(job, self.clock)}))
            gradients[who] = gradient_of((self.ours if who == "ours" else self.trl).model)
        apart = difference(gradients["ours"], gradients["trl"])
        del gradients
        allowed = TOLERANCE if self.base.dtype == torch.float32 else ROUNDED
        if not apart <= allowed:
            raise AssertionError(f"{name}: the gradients differ by {apart:.2g}; {allowed:.2g} is allowed")
        # on a GPU a first run plans kernels for lengths not seen before, as each step of a training does: it stands apart
        cuda = self.device == "cuda"
        seconds = alternate(jobs, self.rounds if cuda else self.rounds - 1, self.clock, None if cuda else first)
        floor = floor_of(rows, self.base)
        return (
            {"trl_sorted": seconds["trl"]}
            | seconds
            | {
                "gradient_difference": apart,
                "ours_unseen": first["ours"],
                "trl_unseen": first["trl"],
                "peak_gib": peak["ours"],
                "peak_gib_trl": peak["trl"],
                "flops": floor.flops,
                "row_tokens": sum(len(row.ids) for row in rows),
                "unique_tokens": floor.tokens,
                "forwarded_trl": self.trl.forwarded(batches),
            }
        )

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
            begun = map(cut, rows_of("harness", self.device, self.vocabulary, prompt=500)[:4])
            rows = [row for row in begun if row.mask.any()]
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
        seconds = {}
        for micro in MICRO_BATCHES[self.device]:
            batches = self.trl.prepare(rows[: len(rows) // 2], values, micro)
            try:
                self.trl.run(batches)
                seconds[micro] = timed(lambda batches=batches: self.trl.run(batches))
            except torch.OutOfMemoryError:
                self.trl.model.zero_grad()
                torch.cuda.empty_cache()
                break
        found = ", ".join(f"{micro}: {value:.2f} s" for micro, value in seconds.items())
        print(f"TRL by rows a forward, on half of the first rows: {found}", file=sys.stderr, flush=True)
        return min(seconds, key=seconds.__getitem__)

    def _usual(self, rows: Sequence[Row]) -> float:
        """How much longer TRL takes at the rows a forward that it has unless it is told; found on as many of the rows."""
        chosen = rows[:: len(rows) // USUAL][:USUAL]
        values = Values(chosen, self.vocabulary)
        batches = [self.trl.prepare(chosen, values, micro) for micro in (USUAL, self.micro or 1)]
        self.trl.run(batches[0])
        usual, fastest = (timed(lambda one=one: self.trl.run(one)) for one in batches)
        return usual / fastest

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
            if rollouts == 8 or self.device == "cuda":
                self.ours.run(batch)
            seconds = alternate({"ours": lambda batch=batch: self.ours.run(batch)}, 1, self.clock)["ours"]
            result[rollouts] = 1e6 * seconds / floor_of(rows, self.base).tokens
        spread = max(result.values()) / min(result.values())
        return {"workload": "growth", "device": self.device, "microseconds_a_unique_token": result, "spread": spread}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", action="store_true", help="one object a line; the table goes to the standard error")
    parser.add_argument("--rounds", type=int, default=1, help="of each draw of a workload; the median counts")
    parser.add_argument("--full", action="store_true", help="three rounds")
    parser.add_argument("--seeds", type=int, nargs="*", help="of the draws; unsaid, 0 to 2, on a GPU 0")
    parser.add_argument("--only", nargs="*", choices=[*WORKLOADS, "growth", "check"])
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, help="our layers; unsaid, on a GPU")
    parser.add_argument("--reply", type=int, help="tokens that the agent writes in a turn, in the mean")
    parser.add_argument("--observation", type=int, help="tokens that it reads after each, in the mean")
    parser.add_argument("--micro", type=int, help="rows a forward of TRL's; unsaid, the fastest of some is found on a GPU")
    parser.add_argument("--backend", default="auto", help="of our attention: auto, cudnn, varlen, flex or sdpa")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU")
    asked = parser.parse_args(arguments)
    if asked.device == "cpu":
        torch.set_num_threads(asked.threads)
    sizes = {name: getattr(asked, name) for name in ("reply", "observation") if getattr(asked, name) is not None}
    rounds, seeds = 3 if asked.full else asked.rounds, asked.seeds or SEEDS[asked.device]
    names = asked.only or [*(["check"] if asked.device == "cuda" else []), *SIZES[asked.device], "growth"]
    table = functools.partial(print, file=sys.stderr if asked.json else sys.stdout, flush=True)
    share = len(names) / len(SIZES[asked.device])
    table(f"training steps: about {max(1, round(MINUTES[asked.device] * rounds * len(seeds) * share))} minutes")
    bench = Bench(asked.device, rounds, seeds, sizes, micro=asked.micro, backend=asked.backend, compiled=asked.compiled)
    about = machine() | {"matrix_gflops": f"{bench.rate / 1e9:.0f}"}
    table(", ".join(f"{name} {value}" for name, value in about.items()))
    table("workload      seconds   TRL   sorted  bar   GiB (TRL)     tokens/unique   TRL's   floor   by seed")
    failed = False
    for name in names:
        special = {"growth": bench.growth, "check": bench.check}
        try:
            result = special[name]() if name in special else bench.workload(name)
        except Exception:  # one workload that fails hides no other
            traceback.print_exc()
            failed = True
            continue
        table(line(result))
        if asked.json and name not in special:
            print(json.dumps({key: result[key] for key in (*KEYS, *ON_A_GPU) if key in result}), flush=True)
    sys.exit(failed)


def line(result: dict[str, Any]) -> str:
    if result["workload"] == "check":
        ours, trl = (result["rounding"][who] for who in ("ours", "trl"))
        return (
            f"in float32 the gradient differs from TRL's by {result['gradient_difference']:.1g}; "
            f"rounding to bfloat16 moves it by {ours:.2g}, TRL's by {trl:.2g}"
        )
    if result["workload"] == "growth":
        by_size = ", ".join(f"{size}: {value:.1f}" for size, value in result["microseconds_a_unique_token"].items())
        return f"microseconds a unique token by rollouts a group: {by_size} (spread {result['spread']:.2f})"
    more = "".join(f"   {name.removeprefix('ratio_trl_')} {result[name]:.2f}" for name in ON_A_GPU if result.get(name))
    return (
        f"{result['workload']:<12}  {result['seconds']:6.3f}  {result['ratio_trl']:5.2f}x {result['ratio_trl_sorted']:5.2f}x  "
        f"{result['bar'] or 0:4.1f}  {result['peak_gib']:5.2f} ({result['peak_gib_trl']:5.2f})   "
        f"{result['row_tokens']:8.2f}   {result['forwarded_trl']:9.2f}   {result['floor_share']:6.0%}   "
        + " ".join(f"{ratio:.2f}" for ratio in result["by_seed"])
        + more
    )


if __name__ == "__main__":
    main()
