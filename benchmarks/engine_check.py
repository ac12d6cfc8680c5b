"""Whether the embedded engine is right and quick on this machine's device: for GPUs, which the test suite does not see.

    python -m benchmarks.engine_check [--device cuda]

Each line is one check: the largest distance of a sampled token's log-probability from a plain forward pass, and tokens a second
of decoding with captured graphs and without.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import time
import traceback
from typing import Any

import torch

from benchmarks.engine import Lengths, Workload, random_model
from benchmarks.measure import machine
from longrein.contract import SampleRequest, Sampling
from longrein.engines.forwarding import SlotForward
from longrein.engines.transformers import TransformersEngine


async def play(engine: TransformersEngine, work: Workload) -> list[tuple[list[int], Any]]:
    async def rollout(row: int) -> list[tuple[list[int], Any]]:
        context, calls = list(work.prompts[row]), []
        for turn in range(work.turns):
            sampling = Sampling(max_tokens=int(work.reply_lengths[turn, row]))
            reply = await engine.sample(SampleRequest(list(context), sampling, frozenset(), seed=1000 * turn + row))
            calls.append((list(context), reply))
            context += [*reply.ids, *work.between[turn][row]]
        return calls

    rollouts = await asyncio.gather(*(rollout(row) for row in range(len(work.prompts))))
    return [call for calls in rollouts for call in calls]


@torch.no_grad()
def distances(model: Any, calls: list[tuple[list[int], Any]]) -> dict[str, float]:
    """Over all sampled tokens, how far their log-probabilities are from a plain pass."""
    found = []
    for prompt, reply in calls:
        logits = model(torch.tensor([[*prompt, *reply.ids]], device=model.device)).logits[0, len(prompt) - 1 : -1].float()
        ids = torch.tensor(reply.ids, device=model.device)
        exact = torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0]
        found.append((exact - torch.tensor(reply.logprobs, device=model.device)).abs())
    every = torch.cat(found)
    return {"tokens": len(every), "mean": float(every.mean()), "largest": float(every.max())}


def check(shape: str, device: str, dtype: torch.dtype, *, captured: bool, cache_tokens: int | None = None) -> dict[str, Any]:
    model = _wide(random_model(shape, device, dtype))
    work = Workload(model.config.vocab_size, Lengths(96, 32, (8, 40), (4, 24)), tasks=4, rollouts=4, turns=4)
    engine = TransformersEngine(model, cache_tokens=cache_tokens)
    try:
        asyncio.run(engine.sample(SampleRequest([1, 2], Sampling(max_tokens=2), frozenset(), 0)))
        forward = engine._forward
        assert isinstance(forward, SlotForward), f"sampled plainly: {type(forward).__name__}"
        if forward.graphs is not None:
            forward.graphs._failed = not captured
        first = asyncio.run(play(engine, work))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.02)
        second = asyncio.run(play(engine, work))  # graphs are replayed over the new weights
        graphs = None if forward.graphs is None or forward.graphs._failed else len(forward.graphs.captured)
        before = {"graphs": graphs, "new_weights": distances(model, second)}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.div_(1.02)
        return {"check": f"{shape} {dtype} captured={captured} cache={cache_tokens}", **distances(model, first), **before}
    finally:
        engine.close()


@torch.no_grad()
def rounding(shape: str, device: str) -> dict[str, Any]:
    """How far plain bfloat16 passes are from float32, and from each other in batches of other shapes: nobody is nearer."""
    exact = _wide(random_model(shape, device, torch.float32))
    short = copy.deepcopy(exact).to(torch.bfloat16)
    exact.load_state_dict(short.state_dict())  # the same weights, so that only the computing is rounded
    ids = torch.randint(0, exact.config.vocab_size, (16, 256), device=device)

    def logprobs(model: Any, rows: torch.Tensor) -> torch.Tensor:
        logps = torch.log_softmax(model(rows).logits[:, 127:-1].float(), -1)
        # Likely tokens, as sampled ones are: those that float32 draws.
        return logps.gather(2, drawn[: len(rows), :, None])[..., 0]

    logits = exact(ids).logits[:, 127:-1]
    drawn = torch.distributions.Categorical(logits=logits.float()).sample()
    single, together, alone = logprobs(exact, ids), logprobs(short, ids), logprobs(short, ids[:1])
    return {
        "rounding": f"{shape} bfloat16, plain passes",
        "mean_from_float32": float((together - single).abs().mean()),
        "largest_from_float32": float((together - single).abs().max()),
        "mean_alone_from_in_a_batch": float((together[:1] - alone).abs().mean()),
        "largest_alone_from_in_a_batch": float((together[:1] - alone).abs().max()),
    }


def _wide(model: Any) -> Any:
    """Random weights wide enough that the tokens differ in probability."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


