"""A worker's answers as the harness may use them: its word, made fit to be stored and shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tilegym_db.records.trace import Status

__all__ = ["Reply", "storable"]

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
        """True where it raised since the GPU had no memory left."""
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
        """What a worker reported, or None where it is not one of these."""
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
