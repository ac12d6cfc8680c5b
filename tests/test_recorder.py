"""Promises 1 and 2: no sampled token is tokenised again, each delivered one is trained exactly once."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conversations import (
    LOOK,
    MOVE,
    TEXT,
    TOOLS,
    assistant,
    next_messages,
    openings,
    replies,
    reply_texts,
    result,
    system,
    user,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from longrein.contract import ContextLengthError, GenerateAPI, LongreinError, Message, Sampled, SampleRequest, Sampling
from longrein.digests import canonical
from longrein.engines.transformers import TransformersEngine
from longrein.recorder import Recorder
from longrein.rendering import FamilyRendering, Rendering
from longrein.rollout import Call

Named = Callable[[str], Any]
FOUR = pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_2", "tiny"])


class Replies:
    """An engine that answers with the ids a function gives, and keeps what it was asked."""

    policy_version = 3

    def __init__(self, answer: Callable[[SampleRequest], list[int]], stop_ids: frozenset[int]) -> None:
        self.answer, self.stop_ids = answer, stop_ids
        self.requests: list[SampleRequest] = []

    async def sample(self, request: SampleRequest) -> Sampled:
        self.requests.append(request)
        ids = self.answer(request)
        stopped = bool(ids) and ids[-1] in self.stop_ids
        return Sampled(ids, logprobs_of(ids, request.seed), "stop" if stopped else "length", self.policy_version)

    def close(self) -> None:
        pass


def logprobs_of(ids: list[int], seed: int) -> list[float]:
    """Any numbers that only this reply has."""
    return [-((seed % 1009) + index / 64) for index in range(len(ids))]


def by_seed(rendering: Rendering) -> Callable[[SampleRequest], list[int]]:
    """Answers that are a function of the request's noise, like a model's."""
    return lambda request: rendering.encode_reply(f"{request.seed % 10_000}")


def in_order(rendering: Rendering, texts: list[str]) -> Callable[[SampleRequest], list[int]]:
    left = iter(texts)
    return lambda request: rendering.encode_reply(next(left))


def recording(rendering: Rendering, answer: Any = None, **settings: Any) -> tuple[Recorder, Replies]:
    """A recorder with the rollout "r" open, over an engine that says what it is told."""
    if isinstance(answer, list):
        answer = in_order(rendering, answer)
    engine = Replies(answer or by_seed(rendering), rendering.stop_ids)
    recorder = Recorder(engine, rendering, **settings)
    recorder.open("r", seed=11)
    return recorder, engine


def ask(recorder: Recorder, messages: list[Message], tools: Any = (), **settings: Any) -> Call:
    return asyncio.run(recorder.call("r", messages, tools, **settings))


# What programs change without meaning to


def as_javascript(value: Any) -> Any:
    """JSON after a program in JavaScript read it and wrote it again."""
    if isinstance(value, dict):
        return {key: as_javascript(value[key]) for key in sorted(value, key=lambda k: (not k.isdigit(), k))}
    if isinstance(value, list):
        return [as_javascript(item) for item in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return int(value) if float(value).is_integer() and abs(value) < 2**53 else float(value)
    return value


@st.composite
def harmless(draw: st.DrawFn, message: Message, text: str | None = None) -> Message:
    """The message as some program would send it back. `text` is a reply as `generate` gave it."""
    echo = copy.deepcopy(message)
    if text is not None and draw(st.booleans()):
        return {"role": "assistant", "content": text}
    if draw(st.booleans()):
        echo.pop("reasoning_content", None)
    for index, call in enumerate(echo.get("tool_calls", [])):
        arguments = json.loads(call["function"]["arguments"])
        spaced = json.dumps(arguments, indent=draw(st.sampled_from([None, 2])), sort_keys=draw(st.booleans()))
        packed = json.dumps(as_javascript(arguments), separators=(",", ":"), ensure_ascii=False)
        call["function"]["arguments"] = draw(st.sampled_from([call["function"]["arguments"], spaced, packed, arguments]))
        call["id"] = draw(st.sampled_from([call["id"], f"other_{index}"]))
    if "tool_call_id" in echo:
        echo["tool_call_id"] = draw(st.sampled_from([echo["tool_call_id"], "other_0"]))
    content = echo["content"]
    if isinstance(content, str):
        if echo["role"] == "assistant":
            content = draw(st.sampled_from([content, content.strip(), f"{content}\n"]))
        parts = [
            {"type": "text", "text": content[:2], "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": content[2:]},
        ]
        echo["content"] = draw(st.sampled_from([content, parts, *([] if content else [None, []])]))
        if not content and draw(st.booleans()):
            del echo["content"]
    if echo["role"] == "assistant" and draw(st.booleans()):
        echo["name"], echo["refusal"] = "policy", None
    return echo


@FOUR
@settings(max_examples=60)
@given(data=st.data())
def test_no_sampled_token_is_tokenised_again(name: str, rendering: Named, tokenizer: Named, data: st.DataObject) -> None:
    found, vocabulary = rendering(name), len(tokenizer(name))
    drawn: list[int] = []
    recorder, engine = recording(found, lambda _: drawn)
    tools = data.draw(TOOLS)
    history: list[tuple[Message, str | None]] = [(message, None) for message in data.draw(openings())]
    news: list[tuple[Message, str | None]] = []
    tokens: list[int] = []
    calls: list[Call] = []
    for _ in range(data.draw(st.integers(2, 4))):
        drawn = data.draw(replies(name, found, vocabulary))
        call = ask(recorder, [data.draw(harmless(message, text)) for message, text in history], tools)
        prompt = list(engine.requests[-1].prompt_ids)
        assert prompt[: len(tokens)] == tokens
        assert call.context_ids.tolist() == prompt[len(tokens) :]
        if calls:
            reply, before = calls[-1].completion_ids.tolist(), tokens[: len(tokens) - len(calls[-1].completion_ids)]
            follows = found.extension(calls[-1].reply, [message for message, _ in news], tools)
            assert prompt[len(tokens) :] == [*found.close(before, reply), *follows]
        assert call.completion_ids.tolist() == drawn
        assert call.parent == (calls[-1].id if calls else None)
        calls.append(call)
        tokens = [*prompt, *drawn]
        text = found.decode(drawn[:-1] if drawn[-1] in found.stop_ids else drawn)
        news = [(message, None) for message in data.draw(next_messages())]
        history += [(call.reply, text), *news]
    (branch,) = recorder.finish("r").branches()
    assert branch.token_ids.tolist() == tokens
    assert branch.agent_mask.sum() == sum(len(call.completion_ids) for call in calls)


@FOUR
@settings(max_examples=40)
@given(data=st.data())
def test_a_real_rewrite_starts_a_branch_and_leaves_the_old_tokens(
    name: str, rendering: Named, tokenizer: Named, data: st.DataObject
) -> None:
    found = rendering(name)
    recorder, engine = recording(found)
    tools = [LOOK]
    messages = data.draw(openings())
    for _ in range(3):
        messages = [*messages, ask(recorder, messages, tools).reply, user(data.draw(TEXT))]
    before = recorder.rollout("r").branches()
    assert len(before) == 1
    first = next(index for index, message in enumerate(messages) if message["role"] == "user")
    rewritten, other_tools = data.draw(
        st.sampled_from(
            [
                ([*messages[:first], user("edited, not what was sent"), *messages[first + 1 :]], tools),
                ([*messages[: first + 1], assistant("not what was sampled"), *messages[first + 2 :]], tools),
                ([*messages[:first], *messages[first + 2 :]], tools),  # the first turn dropped
                ([system("other orders"), *messages[first:]], tools),
                ([messages[first], user("a summary of the rest")], tools),
                (messages, [LOOK, MOVE]),
                (messages, []),
            ]
        )
    )
    call = ask(recorder, rewritten, other_tools)
    rollout = recorder.finish("r")
    assert call.parent is None
    assert list(engine.requests[-1].prompt_ids) == found.prompt(rewritten, other_tools)
    old, new = rollout.branches()
    assert old.token_ids.tolist() == before[0].token_ids.tolist()
    assert old.agent_mask.tolist() == before[0].agent_mask.tolist()
    assert new.calls == (call.id,)


def test_another_next_message_forks_the_conversation(rendering: Named) -> None:
    recorder, _ = recording(rendering("qwen3"))
    first = ask(recorder, [user("hi")])
    left, right = (ask(recorder, [user("hi"), first.reply, user(text)]) for text in ("left", "right"))
    assert left.parent == right.parent == first.id
    a, b = recorder.finish("r").rows()
    assert a.agent_mask.sum() + b.agent_mask.sum() == sum(len(call.completion_ids) for call in (first, left, right))


def test_an_assistant_turn_the_model_never_wrote_is_rendered(rendering: Named) -> None:
    for name, spliced in (("qwen3", False), ("llama3_2", False), ("qwen2_5", True)):
        found = rendering(name)
        recorder, engine = recording(found, ["yes", "sure"])
        first = ask(recorder, [user("hi")])
        messages = [user("hi"), first.reply, user("and?"), assistant("I was not sampled"), user("really?")]
        second = ask(recorder, messages)
        assert (second.parent == first.id) == spliced
        if not spliced:
            assert list(engine.requests[-1].prompt_ids) == found.prompt(messages)
        assert found.decode(engine.requests[-1].prompt_ids) == found.decode(found.prompt(messages))


def test_a_family_that_ends_a_reply_with_the_next_role_is_spliced_without_writing_it_twice(growing: Any) -> None:
    found = FamilyRendering(growing, "glm-5")
    observation = growing.convert_tokens_to_ids("<|observation|>")
    written = found.encode_reply(assistant("", ("look", {"room": "e"})))[:-1]
    recorder, engine = recording(found, lambda _: [*written, observation])
    call = ask(recorder, [user("hi")], [LOOK])
    child = ask(recorder, [user("hi"), call.reply, result("dark")], [LOOK])
    assert child.parent == call.id
    assert list(engine.requests[-1].prompt_ids).count(observation) == 1


def test_the_result_of_a_call_is_told_under_the_id_that_the_model_gave_it(growing: Any, rendering: Named) -> None:
    kimi, mistral = FamilyRendering(growing, "kimi-k2"), rendering("mistral_nemo")
    written = {
        "functions.look:0": kimi.encode_reply({**assistant(""), "tool_calls": [{**LOOK_CALL, "id": "functions.look:0"}]}),
        "abcdefghi": mistral.encode_reply({**assistant(""), "tool_calls": [{**LOOK_CALL, "id": "abcdefghi"}]}),
    }
    for found, (own, ids) in zip((kimi, mistral), written.items(), strict=True):
        recorder, engine = recording(found, lambda _, ids=ids: ids)
        call = ask(recorder, [user("hi")], [LOOK])
        (asked,) = call.reply["tool_calls"]
        assert asked["id"] == f"call_{call.id}_0_{own}"
        ask(recorder, [user("hi"), call.reply, result("dark", asked["id"])], [LOOK])
        told = found.decode(engine.requests[-1].prompt_ids)
        assert told.count(own) == 2  # in the call and in its result
        assert call.id not in told


LOOK_CALL = {"type": "function", "function": {"name": "look", "arguments": '{"room": "a"}'}}


@pytest.mark.parametrize(
    ("recorded", "echoed"),
    [
        ('{"n": 1.0, "b": [2e3]}', '{"b":[2000],"n":1}'),
        ('{"n": -0.0}', '{"n":0}'),
        ('{"n": 12345678901234567890}', '{"n":12345678901234567000}'),
        ('{"é": "\\u00e9"}', '{"\\u00e9": "é"}'),
        ("{}", ""),
        ("{}", None),
        ('{"n": ' + "7" * 5000 + "}", '{ "n": ' + "7" * 5000 + "}"),
    ],
)
def test_arguments_are_compared_by_what_they_say(recorded: str, echoed: str | None) -> None:
    def message(arguments: str | None) -> Message:
        return {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": arguments}}]}

    assert canonical(message(recorded)) == canonical(message(echoed))
    assert canonical(message(recorded)) != canonical(message('{"n": 2}'))


@pytest.mark.parametrize("arguments", ["look around", "[" * 3000, '{"a": "\ud800"}', {"a": {1, 2}}, 5])
def test_any_arguments_and_contents_can_be_compared(arguments: Any) -> None:
    call = {"function": {"name": "look", "arguments": arguments}}
    for content in (None, "", "\ud800", {"a": 1}, 5, [{"type": "image_url", "image_url": {"url": "x"}}]):
        message = {"role": "assistant", "content": content, "tool_calls": [call, {"type": "custom", "name": "x"}]}
        assert canonical(message) == canonical(copy.deepcopy(message))


def test_arguments_of_any_depth_are_recorded_and_continued(rendering: Named) -> None:
    found = rendering("qwen3")
    for depth in range(50, 1500, 50):
        written = '<tool_call>{"name": "look", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}</tool_call>"
        recorder, _ = recording(found, [written, "done"])
        call = ask(recorder, [user("hi")])
        assert ask(recorder, [user("hi"), call.reply, user("more")]).parent == call.id


@settings(max_examples=5)
@given(seed=st.integers(0, 2**32), texts=st.lists(TEXT, min_size=2, max_size=3))
def test_a_trainer_computes_the_log_probabilities_that_were_recorded(
    rendering: Named, random_policy: Any, seed: int, texts: list[str]
) -> None:
    """The whole way with a real model: what is spliced turn by turn is, in one forward pass, what was sampled."""
    engine = TransformersEngine(random_policy)
    recorder = Recorder(engine, rendering("tiny"), sampling=Sampling(max_tokens=8))
    recorder.open("r", seed=seed)
    messages = []
    for text in texts:
        messages.append(user(text))
        messages.append(ask(recorder, messages).reply)
    engine.close()
    (branch,) = recorder.finish("r").branches()
    with torch.no_grad():
        logps = torch.log_softmax(random_policy(torch.from_numpy(branch.token_ids[None].astype(np.int64))).logits[0], dim=-1)
    positions = np.flatnonzero(branch.agent_mask)
    expected = logps[positions - 1, branch.token_ids[positions]].numpy()
    np.testing.assert_allclose(branch.logprobs[positions], expected, atol=1e-4)
    assert len(positions) > 0


@pytest.fixture(scope="module")
def random_policy(random_model: Callable[..., Any], tokenizer: Named) -> Any:
    return random_model(vocab_size=len(tokenizer("tiny")))


def test_a_template_that_keeps_no_prefixes_gives_a_root_a_call(rendering: Named) -> None:
    found = rendering("mistral_nemo")
    recorder, engine = recording(found)
    messages = [system("be brief"), user("hi")]
    for _ in range(3):
        call = ask(recorder, messages)
        assert call.parent is None
        assert list(engine.requests[-1].prompt_ids) == found.prompt(messages)
        messages = [*messages, call.reply, user("more")]
    assert len(recorder.finish("r").rows()) == 3


def test_of_two_like_replies_the_echo_tells_which(rendering: Named) -> None:
    found = rendering("qwen3")
    written = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    recorder, _ = recording(found, [written, f"<think>\nhm\n</think>\n\n{written}", "done", "done", "done"])
    plain, thoughtful = (ask(recorder, [user("hi")]) for _ in range(2))
    new = result("dark", "any")

    def parent_of(echo: Message) -> str | None:
        return ask(recorder, [user("hi"), echo, new]).parent

    assert parent_of(plain.reply) == plain.id
    assert parent_of(thoughtful.reply) == thoughtful.id
    assert parent_of({**assistant(""), "tool_calls": plain.reply["tool_calls"]}) == plain.id


def test_a_reply_that_was_delivered_is_continued_before_one_that_was_not(rendering: Named) -> None:
    recorder, _ = recording(rendering("qwen3"), ["yes", "yes", "done"])
    delivered = ask(recorder, [user("hi")])
    ask(recorder, [user("hi")], delivered=False)
    assert ask(recorder, [user("hi"), assistant("yes"), user("more")]).parent == delivered.id


# Exactly once


def test_a_call_that_is_still_open_is_not_joined(rendering: Named) -> None:
    found = rendering("qwen3")

    async def scenario() -> None:
        gate, engine = asyncio.Event(), Gated(found)
        recorder = Recorder(engine, found)
        recorder.open("r")
        engine.gates = [gate, gate]
        first, second = (asyncio.create_task(recorder.call("r", [user("hi")])) for _ in range(2))
        await asyncio.sleep(0)
        gate.set()
        assert (await first).id != (await second).id
        assert len(recorder.finish("r").rows()) == 2

    asyncio.run(scenario())


class Gated(Replies):
    """Answers by the request's noise, each when its gate opens."""

    def __init__(self, rendering: Rendering) -> None:
        super().__init__(by_seed(rendering), rendering.stop_ids)
        self.gates: list[asyncio.Event] = []

    async def sample(self, request: SampleRequest) -> Sampled:
        gate = self.gates.pop(0) if self.gates else None
        if gate is not None:
            await gate.wait()
        return await super().sample(request)


