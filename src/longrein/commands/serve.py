"""`longrein serve`: a trained model behind the proxy, for using a program with it."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from longrein.commands.common import model_folder
from longrein.contract import LongreinError


def serve(
    model: Annotated[
        str, typer.Argument(help="Folder or hub name of the model, or a run folder; tiny is the small policy.")
    ],
    host: Annotated[
        str, typer.Option(help="Where to listen. Beyond loopback, anyone with the key can use it.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    key: Annotated[
        str | None, typer.Option(help="The key programs must send. Unsaid: a new one.", envvar="LONGREIN_SERVE_KEY")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; a program's own is not used.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest reply; a program may ask for less.")] = 4096,
    history: Annotated[
        str, typer.Option(help="sampled keeps what the model wrote as it was trained; as_sent reads what the program sends.")
    ] = "sampled",
    remember: Annotated[
        int, typer.Option(min=0, help="Tokens of conversations to remember; older ones are forgotten.")
    ] = 2_000_000,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with url and key when it is ready.")
    ] = False,
) -> None:
    """Answer programs with a model, in every dialect, with the splice that it was trained with. Ctrl-C ends it.

    Examples: `longrein serve runs/latest` · `longrein serve Qwen/Qwen3-0.6B --port 8001 --temperature 0.7`
    """
    if history not in ("sampled", "as_sent"):
        raise LongreinError(f"--history is {history!r}; it must be sampled or as_sent")

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    trained = Path(model) / "model"
    model = str(trained) if (trained / "config.json").exists() else model_folder(model, note)
    note(f"loading {model}")
    from longrein.commands.evaluate import load_agent
    from longrein.contract import Sampling
    from longrein.serving import ModelServer

    agent = load_agent(model, sampling=Sampling(temperature=temperature, max_tokens=max_tokens), history=history)
    name = Path(model).parent.resolve().name if model == str(trained) else Path(model).name
    try:
        with ModelServer(
            agent.recorder(), host=host, port=port, key=key, remember_tokens=remember, model_name=name
        ) as server:
            if as_json:
                print(
                    json.dumps({"url": server.url, "base_url": f"{server.url}/v1", "key": server.key, "model": name}),
                    flush=True,
                )
            else:
                _say(server.url, server.key, name)
            threading.Event().wait()
    except KeyboardInterrupt:
        note("\nlongrein: stopped")
    finally:
        agent.engine.cancel()  # a long reply is not waited for
        agent.engine.close()


def _say(url: str, key: str, name: str) -> None:
    print(
        f"""ready: {name}
  chat, responses   OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}
  messages          ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={key}
  gemini            GOOGLE_GEMINI_BASE_URL={url} GEMINI_API_KEY={key}

for example, Claude Code:
  ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={key} ANTHROPIC_MODEL={name} claude -p "Fix the failing test."
or a single request:
  curl {url}/v1/chat/completions -H "Authorization: Bearer {key}" -H "Content-Type: application/json" \\
    -d '{{"model": "{name}", "messages": [{{"role": "user", "content": "hello"}}]}}'
""",
        flush=True,
    )
