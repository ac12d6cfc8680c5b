"""The embedded engine against `model.generate` in padded lockstep batches, as TRL samples, and transformers' continuous batching.

    python -m benchmarks.engine [--json] [--quick] [--shape tiny|smollm2|qwen3] [--turns 6] [--device cuda --dtype bfloat16]

All three play the same rollouts: 8 tasks x 8 rollouts x 6 turns, the prompts of all tasks alike at the start, the replies of
lengths that are drawn beforehand, and after each reply some tokens from the environment. Weights are random: only shapes cost time.
`ratio_*` is tokens sampled a second over the other's; `cost_growth` is what a sampled token costs in the last turn over the first,
where `context_growth` is how much longer the conversation has become. `new_tokens` are all that any prompt or reply has, each
counted once where prompts begin alike, and `forwarded_tokens` what went through the model. `cpu_ratio_*` are the ratios of the process's own seconds.
On a GPU the two that capture graphs play one round that is not counted, and `breakdown` says where a further round of ours spends its time.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.generation import ContinuousBatchingConfig, StoppingCriteria, StoppingCriteriaList

from benchmarks.measure import alternate, machine
from longrein.contract import SampleRequest, Sampling
from longrein.engines.forwarding import SlotForward
from longrein.engines.transformers import TransformersEngine


class Lengths(NamedTuple):
    system: int
    task: int
    reply: tuple[int, int]
    environment: tuple[int, int]


class Workload:
    """Rollouts with everything but the sampled tokens drawn beforehand."""

    def __init__(self, vocabulary: int, lengths: Lengths, tasks: int, rollouts: int, turns: int) -> None:
        rng = np.random.default_rng(0)
        system = rng.integers(0, vocabulary, lengths.system).tolist()
        openings = [system + rng.integers(0, vocabulary, lengths.task).tolist() for _ in range(tasks)]
        self.prompts = [opening for opening in openings for _ in range(rollouts)]
        self.turns = turns
        shape = (turns, len(self.prompts))
        self.reply_lengths = rng.integers(*lengths.reply, shape, endpoint=True)
        between = rng.integers(*lengths.environment, shape, endpoint=True)
        self.between = [[rng.integers(0, vocabulary, count).tolist() for count in row] for row in between]
        self.sampled_tokens = int(self.reply_lengths.sum())
        added = sum(len(tokens) for row in self.between[:-1] for tokens in row)
        self.new_tokens = lengths.system + tasks * lengths.task + self.sampled_tokens + added
        self.context_growth = 1 + float((self.reply_lengths + between)[:-1].sum(0).mean()) / len(self.prompts[0])


class Generate:
    """Every turn is one padded batch; a batch takes as long as its longest reply."""

    def __init__(self, model: Any, work: Workload) -> None:
        self.model, self.work = model, work

    def __call__(self) -> None:
        contexts = [list(prompt) for prompt in self.work.prompts]
        for turn in range(self.work.turns):
            width = max(map(len, contexts))
            ids = torch.tensor([[0] * (width - len(row)) + row for row in contexts], device=self.model.device)
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in contexts], device=self.model.device)
            limits = torch.tensor(self.work.reply_lengths[turn], device=self.model.device) + width
            output = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=GenerationConfig(
                    max_new_tokens=int(self.work.reply_lengths[turn].max()),
                    do_sample=True,
                    top_k=0,
                    pad_token_id=0,
                    eos_token_id=None,
                ),
                stopping_criteria=StoppingCriteriaList([_AtLength(limits)]),
            )
            for row, length in enumerate(self.work.reply_lengths[turn]):
                contexts[row] += output[row, width : width + int(length)].tolist() + self.work.between[turn][row]


class _AtLength(StoppingCriteria):
    def __init__(self, limits: torch.Tensor) -> None:
        self.limits = limits

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.limits


class ContinuousBatching:
    """transformers' own manager, with log-probabilities and shared prefixes; a rollout asks again as soon as it is answered."""

    def __init__(self, model: Any, work: Workload) -> None:
        self.work = work
        longest = len(work.prompts[0]) + int(work.reply_lengths.sum(0).max()) + sum(len(row[0]) + 40 for row in work.between)
        page = 32  # its default of 256 would share nothing here
        named = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        size = {"page_size" if "page_size" in named else "block_size": page}  # transformers 5.17 has the older name
        self.manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=True, top_k=0, pad_token_id=0, eos_token_id=-1, max_new_tokens=64),
            continuous_batching_config=ContinuousBatchingConfig(
                **size,
                num_blocks=-(-longest // page) * len(work.prompts) + 64,
                max_batch_tokens=2048,
                return_logprobs=True,
                allow_block_sharing=True,
            ),
        )
        self.manager.start()

    def __call__(self) -> None:
        work, manager = self.work, self.manager
        contexts = [list(prompt) for prompt in work.prompts]
        turns = [0] * len(contexts)
        rows: dict[str, int] = {}

        def ask(row: int) -> None:
            rows[manager.add_request(contexts[row], max_new_tokens=int(work.reply_lengths[turns[row], row]))] = row

        for row in range(len(contexts)):
            ask(row)
        while rows:
            result = manager.get_result(timeout=120)
            if result is None:
                raise RuntimeError("continuous batching stopped answering")
            if not result.is_finished():
                continue
            row = rows.pop(result.request_id)
            contexts[row] += result.generated_tokens + work.between[turns[row]][row]
            turns[row] += 1
            if turns[row] < work.turns:
                ask(row)

    def close(self) -> None:
        self.manager.stop(block=True)