# Noise


@settings(max_examples=25)
@given(order=st.permutations(range(6)), arrival=st.permutations(range(6)))
def test_noise_is_keyed_by_path_and_not_by_arrival(rendering: Named, order: list[int], arrival: list[int]) -> None:
    """Six calls at once, two alike, asked and answered in any order, then each continued: always the same tree."""
    found = rendering("qwen3")
    texts = ["a", "b", "c", "d", "e", "e"]

    async def tree(arrival: list[int], order: list[int]) -> dict[str, list[int]]:
        engine = Gated(found)
        recorder = Recorder(engine, found)
        rollout = recorder.open("r", seed=5)
        gates = [asyncio.Event() for _ in texts]
        engine.gates = [gates[index] for index in arrival]
        tasks = [asyncio.create_task(recorder.call("r", [user(texts[index])])) for index in arrival]
        await asyncio.sleep(0)
        for index in order:
            gates[index].set()
            await asyncio.sleep(0)
        for index, call in zip(arrival, await asyncio.gather(*tasks), strict=True):
            await recorder.call("r", [user(texts[index]), call.reply, user("more")])
        return {call_id: rollout.tokens(call_id).tolist() for call_id in rollout.calls}

    assert asyncio.run(tree(arrival, order)) == asyncio.run(tree(list(range(6)), list(range(6))))


