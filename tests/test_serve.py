"""`longrein serve`: one model for any program, conversations that go on as they were sampled, and memory that ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from longrein.contract import LongreinError
from longrein.engines.scripted import ScriptedEngine
from longrein.recorder import Recorder
from longrein.rendering import rendering_for
from longrein.serving import ModelServer
from longrein.tokenizer import Lexicon


class Counting(ScriptedEngine):
    """Says how often it was asked, and breaks when it is told to."""

    def __init__(self, rendering: Any) -> None:
        super().__init__(lambda messages, tools: f"<think>\nhm\n</think>\n\nreply {len(messages)}", rendering)
        self.breaks = False

    async def sample(self, request: Any) -> Any:
        await asyncio.sleep(0)
        if self.breaks:
            raise RuntimeError("out of memory")
        return await super().sample(request)


@pytest.fixture
def server() -> Iterator[ModelServer]:
    rendering = rendering_for(Lexicon(), "qwen3")
    with ModelServer(Recorder(Counting(rendering), rendering), remember_conversations=3) as server:
        yield server


def chat(server: ModelServer, *messages: dict[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {server.key}"}
    answer = requests.post(
        f"{server.url}/v1/chat/completions", json={"model": "m", "messages": messages}, headers=headers, timeout=30
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_conversation_goes_on_with_the_tokens_that_were_sampled(server: ModelServer) -> None:
    first = chat(server, user("hello"))
    chat(server, user("hello"), {"role": "assistant", "content": first["content"]}, user("and?"))
    (conversation,) = server.remembered.values()
    one, two = server.recorder.rollout(conversation.session.rollout_id).calls.values()
    assert two.parent == one.id, "the reasoning that the program dropped is still there for the model"
    assert conversation.tokens == sum(len(call.context_ids) + len(call.completion_ids) for call in (one, two))


def test_old_conversations_are_forgotten_and_can_still_go_on(server: ModelServer) -> None:
    for number in range(20):
        chat(server, user(f"hello {number}"))
        assert len(server.remembered) <= 3
    assert len(server.recorder._open) == 1 + 3, "what is forgotten is let go of: the front and three conversations are left"
    assert chat(server, user("hello 0"), {"role": "assistant", "content": "reply 1"}, user("and?"))["content"] == "reply 3"
    server.remember_tokens = 0
    chat(server, user("hello 19"))
    assert not server.remembered


def test_every_dialect_has_a_route_and_needs_the_key(server: ModelServer) -> None:
    key = {"Authorization": f"Bearer {server.key}"}
    parts = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
    asked = {
        "/v1/chat/completions": {"model": "m", "messages": [user("hi")]},
        "/v1/responses": {"model": "m", "input": "hi"},
        "/v1/messages": {"model": "m", "max_tokens": 50, "messages": [user("hi")]},
        "/v1beta/models/m:generateContent": parts,
    }
    for route, body in asked.items():
        assert requests.post(server.url + route, json=body, timeout=60).status_code == 401
        answer = requests.post(server.url + route, json=body, headers=key, timeout=60)
        assert (answer.status_code, "reply 1" in answer.text) == (200, True), (route, answer.text)
    assert len(server.remembered) == 1, "the same words in four dialects"


def test_a_stored_response_is_found_and_gone_on_with(server: ModelServer) -> None:
    key = {"Authorization": f"Bearer {server.key}"}

    def post(**body: Any) -> Any:
        return requests.post(f"{server.url}/v1/responses", json={"model": "m", **body}, headers=key, timeout=60).json()

    first = post(input="hi")
    second = post(input="go on", previous_response_id=first["id"])
    assert "reply 3" in json.dumps(second)
    assert requests.get(f"{server.url}/v1/responses/{first['id']}", headers=key, timeout=60).json()["id"] == first["id"]
    assert len(server.remembered) == 1


def test_a_failure_ends_no_conversation(server: ModelServer) -> None:
    engine: Any = server.recorder.engine
    engine.breaks = True
    headers = {"Authorization": f"Bearer {server.key}"}
    body = {"model": "m", "messages": [user("hello")]}
    answer = requests.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 500
    engine.breaks = False
    assert chat(server, user("hello"))["content"] == "reply 1"


def test_a_port_that_is_taken_is_told(server: ModelServer) -> None:
    with pytest.raises(LongreinError, match="cannot listen on 127.0.0.1"):
        ModelServer(server.recorder, port=server.port).start()


def test_the_command_serves_a_model_until_ctrl_c(folder: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from longrein.cli import main; main()", "serve", str(folder("tiny"))]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "--port", "0", "--json", "--max-tokens", "8"],
        cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            body = {"model": ready["model"], "messages": [user("go to the attic")]}
            headers = {"Authorization": f"Bearer {ready['key']}"}
            answer = requests.post(f"{ready['base_url']}/chat/completions", json=body, headers=headers, timeout=60)
            assert answer.json()["usage"]["completion_tokens"] <= 8
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0, told
    assert told.endswith("longrein: stopped\n")
    assert "Traceback" not in told
