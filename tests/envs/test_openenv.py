"""OpenEnv environments, behind OpenEnv's own server, played as environments here."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from missing import missing
from patience import PATIENCE, until

from longrein import Agent
from longrein.contract import LongreinError
from longrein.engines.scripted import ScriptedEngine
from longrein.envs.environment import EnvConfigError
from longrein.envs.openenv import Actions, OpenEnv
from longrein.envs.openenv_wire import Session

if find_spec("openenv") is None:
    missing("openenv is not installed; `make test` installs it")

import itertools

from openenv.core.env_server import create_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv_worlds import Guess, MoveOrShout, Shop, Shout, Talk, TalkObservation, guessing, running

DOCS = Path(__file__).parents[2] / "docs" / "openenv.md"


def call(name, arguments=None, **fields):
    function = {"name": name, "arguments": json.dumps(fields) if arguments is None else arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def searcher(messages, tools):
    """Halves what is left."""
    low, high = 0, 9
    for before, after in itertools.pairwise(messages):
        if after["role"] == "tool":
            guessed = json.loads(before["tool_calls"][0]["function"]["arguments"])["number"]
            low, high = (guessed + 1, high) if after["content"] == "higher" else (low, guessed - 1)
    return call("guess", number=(low + high) // 2)


@pytest.fixture
def play(tokenizer, rendering):
    def run(script, tasks, num_rollouts=1, **env_config):
        agent = Agent(None, tokenizer("qwen3"), engine=ScriptedEngine(script, rendering("qwen3")))
        return OpenEnv(tokenizer=tokenizer("qwen3"), env_config=env_config).run_trial(tasks, agent, num_rollouts)["rollouts"]

    return run


def told(rollout):
    *_, last = rollout.calls
    return [m["content"] for m in rollout.conversation(last) if m["role"] in ("tool", "user")]


def test_actions_are_tools_observations_are_read_and_each_step_has_its_reward(play):
    with guessing() as url:
        rollouts = play(searcher, [{"seed": 13}, {"seed": 20, "instruction": "Find it."}], 2, url=url)
    assert [rollout.failed for rollout in rollouts] == [None] * 4
    first = rollouts[0]
    assert [round(c.reward, 6) for c in first.calls.values()] == [0.1, 0.1, 0.1, 1.1]  # 4, 1, 2, 3
    assert (round(first.reward, 6), first.success, first.info) == (1.4, True, {"guessed": 3})
    assert told(first) == ["I thought of a number.", "lower", "higher", "higher"]
    assert told(rollouts[2])[0] == "Find it.\n\nI thought of a number."
    (tool,) = next(iter(first.calls.values())).tools
    assert tool["function"] == {
        "name": "guess",
        "description": "Guess the number.",
        "parameters": {
            "type": "object",
            "properties": {
                "number": {"description": "From 0 to 9", "minimum": 0, "maximum": 9, "type": "integer"},
                "why": {"default": "", "type": "string"},
            },
            "required": ["number"],
        },
    }
    assert len({id(made) for made in Guess.made}) == 4  # a session each
    assert all(made.closed for made in Guess.made)


def test_an_action_that_does_not_fit_is_told_and_the_episode_goes_on(play):
    script = [
        call("guess", number=12),
        call("guess"),
        call("leave"),
        call("guess", number=5),
        "bye",
    ]
    with guessing() as url:
        (rollout,) = play(script, [{"seed": 3}], url=url)
    assert (rollout.failed, rollout.turns, round(rollout.reward, 6)) == (None, 5, 0.1)
    _, *answers = told(rollout)
    assert re.search(r"error: guess cannot take this: number: .*less than or equal to 9", answers[0])
    assert re.search(r"number: Field required", answers[1])
    assert answers[2] == "error: there is no tool 'leave'; there is guess"
    assert answers[3] == "lower"


def test_arguments_that_are_no_object_are_told(tokenizer):
    async def answers(url):
        env = OpenEnv(tokenizer=None, env_config={"url": url})
        env._actions = Actions({"title": "GuessAction", "properties": {"number": {"type": "integer"}}})
        episode = env.episode({"seed": 3})
        await episode.start()
        steps = [await episode.step(call("guess", arguments)) for arguments in ("{oops", "[1]")]
        await episode.close()
        return [step.messages[0]["content"] for step in steps]

    with guessing() as url:
        broken, array = asyncio.run(answers(url))
    assert broken.startswith("error: guess cannot take {oops: ")
    assert array == "error: guess cannot take [1]: it takes an object"


def test_nothing_is_done_after_the_end(play):
    several = call("guess", number=2)
    several["tool_calls"] += call("guess", number=3)["tool_calls"] + call("guess", number=8)["tool_calls"]
    with guessing() as url:
        (rollout,) = play([several], [{"seed": 3}], url=url)
    assert (rollout.failed, rollout.turns, round(rollout.reward, 6)) == (None, 1, 1.2)


def test_a_session_answers_the_servers_pings_while_the_policy_thinks(monkeypatch):
    answered = []
    pong = aiohttp.ClientWebSocketResponse.pong

    async def watched(socket, message=b""):
        await pong(socket, message)
        answered.append(message)

    async def think(url):
        session = Session(url, answer_seconds=PATIENCE, full_seconds=PATIENCE, idle_seconds=None)
        await session.reset({"seed": 3})
        assert await asyncio.to_thread(until, lambda: len(answered) >= 3)
        answer = await session.step({"number": 3})
        await session.close()
        return answer

    monkeypatch.setattr(aiohttp.ClientWebSocketResponse, "pong", watched)
    with guessing(ws_ping_interval=0.05, ws_ping_timeout=PATIENCE) as url:
        assert asyncio.run(think(url))["done"] is True


def test_an_exception_inside_the_environment_fails_the_rollout_unless_it_is_to_be_told(play):
    with guessing() as url:
        (failed,) = play([call("guess", number=8)], [{"seed": 3}], url=url)
        (other,) = play([call("guess", number=8), call("guess", number=3)], [{"seed": 3}], url=url, step_errors="tell")
    assert failed.reward is None
    assert "the eight ball broke (EXECUTION_ERROR)" in failed.failed
    assert told(other)[-1] == "error: the eight ball broke"
    assert round(other.reward, 6) == 1.1


def test_a_session_that_timed_out_is_over_and_no_other_is_opened_in_its_place(play, monkeypatch):
    step = Session.step

    async def impatient(session, action):
        session._answer_seconds = 0.5 if action["number"] == 7 else PATIENCE
        return await step(session, action)

    def script(messages, tools):
        return call("guess", number=7) if "slow" in messages[0]["content"] else searcher(messages, tools)

    monkeypatch.setattr(Session, "step", impatient)
    with guessing() as url:
        slow, quick = play(script, [{"seed": 3, "instruction": "slow"}, {"seed": 4}], url=url)
        Guess.release.set()
        assert len(Guess.made) == 2
    assert slow.reward is None
    assert "did not answer a step within 0.5 s" in slow.failed
    assert quick.failed is None
    assert quick.success


def test_a_session_that_lost_its_socket_is_over(play):
    with guessing(ws_max_size=1000) as url:  # the server hangs up on a longer message
        (rollout,) = play([call("guess", number=5, why="x" * 2000), call("guess", number=3)], [{"seed": 3}], url=url)
        assert len(Guess.made) == 1
    assert rollout.reward is None
    assert rollout.turns == 1
    assert "the connection was lost during a step (close code 1009)" in rollout.failed


def test_a_full_server_is_waited_for(play):
    with guessing(sessions=2) as url:
        rollouts = play(searcher, [{"seed": number % 5} for number in range(8)], url=url)
    assert [(rollout.failed, rollout.success) for rollout in rollouts] == [(None, True)] * 8


def test_a_server_that_stays_full_is_given_up_after_the_stated_time(play):
    async def beside_another(url):
        other = Session(url, answer_seconds=PATIENCE, full_seconds=PATIENCE, idle_seconds=None)
        await other.reset({"seed": 3})
        rollouts = await asyncio.to_thread(play, searcher, [{"seed": 4}], url=url, full_seconds=0.4)
        await other.close()
        return rollouts

    with guessing(sessions=1) as url:
        (full,) = asyncio.run(beside_another(url))
    assert "was full for 0.4 s" in full.failed
    assert "max_concurrent_envs" in full.failed


def test_a_session_idle_for_longer_than_the_server_allows_is_over(play, monkeypatch):
    thought = 0.0

    def thinker(messages, tools):
        nonlocal thought
        thought += 7200 if len(messages) > 1 else 0
        return call("guess", number=5)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + thought)
    monkeypatch.setattr("longrein.envs.openenv_wire.time", clock)
    with guessing() as url:
        (rollout,) = play(thinker, [{"seed": 3}], url=url, idle_seconds=3600)
    assert rollout.reward is None
    assert "`idle_seconds`" in rollout.failed
    assert rollout.turns == 2


def test_kinds_of_actions_are_tools_of_their_own(play):
    with running(create_app(Talk, MoveOrShout, TalkObservation)) as url:
        (rollout,) = play(
            [call("move", where="barn"), call("shout", words="hey!")], [{"name": "Ann"}], url=url, show=["heard"]
        )
    assert (rollout.failed, rollout.reward, told(rollout)) == (None, 1.0, ["hello Ann", "went to the barn"])
    tools = {tool["function"]["name"]: tool["function"] for tool in next(iter(rollout.calls.values())).tools}
    assert set(tools) == {"move", "shout"}
    assert tools["move"]["description"] == "Go somewhere."
    assert tools["move"]["parameters"]["properties"] == {"where": {"type": "string"}}


def test_an_environment_that_is_talked_to_takes_the_policys_text(play):
    with running(create_app(Talk, Shout, TalkObservation)) as url:
        (rollout,) = play(["well", "hey!"], [{}], url=url, text_action="words")
        with pytest.raises(EnvConfigError, match="text_action is 'word'; the server's action has .*words"):
            play(["well"], [{}], url=url, text_action="word")
        (wrong,) = play([call("shout", words="a!")], [{}], url=url, show=["seen"])
    assert (rollout.failed, rollout.reward) == (None, 1.0)
    assert told(rollout) == ['{"heard": "hello you", "count": 0}', '{"heard": "well", "count": 1}']
    assert not next(iter(rollout.calls.values())).tools
    assert "show names 'seen'; the observation has metadata, heard, count" in wrong.failed


def test_an_environment_of_mcp_tools_offers_them(play):
    with running(create_app(Shop, CallToolAction, CallToolObservation)) as url:
        script = [call("price", item="lamp"), call("price", cost=1), "It costs 4."]
        (rollout,) = play(script, [{"instruction": "What does a lamp cost?"}], url=url)
    assert (rollout.failed, rollout.turns, rollout.reward) == (None, 3, 0.0)
    (tool,) = next(iter(rollout.calls.values())).tools
    assert tool["function"]["name"] == "price"
    assert tool["function"]["parameters"]["required"] == ["item"]
    assert told(rollout)[1] == "lamp costs 4"
    assert "error" in told(rollout)[2]


def test_the_example_of_the_docs_starts_its_server_and_ends_it(folder, rendering, tmp_path, monkeypatch, capsys):
    server, play, *_ = re.findall(r"```python[^\n]*\n(.*?)```", DOCS.read_text(), re.S)
    (tmp_path / "double_server.py").write_text(server)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(play.replace(".cache/tiny", str(folder("tiny"))), names)
    assert [rollout.failed for rollout in names["trial"]["rollouts"]] == [None] * 8
    assert len(capsys.readouterr().out.splitlines()) == 8

    env, tokenizer = names.pop("env"), names["agent"].tokenizer
    agent = Agent(None, tokenizer, engine=ScriptedEngine([call("say", number=5), call("say", number=42)], rendering("tiny")))
    (rollout,) = env.run_trial([{"seed": 21}], agent)["rollouts"]
    assert (rollout.failed, rollout.reward, told(rollout)) == (None, 1.0, ["What is twice 21?", "No."])
    port = int(env.url.rpartition(":")[2])
    del env
    gc.collect()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_server_that_cannot_start_says_why(play):
    with pytest.raises(LongreinError, match="no_such_module"):
        play(["hello"], [{}], app="no_such_module:app")


def test_a_server_that_is_not_there_is_said_so(play):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers here
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(LongreinError, match=f"no OpenEnv server answers at {url}/schema"):
            play(["hello"], [{}], url=url)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "give the address of a server, or an app"),
        ({"url": "http://a", "app": "b:c"}, "give the address of a server, or an app"),
        ({"url": "localhost:8000"}, "must be like http://"),
        ({"app": "my_env"}, "must be like my_env.server.app:app"),
        ({"url": "http://a", "step_errors": "hide"}, "one of fail, tell"),
        ({"url": "http://a", "answer_seconds": 0}, "answer_seconds is 0"),
        ({"url": "http://a", "addr": 1}, "no setting 'addr'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(config, words):
    with pytest.raises(EnvConfigError, match=words):
        OpenEnv(tokenizer=None, env_config=config)


def test_tasks_are_seeds():
    assert OpenEnv.tasks(3, seed=1) == OpenEnv.tasks(3, seed=1) != OpenEnv.tasks(3, seed=2)
