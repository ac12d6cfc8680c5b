"""The embedded engine: a reply is a function of its request and the weights, whatever else is in the batch."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE
from transformers import GPT2Config, GPT2LMHeadModel

from longrein.contract import LongreinError, Sampled, SampleRequest, Sampling
from longrein.engines import drawing
from longrein.engines.transformers import TransformersEngine

Model = Callable[..., Any]
VOCABULARY = 64


def request(prompt: Any = (1, 2, 3), seed: int = 0, stop_ids: Any = (), **sampling: Any) -> SampleRequest:
    return SampleRequest(prompt, Sampling(**{"max_tokens": 8, **sampling}), frozenset(stop_ids), seed)


def sample(engine: TransformersEngine, *requests: SampleRequest) -> list[Sampled]:
    """The replies to requests that wait together."""

    async def together() -> list[Sampled]:
        return await asyncio.gather(*(engine.sample(one) for one in requests))

    return asyncio.run(together())


@pytest.fixture
def engine(random_model: Model) -> Any:
    engine = TransformersEngine(random_model(VOCABULARY))
    yield engine
    engine.close()


def reference(model: Any, prompt: Any, ids: Any, temperature: float) -> torch.Tensor:
    """Log-probabilities over the vocabulary where each reply token was drawn, by one plain forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float() / temperature, dim=-1)


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.7])
def test_log_probabilities_are_those_of_a_plain_forward_pass(engine: TransformersEngine, temperature: float) -> None:
    requests = [request(range(1, n + 2), seed=n, temperature=temperature, max_tokens=20) for n in range(6)]
    for asked, reply in zip(requests, sample(engine, *requests), strict=True):
        expected = reference(engine.model, asked.prompt_ids, reply.ids, temperature)
        of_ids = expected[range(len(reply.ids)), reply.ids]
        assert reply.logprobs == pytest.approx(of_ids.tolist(), abs=1e-4)
        assert reply.sampler_logprobs is None


TRUNCATIONS = [
    {"top_k": 1}, {"top_k": 5}, {"top_k": 1000}, {"top_p": 0.5}, {"top_p": 1e-6}, {"min_p": 0.1}, {"min_p": 0.9},
    {"top_k": 10, "top_p": 0.8, "min_p": 0.05, "temperature": 0.6}, {"top_p": 0.9, "temperature": 1.5},
]  # fmt: skip


def kept(
    logps: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, temperature: float = 1.0
) -> dict[int, float]:
    """Which tokens stay and with what probability, by the words of the definitions: top-k, then top-p, then min-p."""
    left = dict(sorted(enumerate(logps.double().exp().tolist()), key=lambda item: -item[1])[: top_k or None])
    total = sum(left.values())
    left = {token: mass / total for token, mass in left.items()}
    nucleus, before = {}, 0.0
    for token, mass in left.items():
        if before < top_p:
            nucleus[token] = mass
        before += mass
    top = max(left.values())
    nucleus = {token: mass for token, mass in nucleus.items() if mass >= min_p * top}
    total = sum(nucleus.values())
    return {token: mass / total for token, mass in nucleus.items()}


@pytest.mark.parametrize("sampling", TRUNCATIONS, ids=str)
def test_a_truncated_draw_stays_inside_what_is_kept(engine: TransformersEngine, sampling: dict[str, Any]) -> None:
    requests = [request(seed=seed, max_tokens=12, **sampling) for seed in range(8)]
    for asked, reply in zip(requests, sample(engine, *requests), strict=True):
        assert reply.sampler_logprobs is not None
        expected = reference(engine.model, asked.prompt_ids, reply.ids, sampling.get("temperature", 1.0))
        for step, token in enumerate(reply.ids):
            allowed = kept(expected[step], **sampling)
            assert token in allowed
            assert reply.sampler_logprobs[step] == pytest.approx(np.log(allowed[token]), abs=1e-4)
            assert reply.logprobs[step] == pytest.approx(float(expected[step, token]), abs=1e-4)


