"""What the embedded engine keeps between turns and shares between rollouts changes how much is forwarded, never what is drawn."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from longrein.contract import LongreinError, Sampled, SampleRequest, Sampling
from longrein.engines import forwarding, graphs
from longrein.engines.forwarding import PlainForward, SlotForward
from longrein.engines.graphs import Graphs, _Graph
from longrein.engines.transformers import TransformersEngine

Model = Callable[..., Any]
VOCABULARY = 64


def request(prompt: Any, seed: int = 0, **sampling: Any) -> SampleRequest:
    return SampleRequest(prompt, Sampling(**{"max_tokens": 6, **sampling}), frozenset(), seed)


def sample(engine: TransformersEngine, *requests: SampleRequest) -> list[Sampled]:
    async def together() -> list[Sampled]:
        return await asyncio.gather(*(engine.sample(one) for one in requests))

    return asyncio.run(together())


def assert_exact(model: Any, asked: SampleRequest, reply: Sampled, within: float = 1e-4) -> None:
    """The reply's log-probabilities are those of one plain forward pass over prompt and reply."""
    prompt = list(asked.prompt_ids)
    with torch.no_grad():
        if model.config.model_type == "phi3":  # how it reads a token depends on how many there are: a pass for each
            rows = [[*prompt, *reply.ids[:length]] for length in range(len(reply.ids))]
            logits = torch.cat([model(torch.tensor([row])).logits[0, -1:] for row in rows]).float()
        else:
            logits = model(torch.tensor([[*prompt, *reply.ids]])).logits[0, len(prompt) - 1 : -1].float()
    logps = torch.log_softmax(logits / (asked.sampling.temperature or 1.0), dim=-1)
    assert reply.logprobs == pytest.approx(logps[range(len(reply.ids)), list(reply.ids)].tolist(), abs=within)


def forwarded(engine: TransformersEngine, *requests: SampleRequest) -> int:
    """How many tokens the model had to read for these requests."""
    before = engine.forwarded_tokens
    sample(engine, *requests)
    return engine.forwarded_tokens - before


@pytest.fixture
def engine(random_model: Model) -> Any:
    engine = TransformersEngine(random_model(VOCABULARY))
    sample(engine, request([1]))  # the model has been tried
    yield engine
    engine.close()


async def play(engine: TransformersEngine, rng: random.Random, prompt: list[int], turns: int) -> list[Any]:
    """A conversation of several turns that goes on, forks, is cut short or is cancelled at random moments."""
    calls = []
    for _ in range(turns):
        for _ in range(rng.randint(0, 6)):
            await asyncio.sleep(0)
        sampling = {"max_tokens": rng.randint(1, 9), "temperature": rng.choice([0.7, 1.0])}
        asked = request(list(prompt), rng.getrandbits(64), **sampling)
        if rng.random() < 0.15:
            doomed = asyncio.ensure_future(engine.sample(asked))
            await asyncio.sleep(rng.choice([0, 0.001, 0.004]))
            doomed.cancel()
        reply = await engine.sample(asked)
        calls.append((asked, reply))
        kept = prompt + list(reply.ids)
        if rng.random() < 0.2:
            kept = kept[: rng.randint(1, len(kept))]  # a rewritten history
        prompt = kept + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))]
    return calls


@pytest.mark.parametrize("cache_tokens", [None, 400, 150])
@pytest.mark.parametrize("seed", range(3))
def test_replies_that_come_and_go_at_any_time_are_exact(random_model: Model, cache_tokens: int | None, seed: int) -> None:
    rng = random.Random(seed)
    model = random_model(VOCABULARY)
    common = [rng.randrange(VOCABULARY) for _ in range(40)]
    prompts = [common + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20))] for _ in range(3)]
    prompts += [[rng.randrange(VOCABULARY)], [rng.randrange(VOCABULARY) for _ in range(30)]]

    async def rollouts() -> list[Any]:
        each = (play(engine, random.Random(rng.random()), list(prompt), 4) for prompt in prompts for _ in range(3))
        return await asyncio.gather(*each)

    with closing(TransformersEngine(model, cache_tokens=cache_tokens, max_batch=9)) as engine:
        rollout_calls = asyncio.run(rollouts())
        assert isinstance(engine._forward, SlotForward)
        slots = engine._forward.slots
        if cache_tokens is not None:
            assert slots.allocated <= slots.bound <= cache_tokens + 3 * 64
        assert not any(one.running for one in slots.conversations)
        assert slots.slots.active == slots.stems.active == 0
    for calls in rollout_calls:
        for asked, reply in calls:
            assert_exact(model, asked, reply)


