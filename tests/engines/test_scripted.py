"""Scripted engines: real tokens without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from longrein.contract import LongreinError, Message, Sampled, SampleRequest, Sampling
from longrein.engines.scripted import ScriptedEngine, TextAgentEngine
from longrein.recorder import Recorder
from longrein.rendering import Rendering

Named = Callable[[str], Rendering]
USER: Message = {"role": "user", "content": "hi"}


def sample(engine: ScriptedEngine, messages: Any = (USER,), rollout_id: str = "r", **sampling: Any) -> Sampled:
    return asyncio.run(engine.sample(SampleRequest([1], Sampling(**sampling), frozenset(), 0, rollout_id, messages)))


def test_a_list_is_answered_in_order_from_the_start_for_every_rollout(rendering: Named) -> None:
    found = rendering("qwen3")
    recorder = Recorder(ScriptedEngine(["one", "two"], found), found)
    for rollout_id in ("a", "b"):
        recorder.open(rollout_id)
        first = recorder.generate(rollout_id, 0, [USER])
        second = recorder.generate(rollout_id, 1, [USER, {"role": "assistant", "content": first}, USER])
        assert [first, second] == ["one", "two"]
        (branch,) = recorder.finish(rollout_id).branches()
        assert not branch.logprobs.any()
        assert branch.agent_mask.sum() == len(found.encode_reply("one")) + len(found.encode_reply("two"))


def test_a_script_that_has_ended_says_so(rendering: Named) -> None:
    engine = ScriptedEngine(["one"], rendering("qwen3"))
    with pytest.raises(LongreinError, match="the script has 1 replies and was asked for one more"):
        sample(engine, [USER, {"role": "assistant", "content": "one"}, USER])


def test_a_function_is_asked_with_messages_and_tools(rendering: Named) -> None:
    asked = []

    def script(messages: Any, tools: Any) -> str:
        asked.append((list(messages), list(tools)))
        return "yes"

    found = rendering("qwen3")
    reply = sample(ScriptedEngine(script, found))
    assert asked == [([USER], [])]
    assert list(reply.ids) == found.encode_reply("yes")
    assert (list(reply.logprobs), reply.finish_reason, reply.sampler_logprobs) == ([0.0, 0.0], "stop", None)


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_2", "tiny"])
def test_a_message_is_written_in_the_format_of_the_model(name: str, rendering: Named) -> None:
    found = rendering(name)
    function = {"name": "look", "arguments": '{"room": "kitchen"}'}
    message = {"content": "", "tool_calls": [{"id": "x", "type": "function", "function": function}]}
    reply = sample(ScriptedEngine([message], found))
    (call,) = found.parse(reply.ids)["tool_calls"]
    assert call["function"] == function


def test_a_reply_longer_than_allowed_is_cut(rendering: Named) -> None:
    found = rendering("qwen3")
    whole = found.encode_reply("one two three")
    for limit, reason in ((2, "length"), (len(whole), "stop"), (100, "stop")):
        reply = sample(ScriptedEngine(["one two three"], found), max_tokens=limit, top_k=5)
        assert list(reply.ids) == whole[:limit]
        assert reply.finish_reason == reason
        assert reply.sampler_logprobs is not None
        assert len(reply.logprobs) == len(reply.sampler_logprobs) == len(reply.ids)


class Counting:
    """Says how many replies it gave in a rollout."""

    def get_action(self, messages: list[Message], state: int | None) -> tuple[str, int]:
        count = (state or 0) + 1
        return str(count), count


def test_each_rollout_of_a_text_agent_has_its_own_state(rendering: Named) -> None:
    found = rendering("qwen3")
    engine = TextAgentEngine(Counting(), found)
    later = [USER, {"role": "assistant", "content": "1"}, USER]

    def said(messages: list[Message], rollout_id: str) -> str:
        return found.parse(sample(engine, messages, rollout_id).ids)["content"]

    assert [said([USER], "a"), said([USER], "b"), said(later, "a"), said(later, "a")] == ["1", "1", "2", "3"]
    assert said([USER], "a") == "1"  # the next trial's rollout of the same name
    engine.close()


def test_a_text_agent_that_gives_no_pair_is_refused(rendering: Named) -> None:
    class Wrong:
        def get_action(self, messages: list[Message], state: Any) -> str:
            return "yes"

    with pytest.raises(LongreinError, match=r"Wrong.get_action returned 'yes'; it must return a pair \(text, state\)"):
        sample(TextAgentEngine(Wrong(), rendering("qwen3")))
