"""The line protocol between harness and worker: one JSON object per line, with the id of its request.

The harness trusts only the id of a reply. It compares outputs in shared memory, and it ends a worker whose reply is too
long, malformed, late or out of order. Ids are random, so that a worker cannot answer a request in advance. Both sides use
one local stream socket. A request may carry file descriptors, a reply may not.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tilegym_db.catalog import SolutionFiles
from tilegym_db.errors import TilegymDBError
from tilegym_db.records import Definition
from tilegym_db.records.verdicts import Status
from tilegym_db.sandbox.scan.tables import reviewed_libraries

MAX_LINE = 1 << 23
"""In bytes. The largest reply is a profile: some hundred kernel names, independent of the number of launches."""
MAX_DESCRIPTORS = 16

Message = dict[str, Any]


class ProtocolError(TilegymDBError):
    """The other side sent something that is not a message."""

    code = "protocol_broken"


def encode(message: Message) -> bytes:
    """Return a message as one line, newline included."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Parse one line; raise :class:`ProtocolError` unless it is an object with an integer id."""
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
    """The worker's end: it receives requests and sends replies, one at a time. Blocks."""

    def __init__(self, descriptor: int) -> None:
        """Take over the descriptor of a connected socket."""
        self._socket = socket.socket(fileno=descriptor)
        self._buffer = b""
        self._descriptors: list[int] = []

    def receive(self) -> Message | None:
        """Return the next request, or None when the harness has closed the channel.

        The request's ``descriptors`` are the file descriptors that came with it. The handler of the request owns them.
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
        """Send a reply."""
        self._socket.sendall(encode(message))

    def close(self) -> None:
        """Close the channel, which tells the harness that this worker is done."""
        self._socket.close()


# ---- loading --------------------------------------------------------------------------------------


def load_request(definition: Definition, solution: SolutionFiles, *, interpret: bool) -> dict[str, Any]:
    """Return the content of a ``load`` request."""
    return {
        "record": str(solution.path),
        "digest": solution.digest,
        "inputs": list(definition.inputs),
        "outputs": list(definition.written_outputs),
        "in_place": definition.in_place,
        "libraries": reviewed_libraries(solution.record.spec.dependencies),
        "interpret": interpret,
    }


# ---- reply ----------------------------------------------------------------------------------------
# A reply is untrusted. Its texts are cleaned before they are stored or shown.

MAX_SUMMARY = 300


@dataclass(frozen=True)
class Reply:
    """A worker's answer: ``ok`` with its content, or the Solution's error. Its texts are untrusted and cleaned for storage."""

    ok: bool
    content: Mapping[str, Any]

    @property
    def error(self) -> str:
        """The traceback of the Solution's exception."""
        return storable(self.content.get("error", ""))

    @property
    def summary(self) -> str:
        """The last line of the traceback: the exception and its message."""
        return (self.error.strip().splitlines() or ["no message"])[-1][:MAX_SUMMARY]

    @property
    def mismatch(self) -> tuple[str, str] | None:
        """The mismatch of a returned value or an argument: ``dtype``, ``shape`` or ``argument``, and a description."""
        found = self.content.get("mismatch")
        if not isinstance(found, dict):
            return None
        return str(found.get("kind")), storable(found.get("what"))[:MAX_SUMMARY]

    @property
    def failed_as(self) -> Status:
        """The status of a Solution that raised.

        UNSUPPORTED if the GPU had no memory left: the machine or another process caused it, so earlier passes stay valid.
        """
        if self.no_memory:
            return "UNSUPPORTED"
        return "COMPILE_ERROR" if self.content.get("kind") == "compile" else "RUNTIME_ERROR"

    @property
    def no_memory(self) -> bool:
        """True if the GPU had no memory left."""
        return self.content.get("kind") == "memory"


def storable(text: object) -> str:
    """Return text without lone surrogates, NUL and escape sequences, which JSON, databases or terminals do not accept."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in str(text))


MAX_KINDS, MAX_NAME = 500, 2000
"""Maximum number of kernel names in a profile, and of characters in each; with escapes they still fit in a message."""


OTHERS, CLIPPED = "(other kernels)", "..."
"""The name of the remaining kernels, and the end of a shortened name. A Solution's kernel cannot have such a name
(:func:`own_kernel`), so omitted kernels never count as the Solution's own."""


@dataclass(frozen=True)
class KernelUse:
    """Device activities of one name on one stream: their total time in microseconds, and their number."""

    name: str
    us: float
    stream: int
    count: int = 1

    @classmethod
    def from_message(cls, message: object) -> KernelUse | None:
        """Parse a worker's message; return None if it is not valid."""
        if not isinstance(message, dict):
            return None
        name, us, stream, count = (message.get(key) for key in ("name", "us", "stream", "count"))
        if not isinstance(name, str) or any(isinstance(number, bool) for number in (us, stream, count)):
            return None
        if not isinstance(us, float | int) or not 0 <= us < 1e12 or not isinstance(stream, int):
            return None
        if not isinstance(count, int) or not 0 < count < 1e9:
            return None
        return cls(storable(name), float(us), stream, count)


def sum_uses(activities: Iterable[tuple[str, float, int]]) -> list[KernelUse]:
    """Add up (name, microseconds, stream) by name and stream, in the order in which each came first.

    What a worker reports of a profile grows with the kinds of kernels that ran, not with their launches. Names beyond the first
    :data:`MAX_KINDS` are added up as :data:`OTHERS`, by stream too: work on a second stream stays in sight.
    """
    sums: dict[tuple[str, int], tuple[float, int]] = {}
    names: dict[str, str] = {}
    for full, us, stream in activities:
        name = names.get(full)
        if name is None and len(names) < MAX_KINDS:
            name = names[full] = full if len(full) <= MAX_NAME else full[:MAX_NAME] + CLIPPED
        key = name or OTHERS, stream
        total_us, count = sums.get(key, (0.0, 0))
        sums[key] = total_us + us, count + 1
    return [KernelUse(name, us, stream, count) for (name, stream), (us, count) in sums.items()]