def test_a_turn_forwards_only_what_it_adds(engine: TransformersEngine) -> None:
    prompt = list(np.random.default_rng(0).integers(0, VOCABULARY, 50))
    for _ in range(5):
        asked = request(prompt, max_tokens=4)
        (reply,) = sample(engine, asked)
        prompt = [*prompt, *reply.ids, 7, 8, 9]
        # The last token of the reply, the three new ones, and one pass for each further token of the next reply.
        assert forwarded(engine, request(prompt, seed=1, max_tokens=1)) == 4
    assert len(prompt) == 85


def test_rollouts_of_a_task_share_the_forward_pass_of_their_prompt(engine: TransformersEngine) -> None:
    prompt = list(np.random.default_rng(0).integers(0, VOCABULARY, 50))
    requests = [request(prompt, seed, max_tokens=3) for seed in range(8)]
    assert forwarded(engine, *requests) == 49 + 8 * 3
    assert isinstance(engine._forward, SlotForward)
    slots = engine._forward.slots
    assert sum(len(stem.ids) == 49 for stem in slots._stems()) == 1  # stored once
    assert forwarded(engine, request(prompt, 99, max_tokens=3)) == 3  # also for one that comes later


def test_tasks_that_begin_alike_forward_their_common_part_once(engine: TransformersEngine) -> None:
    rng = np.random.default_rng(0)
    system = list(rng.integers(0, VOCABULARY, 100))
    prompts = [[*system, task, *list(rng.integers(0, VOCABULARY, 9))] for task in range(6)]
    requests = [request(prompt, seed, max_tokens=1) for prompt in prompts for seed in range(4)]
    assert forwarded(engine, *requests) == 100 + 6 * 9 + 24


def test_a_conversation_that_was_released_is_forwarded_again(random_model: Model) -> None:
    model = random_model(VOCABULARY)
    with closing(TransformersEngine(model, cache_tokens=128)) as engine:
        one, other = ([start] * 100 for start in (1, 2))
        sample(engine, request(one))
        assert forwarded(engine, request(one, max_tokens=1)) == 1
        sample(engine, request(other))
        again = request(one, seed=5)
        assert forwarded(engine, again) == 100 + 5
        assert_exact(model, again, sample(engine, again)[0])


def test_the_conversation_used_longest_ago_goes_first(random_model: Model) -> None:
    with closing(TransformersEngine(random_model(VOCABULARY), cache_tokens=320)) as engine:
        for start in (1, 2):
            sample(engine, request([start] * 60, max_tokens=1))
        sample(engine, request([1] * 60, max_tokens=1))
        sample(engine, request([3] * 60, max_tokens=1))
        assert forwarded(engine, request([1] * 60, max_tokens=1)) == 1
        assert forwarded(engine, request([2] * 60, max_tokens=1)) == 60


def test_more_than_the_cache_holds_is_sampled_in_turns(random_model: Model) -> None:
    model = random_model(VOCABULARY)
    requests = [request([start] * 50, start, max_tokens=60) for start in range(6)]
    with closing(TransformersEngine(model, cache_tokens=200)) as engine:
        for asked, reply in zip(requests, sample(engine, *requests), strict=True):
            assert len(reply.ids) == 60
            assert_exact(model, asked, reply)
        (longest,) = sample(engine, request([1] * 100, max_tokens=None))
        assert (len(longest.ids), longest.finish_reason) == (100, "length")  # the cache is the context


def test_what_can_never_fit_is_refused_and_does_not_block_the_rest(random_model: Model) -> None:
    model = random_model(VOCABULARY)
    with closing(TransformersEngine(model, cache_tokens=100)) as engine:
        sample(engine, request([1]))
        engine.cache_tokens = None  # a model that states no length could be asked for anything
        engine._made_for = (*engine._made_for[:4], None, *engine._made_for[5:])

        async def both() -> list[Any]:
            requests = request([1] * 400), request([2] * 20, max_tokens=300), request([3] * 20)
            return await asyncio.gather(*(engine.sample(one) for one in requests), return_exceptions=True)

        too_long, grows_too_long, fits = asyncio.run(both())
        for refused in (too_long, grows_too_long):
            assert isinstance(refused, LongreinError)
            assert "does not fit into the cache" in str(refused)
        assert isinstance(fits, Sampled)


