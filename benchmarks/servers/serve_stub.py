"""An OpenAI-compatible server that answers at once: what a proxy costs is what it adds to this.

It reads no more of a request than it must. Asked for token ids, as vLLM can be, it gives a prompt as long as the request's
text: a longer conversation starts with the ids of a shorter one, and its own reply follows, so that proxies which link turns
by their tokens find what they look for.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading

import control
from aiohttp import web

REPLY = "I looked at what you sent and here is the next step : open the second file and read it to the end before we go on ."
WORDS = REPLY.split()
POOL = [random.Random(0).randrange(1000, 100_000) for _ in range(400_000)]
TEXTS = [str(token).encode() for token in POOL]
ENDS = list(itertools.accumulate((len(text) + 1 for text in TEXTS), initial=0))
JOINED = b",".join(TEXTS)
HEAD = b'{"id":"chatcmpl-0","object":"chat.completion","created":0,"model":"policy","choices":[{"index":0,'
MESSAGE = b'"message":' + json.dumps({"role": "assistant", "content": REPLY}).encode()


def ids(start: int, end: int) -> bytes:
    return b"[" + JOINED[ENDS[start] : ENDS[end] - 1] + b"]"


async def answer(http: web.Request) -> web.Response:
    body = await http.read()
    if http.app["seconds"]:
        await asyncio.sleep(http.app["seconds"])
    prompt, reply = len(body) // 6, len(WORDS)
    usage = b'"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}' % (prompt, reply, prompt + reply)
    tail = b',"finish_reason":"stop"}],'
    if b'"return_token_ids":true' in body[-2000:].replace(b'": ', b'":'):
        entries = [{"token": word, "logprob": -0.5, "bytes": list(word.encode()), "top_logprobs": []} for word in WORDS]
        tail = (
            b',"logprobs":' + json.dumps({"content": entries}).encode()
            + b',"token_ids":' + ids(prompt, prompt + reply)
            + b',"finish_reason":"stop"}],"prompt_token_ids":' + ids(0, prompt) + b","
        )  # fmt: skip
    return web.Response(body=HEAD + MESSAGE + tail + usage, content_type="application/json")


def main() -> None:
    app = web.Application(client_max_size=64 * 1024**2)
    app["seconds"] = control.options().seconds
    app.router.add_post("/v1/chat/completions", answer)
    started: list[int] = []
    ready = threading.Event()

    async def run() -> None:
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        started.append(runner.addresses[0][1])
        ready.set()
        await asyncio.Event().wait()

    try:
        import uvloop

        loop = uvloop.new_event_loop()
    except ImportError:
        loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True).start()
    ready.wait()
    control.serve(f"http://127.0.0.1:{started[0]}", lambda count: ["sk-stub"] * count)


if __name__ == "__main__":
    main()
