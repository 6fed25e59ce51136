"""The line protocol between harness and worker: one JSON object a line, each with the id of its request.

The harness believes nothing in a reply but the id: outputs are compared in shared memory, and a reply that is too long,
malformed, late or out of order ends the worker. Ids are random, so that nothing can be answered before it is asked. Both sides
speak over one local stream socket; a request may carry file descriptors, a reply may not.
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
from tilegym_db.records.trace import Status
from tilegym_db.sandbox.scan.tables import reviewed_libraries

MAX_LINE = 1 << 23
"""In bytes. The largest reply is a profile: some hundred names of kernels, however often each was launched."""
MAX_DESCRIPTORS = 16

Message = dict[str, Any]


class ProtocolError(TilegymDBError):
    """The other side sent something that is not a message."""

    code = "protocol_broken"


def encode(message: Message) -> bytes:
    """Return one line, newline included."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return the message of one line; :class:`ProtocolError` for anything that is not an object with an integer id."""
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
        """Return the next request, or None when the harness has closed the channel.

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


# ---- loading --------------------------------------------------------------------------------------
# What a worker is told in order to load a Solution.


def load_request(definition: Definition, solution: SolutionFiles, *, interpret: bool) -> dict[str, Any]:
    """Return the content of a ``load`` request.

    Args:
        definition: says in which order the arguments come.
        solution: the record's file and the digest that its source must still have.
        interpret: run it in its language's interpreter.
    """
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
# A worker's answers as the harness may use them: its word, made fit to be stored and shown.

MAX_SUMMARY = 300


@dataclass(frozen=True)
class Reply:
    """An answer: ``ok`` with its content, or the Solution's error. Its texts are the worker's word, made fit to store."""

    ok: bool
    content: Mapping[str, Any]

    @property
    def error(self) -> str:
        """The traceback, where the Solution raised."""
        return storable(self.content.get("error", ""))

    @property
    def summary(self) -> str:
        """The last line of the traceback: the exception and its message."""
        return (self.error.strip().splitlines() or ["no message"])[-1][:MAX_SUMMARY]

    @property
    def mismatch(self) -> tuple[bool, str] | None:
        """Where a returned value does not fit its output: (true for its dtype, false for its shape or kind; what)."""
        found = self.content.get("mismatch")
        if not isinstance(found, dict):
            return None
        return found.get("kind") == "dtype", storable(found.get("what"))[:MAX_SUMMARY]

    @property
    def failed_as(self) -> Status:
        """The status of a Solution that raised.

        UNSUPPORTED where the GPU had no memory left: that is this machine's, or another process's, and takes no pass back.
        """
        if self.no_memory:
            return "UNSUPPORTED"
        return "COMPILE_ERROR" if self.content.get("kind") == "compile" else "RUNTIME_ERROR"

    @property
    def no_memory(self) -> bool:
        """True if it raised since the GPU had no memory left."""
        return self.content.get("kind") == "memory"


def storable(text: object) -> str:
    """Text without what JSON, a database or a terminal must not be given: lone surrogates, NUL, escape sequences."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in str(text))


MAX_KINDS, MAX_NAME = 500, 2000
"""Names that a profile tells apart, and characters of each: so many escaped ones still fit in a message."""


OTHERS, CLIPPED = "(other kernels)", "..."
"""What the rest is called, and what a shortened name ends with. No kernel of a Solution's own is called so
(:func:`own_kernel`), so that what was left out never counts as its own."""


@dataclass(frozen=True)
class KernelUse:
    """Device activities of one name on one stream: microseconds of all of them together, and how many they were."""

    name: str
    us: float
    stream: int
    count: int = 1

    @classmethod
    def from_message(cls, message: object) -> KernelUse | None:
        """What a worker reported, or None if it is not one of these."""
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