def decoding(shape: str, device: str, dtype: torch.dtype, rows: int, *, captured: bool) -> dict[str, Any]:
    """Tokens a second of `rows` replies of 128 tokens to one prompt of 512."""
    model = random_model(shape, device, dtype)
    engine = TransformersEngine(model)
    vocabulary = model.config.vocab_size

    async def replies(start: int) -> None:
        prompt = [(start + 7 * index) % vocabulary for index in range(512)]
        requests = (SampleRequest(prompt, Sampling(max_tokens=128), frozenset(), seed) for seed in range(rows))
        await asyncio.gather(*(engine.sample(request) for request in requests))

    try:
        asyncio.run(engine.sample(SampleRequest([1, 2], Sampling(max_tokens=2), frozenset(), 0)))
        assert isinstance(engine._forward, SlotForward)
        if engine._forward.graphs is not None:
            engine._forward.graphs._failed = not captured
        asyncio.run(replies(1))
        started = time.perf_counter()
        asyncio.run(replies(2))
        seconds = time.perf_counter() - started
        started = time.perf_counter()
        with torch.no_grad():
            ids = torch.tensor([[(7 * index) % vocabulary for index in range(512)]] * rows, device=device)
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=128, min_new_tokens=128, do_sample=True)
        plain = time.perf_counter() - started
        rate = {"tokens_per_second": round(rows * 128 / seconds), "generate": round(rows * 128 / plain)}
        return {"decoding": f"{shape} {dtype} rows={rows} captured={captured}", **rate}
    finally:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=["exact", "decoding", "quick"], help="quick: two cases, and rounding")
    options = parser.parse_args()
    print(json.dumps(machine()))
    ways = (True, False) if options.device != "cpu" else (False,)
    single, half = torch.float32, torch.bfloat16
    runs: list[Any] = [lambda c=c: check("tiny", options.device, single, captured=c) for c in ways]
    runs += [lambda: check("tiny", options.device, single, captured=ways[0], cache_tokens=1500)]
    if options.device != "cpu":
        runs += [lambda d=d, c=c: check("qwen3", options.device, d, captured=c) for d in (single, half) for c in ways]
        for shape, dtype in (("tiny", single), ("qwen3", half)):
            runs += [
                lambda s=shape, d=dtype, r=rows, c=c: decoding(s, options.device, d, r, captured=c)
                for rows in (1, 64)
                for c in ways
            ]
    exact = 3 if options.device == "cpu" else len(ways) + 1 + 2 * len(ways)
    runs += [lambda: rounding("qwen3" if options.device != "cpu" else "tiny", options.device)]
    quick = [runs[0], lambda: check("qwen3", options.device, half, captured=True), runs[-1]]
    runs = {None: runs, "exact": [*runs[:exact], runs[-1]], "decoding": runs[exact:-1], "quick": quick}[options.only]
    for run in runs:
        try:
            print(json.dumps(run()), flush=True)
        except Exception:
            traceback.print_exc()


if __name__ == "__main__":
    main()
