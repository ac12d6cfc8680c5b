"""Episodes whose tools are methods: mark them with `@tool`, write types and a docstring, and score the final answer.

Always true: a call that does not fit its tool is told so, and the episode goes on; a tool that breaks on arguments of the types it
asks for is a failed rollout.
"""

from __future__ import annotations

import inspect
import json
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from longrein.contract import LongreinError, Message, Tool
from longrein.envs.environment import Episode, Step, settled

F = TypeVar("F", bound=Callable[..., Any])


def tool(method: F) -> F:
    """Offer a method to the policy. Its signature and Google-style docstring are the schema."""
    if isinstance(method, classmethod | staticmethod | property) or not callable(method):
        raise LongreinError(f"@tool was put on {method!r}; it goes on the function itself, below any other decorator")
    method.__longrein_tool__ = True  # type: ignore[attr-defined]
    return method


class ToolEpisode(Episode):
    """Plays until the policy answers without calling a tool; `score` judges that answer.

    >>> class Dice(ToolEpisode):
    ...     def start(self):
    ...         return [{"role": "user", "content": "Roll and tell me."}]
    ...     @tool
    ...     def roll(self) -> str:
    ...         '''Roll the die.'''
    ...         return str(self.task["face"])
    ...     def score(self, answer):
    ...         return float(str(self.task["face"]) in answer)
    >>> [schema["function"]["name"] for schema in Dice({"face": 3}, None).tools]
    ['roll']
    """

    def __init__(self, task_data: dict[str, Any], config: Any) -> None:
        super().__init__(task_data, config)
        self._methods = {
            name: getattr(self, name)
            for name in dir(type(self))
            if getattr(getattr(type(self), name, None), "__longrein_tool__", False)
        }

    @property
    def tools(self) -> Sequence[Tool]:  # type: ignore[override]
        return _schemas(type(self), tuple(self._methods))

    @abstractmethod
    def score(self, answer: str) -> float | Awaitable[float]:
        """The reward of a final answer."""

    async def step(self, reply: Message) -> Step:
        calls = reply.get("tool_calls") or ()
        if not calls:
            return Step(reward=await settled(self.score(reply["content"])), done=True)
        return Step(
            messages=[
                {"role": "tool", "tool_call_id": call["id"], "content": await self._result(call["function"])}
                for call in calls
            ]
        )

    async def _result(self, function: dict[str, Any]) -> str:
        """What the tool says, or what does not fit."""
        name = function["name"]
        method = self._methods.get(name)
        if method is None:
            return f"error: there is no tool {name!r}; there is {', '.join(self._methods)}"
        try:
            arguments = json.loads(function["arguments"] or "{}")
            bound = inspect.signature(method).bind(**arguments)
        except (ValueError, TypeError, RecursionError) as error:
            return f"error: {name} cannot take {function['arguments']}: {error}"
        try:
            return str(await settled(method(*bound.args, **bound.kwargs)))
        except Exception:
            schema = next(one["function"]["parameters"] for one in self.tools if one["function"]["name"] == name)
            if (wrong := _misfit(bound.arguments, schema["properties"])) is None:
                raise
            return f"error: {name} cannot take {function['arguments']}: {wrong}"


_KINDS = {"string": str, "integer": int, "number": int | float, "boolean": bool, "array": list, "object": dict}


def _misfit(arguments: Mapping[str, Any], schemas: Mapping[str, Any]) -> str | None:
    """The first argument that is not of its type, in words."""
    for name, value in arguments.items():
        schema = schemas.get(name, {})
        if (kind := schema.get("type")) not in _KINDS or (value is None and schema.get("nullable")):
            continue
        if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "boolean"):
            return f"{name} must be of type {kind}"
    return None


_SCHEMAS: dict[type, list[Tool]] = {}


def _schemas(cls: type, names: tuple[str, ...]) -> list[Tool]:
    if cls not in _SCHEMAS:
        from transformers.utils.chat_template_utils import get_json_schema

        _SCHEMAS[cls] = [_without_return(get_json_schema(getattr(cls, name))) for name in names]
    return _SCHEMAS[cls]


def _without_return(schema: Tool) -> Tool:
    function = {key: value for key, value in schema["function"].items() if key != "return"}
    return {"type": "function", "function": function}