def step_of_an_optimizer(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(torch.tensor([[1, 2, 3, 4]])).logits.logsumexp(-1).sum().backward()
    optimizer.step()


def copied_into(model: Any) -> None:
    with torch.no_grad():
        next(iter(model.parameters())).mul_(1.5)


def replaced(model: Any) -> None:
    weight = model.model.layers[0].self_attn.v_proj.weight
    weight.data = weight.data * 1.5


@pytest.mark.parametrize("change", [step_of_an_optimizer, copied_into, replaced], ids=lambda f: f.__name__)
def test_keys_and_values_do_not_outlive_their_weights(engine: TransformersEngine, change: Callable[[Any], None]) -> None:
    prompt = list(range(1, 40))
    (reply,) = sample(engine, request(prompt))
    change(engine.model)
    asked = request([*prompt, *reply.ids, 3], seed=1)
    (after,) = sample(engine, asked)
    assert_exact(engine.model, asked, after)
    assert forwarded(engine, asked) < len(prompt)  # and the new ones are kept again


def test_a_new_policy_version_drops_what_is_kept(engine: TransformersEngine) -> None:
    """For weights that are written past their version counter."""
    prompt = list(range(1, 40))
    sample(engine, request(prompt))
    engine.model.model.layers[0].self_attn.v_proj.weight.data.mul_(1.5)
    engine.policy_version += 1
    asked = request(prompt, seed=1)
    (after,) = sample(engine, asked)
    assert_exact(engine.model, asked, after)


def test_a_reply_that_spans_new_weights_goes_on_under_them(engine: TransformersEngine) -> None:
    model, prompt, drawn = engine.model, list(range(1, 20)), []

    def change(*_: Any) -> None:
        drawn.append(None)
        if len(drawn) == 4:  # after three tokens, in the middle of the reply
            copied_into(model)
            engine.policy_version = 8

    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine.policy_version = 7
    hook = model.register_forward_hook(change)
    asked = request(prompt, max_tokens=9)
    (reply,) = sample(engine, asked)
    hook.remove()
    assert (reply.policy_version, reply.versions) == (7, [7] * 4 + [8] * 5)
    rest = request([*prompt, *reply.ids[:4]], max_tokens=5)
    tail = Sampled(reply.ids[4:], reply.logprobs[4:], "length")
    assert_exact(model, rest, tail)
    model.load_state_dict(old)
    head = Sampled(reply.ids[:4], reply.logprobs[:4], "length")
    assert_exact(model, request(prompt, max_tokens=4), head)


class Replayed(Graphs):
    """Steps of fixed shapes, padded as for a GPU's captured graphs, with a pass in place of each replay."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.replayed: set[Any] = set()

    def _run(self, shape: Any, numbers: np.ndarray) -> torch.Tensor:
        self.replayed |= {shape} & set(self.captured)
        return super()._run(shape, numbers)

    def _record(self, inputs: torch.Tensor, run: Callable[[], torch.Tensor]) -> Any:
        logits = run().clone()
        return _Graph(SimpleNamespace(replay=lambda: logits.copy_(run())), inputs, logits)


@pytest.mark.parametrize("family", ["llama", "mistral, a window", "gemma 2, windows and soft caps"])
def test_steps_of_fixed_shapes_are_exact_and_leave_idle_conversations_alone(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small enough that some pieces are long, batches are full, widths grow, and graphs serve steps smaller than they are.
    for name, value in {"LENGTHS": [4, 32], "BATCH_TOKENS": 64, "NARROWEST": 16, "OFTEN": 6}.items():
        monkeypatch.setattr(graphs, name, value)
    make, changes, _ = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make(**{**SMALL, **changes}), dtype=torch.float32).eval()
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (1, 30, 30, 45)]

    async def rollouts() -> list[Any]:
        return await asyncio.gather(*(play(engine, random.Random(seed), prompts[seed % 4], 4) for seed in range(14)))

    with closing(TransformersEngine(model, max_batch=6)) as engine:
        sample(engine, request([1]))
        forward = engine._forward
        assert isinstance(forward, SlotForward)
        forward.graphs = Replayed(forward.slots.slots, forward.slots.stems, forward._logits, forward.device)
        for calls in asyncio.run(rollouts()):
            for asked, reply in calls:
                assert_exact(model, asked, reply)
        forward.slots.roomy = True
        for prompt in ([token] * 30 for token in range(6)):
            asked = request(prompt)
            (reply,) = sample(engine, asked)
            assert_exact(model, asked, reply)
        idle = [request([9] * 30, seed, max_tokens=3) for seed in range(5)]
        kept = sample(engine, *idle)
        sample(engine, request([8] * 30, max_tokens=9), request([7] * 30, max_tokens=9), request([6] * 30, max_tokens=9))
        later = [
            request([*one.prompt_ids, *reply.ids, 1, 2], 1) for one, reply in zip(idle, kept, strict=True)
        ]  # idle slots stood where three rows were padded to four
        before = engine.forwarded_tokens
        for asked, reply in zip(later, sample(engine, *later), strict=True):
            assert_exact(model, asked, reply)
        assert engine.forwarded_tokens - before == 5 * (3 + 5)
        kinds = {(type(shape), getattr(shape, "of_stems", None)) for shape in forward.graphs.replayed}
        assert kinds == {(graphs.Rows, None), (graphs.Pieces, True), (graphs.Pieces, False)}
        assert not forward.graphs._failed


def test_a_graph_at_hand_serves_smaller_steps_until_they_come_often(engine: TransformersEngine) -> None:
    assert isinstance(engine._forward, SlotForward)
    slots = engine._forward.slots
    slots.roomy = True
    engine._forward.graphs = made = Replayed(slots.slots, slots.stems, engine._forward._logits, engine._forward.device)
    crowd = [request([5] * 30, seed, max_tokens=4) for seed in range(40)]
    sample(engine, *crowd)
    assert [shape.rows for shape in made.captured if isinstance(shape, graphs.Rows)] == [64]
    moves, captures = slots.slots.moves, made.captures
    sample(engine, request([6] * 30, max_tokens=graphs.OFTEN // 2))
    assert made.captures == captures + 1  # of the prompt, which came for the second time; forty rows have served one
    sample(engine, request([6] * 30, 1, max_tokens=graphs.OFTEN))
    assert [shape.rows for shape in made.captured if isinstance(shape, graphs.Rows)] == [64, 1]
    assert slots.slots.moves == moves


def test_a_prompt_longer_than_a_step_is_forwarded_in_several(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "STEP_TOKENS", 16)
    asked = request(list(np.random.default_rng(0).integers(0, VOCABULARY, 50)))
    (reply,) = sample(engine, asked)  # for three steps nobody draws
    assert_exact(engine.model, asked, reply)


SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, tuple[Any, dict[str, Any], type]] = {
    "llama": (LlamaConfig, {}, SlotForward),
    "mistral, a window": (MistralConfig, {"sliding_window": 8}, SlotForward),
    "gemma 2, windows and soft caps": (Gemma2Config, {"sliding_window": 8, "query_pre_attn_scalar": 8}, SlotForward),
    "gemma 3, windows": (Gemma3TextConfig, {"sliding_window": 8, "num_hidden_layers": 6}, SlotForward),
    "cohere 2, windows": (Cohere2Config, {"sliding_window": 8, "num_hidden_layers": 4}, SlotForward),
    "mixtral, experts": (MixtralConfig, {**EXPERTS, "sliding_window": None}, SlotForward),
    "qwen 3, experts": (Qwen3MoeConfig, EXPERTS, SlotForward),
    "gpt-oss, sinks": (GptOssConfig, {**EXPERTS, "sliding_window": 8}, PlainForward),
    "phi 3, frequencies that change": (
        Phi3Config,
        {
            "original_max_position_embeddings": 24,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 24,
            },
        },
        PlainForward,
    ),
    "qwen 3 next, state": (
        Qwen3NextConfig,
        {**EXPERTS, "num_hidden_layers": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "shared_expert_intermediate_size": 24},
        PlainForward,
    ),
    "lfm 2, convolutions": (Lfm2Config, {"full_attn_idxs": [1]}, PlainForward),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exact_fast_or_plainly(family: str) -> None:
    config_class, changes, expected = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**{**SMALL, **changes}), dtype=torch.float32).eval()
    rng = random.Random(0)

    async def rollouts() -> list[Any]:
        prompt = [rng.randrange(3, VOCABULARY) for _ in range(20)]
        return await asyncio.gather(*(play(engine, random.Random(seed), list(prompt), 3) for seed in range(3)))

    with closing(TransformersEngine(model)) as engine:
        for calls in asyncio.run(rollouts()):
            for asked, reply in calls:
                assert_exact(model, asked, reply)
        assert isinstance(engine._forward, expected)


def test_adapters_are_sampled_from_and_switching_them_off_is_noticed(random_model: Model) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model: Any = get_peft_model(random_model(VOCABULARY), LoraConfig(target_modules="all-linear", init_lora_weights=False))
    model.eval()
    prompt = list(range(1, 30))
    with closing(TransformersEngine(model)) as engine:
        adapted = request(prompt)
        assert_exact(model, adapted, sample(engine, adapted)[0])
        with model.disable_adapter():
            plain = request(prompt, seed=1)
            assert_exact(model, plain, sample(engine, plain)[0])
        assert_exact(model, adapted, sample(engine, adapted)[0])
        assert isinstance(engine._forward, SlotForward)