def test_noise_differs_by_rollout_seed_and_by_sibling(rendering: Named) -> None:
    found = rendering("qwen3")
    engine = Replies(by_seed(found), found.stop_ids)
    recorder = Recorder(engine, found)
    for seed in range(3):
        recorder.open(str(seed), seed=seed)
        for _ in range(2):
            asyncio.run(recorder.call(str(seed), [user("hi")]))
    assert len({request.seed for request in engine.requests}) == 6


def test_a_call_that_failed_or_was_cancelled_draws_the_same_noise_when_asked_again(rendering: Named) -> None:
    found = rendering("qwen3")
    recorder, _ = recording(found)
    undisturbed = ask(recorder, [user("hi")])

    async def scenario() -> None:
        gated = Gated(found)
        recorder = Recorder(gated, found)
        recorder.open("r", seed=11)
        gated.gates = [asyncio.Event(), asyncio.Event()]
        cancelled, beside = (asyncio.create_task(recorder.call("r", [user("hi")])) for _ in range(2))
        gates = list(gated.gates)
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        again = await recorder.call("r", [user("hi")])
        assert again.id == undisturbed.id
        assert again.completion_ids.tolist() == undisturbed.completion_ids.tolist()
        gates[1].set()
        assert (await beside).id != again.id

    asyncio.run(scenario())

    def away_once(request: SampleRequest) -> list[int]:
        if len(engine.requests) == 1:
            raise ConnectionError("the engine is away")
        return by_seed(found)(request)

    recorder, engine = recording(found, away_once)
    with pytest.raises(ConnectionError):
        ask(recorder, [user("hi")])
    assert ask(recorder, [user("hi")]).id == undisturbed.id