@settings(max_examples=40)
@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=12, unique=True),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.01, 0.3, 0.75, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.4, 0.99]),
)
def test_truncation_is_what_its_definitions_say(logits: list[float], top_k: int, top_p: float, min_p: float) -> None:
    logps = torch.log_softmax(torch.tensor([logits]), dim=-1)
    sampling = Sampling(top_k=top_k, top_p=top_p, min_p=min_p)
    ours = drawing.truncated(torch.cat([logps, logps]), [sampling, Sampling()])
    assert torch.equal(ours[1], logps[0])  # a row that asks for nothing is left alone, whatever its neighbour asks
    if not sampling.truncated:
        return
    expected = kept(logps[0], top_k, top_p, min_p)
    finite = {index: value for index, value in enumerate(ours[0].tolist()) if value > -np.inf}
    assert set(finite) == set(expected)
    for token, mass in expected.items():
        assert finite[token] == pytest.approx(np.log(mass), abs=1e-4)


@pytest.mark.parametrize("noise", [0.0, 1 - 2**-53])
def test_the_ends_of_the_noise_draw_kept_tokens_too(
    random_model: Model, monkeypatch: pytest.MonkeyPatch, noise: float
) -> None:
    monkeypatch.setattr(drawing, "uniforms", lambda seeds, positions: np.full(len(seeds), noise))
    for seed in range(5):
        with closing(TransformersEngine(random_model(VOCABULARY, seed))) as engine:
            (reply,) = sample(engine, request(top_k=3, max_tokens=30))
        assert reply.sampler_logprobs is not None
        assert np.isfinite(reply.sampler_logprobs).all()


