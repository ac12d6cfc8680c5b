"""A ReAct agent in sixty lines: it guesses a number between 1 and 20 with two tools, and knows nothing of training.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python react.py SECRET

Its last line says what it found: {"answer": 7}.
"""

import json
import os
import sys

import requests


def tool(name: str, description: str) -> dict:
    parameters = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [tool("guess", "Try a number; says higher, lower or right."), tool("answer", "Give the final number.")]


def ask(messages: list[dict]) -> dict:
    response = requests.post(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
        json={"model": "policy", "messages": messages, "tools": TOOLS},
        timeout=600,
    )
    response.raise_for_status()
    return response.json()["choices"][0]["message"]


def number_of(call: dict) -> int | None:
    try:
        return int(json.loads(call["function"]["arguments"])["number"])
    except (ValueError, KeyError, TypeError):
        return None


def main(secret: int) -> None:
    messages = [{"role": "user", "content": "I think of a number from 1 to 20. Guess with the tool, then answer."}]
    answer = None
    for _ in range(8):
        reply = ask(messages)
        messages.append(reply)
        calls = reply.get("tool_calls") or []
        if not calls:
            break
        for call in calls:
            number = number_of(call)
            if call["function"]["name"] == "answer":
                answer = number
            said = (
                "no number" if number is None else "right" if number == secret else "higher" if number < secret else "lower"
            )
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
        if answer is not None:
            break
    print(json.dumps({"answer": answer}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
