"""`{name}` in a command, a variable or a config file, filled from the task and the session.

Always true: only `{name}` is a placeholder; `${name}`, `{{name}}` and every other brace stay as they are, so shell, JSON and
Jinja pass through.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Any

from longrein.contract import LongreinError

_NAME = r"\{([A-Za-z_][A-Za-z0-9_]*)\}"
_PLACEHOLDER = re.compile(rf"\{{{_NAME}\}}|\${_NAME}|{_NAME}")


def fill(template: str, task: Any, values: Mapping[str, str], where: str, *, strict: bool = True) -> str:
    """The template with its placeholders filled: the session's values, the fields of a task that is a dict, `{task}` itself.

    Texts go in as they are, other values as JSON. A name that nobody knows is an error, or stays where not `strict`.

    >>> fill("--rooms {rooms} --url {url}", {"rooms": ["attic"]}, {"url": "http://x"}, "command")
    '--rooms ["attic"] --url http://x'
    """
    fields = task if isinstance(task, Mapping) else {}

    def value(match: re.Match[str]) -> str:
        name = match[3]
        if name is None:
            return match[0]
        if name in values:
            return values[name]
        if name in fields:
            return _text(fields[name])
        if name == "task":
            return _text(task)
        if not strict:
            return match[0]
        known = [*values, *map(str, fields), "task"]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {{{near[0]}}}?" if near else ", ".join(known)
        raise LongreinError(f"{where} has the placeholder {match[0]}, and neither the session nor the task has it: {hint}")

    return _PLACEHOLDER.sub(value, template)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
