"""The proxy: a server that answers agent programs' model calls, and one file per wire dialect."""

from longrein.proxy.auxiliary import mark_auxiliary
from longrein.proxy.dialect import Answer, DialectError, ModelRequest
from longrein.proxy.server import InterceptionServer, turn_of
from longrein.proxy.session import CallLimits, Traffic

__all__ = [
    "Answer",
    "CallLimits",
    "DialectError",
    "InterceptionServer",
    "ModelRequest",
    "Traffic",
    "mark_auxiliary",
    "turn_of",
]
