"""A worker's answers as the harness may use them: its word, made fit to be stored and shown."""

from __future__ import annotations

from collections.abc import Mapping
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
