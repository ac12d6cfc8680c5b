"""Uses modules by calls and writes down what they gave: `python uses.py CALLS RESULTS`, standard library alone.

Always true: it is told what to call and never what should come out, so that nothing the modules do to this process can make a
wrong result right.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def results(module: Any, case: list[list[Any]]) -> list[Any]:
    """What each call of a case gave, or the name of what it raised."""
    target = module
    found: list[Any] = []
    for number, (name, arguments) in enumerate(case):
        try:
            value = getattr(target, name)(*arguments)
        except Exception as error:
            found.append({"raises": type(error).__name__})
            continue
        if number == 0 and isinstance(getattr(module, name), type):
            target, value = value, None
        found.append({"gives": value})
    return found


def as_text(value: Any) -> str:
    """A result as JSON, by which two results are the same or not: 1, 1.0 and True are three."""
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return f"not JSON: {type(value).__name__}"


def main() -> None:
    calls, written = sys.argv[1:3]
    with open(calls) as file:
        asked = json.load(file)
    sys.path.insert(0, ".")
    told: list[Any] = []
    for name, case in asked:
        try:
            told.append(as_text(results(importlib.import_module(name), case)))
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    with open(written, "w") as file:
        json.dump(told, file)


if __name__ == "__main__":
    main()
