"""For the reference (`docs/reference.md`): docstrings as mkdocstrings is to show them.

Examples (`>>> ...`) become code to copy, what they print a comment; a setting that says its help in its `field` has it for a docstring.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*\n?)(?:^.+\n?)*", re.M)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value)

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **kwargs: Any) -> None:
        if attr.docstring is None and isinstance(node, ast.AST) and (text := _help(node)) is not None:
            attr.docstring = griffe.Docstring(text, parent=attr)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """After signatures were made of them: fields are shown with their default alone."""
        for part in _within(pkg):
            if part.is_attribute and (default := _default(str(part.value))) is not None:
                part.value = default


def _within(part: griffe.Object) -> Iterator[Any]:
    for member in part.members.values():
        if not member.is_alias:
            yield member
            yield from _within(member)


def _default(value: str) -> str | None:
    """What `field(default=...)` or `field(default_factory=...)` gives."""
    if not value.startswith("field("):
        return None
    call = ast.parse(value, mode="eval").body
    said = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords} if isinstance(call, ast.Call) else {}
    return said.get("default") or (f"{said['default_factory']}()" if "default_factory" in said else None)


def _fenced(found: re.Match[str]) -> str:
    lines = re.sub(r"\s*# doctest: \+SKIP", "", found[0].rstrip()).splitlines()
    code = [line[4:] if line.startswith((">>> ", "... ")) else f"# {line}" for line in lines]
    return "```python\n" + "\n".join(code) + "\n```\n"


def _help(node: ast.AST) -> str | None:
    """The text of `metadata={"help": "..."}`."""
    for part in ast.walk(node):
        if isinstance(part, ast.Dict):
            for key, value in zip(part.keys, part.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "help" and isinstance(value, ast.Constant):
                    return str(value.value)
    return None
