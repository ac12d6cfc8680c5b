"""Runs a few tasks through the ReAct program and prints what was said, scored and captured.

python run.py --engine scripted | transformers --model NAME | vllm --url URL --model NAME
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worker import HarnessRolloutWorker

from longrein import InterceptionServer, ProcessSessionFactory, Recorder, Sampling
from longrein.engines.scripted import ScriptedEngine
from longrein.rendering import Rendering, rendering_for

REACT = str(Path(__file__).resolve().with_name("react.py"))


class ByteTokenizer:
    """A tokenizer without a download: a byte is a token, and so is each of Qwen3's special words."""

    name_or_path, unk_token_id = "bytes", None
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
               "<tool_response>", "</tool_response>")  # fmt: skip
    eos_token_id = 258

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        for index, word in enumerate(self.special):
            if word in text:
                before, _, after = text.partition(word)
                return [*self.encode(before), 256 + index, *self.encode(after)]
        return list(text.encode())

    def decode(self, token_ids: Any, **kwargs: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return b"".join(bytes([i]) if i < 256 else self.special[i - 256].encode() for i in ids).decode(errors="replace")

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return 256 + self.special.index(tokens) if tokens in self.special else None


def bisect(messages: Sequence[dict], tools: Sequence[dict]) -> str:
    """Plays the game by halving: a model that knows how."""
    low, high, last = 1, 20, None
    for message in messages:
        for call in message.get("tool_calls") or ():
            last = json.loads(call["function"]["arguments"])["number"]
        if message["role"] == "tool" and last is not None:
            low, high = {"higher": (last + 1, high), "lower": (low, last - 1)}.get(message["content"], (last, last))
    name = "answer" if last is not None and low == high == last else "guess"
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'number': (low + high) // 2}})}\n</tool_call>"


def verify(task: dict, outcome: Any) -> float:
    try:
        return float(json.loads(outcome.last_line())["answer"] == task["secret"])
    except (ValueError, KeyError, TypeError):
        return 0.0


def make_engine(options: argparse.Namespace) -> tuple[Any, Rendering]:
    if options.engine == "scripted":
        rendering = rendering_for(ByteTokenizer(), "qwen3")
        return ScriptedEngine(bisect, rendering), rendering
    from transformers import AutoTokenizer

    rendering = rendering_for(AutoTokenizer.from_pretrained(options.model))
    if options.engine == "vllm":
        from longrein.engines.vllm import VLLMEngine

        return VLLMEngine(options.url, options.model), rendering
    from transformers import AutoModelForCausalLM

    from longrein.engines.transformers import TransformersEngine

    return TransformersEngine(AutoModelForCausalLM.from_pretrained(options.model)), rendering


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("scripted", "transformers", "vllm"), default="scripted")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--tasks", type=int, default=2)
    options = parser.parse_args()
    engine, rendering = make_engine(options)
    sampling = Sampling(max_tokens=128)
    recorder = Recorder(engine, rendering, sampling=sampling)
    with InterceptionServer() as server:
        factory = ProcessSessionFactory(
            ["{python}", REACT, "{secret}"], server=server, verify=verify, rendering=rendering, timeout=300
        )
        worker = HarnessRolloutWorker(factory, recorder, sampling)
        for number in range(options.tasks):
            rollout_id = f"rollout-{number}"
            recorder.open(rollout_id, seed=number)
            told = worker.rollout({"secret": 7 + 5 * number}, rollout_id)
            rollout = recorder.finish(rollout_id)
            print(f"{told.rollout_id}: reward {told.reward}, {len(told.messages)} messages, {len(rollout.calls)} turns")
            for message in told.messages:
                print(f"  {message['role']:>9}: {(message['content'] or json.dumps(message.get('tool_calls')))!r:.100}")
            for turn, call in enumerate(rollout.calls.values()):
                ids, logprobs = call.completion_ids.tolist(), [round(float(p), 3) for p in call.logprobs]
                print(
                    f"  turn {turn}: prompt of {len(rollout.prompt(call.id))} tokens, sampled ids {ids[:6]}…, log-probabilities {logprobs[:6]}…"
                )
    engine.close()


if __name__ == "__main__":
    main()
