"""The line protocol between supervisor and worker: one JSON object a line, each with the id of its request.

The supervisor believes nothing in a reply but the id: outputs are compared in shared memory, and a reply that is too long,
malformed, late or out of order ends the worker.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["MAX_LINE", "ProtocolError", "decode", "encode"]

MAX_LINE = 1 << 20

Message = dict[str, Any]


class ProtocolError(Exception):
    """The other side sent something that is no message."""


def encode(message: Message) -> bytes:
    """One line, newline included."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message of one line; :class:`ProtocolError` for anything that is not an object with an integer id."""
    if len(line) > MAX_LINE:
        raise ProtocolError(f"a message of {len(line)} bytes (at most {MAX_LINE})")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}: {line[:80]!r}") from None
    if not isinstance(message, dict) or isinstance(message.get("id"), bool) or not isinstance(message.get("id"), int):
        raise ProtocolError(f"not a message with an id: {line[:80]!r}")
    return message
