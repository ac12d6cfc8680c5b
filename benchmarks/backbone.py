"""Time of a packed pass, forward and backward, of a Qwen3-0.6B-shaped decoder without its head, on a GPU.

`python -m benchmarks.backbone` checks every attention back end against the plain pass, then prints a JSON object a line:
rates of the kernels alone, then each workload by each back end, with layers compiled and not. `floor_share` is the FLOPs
that must be done (no recomputation) over the measured bf16 matrix rate and the time taken.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from longrein.training.packed import decoder_of, packed_hidden
from longrein.training.tree import PrefixTree
from longrein.training.tree_attention import TreeAttention
from longrein.training.way import way_for

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
LAYERS = 28
STARTED = time.perf_counter()


def say(**facts: Any) -> None:
    print(json.dumps(facts | {"at": round(time.perf_counter() - STARTED)}), flush=True)


def attempt(name: str, part: Callable[[], Any]) -> None:
    try:
        part()
    except Exception as error:
        say(part=name, error=f"{type(error).__name__}: {error}"[:600])


def seconds(run: Callable[[], Any], rounds: int = 3, warm: bool = False) -> float:
    if not warm:
        run()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def workloads() -> dict[str, list[np.ndarray]]:
    rng = np.random.default_rng(0)

    def fresh(low: int, high: int) -> np.ndarray:
        return rng.integers(0, 30_000, rng.integers(low, high))

    prompt = fresh(2000, 2001)
    group = [np.concatenate([prompt, fresh(2000, 12_000)]) for _ in range(8)]
    harness = []
    for _ in range(2):
        trunk = np.concatenate([prompt, fresh(9_000, 16_000)])
        harness.append(trunk)
        harness += [np.concatenate([trunk[: rng.integers(2500, len(trunk))], fresh(100, 2500)]) for _ in range(8)]
        harness.append(np.concatenate([prompt, fresh(3000, 6000)]))
    per_turn = []
    for _ in range(4):
        whole = np.concatenate([prompt, fresh(8_000, 16_000)])
        per_turn += [whole[:cut] for cut in np.linspace(3000, len(whole), 10).astype(int)]
    none = [fresh(4000, 16_000) for _ in range(5)]
    return {"group": group, "harness": harness, "per_turn": per_turn, "none": none}


def flops(tree: PrefixTree) -> float:
    """Forward and backward, each product once: backward is twice the forward."""
    width, heads = SHAPE["hidden_size"], SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    keys = SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    weights = width * (2 * heads + 2 * keys + 3 * SHAPE["intermediate_size"])
    return 3.0 * LAYERS * (2.0 * weights * len(tree) + 4.0 * heads * float((tree.positions + 1).sum()))


def matrix_rate() -> float:
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 10 * 2 * 8192**3 / seconds(lambda: [left @ right for _ in range(10)])


def kernel_rates(name: str, size: int) -> None:
    """An attention kernel alone on one causal row: forward and backward, in TFLOP/s."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    work = 4.0 * 16 * 128 * size * size / 2
    shapes = [(1, heads, size, 128) for heads in (16, 8, 8)]
    leaves = [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]

    def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if name == "cudnn" else SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    tree = PrefixTree.of([np.arange(size)])
    attention: Any = TreeAttention(tree, torch.device("cuda"), name) if name in ("varlen", "flex") else dense
    started = time.perf_counter()
    grad = torch.randn_like(attention(*leaves))
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    forward = seconds(lambda: attention(*leaves))
    both = seconds(lambda: attention(*leaves).backward(grad))
    say(kernel=name, size=size, first_s=round(first, 2), forward=round(work / forward / 1e12),
        backward=round(2.5 * work / (both - forward) / 1e12))  # fmt: skip