class Ours:
    """The engine as a recorder asks it: every rollout a task of its own."""

    def __init__(self, model: Any, work: Workload) -> None:
        self.engine, self.work = TransformersEngine(model), work
        self.seed = 0
        self.forwarded = 0

    def __call__(self) -> None:
        before = self.engine.forwarded_tokens
        self.engine.policy_version += 1  # nothing is left of the last round
        asyncio.run(self._all())
        self.forwarded = self.engine.forwarded_tokens - before

    async def _all(self) -> None:
        await asyncio.gather(*(self._rollout(row) for row in range(len(self.work.prompts))))

    async def _rollout(self, row: int) -> None:
        context = list(self.work.prompts[row])
        for turn in range(self.work.turns):
            context += await self._turn(context, row, turn)

    async def _turn(self, context: list[int], row: int, turn: int) -> list[int]:
        self.seed += 1
        sampling = Sampling(max_tokens=int(self.work.reply_lengths[turn, row]))
        reply = await self.engine.sample(SampleRequest(list(context), sampling, frozenset(), self.seed))
        return [*reply.ids, *self.work.between[turn][row]]

    def breakdown(self) -> dict[str, Any] | None:
        """Where a round's seconds go on a GPU: a round of its own, since waiting for each part makes all of them longer."""
        forward = self.engine._forward
        graphs = forward.graphs if isinstance(forward, SlotForward) else None
        if graphs is None:
            return None
        parts: dict[str, list[float]] = {}

        def watch(owner: Any, method: str, name: str) -> Callable[..., Any]:
            plain = getattr(owner, method)

            def timed(*args: Any) -> Any:
                torch.cuda.synchronize()
                started = time.perf_counter()
                result = plain(*args)
                torch.cuda.synchronize()
                parts.setdefault(name, []).append(time.perf_counter() - started)
                return result

            return timed

        watched = [(graphs, "_store", "pieces"), (graphs, "_rows", "rows"), (graphs, "_capture", "capture")]
        watched += [(self.engine, "_step", "steps")]
        captures = graphs.captures
        for owner, method, name in watched:
            setattr(owner, method, watch(owner, method, name))
        started = time.perf_counter()
        try:
            self()
        finally:
            for owner, method, _ in watched:
                delattr(owner, method)
        return {
            "seconds": round(time.perf_counter() - started, 3),
            **{f"{name}_seconds": round(sum(found), 3) for name, found in parts.items()},
            "steps": len(parts["steps"]),
            "captures_before": captures,
            "captures": graphs.captures - captures,
            "graphs": len(graphs.captured),
            "moves": graphs.slots.moves + graphs.stems.moves,
            "eager": graphs._failed,
        }

    def seconds_by_turn(self) -> list[float]:
        """What each turn takes when all rollouts take it together."""
        self.engine.policy_version += 1
        contexts = [list(prompt) for prompt in self.work.prompts]

        async def turn_of_all(turn: int) -> list[list[int]]:
            return await asyncio.gather(*(self._turn(context, row, turn) for row, context in enumerate(contexts)))

        seconds = []
        for turn in range(self.work.turns):
            started = time.perf_counter()
            added = asyncio.run(turn_of_all(turn))
            seconds.append((time.perf_counter() - started) / int(self.work.reply_lengths[turn].sum()))
            for context, tokens in zip(contexts, added, strict=True):
                context += tokens
        return seconds