def absolute_model() -> Any:
    """A model whose positions are absolute: padding that shifted them would show."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3)
        return GPT2LMHeadModel(config).eval()


REQUESTS = st.builds(
    request,
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40),
    seed=st.integers(0, 2**64 - 1),
    stop_ids=st.sampled_from([(), (5, 6, 7)]),
    max_tokens=st.integers(1, 16),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_p=st.sampled_from([0.8, 1.0]),
)


@pytest.mark.parametrize("positions", ["rotary", "absolute"])
@settings(max_examples=20)
@given(requests=st.lists(REQUESTS, min_size=2, max_size=6))
def test_a_reply_is_the_same_alone_and_in_any_batch(
    positions: str, random_model: Model, requests: list[SampleRequest]
) -> None:
    # In float64 no draw falls so near to the border of two tokens that the last bits decide.
    model = (random_model(VOCABULARY) if positions == "rotary" else absolute_model()).double()
    with closing(TransformersEngine(model)) as engine:
        for asked, reply in zip(requests, sample(engine, *requests), strict=True):
            (alone,) = sample(engine, asked)
            assert (alone.ids, alone.finish_reason) == (reply.ids, reply.finish_reason)
            assert alone.logprobs == pytest.approx(reply.logprobs, abs=1e-5)
            assert (alone.sampler_logprobs or []) == pytest.approx(reply.sampler_logprobs or [], abs=1e-5)


def test_in_float32_a_batch_changes_the_last_bits_only(engine: TransformersEngine) -> None:
    requests = [request(range(1, 2 + seed % 30), seed=seed, max_tokens=20) for seed in range(60)]
    together, alone = sample(engine, *requests), [sample(engine, asked)[0] for asked in requests]
    alike = [pair for pair in zip(together, alone, strict=True) if pair[0].ids == pair[1].ids]
    assert len(alike) >= 58  # a draw at the border of two tokens may go either way
    for one, other in alike:
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_reply_ends_at_a_stop_or_at_its_limit(engine: TransformersEngine) -> None:
    (free,) = sample(engine, request(max_tokens=20, seed=3))
    assert (len(free.ids), free.finish_reason) == (20, "length")
    stop = free.ids[7]
    (stopped,) = sample(engine, request(max_tokens=20, seed=3, stop_ids=[stop]))
    assert stopped.ids == free.ids[: free.ids.index(stop) + 1]
    assert stopped.finish_reason == "stop"
    (at_limit,) = sample(engine, request(max_tokens=len(stopped.ids), seed=3, stop_ids=[stop]))
    assert at_limit.finish_reason == "stop"


def test_greedy_takes_the_likeliest_token(engine: TransformersEngine) -> None:
    cold, warm = sample(engine, request(temperature=0.0, seed=1), request(temperature=0.0, seed=2))
    assert cold.ids == warm.ids
    expected = reference(engine.model, (1, 2, 3), cold.ids, 1.0)
    assert expected.argmax(-1).tolist() == cold.ids
    assert cold.logprobs == pytest.approx(expected.max(-1).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.7}], ids=str)
def test_frequencies_are_the_probabilities(random_model: Model, sampling: dict[str, Any]) -> None:
    engine = TransformersEngine(random_model(vocab_size=12, initializer_range=0.15), max_batch=1000)
    count = 3000
    replies = sample(engine, *(request(seed=seed * 7919, max_tokens=1, **sampling) for seed in range(count)))
    drawn = Counter(reply.ids[0] for reply in replies)
    allowed = kept(reference(engine.model, (1, 2, 3), [0], sampling.get("temperature", 1.0))[0], **sampling)
    assert set(drawn) <= set(allowed)
    likely = {token: mass for token, mass in allowed.items() if mass * count >= 5}
    chi_square = sum((drawn[token] - mass * count) ** 2 / (mass * count) for token, mass in likely.items())
    assert chi_square < len(likely) + 6 * (2 * len(likely)) ** 0.5
    engine.close()


def test_tokens_of_a_reply_are_drawn_independently(random_model: Model) -> None:
    """The same seed at another position is other noise, and so is another seed at the same position."""
    engine = TransformersEngine(random_model(vocab_size=12, initializer_range=0.0))  # every token as likely as any
    replies = sample(engine, *(request(seed=seed, max_tokens=50) for seed in range(40)))
    table = np.array([reply.ids for reply in replies])
    assert np.abs(np.bincount(table.ravel(), minlength=12) / table.size - 1 / 12).max() < 0.03
    assert (table[:, 1:] == table[:, :-1]).mean() == pytest.approx(1 / 12, abs=0.03)
    assert (table[1:] == table[:-1]).mean() == pytest.approx(1 / 12, abs=0.03)
    engine.close()


def test_the_training_mode_of_every_module_is_restored(engine: TransformersEngine) -> None:
    model = engine.model
    modes: list[bool] = []
    model.register_forward_pre_hook(lambda *_: modes.append(model.training))
    model.train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    sample(engine, request())
    assert [module.training for module in model.modules()] == before
    assert set(modes) == {False}


def test_new_weights_are_sampled_from_at_once(engine: TransformersEngine, random_model: Model) -> None:
    (before,) = sample(engine, request(max_tokens=20))
    engine.model.load_state_dict(random_model(VOCABULARY, seed=9).state_dict())
    engine.policy_version = 4
    (after,) = sample(engine, request(max_tokens=20))
    assert before.ids != after.ids
    assert (before.policy_version, after.policy_version) == (0, 4)


def test_a_paused_engine_lets_its_batch_end_and_starts_none(engine: TransformersEngine, random_model: Model) -> None:
    held = Held(engine)

    async def scenario() -> None:
        running = asyncio.create_task(engine.sample(request()))
        await asyncio.to_thread(held.entered.wait)
        pausing = asyncio.create_task(asyncio.to_thread(engine.pause))
        await asyncio.sleep(0.01)
        assert not pausing.done()
        held.go.set()
        await pausing
        before = await running
        passes = len(held.sizes)
        waiting = asyncio.create_task(engine.sample(request()))
        await asyncio.sleep(0.05)
        assert len(held.sizes) == passes
        engine.load_weights(random_model(VOCABULARY, seed=9).named_parameters())
        engine.resume()
        assert (await waiting).ids != before.ids

    asyncio.run(scenario())
    with pytest.raises(LongreinError, match="no parameter 'head'"):
        engine.load_weights([("head", torch.zeros(1))])


def test_pausing_waits_for_a_reply_that_goes_on_under_new_weights(engine: TransformersEngine) -> None:
    held = Held(engine)
    deliver, paused = engine._deliver, threading.Event()

    async def scenario() -> None:
        running = asyncio.create_task(engine.sample(request()))
        await asyncio.to_thread(held.entered.wait)
        engine.policy_version = 1  # the run of steps ends, and the reply goes on in the next one

        def slowly() -> None:
            if engine._weights_changed():  # time enough for `pause` to return too early
                paused.wait(timeout=0.2)
            deliver()

        def pause() -> list[Any]:
            engine.pause()
            paused.set()
            return list(engine._running)

        engine._deliver = slowly
        pausing = asyncio.create_task(asyncio.to_thread(pause))
        while not engine._paused:
            await asyncio.sleep(0)
        held.go.set()
        assert await pausing == []
        assert len((await running).ids) == 8

    asyncio.run(scenario())


def test_cancelling_a_paused_engine_refuses_who_waits(engine: TransformersEngine) -> None:
    async def scenario() -> None:
        await engine.sample(request())
        engine.pause()
        waiting = asyncio.create_task(engine.sample(request()))
        await asyncio.sleep(0)
        engine.cancel()
        with pytest.raises(LongreinError, match="told to cancel"):
            await asyncio.wait_for(waiting, 20)
        engine.resume()
        assert len((await engine.sample(request())).ids) == 8

    asyncio.run(scenario())


def test_a_loop_that_was_closed_while_it_asked_holds_up_nobody(engine: TransformersEngine) -> None:
    loop = asyncio.new_event_loop()
    asking = engine.sample(request())
    loop.call_soon(lambda: asking.send(None))  # asks, and the loop never turns again
    loop.call_soon(loop.stop)
    loop.run_forever()
    asking.close()
    loop.close()
    assert len(sample(engine, request())[0].ids) == 8


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_said_and_draw_nothing(
    engine: TransformersEngine, random_model: Model, value: float
) -> None:
    (before,) = sample(engine, request())
    head = engine.model.lm_head.weight
    with torch.no_grad():
        sound = head.clone()
        head[3] = value
    with pytest.raises(LongreinError, match="its weights have diverged"):
        sample(engine, request())
    with torch.no_grad():
        head.copy_(sound)
    assert sample(engine, request())[0].ids == before.ids


class Held:
    """Holds the engine's steps until it is let go; `entered` says that one has begun, `sizes` how many replies each drew for."""

    def __init__(self, engine: TransformersEngine) -> None:
        sample(engine, request(max_tokens=1))  # the engine has tried the model and knows how to forward it
        self.entered, self.go, self.sizes = threading.Event(), threading.Event(), []
        engine.model.register_forward_pre_hook(self._wait, with_kwargs=True)

    def _wait(self, _: Any, __: Any, kwargs: dict[str, Any]) -> None:
        self.sizes.append(kwargs["logits_to_keep"])
        self.entered.set()
        assert self.go.wait(timeout=PATIENCE)


