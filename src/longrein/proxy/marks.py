"""Ids and signatures that programs carry for us.

Always true: an id that `minted` made and a text that `sealed` made name the call they came from, and whoever echoes one says
which call it quotes. An id or a text of anyone else's names nothing.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from typing import Any, NamedTuple

_MINTED = re.compile(r"[a-z]+_([0-9a-f]{16}|turn[0-9]+)(?:_|$)")


def minted(kind: str, call_id: str, index: int | None = None) -> str:
    """An id that names the call it came from.

    >>> minted("msg", "00c0ffee00c0ffee"), origin("msg_00c0ffee00c0ffee"), origin("msg_of_others")
    ('msg_00c0ffee00c0ffee', '00c0ffee00c0ffee', None)
    """
    return f"{kind}_{call_id}" if index is None else f"{kind}_{call_id}_{index}"


def origin(minted_id: Any) -> str | None:
    """The call that an id names, if we made it."""
    found = _MINTED.match(minted_id) if isinstance(minted_id, str) else None
    return found[1] if found else None


class Sealed(NamedTuple):
    """What a signature, or an encrypted reasoning, of ours holds."""

    call_id: str | None
    reasoning: str = ""


def sealed(call_id: str, reasoning: str = "") -> str:
    """A text for a program to carry and not to read: it names the call, and brings its reasoning back."""
    return base64.b64encode(json.dumps({"longrein": [call_id, reasoning]}).encode()).decode()


def unsealed(text: Any) -> Sealed:
    """What `sealed` put into a text; nothing, where it is not one of ours."""
    try:
        call_id, reasoning = json.loads(base64.b64decode(text, validate=True))["longrein"]
    except (binascii.Error, ValueError, TypeError, KeyError, RecursionError):
        return Sealed(None)
    return Sealed(call_id, reasoning) if isinstance(call_id, str) and isinstance(reasoning, str) else Sealed(None)
