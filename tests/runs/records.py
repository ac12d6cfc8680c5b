"""Rollouts for the tests of runs: random ones by seed, and what it means that two are equal."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from longrein.rollout import Call, Rollout

TOOLS = (
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "move", "description": "é", "parameters": {"type": "object"}}},
)
WORDS = ["attic", "barn", "日本語", "🙂", "<script>alert(1)</script>", '"quoted"', "a\nb", "100%", "under_score", "\\"]


def rollout(seed: int, **fields: Any) -> Rollout:
    """A random tree of calls; the same for the same seed."""
    rng = random.Random(seed)
    record = Rollout(
        id=f"r{seed}",
        task={"rooms": rng.sample(WORDS, 3), "n": rng.random(), "deep": [None, {"a": [1, 2.5, True]}]},
        seed=rng.getrandbits(64),
        env=rng.choice(["TreasureHunt", "HarnessEnv"]),
        reward=rng.choice([0.0, 0.5, 1.0, -0.25]),
        success=rng.choice([True, False, None]),
        limit=rng.choice([None, None, "turns", "tokens"]),
        info={"exit_code": 0, "note": rng.choice(WORDS)},
        group=f"g{seed // 4}",
    )
    for index in range(rng.randint(1, 6)):
        drawn = rng.randint(0, 30)
        parent = list(record.calls)[-1] if record.calls and rng.random() < 0.8 else None
        record.add(
            Call(
                id=f"{seed}-{index}",
                parent=parent,
                context_ids=np.array([rng.randrange(150_000) for _ in range(rng.randint(1, 40))], np.int32),
                completion_ids=np.array([rng.randrange(150_000) for _ in range(drawn)], np.int32),
                logprobs=np.array([-rng.expovariate(1) for _ in range(drawn)], np.float32),
                sampler_logprobs=np.array([-rng.random() for _ in range(drawn)], np.float32) if rng.random() < 0.3 else None,
                finish_reason=rng.choice(["stop", "length", "tool_calls"]),
                policy_version=rng.randrange(100),
                messages=({"role": "user", "content": " ".join(rng.choices(WORDS, k=4))},),
                tools=rng.choice([(), TOOLS, TOOLS[:1]]),
                reply={"role": "assistant", "content": rng.choice(WORDS)},
                delivered=rng.random() < 0.9,
                reward=rng.choice([None, 0.1]),
                excluded=rng.choice([None, None, "stale", "auxiliary"]),
            )
        )
    if rng.random() < 0.1:
        record.failed, record.reward, record.success = "EngineError: away", None, None
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def plain(record: Rollout) -> dict[str, Any]:
    """Everything a rollout says, to the bit, as values that compare."""
    fields = ("id", "task", "seed", "env", "reward", "success", "failed", "limit", "info", "group")
    names = list(Call.__slots__)
    calls = [{name: _bits(getattr(call, name)) for name in names} for call in record.calls.values()]
    children = {parent: record.children(parent) for parent in (None, *record.calls)}
    return {name: getattr(record, name) for name in fields} | {"calls": calls, "children": children}


def _bits(value: Any) -> Any:
    return (value.dtype.str, value.tobytes()) if isinstance(value, np.ndarray) else value
