"""A run as training data for other trainers: JSONL or parquet, in TRL's formats.

Always true: a file is there whole or not at all; every line has the same columns, so that `datasets.load_dataset` reads it; what
the policy said is what stands as the assistant's, and token rows are the recorded ids, tokenised by nobody again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from longrein.contract import LongreinError, Message
from longrein.rollout import Rollout
from longrein.runs.reader import Filter, Run

Example = dict[str, Any]

ROWS_AT_A_TIME = 256


def export(run: Run, path: str | Path, *, format: str = "messages", of: Filter | None = None) -> int:
    """Write the examples that a run gives in this format, to a `.jsonl` or `.parquet` file; returns how many. Of none there is
    no file."""
    path = Path(path)
    if format not in FORMATS:
        raise LongreinError(f"the format is {format!r}; it must be one of {', '.join(FORMATS)}")
    if path.suffix not in WRITERS:
        raise LongreinError(f"{path} must end in {' or '.join(WRITERS)}: the ending says how it is written")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.part")
    try:
        count = WRITERS[path.suffix](partial, FORMATS[format](run, of or Filter(phase="train", failed=False)), format)
        if count:
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return count


# ---- formats


def messages(run: Run, of: Filter) -> Iterator[Example]:
    """A conversation a line: TRL's language modelling and OpenAI's fine-tuning format."""
    for rollout in run.rollouts(of):
        for row in rollout.rows():
            if row.calls:
                yield {"messages": _chat(rollout.conversation(row.calls[-1])), **_of(rollout, row.calls[-1])}


def prompt_completion(run: Run, of: Filter) -> Iterator[Example]:
    """A trained reply a line, with all that was read before it: only the policy's own words are completions."""
    for rollout in run.rollouts(of):
        for call in rollout.calls.values():
            if rollout.reason(call) is None and len(call.completion_ids):
                *prompt, reply = rollout.conversation(call.id)
                yield {"prompt": _chat(prompt), "completion": _chat([reply]), **_of(rollout, call.id)}


def preference(run: Run, of: Filter) -> Iterator[Example]:
    """The best and the worst rollout of each group whose rewards differ: TRL's preference format."""
    condition, values = of.sql()
    groups: dict[str, list[tuple[float, int]]] = {}
    for row in run.rows(
        f'SELECT "group", reward, number FROM rollouts WHERE {condition} AND reward IS NOT NULL ORDER BY number', values
    ):
        groups.setdefault(row["group"], []).append((row["reward"], row["number"]))
    for scored in groups.values():
        worst, best = min(scored), max(scored)
        if worst[0] == best[0]:
            continue
        chosen, rejected = run.rollout(best[1]), run.rollout(worst[1])
        (prompt, won), (_, lost) = _parted(chosen), _parted(rejected)
        if won and lost:
            rewards = {"reward": best[0], "reward_rejected": worst[0]}
            yield {"prompt": prompt, "chosen": won, "rejected": lost, **_of(chosen, next(reversed(chosen.calls))), **rewards}


def tokens(run: Run, of: Filter) -> Iterator[Example]:
    """A row of ids a line, as the model read and wrote them; `labels` is -100 wherever a token is not trained."""
    for rollout in run.rollouts(of):
        for row in rollout.rows():
            if row.calls:
                yield {
                    "input_ids": row.token_ids.tolist(),
                    "labels": np.where(row.agent_mask, row.token_ids, -100).tolist(),
                    "logprobs": [round(float(value), 6) for value in row.logprobs],
                    **{name: value for name, value in _of(rollout, row.calls[-1]).items() if name != "tools"},
                }


FORMATS: dict[str, Callable[[Run, Filter], Iterator[Example]]] = {
    "messages": messages,
    "prompt-completion": prompt_completion,
    "preference": preference,
    "tokens": tokens,
}


def _of(rollout: Rollout, call_id: str) -> Example:
    """What every example says about where it comes from. Tools and task are JSON text: their shapes differ from line to line."""
    tools = rollout.calls[call_id].tools
    return {
        "tools": json.dumps(tools, ensure_ascii=False) if tools else None,
        "reward": rollout.reward,
        "env": rollout.env,
        "task": json.dumps(rollout.task, ensure_ascii=False),
        "rollout": rollout.id,
    }


def _parted(rollout: Rollout) -> tuple[list[Example], list[Example]]:
    """What was read first, and what followed along the last call."""
    if not rollout.calls:
        return [], []
    path = rollout.path(next(reversed(rollout.calls)))
    whole = rollout.conversation(path[-1].id)
    return _chat(whole[: len(path[0].messages)]), _chat(whole[len(path[0].messages) :])


def _chat(conversation: Iterable[Message]) -> list[Example]:
    return [_message(message) for message in conversation]


def _message(message: Message) -> Example:
    """A message with text for content and JSON text for tool arguments, as OpenAI writes them; absent fields stay away."""
    plain: Example = {"role": str(message.get("role", "")), "content": _text(message.get("content"))}
    for name in ("reasoning_content", "tool_call_id", "name"):
        if message.get(name):
            plain[name] = str(message[name])
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_tool_call(call) for call in calls]
    return plain


def _tool_call(call: Any) -> Example:
    function = call.get("function") or call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": str(function.get("name", "")), "arguments": arguments},
    }


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "".join(_text(part.get("text", part)) if isinstance(part, dict) else _text(part) for part in content)
    return json.dumps(content, ensure_ascii=False)


# ---- files


def _jsonl(path: Path, examples: Iterator[Example], format: str) -> int:
    count = 0
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for example in examples:
            file.write(json.dumps(example, ensure_ascii=False) + "\n")
            count += 1
    return count


def _parquet(path: Path, examples: Iterator[Example], format: str) -> int:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise LongreinError("parquet needs pyarrow (`pip install pyarrow`); a .jsonl file needs nothing") from error
    schema = _schema(pyarrow, format)
    count = 0
    with pyarrow.parquet.ParquetWriter(path, schema) as file:
        while chunk := list(islice(examples, ROWS_AT_A_TIME)):
            file.write_table(pyarrow.Table.from_pylist(chunk, schema))
            count += len(chunk)
    return count


WRITERS = {".jsonl": _jsonl, ".parquet": _parquet}


def _schema(pyarrow: Any, format: str) -> Any:
    text, number = pyarrow.string(), pyarrow.float64()
    function = pyarrow.struct([("name", text), ("arguments", text)])
    calls = pyarrow.list_(pyarrow.struct([("id", text), ("type", text), ("function", function)]))
    chat = pyarrow.list_(
        pyarrow.struct(
            [
                ("role", text),
                ("content", text),
                ("reasoning_content", text),
                ("tool_calls", calls),
                ("tool_call_id", text),
                ("name", text),
            ]
        )
    )
    whole = pyarrow.list_(pyarrow.int64())
    columns = {
        "messages": [("messages", chat)],
        "prompt-completion": [("prompt", chat), ("completion", chat)],
        "preference": [("prompt", chat), ("chosen", chat), ("rejected", chat)],
        "tokens": [("input_ids", whole), ("labels", whole), ("logprobs", pyarrow.list_(pyarrow.float32()))],
    }[format]
    if format != "tokens":
        columns.append(("tools", text))
    columns += [("reward", number), ("env", text), ("task", text), ("rollout", text)]
    if format == "preference":
        columns.append(("reward_rejected", number))
    return pyarrow.schema(columns)