SHAPES: dict[str, tuple[Any, Lengths]] = {
    # The policy of `make train`.
    "tiny": (
        lambda: Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=731, hidden_size=256, intermediate_size=640, num_hidden_layers=3, num_attention_heads=8,
                num_key_value_heads=4, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=True,
            )
        ),
        Lengths(system=128, task=64, reply=(8, 40), environment=(8, 24)),
    ),
    "smollm2": (
        lambda: LlamaForCausalLM(
            LlamaConfig(
                vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
            )
        ),
        Lengths(system=32, task=32, reply=(4, 16), environment=(4, 12)),
    ),
    "qwen3": (
        lambda: Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True,
            )
        ),
        Lengths(system=512, task=128, reply=(32, 128), environment=(32, 96)),
    ),
}  # fmt: skip


def random_model(shape: str, device: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with torch.device(device):  # a GPU draws a large model's weights in a moment, a CPU in many seconds
        return SHAPES[shape][0]().to(dtype).eval()


def measure(shape: str, device: str, dtype: torch.dtype, sizes: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    model, lengths = random_model(shape, device, dtype), SHAPES[shape][1]
    work = Workload(model.config.vocab_size, lengths, *sizes)
    warm = Workload(model.config.vocab_size, lengths, 2, 2, 1)
    ours, continuous = Ours(model, work), ContinuousBatching(copy.deepcopy(model), work)
    generate = Generate(copy.deepcopy(model), work)
    try:
        for contender in (ours, continuous, generate):
            contender.work = warm
            contender()
            contender.work = work
            if device != "cpu" and contender is not generate:  # the two that capture graphs, for the workload's shapes
                contender()
        contenders = {"ours": ours, "generate": generate, "continuous": continuous}
        busy: dict[str, list[float]] = {name: [] for name in contenders}

        def counted(name: str) -> None:
            started, began = time.process_time(), time.perf_counter()
            contenders[name]()
            busy[name].append(time.process_time() - started)
            print(f"{shape}, {name}: {time.perf_counter() - began:.2f} s", file=sys.stderr, flush=True)

        seconds = alternate({name: functools.partial(counted, name) for name in contenders}, rounds)
        by_turn = ours.seconds_by_turn()
        breakdown = ours.breakdown()
    finally:
        continuous.close()
        ours.engine.close()
    rate = {name: work.sampled_tokens / value for name, value in seconds.items()}
    return {
        "workload": f"{shape}, {sizes[0]} tasks x {sizes[1]} rollouts x {sizes[2]} turns",
        "ratio_generate": round(rate["ours"] / rate["generate"], 2),
        "ratio_continuous_batching": round(rate["ours"] / rate["continuous"], 2),
        # The same by the process's own seconds, which others on the machine do not lengthen.
        "cpu_ratio_generate": round(median(busy["generate"]) / median(busy["ours"]), 2) if device == "cpu" else None,
        "cpu_ratio_continuous_batching": round(median(busy["continuous"]) / median(busy["ours"]), 2)
        if device == "cpu"
        else None,
        "tokens_per_second": round(rate["ours"], 1),
        "generate_tokens_per_second": round(rate["generate"], 1),
        "continuous_batching_tokens_per_second": round(rate["continuous"], 1),
        "sampled_tokens": work.sampled_tokens,
        "new_tokens": work.new_tokens,
        "forwarded_tokens": ours.forwarded,
        "cost_growth": round(by_turn[-1] / by_turn[0], 2),
        "context_growth": round(work.context_growth, 2),
        "breakdown": breakdown,
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="4 tasks x 4 rollouts x 3 turns, one round")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="tiny and smollm2 unless said")
    parser.add_argument("--turns", type=int, help="6 unless said")
    parser.add_argument("--rounds", type=int, help="3 for tiny, else 1")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    sizes = (4, 4, options.turns or 3) if options.quick else (8, 8, options.turns or 6)
    if not options.json:
        print(machine())
    for shape in options.shape or ["tiny", "smollm2"]:
        rounds = options.rounds or (3 if shape == "tiny" and not options.quick else 1)
        line = measure(shape, options.device, getattr(torch, options.dtype), sizes, rounds)
        print(json.dumps(line | machine() if options.json else line, indent=None if options.json else 1), flush=True)


if __name__ == "__main__":
    main()
