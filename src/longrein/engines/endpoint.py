"""An engine over an OpenAI-compatible endpoint: a model that is only to be had as text, to be evaluated and not trained.

Always true: what the endpoint said is what the environment or the program gets, to the letter, calls included. Its tokens are not
known: the record has the text in pieces of about a token's size, with log-probability 0, and limits in tokens count those pieces.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import aiohttp

from longrein.contract import ContextLengthError, LongreinError, Message, Sampled, SampleRequest, Tool

PIECE = re.compile(r" ?\w{1,6}|\s|[^\w\s]")
MARKS = ("<end>", "<call>", "</call>", "<think>", "</think>", "<message>")
END, CALL, CALLED, THINK, THOUGHT, MESSAGE = range(len(MARKS))
TRIES = 6
"""Of a request that the endpoint is too busy for, with a pause that doubles from half a second."""
SENT = ("role", "content", "name", "tool_calls", "tool_call_id")
"""What of a message goes out; some endpoints refuse what they do not know."""


class EndpointError(LongreinError):
    """The endpoint does not answer, or not with a reply."""


class Words:
    """A tokenizer and rendering for a model whose own are not known. A mark is never made from text."""

    name = "words"
    name_or_path = "words"
    stop_ids = frozenset([END])
    keeps_prefixes = True
    pad_token_id = eos_token_id = END

    def __init__(self, known: Mapping[int, bytes] | None = None) -> None:
        """`known`: the pieces of a run to go on with, whose ids mean what they meant."""
        self._lock = threading.Lock()
        self._words: list[str] = list(MARKS)
        self._ids: dict[str, int] = {}
        for token, piece in sorted((known or {}).items()):
            if token >= len(MARKS):
                self._words += [""] * (token - len(self._words))  # words of rollouts that never ended
                self._words.append(piece.decode("utf-8", "replace"))
                self._ids[self._words[-1]] = token

    def encode(self, text: str) -> list[int]:
        return [self._id(piece) for piece in PIECE.findall(text)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._words[int(token)] for token in ids)

    def pieces(self, tokens: Iterable[int]) -> list[bytes]:
        """What a run writes beside its tokens."""
        return [self._words[token].encode("utf-8", "replace") for token in tokens]

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        offered = self.encode(json.dumps(list(tools), ensure_ascii=False)) if tools else []
        return [*offered, *itertools.chain.from_iterable(map(self._message, messages)), MESSAGE]

    def extension(
        self,
        reply: Message,
        new_messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        system: Sequence[Message] = (),
        stop_id: int | None = None,
    ) -> list[int] | None:
        return [*itertools.chain.from_iterable(map(self._message, new_messages)), MESSAGE]

    def close(self, prompt_ids: Any, completion_ids: Any) -> list[int]:
        return [] if len(completion_ids) and completion_ids[-1] == END else [END]

    def encode_reply(self, reply: str | Message) -> list[int]:
        if isinstance(reply, str):
            return [*self.encode(reply), END]
        ids = self.encode(reply.get("content") or "")
        if thought := reply.get("reasoning_content"):
            ids = [THINK, *self.encode(thought), THOUGHT, *ids]
        for call in reply.get("tool_calls") or ():
            function = {key: call["function"].get(key) for key in ("name", "arguments")}
            ids += [CALL, *self.encode(json.dumps(function, ensure_ascii=False)), CALLED]
        return [*ids, END]

    def parse(self, completion_ids: Any, prompt_ids: Any = (), tools: Sequence[Tool] = ()) -> Message:
        parts: dict[int, list[str]] = {END: [""], CALL: [], THINK: []}
        inside = END
        for token in map(int, completion_ids):
            if token in (CALL, THINK):
                parts[token].append("")
                inside = token
            elif token in (CALLED, THOUGHT, END):
                inside = END
            else:
                parts[inside][-1] += self._words[token]
        message: Message = {"role": "assistant", "content": parts[END][0]}
        if parts[THINK]:
            message["reasoning_content"] = "".join(parts[THINK])
        for text in parts[CALL]:
            try:
                call = {"type": "function", "function": json.loads(text)}
            except ValueError:  # cut off by a stop word of the program
                message["content"] += text
            else:
                message.setdefault("tool_calls", []).append(call)
        return message

    def _message(self, message: Message) -> list[int]:
        content = message.get("content")
        text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
        return [MESSAGE, *self.encode(f"{message.get('role')}\n"), *self.encode_reply({**message, "content": text})]

    def _id(self, piece: str) -> int:
        if piece not in self._ids:
            with self._lock:
                if piece not in self._ids:
                    self._words.append(piece)
                    self._ids[piece] = len(self._words) - 1
        return self._ids[piece]


class EndpointEngine:
    """Samples from `url/chat/completions`; requests from any loop or thread go through one connection pool."""

    policy_version = 0

    def __init__(
        self, url: str, model: str, words: Words, *, key: str | None = None, seconds: float = 600.0, tries: int = TRIES
    ) -> None:
        if not re.match(r"https?://", url):
            raise LongreinError(f"the endpoint is {url!r}; it must be a url such as http://127.0.0.1:8000/v1")
        self.url = url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        self.model = model
        self._words = words
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._seconds, self._tries = seconds, tries
        self._limit_name = "max_tokens"
        self._session: aiohttp.ClientSession | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="longrein-endpoint", daemon=True)
        self._thread.start()

    async def sample(self, request: SampleRequest) -> Sampled:
        sampling = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._sample(request), self._loop))
        try:
            return await sampling
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EndpointError("the engine was told to cancel what it was sampling") from None

    def cancel(self) -> None:
        """Refuse what waits and what runs."""

        def stop() -> None:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()

        self._loop.call_soon_threadsafe(stop)

    def pause(self) -> None:
        """Nothing here changes weights."""

    def resume(self) -> None:
        """Nothing waits."""

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        raise LongreinError("an endpoint takes no weights; it can be evaluated and not trained")

    def close(self) -> None:
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _sample(self, request: SampleRequest) -> Sampled:
        answer = await self._post(request)
        try:
            choice = answer["choices"][0]
            ids = self._words.encode_reply(_reply(choice["message"]))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise EndpointError(
                f"{self.url} answered with no chat completion ({error!r}): {json.dumps(answer)[:300]}"
            ) from None
        cut = choice.get("finish_reason") == "length"
        ids = ids[:-1] if cut else ids
        return Sampled(ids=ids, logprobs=[0.0] * len(ids), finish_reason="length" if cut else "stop")

    async def _post(self, request: SampleRequest) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=self._seconds),
                connector=aiohttp.TCPConnector(limit=0),
            )
        pause, trouble = 0.5, ""
        for tried in range(1, self._tries + 1):
            wait = pause
            try:
                async with self._session.post(self.url, json=self._body(request)) as response:
                    text = await response.text()
                    if response.status == 200:
                        return json.loads(text)
                    trouble = f"{response.status} {' '.join(text.split())[:300]}"
                    if response.status in (400, 413, 422):
                        if self._limit_name == "max_tokens" and "max_completion_tokens" in text:
                            self._limit_name = "max_completion_tokens"  # what newer models call it
                            continue
                        if "context_length" in text or "maximum context" in text:
                            raise ContextLengthError(len(request.prompt_ids), len(request.prompt_ids))
                    if response.status == 501 or (response.status < 500 and response.status not in (408, 409, 429)):
                        raise EndpointError(f"{self.url} refuses the request: {trouble}")
                    wait = _seconds_of(response.headers.get("Retry-After"), pause)
            except TimeoutError:
                raise EndpointError(f"{self.url} did not answer within {self._seconds:g} s (--timeout)") from None
            except aiohttp.ClientError as error:
                trouble = f"{type(error).__name__}: {error}"
            except json.JSONDecodeError as error:
                raise EndpointError(f"{self.url} answered with what is not JSON: {error}") from None
            if tried < self._tries:
                await asyncio.sleep(wait)
                pause *= 2
        raise EndpointError(f"{self.url} did not answer in {self._tries} tries; the last gave: {trouble}")

    def _body(self, request: SampleRequest) -> dict[str, Any]:
        sampling = request.sampling
        messages = [{name: message[name] for name in SENT if name in message} for message in request.messages]
        body: dict[str, Any] = {"model": self.model, "messages": messages, "temperature": sampling.temperature}
        if request.tools:
            body["tools"] = list(request.tools)
        if sampling.max_tokens is not None:
            body[self._limit_name] = sampling.max_tokens
        # What is off is left out: not every endpoint knows all of them, and one that does not know what is on says so.
        truncation = {"top_p": (sampling.top_p, 1), "top_k": (sampling.top_k, 0), "min_p": (sampling.min_p, 0)}
        return body | {name: value for name, (value, off) in truncation.items() if value != off}


def _reply(message: Mapping[str, Any]) -> Message:
    """What was said, where an endpoint may leave out or null what there is none of, or give arguments as an object."""
    calls = [call["function"] for call in message.get("tool_calls") or () if call.get("function")]
    thought = message.get("reasoning_content") or message.get("reasoning")
    return {
        "content": _sound(message.get("content") or ""),
        "tool_calls": [
            {"function": {"name": _sound(function["name"]), "arguments": _sound(_arguments(function.get("arguments")))}}
            for function in calls
        ],
        "reasoning_content": _sound(thought) if isinstance(thought, str) else "",
    }


def _arguments(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps({} if given is None else given, ensure_ascii=False)


def _sound(text: str) -> str:
    """Text that can be written: half of a surrogate pair is JSON, but not text."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _seconds_of(header: str | None, otherwise: float) -> float:
    try:
        return min(60.0, max(0.0, float(header))) if header is not None else otherwise
    except ValueError:  # a date
        return otherwise