def test_a_cancelled_request_leaves_the_others_alone(engine: TransformersEngine) -> None:
    held = Held(engine)
    (expected,) = sample_after(held, engine, request(seed=2))

    async def scenario() -> None:
        held.entered.clear(), held.go.clear()
        running = asyncio.create_task(engine.sample(request(seed=1)))
        await asyncio.to_thread(held.entered.wait)
        waiting, kept_waiting = (asyncio.create_task(engine.sample(request(seed=2))) for _ in range(2))
        await asyncio.sleep(0.01)
        running.cancel()
        waiting.cancel()
        await asyncio.wait([running, waiting])
        held.sizes.clear()
        held.go.set()
        assert (await kept_waiting).ids == expected.ids
        assert max(held.sizes[-8:]) == 1  # nobody samples for a request that was cancelled while it waited
        assert running.cancelled()
        assert waiting.cancelled()

    asyncio.run(scenario())


def sample_after(held: Held, engine: TransformersEngine, *requests: SampleRequest) -> list[Sampled]:
    held.go.set()
    return sample(engine, *requests)


def test_requests_that_come_while_a_batch_runs_form_the_next(engine: TransformersEngine) -> None:
    held = Held(engine)

    async def scenario() -> None:
        first = asyncio.create_task(engine.sample(request(max_tokens=1)))
        await asyncio.to_thread(held.entered.wait)
        rest = [asyncio.create_task(engine.sample(request(seed=seed, max_tokens=1))) for seed in range(5)]
        await asyncio.sleep(0.01)
        held.go.set()
        await asyncio.gather(first, *rest)

    asyncio.run(scenario())
    assert held.sizes == [1, 5]


def test_a_batch_has_its_limit(random_model: Model) -> None:
    engine = TransformersEngine(random_model(VOCABULARY), max_batch=3)
    held = Held(engine)
    held.go.set()
    assert len(sample(engine, *(request(seed=seed, max_tokens=1) for seed in range(8)))) == 8
    assert max(held.sizes) <= 3
    engine.close()


