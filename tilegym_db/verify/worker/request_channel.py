"""The harness's end of the socket to a worker: one request out, the answer to that very request in, by a deadline."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

from tilegym_db.errors import TilegymDBError
from tilegym_db.verify.worker import protocol

__all__ = ["ChannelBroken", "ChannelTimeout", "RequestChannel"]


class ChannelBroken(TilegymDBError):
    """The other end is gone or says what it should not; the message completes "the worker ..."."""

    code = "channel_broken"


class ChannelTimeout(Exception):
    """The deadline passed."""


class RequestChannel:
    """One socket, and what has arrived of a message that is not whole yet."""

    def __init__(self) -> None:
        """Make a pair of sockets; the worker's is :attr:`other`, to be closed when the worker has it."""
        self._socket, self.other = socket.socketpair()
        self._socket.setblocking(False)
        self._buffer = b""

    def close(self) -> None:
        """Close this end. Safe to call twice."""
        self._socket.close()

    def send(self, line: bytes, descriptors: Sequence[int], deadline: float) -> None:
        """Send a request, with copies of open files.

        Args:
            line: as :func:`protocol.encode` gives it.
            descriptors: of the files.
            deadline: of ``time.monotonic()``.

        Raises:
            ChannelBroken: the worker is gone, or has sent something that it was not asked for.
            ChannelTimeout: it did not take the request in time.
        """
        if self._buffer or self._says_something():
            raise ChannelBroken("sent something that it was not asked for", code="message_unasked")
        rest = memoryview(line)
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_WRITE)
            while rest:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise ChannelTimeout
                try:
                    sent = socket.send_fds(self._socket, [rest], list(descriptors))
                except BlockingIOError:
                    continue
                except OSError:
                    raise ChannelBroken("is gone", code="worker_gone") from None
                rest, descriptors = rest[sent:], ()

    def receive(self, expected: int, deadline: float) -> dict[str, Any]:
        """The next message, which must be the answer to request number ``expected``.

        Raises:
            ChannelBroken: it is another, or none, or breaks the protocol.
            ChannelTimeout: none came before ``deadline``, of ``time.monotonic()``.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not selector.select(remaining):
                    raise ChannelTimeout
                try:
                    piece = self._socket.recv(1 << 16)  # files that a worker sends along are dropped by the kernel
                except OSError:
                    piece = b""
                if not piece:
                    raise ChannelBroken("ended", code="worker_ended")
                self._buffer += piece
                if len(self._buffer) > 2 * protocol.MAX_LINE:
                    raise ChannelBroken("sent an endless message", code="message_too_long")
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = protocol.decode(line)
        except protocol.ProtocolError as error:
            raise ChannelBroken(f"broke the protocol: {error}", code=error.code) from None
        if message["id"] != expected:
            raise ChannelBroken("answered another request than the one that it was asked", code="answer_mismatched")
        return message

    def _says_something(self) -> bool:
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return False
        except OSError:
            return False  # it is gone, as sending will find out
