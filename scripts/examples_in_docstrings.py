"""For the reference: examples in docstrings (`>>> ...`) become code to copy, what they print a comment."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*\n?)(?:^.+\n?)*", re.M)


class ExamplesInDocstrings(griffe.Extension):
    """What mkdocstrings reads before it writes `docs/reference.md`."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(found: re.Match[str]) -> str:
    lines = re.sub(r"\s*# doctest: \+SKIP", "", found[0].rstrip()).splitlines()
    code = [line[4:] if line.startswith((">>> ", "... ")) else f"# {line}" for line in lines]
    return "```python\n" + "\n".join(code) + "\n```\n"
