"""OpenEnv environments as environments here, and environments here as OpenEnv's.

Always true of an episode: it is one session of the server, reset once; each tool call of the policy is one step of it, in order,
and its reward is that of the reply that made the call; a session that was lost is a failed rollout with its cause, never one
that went on somewhere else. Playing needs only this package; serving needs `openenv` (`pip install 'longrein[openenv]'`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import socket
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp

from longrein.agents import Agent
from longrein.contract import LongreinError, Message, Tool
from longrein.envs.environment import EnvConfig, EnvConfigError, Environment, Episode, Step
from longrein.envs.openenv_wire import Refused, Session
from longrein.harnesses.program import Program
from longrein.rollout import Rollout

START_SECONDS = 120.0
"""How long a server of our own may take to start."""


@dataclass(frozen=True, kw_only=True)
class OpenEnvConfig(EnvConfig):
    url: str | None = None
    """A running server: `http://host:port`."""
    app: str | None = None
    """In place of `url`: a server to start here, as uvicorn names it (`my_env.server.app:app`). It ends with us."""
    instruction: str = ""
    """What the policy reads before the first observation; a task's own `instruction` goes before it."""
    show: Sequence[str] = ()
    """The fields of an observation that the policy reads; all but `metadata` unless said."""
    text_action: str | None = None
    """For environments that are talked to: the field of the action that takes the policy's text. There are no tools then."""
    step_errors: Literal["fail", "tell"] = "fail"
    """What an exception inside the environment's `step` is: a failed rollout, or a reply that the policy is told."""
    answer_seconds: float = 60.0
    """How long the server may take to answer; then the session is over."""
    full_seconds: float = 300.0
    """How long a full server is waited for."""
    idle_seconds: float | None = None
    """The server's limit on an idle session, where it has one (`session_timeout`): it ends such a session without a word."""
    concurrency: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.url is None) == (self.app is None):
            raise EnvConfigError(
                f"url is {self.url!r} and app is {self.app!r}; give the address of a server, or an app to start"
            )
        if self.url is not None and (urlsplit(self.url).scheme not in _SCHEMES or not urlsplit(self.url).netloc):
            raise EnvConfigError(f"url is {self.url!r}; it must be like http://127.0.0.1:8000")
        if self.app is not None and not re.fullmatch(r"[\w.]+:[\w.]+", self.app):
            raise EnvConfigError(f"app is {self.app!r}; it must be like my_env.server.app:app")
        for name in ("answer_seconds", "full_seconds", "idle_seconds"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise EnvConfigError(f"{name} is {value!r}; it must be a number of seconds above 0")


_SCHEMES = {"http": "http", "https": "https", "ws": "http", "wss": "https"}


@dataclass(frozen=True, slots=True)
class Act:
    """A kind of action, as a tool."""

    tool: Tool
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the action that this kind always has the same."""


class Actions:
    """What a server takes as an action, read from its schema.

    `by_tool` holds one tool for each kind of action. An environment of MCP tools (`mcp`) tells its tools in each session; one of
    longrein's own (`whole`) takes the policy's reply as it is.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        kinds = [_resolved(kind, schema) for kind in schema.get("oneOf") or schema.get("anyOf") or [schema]]
        names = set(kinds[0].get("properties", {})) - {"metadata"}
        only = len(kinds) == 1
        self.whole = only and {"content", "tool_calls"} <= names
        self.mcp = only and (kinds[0].get("title") == "Action" or names == {"type", "tool_name", "arguments"})
        self.by_tool: dict[str, Act] = {}
        if not (self.whole or self.mcp):
            self.by_tool = {act.tool["function"]["name"]: act for act in (_act(kind, schema) for kind in kinds)}


class OpenEnvEpisode(Episode):
    config: OpenEnvConfig

    def __init__(self, task_data: dict[str, Any], config: OpenEnvConfig, url: str, actions: Actions) -> None:
        super().__init__(task_data, config)
        self.actions = actions
        self.session = Session(
            url,
            answer_seconds=config.answer_seconds,
            full_seconds=config.full_seconds,
            idle_seconds=config.idle_seconds,
        )
        self.acts = dict(actions.by_tool)

    async def start(self) -> Sequence[Message]:
        task = {name: value for name, value in self.task.items() if name != "instruction"}
        answer = await self.session.reset({"task": self.task} if self.actions.whole else task)
        if answer.get("done"):
            raise LongreinError(f"the environment was over at its reset with {task!r}, before the policy had a turn")
        observation = answer["observation"]
        if self.actions.whole:
            self.tools = observation["tools"]
            return observation["messages"]
        if self.actions.mcp:
            self.acts = _mcp_acts(await self.session.step({"type": "list_tools"}))
        if self.config.text_action is None:
            self.tools = [act.tool for act in self.acts.values()]
        parts = (self.task.get("instruction"), self.config.instruction, self.text(observation))
        return [{"role": "user", "content": "\n\n".join(part for part in parts if part)}]

    async def step(self, reply: Message) -> Step:
        if self.actions.whole:
            return await self._whole(reply)
        if self.config.text_action is not None:
            answer = await self._take({self.config.text_action: reply.get("content") or ""})
            return self._said([{"role": "user", "content": answer["text"] or "Go on."}], [answer])
        calls = reply.get("tool_calls") or ()
        messages, answers = [], []
        for call in calls:
            answers.append(await self._call(call["function"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": answers[-1]["text"]})
            if answers[-1].get("done"):
                break
        return self._said(messages, answers)

    def text(self, observation: dict[str, Any]) -> str:
        """An observation as the policy reads it: its only text as it is, several fields as JSON."""
        config = self.config
        if missing := [name for name in config.show if name not in observation]:
            raise LongreinError(f"show names {missing[0]!r}; the observation has {', '.join(observation)}")
        shown = {name: observation[name] for name in config.show or observation if name in config.show or name != "metadata"}
        return _as_text(next(iter(shown.values())) if len(shown) == 1 else shown)

    def _said(self, messages: list[Message], answers: list[dict[str, Any]]) -> Step:
        done = not answers or bool(answers[-1].get("done"))  # a policy that no longer acts is at its end
        info = (answers[-1].get("metadata") if answers and done else None) or {}
        return Step(messages=messages, reward=sum(_reward(answer) for answer in answers), done=done, info=info)

    async def _whole(self, reply: Message) -> Step:
        said = {name: reply[name] for name in ("content", "tool_calls", "reasoning_content") if reply.get(name)}
        answer = await self.session.step(said)
        seen = answer["observation"]
        done = bool(answer.get("done"))
        return Step(seen["messages"], _reward(answer), done, success=seen["success"], info=seen["info"])

    async def _call(self, function: dict[str, Any]) -> dict[str, Any]:
        """One tool call as one step; a call that does not fit is told so, and the episode goes on."""
        name, act = function["name"], self.acts.get(function["name"])
        if act is None:
            return {"text": f"error: there is no tool {name!r}; there is {', '.join(self.acts)}"}
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except ValueError as error:
            return {"text": f"error: {name} cannot take {function['arguments']}: {error}"}
        if not isinstance(arguments, dict):
            return {"text": f"error: {name} cannot take {function['arguments']}: it takes an object"}
        if self.actions.mcp:
            return await self._take({**act.fixed, "arguments": arguments}, name)
        return await self._take({**arguments, **act.fixed}, name)

    async def _take(self, action: dict[str, Any], name: str = "the environment") -> dict[str, Any]:
        try:
            answer = await self.session.step(action)
        except Refused as refusal:
            if refusal.code == "VALIDATION_ERROR":
                return {"text": f"error: {name} cannot take this: {refusal.wrong}"}
            if refusal.code == "EXECUTION_ERROR" and self.config.step_errors == "tell":
                return {"text": f"error: {refusal.wrong}"}
            raise LongreinError(f"the OpenEnv environment broke at {action!r}: {refusal}") from refusal
        observation = answer["observation"]
        return {**answer, "text": _mcp_text(observation) if self.actions.mcp else self.text(observation)}

    async def close(self) -> None:
        await self.session.close()


class OpenEnv(Environment):
    """Any OpenEnv environment: its actions are the policy's tools, its observations what the policy reads.

    >>> env = OpenEnv(tokenizer=tokenizer, env_config={"url": "http://127.0.0.1:8000"})          # doctest: +SKIP
    >>> trial = env.run_trial([{"seed": 7}], agent, num_rollouts=4)                             # doctest: +SKIP

    A task is what the environment's `reset` is told (`seed` and whatever else it takes), and maybe an `instruction`.
    """

    Config = OpenEnvConfig
    config: OpenEnvConfig

    def __init__(self, *, tokenizer: Any, env_config: dict[str, Any] | None = None) -> None:
        super().__init__(tokenizer=tokenizer, env_config=env_config)
        self._lock = threading.Lock()
        self._url: str | None = None
        self._actions: Actions | None = None

    @classmethod
    def tasks(cls, count: int, *, seed: int = 0, env_config: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        return [{"seed": s} for s in random.Random(f"openenv-{seed}").sample(range(2**31), count)]

    @property
    def url(self) -> str:
        """The server's address; a server of our own is started when it is first needed."""
        with self._lock:
            if self._url is None:
                self._url = self._start() if self.config.url is None else _http(self.config.url)
            return self._url

    def episode(self, task_data: dict[str, Any]) -> Episode:
        if self._actions is None:
            raise LongreinError("the server's actions are not known yet; episodes are made by `run_trial`")
        return OpenEnvEpisode(task_data, self.config, self.url, self._actions)

    async def play(self, tasks: Sequence[dict[str, Any]], agent: Agent, num_rollouts: int) -> list[Rollout]:
        if self._actions is None:
            url = await asyncio.to_thread(lambda: self.url)
            schema = (await _get(f"{url}/schema", self.config.answer_seconds))["action"]
            self._actions = Actions(schema)
            if (name := self.config.text_action) is not None and name not in schema.get("properties", {}):
                raise EnvConfigError(
                    f"text_action is {name!r}; the server's action has {', '.join(schema.get('properties', {}))}"
                )
        return await super().play(tasks, agent, num_rollouts)

    def _start(self) -> str:
        assert self.config.app is not None
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        command = [sys.executable, "-m", "uvicorn", self.config.app, "--host", "127.0.0.1", "--port", port]
        program = Program(command, env=dict(os.environ), cwd=os.getcwd())
        weakref.finalize(self, program.stop)
        url = f"http://127.0.0.1:{port}"
        try:
            asyncio.run(_healthy(url, program))
        except BaseException:
            program.stop()
            raise
        return url


async def _healthy(url: str, program: Program) -> None:
    deadline = time.monotonic() + START_SECONDS
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http:
        while time.monotonic() < deadline:
            if program.ended.done():
                raise LongreinError(f"the OpenEnv server ended at its start: {program.stderr.text()[-1000:].strip()}")
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with http.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)
    said = program.stderr.text()[-1000:].strip()
    raise LongreinError(f"the OpenEnv server was not healthy within {START_SECONDS:g} s of its start: {said}")


async def _get(url: str, seconds: float) -> Any:
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=seconds)) as http, http.get(url) as answer:
            answer.raise_for_status()
            return await answer.json()
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise LongreinError(f"no OpenEnv server answers at {url}: {type(error).__name__}: {error}") from error


def _http(url: str) -> str:
    scheme, rest = url.rstrip("/").split("://", 1)
    return f"{_SCHEMES[scheme]}://{rest}"


def _act(kind: Mapping[str, Any], schema: Mapping[str, Any]) -> Act:
    properties = {name: value for name, value in kind.get("properties", {}).items() if name != "metadata"}
    fixed = {name: value["const"] for name, value in properties.items() if "const" in value}
    free = {name: _untitled(value) for name, value in properties.items() if name not in fixed}
    parameters: dict[str, Any] = {"type": "object", "properties": free}
    if required := [name for name in kind.get("required", ()) if name in free]:
        parameters["required"] = required
    if "$defs" in schema and '"$ref"' in json.dumps(free):
        parameters["$defs"] = {name: _untitled(value) for name, value in schema["$defs"].items()}
    said = [value for value in fixed.values() if isinstance(value, str)]
    title = re.sub(r"(?<=.)Action$", "", str(kind.get("title", "act")))
    name = said[0] if len(said) == 1 else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", title).lower()
    return Act(_tool(name, kind.get("description", "Act in the environment."), parameters), fixed)


def _mcp_acts(answer: dict[str, Any]) -> dict[str, Act]:
    """The tools of an MCP environment, each with the action that calls it."""
    return {
        tool["name"]: Act(
            _tool(tool["name"], tool["description"], _untitled(tool["input_schema"])),
            {"type": "call_tool", "tool_name": tool["name"]},
        )
        for tool in answer["observation"]["tools"]
    }


def _mcp_text(observation: dict[str, Any]) -> str:
    if error := observation.get("error"):
        return f"error: {error.get('message', error)}"
    result = observation.get("result")
    if isinstance(result, dict) and isinstance(result.get("content"), list):  # as an MCP client gets it
        texts = [part["text"] for part in result["content"] if isinstance(part, dict) and "text" in part]
        return "\n".join(texts) if texts else _as_text(result.get("data"))
    return _as_text(result)


def _tool(name: str, description: str, parameters: dict[str, Any]) -> Tool:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _resolved(kind: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return schema["$defs"][kind["$ref"].rpartition("/")[2]] if "$ref" in kind else kind


def _untitled(schema: Any) -> Any:
    """A JSON schema without the titles that pydantic makes of the names: they are read, and say nothing."""
    if isinstance(schema, dict):
        return {name: _untitled(value) for name, value in schema.items() if not (name == "title" and isinstance(value, str))}
    return [_untitled(value) for value in schema] if isinstance(schema, list) else schema


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _reward(answer: dict[str, Any]) -> float:
    return float(answer.get("reward") or 0.0)


def app(env_class: type[Environment] | str, env_config: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A longrein environment as an OpenEnv server's application; see `longrein.envs.openenv_server.make_app`."""
    from longrein.envs.openenv_server import make_app

    return make_app(env_class, env_config, **settings)


def serve(
    env_class: type[Environment] | str,
    env_config: dict[str, Any] | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    **settings: Any,
) -> None:
    """Serve a longrein environment with OpenEnv's server until it is stopped.

    >>> serve("longrein.envs.TreasureHunt", port=8000)                                          # doctest: +SKIP
    """
    application = app(env_class, env_config, **settings)
    import uvicorn  # pyright: ignore[reportMissingImports]

    uvicorn.run(application, host=host, port=port, log_level="warning")