# History as it was sent


@FOUR
@settings(max_examples=30)
@given(data=st.data())
def test_as_sent_always_reads_what_a_stock_server_would_render(name: str, rendering: Named, data: st.DataObject) -> None:
    found = rendering(name)
    text = ""
    recorder, engine = recording(found, lambda _: found.encode_reply(text), history="as_sent")
    messages = data.draw(openings())
    for _ in range(3):
        text = data.draw(reply_texts(name))
        call = ask(recorder, messages)
        prompt = list(engine.requests[-1].prompt_ids)
        assert prompt == found.prompt(messages)
        assert recorder.rollout("r").prompt(call.id).tolist() == prompt
        messages = [*messages, call.reply, user(data.draw(TEXT))]


def test_as_sent_keeps_one_branch_where_nothing_changed_and_branches_where_reasoning_is_dropped(rendering: Named) -> None:
    found = rendering("qwen3")
    for texts, parents in ((["yes", "no"], True), (["<think>\nhm\n</think>\n\nyes", "no"], False)):
        recorder, _ = recording(found, texts, history="as_sent")
        first = ask(recorder, [user("hi")])
        second = ask(recorder, [user("hi"), first.reply, user("more")])
        assert (second.parent == first.id) == parents


def test_an_unknown_history_is_refused(rendering: Named) -> None:
    with pytest.raises(LongreinError, match="history is 'kept'"):
        recording(rendering("qwen3"), history="kept")


