"""Methods as tools: whatever the policy calls them with is answered, and only a tool that is broken fails its rollout."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from longrein import LongreinError, Step
from longrein.envs import ToolEpisode, tool


class Bench(ToolEpisode):
    def start(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "go"}]

    @tool
    def repeat(self, word: str, times: int = 2, *, loud: bool = False) -> str:
        """Say a word again.

        Args:
            word: The word.
            times: How often.
            loud: In capitals.
        """
        said = " ".join([word] * times)
        return said.upper() if loud else said

    @tool
    async def half(self, number: float | None) -> float:
        """Half of a number.

        Args:
            number: The number.
        """
        await asyncio.sleep(0)
        return number / 2

    @classmethod
    @tool
    def name_of_it(cls) -> str:
        """What this is called."""
        return cls.__name__

    @staticmethod
    @tool
    def give(things: list[str]) -> list[str]:
        """Give things back.

        Args:
            things: The things.
        """
        return things[::-1]

    @tool
    def broken(self) -> str:
        """Break."""
        raise RuntimeError("the tool is broken")

    async def score(self, answer: str) -> float:
        return len(answer)


def call(name: str, arguments: Any) -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    reply = {"content": "", "tool_calls": [{"id": "c1", "function": {"name": name, "arguments": text}}]}
    (message,) = asyncio.run(Bench({}, None).step(reply)).messages
    assert (message["role"], message["tool_call_id"]) == ("tool", "c1")
    return message["content"]


def test_every_kind_of_method_is_offered() -> None:
    schemas = {schema["function"]["name"]: schema["function"]["parameters"] for schema in Bench({}, None).tools}
    assert set(schemas) == {"repeat", "half", "name_of_it", "give", "broken"}
    assert set(schemas["repeat"]["properties"]) == {"word", "times", "loud"}
    assert schemas["repeat"]["required"] == ["word"]
    assert not schemas["name_of_it"]["properties"]


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("repeat", {"word": "ho", "times": 3}, "ho ho ho"),
        ("repeat", {"word": "ho", "loud": True}, "HO HO"),
        ("half", {"number": 3}, "1.5"),
        ("name_of_it", {}, "Bench"),
        ("name_of_it", "", "Bench"),
        ("give", {"things": ["a", "b"]}, "['b', 'a']"),
    ],
)
def test_a_call_that_fits_is_answered(name: str, arguments: Any, answer: str) -> None:
    assert call(name, arguments) == answer


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("nothing", {}, "there is no tool 'nothing'; there is broken, give"),
        ("repeat", {}, "missing a required argument: 'word'"),
        ("repeat", {"word": "ho", "size": 1}, "unexpected keyword argument 'size'"),
        ("repeat", ["ho"], "must be a mapping"),
        ("repeat", "null", "must be a mapping"),
        ("repeat", '{"word": ', "Expecting value"),
        ("repeat", "[" * 100_000, "recursion"),
        ("repeat", {"word": "ho", "times": "three"}, "times must be of type integer"),
        ("repeat", {"word": None}, "word must be of type string"),
        ("half", {"number": "three"}, "number must be of type number"),
        ("give", {"things": 3}, "things must be of type array"),
    ],
)
def test_a_call_that_does_not_fit_is_told_so(name: str, arguments: Any, words: str) -> None:
    told = call(name, arguments)
    assert told.startswith("error: ")
    assert words in told


def test_a_tool_that_breaks_on_what_it_asks_for_fails_its_rollout() -> None:
    with pytest.raises(RuntimeError, match="the tool is broken"):
        call("broken", {})
    with pytest.raises(TypeError):
        call("half", {"number": None})


def test_an_answer_is_scored() -> None:
    assert asyncio.run(Bench({}, None).step({"content": "four"})) == Step(reward=4, done=True)


def test_the_mark_goes_on_the_function_itself() -> None:
    with pytest.raises(LongreinError, match="below any other decorator"):
        tool(classmethod(lambda cls: "x"))  # type: ignore[type-var]
