"""An agent: a policy, its engine and its sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from longrein import Agent
from longrein.agents import as_agent
from longrein.contract import LongreinError
from longrein.engines.scripted import ScriptedEngine
from longrein.engines.transformers import TransformersEngine

Named = Callable[[str], Any]


def test_the_context_is_the_shorter_of_the_models_and_the_engines(tokenizer: Named, random_model: Any) -> None:
    model = random_model(max_position_embeddings=512)
    engine = TransformersEngine(model, cache_tokens=256)
    assert Agent(model, tokenizer("tiny"), engine=engine).context_length == 256
    assert Agent(None, tokenizer("tiny"), engine=engine).context_length == 256
    assert Agent(None, tokenizer("tiny"), engine=engine).recorder().context_length == 256
    assert Agent(model, tokenizer("tiny")).context_length == 512


def test_without_a_model_and_without_an_engines_word_there_is_no_limit(tokenizer: Named, rendering: Named) -> None:
    engine = ScriptedEngine(["yes"], rendering("tiny"))
    assert Agent(None, tokenizer("tiny"), engine=engine).context_length is None


def test_an_agent_needs_something_to_sample_from(tokenizer: Named) -> None:
    with pytest.raises(LongreinError, match="needs a model to sample from, or an engine"):
        Agent(None, tokenizer("tiny"))
    with pytest.raises(LongreinError, match="the agent is a int"):
        as_agent(5, tokenizer("tiny"))