# The seam


def test_generate_gives_text_and_recorded_gives_its_tokens(rendering: Named) -> None:
    found = rendering("qwen3")
    written = ["<think>\nhm\n</think>\n\nLook:\n" + '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', "done"]
    recorder, _ = recording(found, written)
    assert isinstance(recorder, GenerateAPI)
    first = recorder.generate("r", 0, [user("hi")], [LOOK], Sampling())
    second = recorder.generate("r", 1, [user("hi"), assistant(first), result("dark")], [LOOK], Sampling())
    assert [first, second] == written
    assert recorder.recorded("r", 0).completion_ids.tolist() == found.encode_reply(written[0])
    assert recorder.recorded("r", 1).parent == recorder.recorded("r", 0).id
    with pytest.raises(LongreinError, match="'r' has no recorded turn 2; it has 2"):
        recorder.recorded("r", 2)


def test_generate_works_inside_a_running_event_loop(rendering: Named) -> None:
    recorder, _ = recording(rendering("qwen3"), ["yes"])

    async def notebook() -> str:
        return recorder.generate("r", 0, [user("hi")])

    assert asyncio.run(notebook()) == "yes"


def test_an_error_of_the_engine_reaches_the_caller_inside_a_loop_too(rendering: Named) -> None:
    def away(_: SampleRequest) -> list[int]:
        raise ConnectionError("the engine is away")

    recorder, _ = recording(rendering("qwen3"), away)

    async def notebook() -> str:
        return recorder.generate("r", 0, [user("hi")])

    for run in (lambda: asyncio.run(notebook()), lambda: recorder.generate("r", 0, [user("hi")])):
        with pytest.raises(ConnectionError, match="away"):
            run()
    assert not recorder.finish("r").calls