def test_closing_refuses_who_waits_and_who_comes_later(engine: TransformersEngine) -> None:
    held = Held(engine)

    async def scenario() -> None:
        running = asyncio.create_task(engine.sample(request(seed=1)))
        await asyncio.to_thread(held.entered.wait)
        cancelled, waiting = (asyncio.create_task(engine.sample(request(seed=2))) for _ in range(2))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        worker = engine._worker
        ending = asyncio.create_task(asyncio.to_thread(engine.close))
        while not engine._closed:
            await asyncio.sleep(0.001)
        held.go.set()
        assert len((await running).ids) == 8
        with pytest.raises(LongreinError, match="closed before this request was sampled"):
            await waiting
        await ending
        assert worker is not None
        assert not worker.is_alive()
        assert engine._forward is None  # its keys and values take no memory
        assert engine.forwarded_tokens > 0
        with pytest.raises(LongreinError, match="this engine is closed"):
            await engine.sample(request())

    asyncio.run(scenario())
    engine.close()  # a second time does nothing


def test_cancelling_refuses_what_runs_and_what_waits_and_later_requests_are_served(engine: TransformersEngine) -> None:
    held = Held(engine)

    async def scenario() -> None:
        running = asyncio.create_task(engine.sample(request(seed=1)))
        await asyncio.to_thread(held.entered.wait)
        waiting = asyncio.create_task(engine.sample(request(seed=2)))
        await asyncio.sleep(0.01)
        engine.cancel()
        held.go.set()
        for refused in (running, waiting):
            with pytest.raises(LongreinError, match="told to cancel"):
                await refused
        assert len((await engine.sample(request(seed=3))).ids) == 8

    asyncio.run(scenario())


def test_an_error_in_the_model_reaches_everyone_who_waits_and_the_engine_goes_on(engine: TransformersEngine) -> None:
    broken = engine.model.register_forward_pre_hook(fail)

    async def scenario() -> list[Any]:
        return await asyncio.gather(*(engine.sample(request(seed=seed)) for seed in range(4)), return_exceptions=True)

    engine.model.train()
    outcomes = asyncio.run(scenario())
    assert [str(error) for error in outcomes] == ["out of memory"] * 4
    assert engine.model.training
    broken.remove()
    assert len(sample(engine, request())[0].ids) == 8


def fail(*_: Any) -> None:
    raise RuntimeError("out of memory")


def test_requests_of_two_event_loops_are_answered_alike(engine: TransformersEngine) -> None:
    requests = [request(seed=seed) for seed in range(4)]
    expected = [reply.ids for reply in sample(engine, *requests)]
    with ThreadPoolExecutor(2) as pool:
        for replies in pool.map(lambda _: sample(engine, *requests), range(2)):
            assert [reply.ids for reply in replies] == expected


def test_the_forward_context_is_entered_around_a_batch(engine: TransformersEngine) -> None:
    entered = []

    class Context:
        def __enter__(self) -> None:
            entered.append("in")

        def __exit__(self, *_: Any) -> None:
            entered.append("out")

    engine.forward_context = Context
    sample(engine, request())
    assert entered == ["in", "out"]


def test_without_max_tokens_a_reply_fills_the_context(random_model: Model) -> None:
    engine = TransformersEngine(random_model(VOCABULARY, max_position_embeddings=16))
    endless, bounded = sample(engine, request(max_tokens=None), request(range(10), max_tokens=100))
    assert (len(endless.ids), endless.finish_reason) == (13, "length")
    assert (len(bounded.ids), bounded.finish_reason) == (6, "length")
    engine.close()


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "the prompt has no tokens"),
        ([1, VOCABULARY], "the model knows ids from 0 to 63"),
        ([-1, 2], "the model knows ids from 0 to 63"),
        ([1] * 512, "the prompt has 512 tokens; the model reads and writes 512"),
    ],
)
def test_a_request_that_would_fail_its_batch_is_refused_at_the_door(
    engine: TransformersEngine, prompt: list[int], words: str
) -> None:
    async def scenario() -> list[Any]:
        return await asyncio.gather(engine.sample(request(prompt)), engine.sample(request()), return_exceptions=True)

    refused, answered = asyncio.run(scenario())
    assert isinstance(refused, LongreinError)
    assert words in str(refused)
    assert isinstance(answered, Sampled)


def test_any_integer_is_a_seed(engine: TransformersEngine) -> None:
    negative, wrapped = sample(engine, request(seed=-1), request(seed=2**64 - 1))
    assert negative.ids == wrapped.ids
