"""The line protocol between harness and worker: one JSON object a line, each with the id of its request.

The harness believes nothing in a reply but the id: outputs are compared in shared memory, and a reply that is too long,
malformed, late or out of order ends the worker. Ids are random, so that nothing can be answered before it is asked. Both sides
speak over one local stream socket; a request may carry file descriptors, a reply may not.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from tilegym_db.errors import TilegymDBError

__all__ = ["MAX_DESCRIPTORS", "MAX_LINE", "Channel", "ProtocolError", "decode", "encode"]

MAX_LINE = 1 << 23
"""In bytes. The largest reply is a profile: some hundred names of kernels, however often each was launched."""
MAX_DESCRIPTORS = 16

Message = dict[str, Any]


class ProtocolError(TilegymDBError):
    """The other side sent something that is not a message."""

    code = "protocol_broken"


def encode(message: Message) -> bytes:
    """One line, newline included."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message of one line; :class:`ProtocolError` for anything that is not an object with an integer id."""
    if len(line) > MAX_LINE:
        raise ProtocolError(f"a message of {len(line)} bytes (at most {MAX_LINE})", code="message_too_long")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}: {line[:80]!r}", code="message_not_json") from None
    if not isinstance(message, dict) or isinstance(message.get("id"), bool) or not isinstance(message.get("id"), int):
        raise ProtocolError(f"not a message with an id: {line[:80]!r}", code="message_without_id")
    return message


class Channel:
    """The worker's end: requests in, replies out, one at a time. Blocks."""

    def __init__(self, descriptor: int) -> None:
        """Take over the descriptor of a connected socket."""
        self._socket = socket.socket(fileno=descriptor)
        self._buffer = b""
        self._descriptors: list[int] = []

    def receive(self) -> Message | None:
        """The next request, or None when the harness has closed the channel.

        The file descriptors that came with it are its ``descriptors``; they belong to whoever handles the request.
        """
        while b"\n" not in self._buffer:
            piece, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 16, MAX_DESCRIPTORS)
            if not piece:
                return None
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            self._buffer += piece
            self._descriptors += descriptors
        line, _, self._buffer = self._buffer.partition(b"\n")
        descriptors, self._descriptors = self._descriptors, []
        return {**decode(line), "descriptors": descriptors}

    def send(self, message: Message) -> None:
        """Answer."""
        self._socket.sendall(encode(message))

    def close(self) -> None:
        """Close the channel, which tells the harness that this worker is done."""
        self._socket.close()