def test_a_call_says_what_was_asked_and_answered(rendering: Named) -> None:
    recorder, engine = recording(rendering("qwen3"), ['<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', "yes"])
    call = ask(recorder, [user("hi")], [LOOK])
    assert call.finish_reason == "tool_calls"
    assert call.policy_version == 3
    assert (call.messages, call.tools) == ((user("hi"),), (LOOK,))
    assert call.reply["tool_calls"][0]["id"].startswith("call_")
    assert call.logprobs.tolist() == np.float32(logprobs_of(call.completion_ids.tolist(), engine.requests[0].seed)).tolist()
    answer = ask(recorder, [user("hi"), call.reply, result("dark")], [LOOK])
    assert (answer.finish_reason, answer.messages) == ("stop", (result("dark"),))
    assert recorder.finish("r").conversation(answer.id) == [user("hi"), call.reply, result("dark"), answer.reply]


def test_what_the_caller_does_to_messages_does_not_reach_the_record(rendering: Named) -> None:
    recorder, _ = recording(rendering("qwen3"), ["yes"])
    sent = user("hi")
    call = ask(recorder, [sent])
    sent["content"] = call.reply["content"] = "changed"
    assert recorder.finish("r").conversation(call.id) == [user("hi"), assistant("yes")]


def test_a_full_context_is_refused_and_a_nearly_full_one_shortens_the_reply(rendering: Named) -> None:
    found = rendering("qwen3")
    length = len(found.prompt([user("hi")]))
    for model, limits in (({"context_length": length + 5}, {}), ({}, {"max_length": length + 5})):
        recorder, engine = recording(found, **model)
        ask(recorder, [user("hi")], **limits)
        ask(recorder, [user("hi")], sampling=Sampling(max_tokens=3), **limits)
        assert [request.sampling.max_tokens for request in engine.requests] == [5, 3]
        with pytest.raises(ContextLengthError, match=f"the limit is {length + 5}: no room for a reply"):
            ask(recorder, [user("hi " * 20)], **limits)


