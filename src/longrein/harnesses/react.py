"""A ReAct agent as a program of its own: it hunts the coin with two tools, and talks to a model over OpenAI's chat API.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python -m longrein.harnesses.react --rooms attic,barn,cellar

It knows nothing of training, and plays by the rules of `longrein.envs.TreasureHunt`: the same messages in the same order, so
the same policy writes the same tokens. Its last line says what it found: `{"answer": "cellar", "turns": 4}`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from longrein.rooms import TOOLS, actions_of, answered, opening, over, result

if TYPE_CHECKING:
    import requests

    from longrein.harnesses.outcome import Outcome

Message = dict[str, Any]


class Chat:
    """A model behind an OpenAI-compatible address."""

    def __init__(self, base_url: str, key: str, model: str, stream: bool) -> None:
        import requests  # here, so that a verifier which imports this file need not have it

        self._session = requests.Session()
        self._session.trust_env = False  # no proxy between us and the model, no key from a .netrc
        self._session.headers["Authorization"] = f"Bearer {key}"
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._model = model
        self._stream = stream

    def reply(self, messages: Sequence[Message]) -> Message:
        """The assistant's next message."""
        body = {"model": self._model, "messages": messages, "tools": TOOLS}
        if self._stream:
            body["stream"] = True
        with self._session.post(self._url, json=body, stream=self._stream, timeout=(10, 600)) as response:
            if not response.ok:
                raise SystemExit(f"the model answered {response.status_code}: {response.text}")
            if self._stream:
                return assembled(_events(response))
            return response.json()["choices"][0]["message"]


def assembled(chunks: Iterable[dict[str, Any]]) -> Message:
    """The message that a stream of deltas adds up to."""
    message: Message = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        if "error" in chunk:
            raise SystemExit(f"the model broke off: {chunk['error']}")
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            for field in ("content", "reasoning_content"):
                if delta.get(field):
                    message[field] = message.get(field, "") + delta[field]
            for part in delta.get("tool_calls") or ():
                empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                call = calls.setdefault(part["index"], empty)
                call["id"] = part.get("id") or call["id"]
                for field in ("name", "arguments"):
                    call["function"][field] += (part.get("function") or {}).get(field) or ""
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


def hunt(rooms: Sequence[str], chat: Chat, max_turns: int, found: dict[str, Any]) -> None:
    """Act until an answer, a reply without a tool call, or the last turn; `found` says how far it has come."""
    messages = opening(rooms[0])
    for turn in range(max_turns):
        reply = chat.reply(messages)
        found["turns"] = turn + 1
        actions = actions_of(reply)
        found["answer"] = answered(actions)
        if over(actions):
            return
        messages += [reply, *(result(rooms, action) for action in actions)]


def verify_hunt(task: dict[str, Any], outcome: Outcome) -> float:
    """1.0 when the program's answer is the room of the coin. It reports an answer only where it was a turn's first action."""
    try:
        found = json.loads(outcome.last_line())
    except ValueError:
        return 0.0
    return float(isinstance(found, dict) and found.get("answer") == task["rooms"][-1])


def _events(response: requests.Response) -> Iterable[dict[str, Any]]:
    ended = False
    for line in response.iter_lines():
        if line == b"data: [DONE]":
            ended = True
        elif line.startswith(b"data: "):
            yield json.loads(line[6:])
    if not ended:
        raise SystemExit("the model's stream ended before its end")


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(
        prog="python -m longrein.harnesses.react", description="Find the coin, by a model's tools."
    )
    parser.add_argument("--rooms", required=True, help="the rooms that the notes lead through: attic,barn or a JSON list")
    parser.add_argument("--max-turns", type=int, default=6)
    parser.add_argument("--stream", action="store_true", help="read replies as they are written")
    options = parser.parse_args()
    rooms = json.loads(options.rooms) if options.rooms.startswith("[") else options.rooms.split(",")

    variables = os.environ
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        if name not in variables:
            sys.exit(f"{name} is not set; it says where the model is")
    model = variables.get("OPENAI_MODEL", "policy")
    found = {"answer": None, "turns": 0}
    try:
        chat = Chat(variables["OPENAI_BASE_URL"], variables["OPENAI_API_KEY"], model, options.stream)
        hunt(rooms, chat, options.max_turns, found)
    finally:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