def correctness(*backends: str) -> None:
    """Hidden states and gradients of a two-layer model in bf16, against the plain pass of each row in float32."""
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=30_000, num_hidden_layers=2, tie_word_embeddings=True, **SHAPE)
    model = Qwen3ForCausalLM(config).cuda().train()
    rows = [row[:700] for row in workloads()["harness"][:5]] + [row[:300] for row in workloads()["none"][:2]]
    tree = PrefixTree.of(rows)

    def gradients(hidden: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        noise = torch.Generator("cuda").manual_seed(1)
        sum((h.float() * torch.randn(h.shape, generator=noise, device="cuda")).sum() for h in hidden).backward()
        grads = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
        return torch.cat([h.detach().float() for h in hidden]), torch.cat(grads)

    def plain() -> list[torch.Tensor]:
        return [decoder_of(model)(input_ids=torch.as_tensor(r, device="cuda")[None]).last_hidden_state[0] for r in rows]

    def packed(**how: Any) -> list[torch.Tensor]:
        hidden = packed_hidden(model, tree, **how)
        return [hidden[torch.as_tensor(places, device="cuda")] for places in tree.places]

    exact = gradients(plain())

    def check(name: str, hidden: Callable[[], list[torch.Tensor]]) -> None:
        def one() -> None:
            found = gradients(hidden())
            errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]
            say(check=name, dtype=str(model.dtype), hidden=f"{errors[0]:.1e}", gradient=f"{errors[1]:.1e}")

        attempt(f"check {name}", one)

    for backend in backends:
        if backend != "varlen":
            check(backend, lambda backend=backend: packed(backend=backend))
    model.bfloat16()
    say(way=way_for(model))
    check("plain", plain)
    for backend in backends:
        check(backend, lambda backend=backend: packed(backend=backend))
    if "varlen" not in backends:
        return
    check("varlen compiled", lambda: packed(backend="varlen", compiled=True))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check("varlen checkpointed", lambda: packed(backend="varlen"))
    check("varlen compiled checkpointed", lambda: packed(backend="varlen", compiled=True))


def passes(rate: float, budget: float, ways: list[tuple[str, bool]]) -> None:
    config = Qwen3Config(vocab_size=30_000, num_hidden_layers=LAYERS, tie_word_embeddings=True, **SHAPE)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).bfloat16().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for backend, compiled in ways:
        for name, rows in workloads().items():
            if time.perf_counter() - STARTED > budget:
                return
            tree = PrefixTree.of(rows)

            def step(tree: PrefixTree = tree, backend: str = backend, compiled: bool = compiled) -> None:
                packed_hidden(model, tree, backend=backend, compiled=compiled).float().square().mean().backward()

            def one(step: Any = step, name: str = name, tree: PrefixTree = tree, key: Any = (backend, compiled)) -> None:
                torch.cuda.reset_peak_memory_stats()
                started = time.perf_counter()
                step()
                torch.cuda.synchronize()
                first, taken = time.perf_counter() - started, seconds(step, 2, warm=True)
                share = flops(tree) / rate / taken
                peak = torch.cuda.max_memory_allocated() / 2**30
                say(workload=name, backend=key[0], compiled=key[1], tokens=len(tree), segments=len(tree.starts),
                    seconds=round(taken, 3), floor_share=round(share, 3), peak_gib=round(peak, 1), first_s=round(first, 1))  # fmt: skip
                if name == "harness" and key[0] == "varlen":
                    profile(step)

            attempt(f"{name} {backend} {compiled}", one)


def profile(step: Callable[[], None]) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    with profiled(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)[:14]
    for event in events:
        say(kernel=event.key[:90], ms=round(event.self_device_time_total / 1e3, 1), calls=event.count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=200.0, help="seconds after which no new measurement starts")
    budget = parser.parse_args().budget
    say(
        torch=torch.__version__,
        gpu=torch.cuda.get_device_name(),
        cc=shutil.which("gcc") or shutil.which("cc"),
        cpus=os.cpu_count(),
    )
    attempt("correctness", lambda: correctness("varlen", "sdpa"))
    rate = matrix_rate()
    say(matrix_tflops=round(rate / 1e12))
    for name in ("varlen", "flash", "cudnn"):
        attempt(f"kernel {name}", lambda name=name: kernel_rates(name, 8192))
    attempt("passes", lambda: passes(rate, budget, [("varlen", True)]))
    attempt("kernel flex", lambda: kernel_rates("flex", 8192))
    attempt("correctness", lambda: correctness("flex"))
    attempt("passes", lambda: passes(rate, budget, [("flex", True), ("varlen", False), ("sdpa", False)]))


if __name__ == "__main__":
    main()
