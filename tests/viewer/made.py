"""Runs for the page's tests: real token ids of a real vocabulary, forks, failures, markup, and a very long conversation."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from longrein.rollout import Call, Reason, Rollout
from longrein.runs import RunWriter
from longrein.runs.pieces import Pieces

MARKUP = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script><b>bold</b>&amp;'
LOOK = {"type": "function", "function": {"name": "look", "description": MARKUP, "parameters": {"type": "object"}}}


def run(folder: Path, tokenizer: Any, *, rollouts: int = 64, long_tokens: int = 0) -> Path:
    """A run of a few steps: two environments, groups of four; the last rollout is very long if asked for."""
    rng = random.Random(0)
    with RunWriter(folder, pieces=Pieces(tokenizer), seed=7) as writer:
        for number in range(rollouts):
            step = 1 + number // 16
            record = _rollout(number, rng, tokenizer)
            writer.write(record, phase="train", step=step)
            if record.failed is None:
                trained = [call for call in record.calls.values() if record.reason(call) is None]
                writer.credit(
                    record.id, {call.id: np.full(len(call.completion_ids), (record.reward or 0) - 0.5) for call in trained}
                )
            if number % 16 == 15:
                writer.metrics(
                    step,
                    {
                        "reward": 0.2 * step,
                        "success": 0.2 * step,
                        "loss": 0.1,
                        "step_time": 5.0,
                        "time/rollout": 3.0,
                        "time/training": 1.5,
                    },
                )
        if long_tokens:
            writer.write(_long(long_tokens, rng, tokenizer), phase="train", step=9)
    (folder / "config.json").write_text('{"model": "tiny", "note": "</script><script>window.hacked=1</script>"}')
    return folder


def _call(name: str, parent: str | None, tokenizer: Any, sent: list[Any], reply: Any, **fields: Any) -> Call:
    text = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in sent)
    said = (reply.get("content") or "") + "".join(call["function"]["arguments"] for call in reply.get("tool_calls", ()))
    context, drawn = (tokenizer.encode(words, add_special_tokens=False) for words in (text, said + "<|im_end|>"))
    logprobs = -np.random.default_rng(len(drawn)).exponential(0.7, len(drawn)).astype(np.float32)
    return Call(
        name,
        parent,
        np.array(context, np.int32),
        np.array(drawn, np.int32),
        logprobs,
        "stop",
        messages=tuple(sent),
        reply=reply,
        tools=(LOOK,),
        **fields,
    )


def _rollout(number: int, rng: random.Random, tokenizer: Any) -> Rollout:
    env = ["TreasureHunt", "HarnessEnv"][number % 2]
    reward = rng.choice([0.0, 0.5, 1.0])
    record = Rollout(
        id=f"r{number}",
        task={"room": f"attic {number // 4}", "evil": MARKUP},
        env=env,
        group=f"g{number // 4}",
        reward=reward,
        success=reward == 1,
    )
    first = [{"role": "system", "content": "Find the coin."}, {"role": "user", "content": f"Hunt {number // 4}. {MARKUP}"}]
    asked = {"role": "assistant", "content": f"I look. {MARKUP}", "reasoning_content": f"hm {MARKUP}", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": f"look{MARKUP}", "arguments": f'{{"room": "{rng.choice(["attic", "barn"])}"}}'}}]}  # fmt: skip
    record.add(_call("a", None, tokenizer, first, asked, reward=0.0))
    record.add(
        _call(
            "b",
            "a",
            tokenizer,
            [{"role": "tool", "tool_call_id": "c1", "content": f"a note: 日本語🙂 {MARKUP}"}],
            {"role": "assistant", "content": "The coin is here."},
            reward=reward,
        )
    )
    if number % 8 == 3:  # the program rewrote its history, and asked on the side
        reason: Reason = "auxiliary"
        record.add(
            _call(
                "c", "a", tokenizer, [{"role": "user", "content": "again"}], {"role": "assistant", "content": "Another way."}
            )
        )
        record.add(
            _call(
                "d",
                None,
                tokenizer,
                [{"role": "user", "content": "a title?"}],
                {"role": "assistant", "content": "A title."},
                excluded=reason,
            )
        )
        record.add(
            _call("e", "c", tokenizer, [{"role": "user", "content": "go on"}], {"role": "assistant", "content": "The end."})
        )
    if number % 16 == 5:
        record.failed, record.reward, record.success = f"EngineError: the sandbox was lost {MARKUP}", None, None
    if number % 16 == 9:
        record.limit = "turns"
    return record


def _long(tokens: int, rng: random.Random, tokenizer: Any) -> Rollout:
    record = Rollout(id="long", task={"room": "everywhere"}, env="TreasureHunt", group="long", reward=1.0, success=True)
    vocabulary = list(range(300, min(len(tokenizer), 4000)))
    parent, turns = None, 100
    for index in range(turns):
        ids = np.array(rng.choices(vocabulary, k=tokens // turns), np.int32)
        cut = len(ids) // 2
        logprobs = np.full(len(ids) - cut, -0.3, np.float32)
        message = {"role": "user", "content": f"turn {index} " + "word " * (len(ids) // 2)}
        record.add(
            Call(
                f"l{index}",
                parent,
                ids[:cut],
                ids[cut:],
                logprobs,
                "stop",
                messages=(message,),
                reply={"role": "assistant", "content": "yes " * 100},
            )
        )
        parent = f"l{index}"
    return record