@settings(max_examples=40)
@given(texts=st.lists(TEXT, min_size=1, max_size=3), words=st.lists(st.sampled_from(["Observation:", "日", "a", "\n"])))
def test_a_stop_word_ends_the_reply_and_the_next_turn_keeps_its_tokens(
    rendering: Named, texts: list[str], words: list[str]
) -> None:
    found = rendering("qwen2_5")
    whole = found.encode_reply("Thought. Observation:".join(texts))
    recorder, engine = recording(found, lambda _: whole)
    call = ask(recorder, [user("hi")], stop=words)
    drawn = call.completion_ids.tolist()
    assert drawn == whole[: len(drawn)]
    assert len(call.logprobs) == len(drawn)
    if len(drawn) < len(whole):  # it ends with the token that completed a word, and its message before the word
        assert any(word in found.decode(drawn) for word in words)
        assert not any(word in found.decode(drawn[:-1]) for word in words)
        assert call.finish_reason == "stop"
    assert not any(word in call.reply["content"] for word in words)
    child = ask(recorder, [user("hi"), call.reply, user("more")], stop=words)
    assert child.parent == call.id
    before = [*found.prompt([user("hi")]), *drawn]
    assert list(engine.requests[-1].prompt_ids)[: len(before)] == before


def test_a_stop_word_in_the_reasoning_ends_it_there(rendering: Named) -> None:
    found = rendering("qwen3")
    recorder, _ = recording(found, ["<think>\nfirst STOP second\n</think>\n\nanswer"])
    call = ask(recorder, [user("hi")], stop=["STOP"])
    assert (call.reply["reasoning_content"].strip(), call.reply["content"]) == ("first", "")
    assert found.decode(call.completion_ids).endswith("STOP")


def test_a_rollout_is_open_once_and_closed_for_good(rendering: Named) -> None:
    recorder, _ = recording(rendering("qwen3"))
    with pytest.raises(LongreinError, match="'r' is already open"):
        recorder.open("r")
    with pytest.raises(LongreinError, match="at least one message"):
        ask(recorder, [])
    recorder.finish("r")
    for late in (lambda: ask(recorder, [user("hi")]), lambda: recorder.finish("r"), lambda: recorder.digest("r", [])):
        with pytest.raises(LongreinError, match="'r' is not open here"):
            late()


def test_a_reply_that_comes_after_the_end_is_refused(rendering: Named) -> None:
    found = rendering("qwen3")

    async def scenario() -> None:
        gate, engine = asyncio.Event(), Gated(found)
        recorder = Recorder(engine, found)
        rollout = recorder.open("r")
        engine.gates = [gate]
        late = asyncio.create_task(recorder.call("r", [user("hi")]))
        await asyncio.sleep(0)
        recorder.finish("r")
        recorder.open("r")  # another rollout of the same name
        gate.set()
        with pytest.raises(LongreinError, match="ended while this call was sampled"):
            await late
        assert not rollout.calls
        assert not recorder.finish("r").calls

    asyncio.run(scenario())


def test_calls_from_many_threads_are_all_recorded(rendering: Named) -> None:
    from concurrent.futures import ThreadPoolExecutor

    recorder, _ = recording(rendering("qwen3"))
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda index: recorder.generate("r", index, [user(str(index % 4))]), range(32)))
    rollout = recorder.finish("r")
    assert len(rollout.calls) == len(set(rollout.calls)) == 32
    assert len(set(texts)) > 16
