"""The fuzz cases of one Solution, from which each of its workers takes the next one when it is free."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from operator import itemgetter

from tilegym_db.verify.expected import Expected
from tilegym_db.verify.verifier import Failure

__all__ = ["CaseQueue", "Pair"]

Pair = tuple[Expected, Expected | None]
"""A fuzz case, and another call of its shape that is made after it."""


class CaseQueue:
    """Hands out cases in their order until one has failed for good; safe to use from several threads.

    All before that one have been handed out then, and are judged to their end. So the first failure in the order of the cases is
    the same one however many workers there are, and however fast.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        """None is handed out yet."""
        self._pairs, self._next = pairs, 0
        self._failures: list[tuple[int, Failure]] = []
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[tuple[int, Pair]]:
        """The cases that nobody has taken, each with its number, as long as there are any."""
        while True:
            with self._lock:
                if self._next >= len(self._pairs):
                    return
                number = self._next
                self._next += 1
            yield number, self._pairs[number]

    @property
    def left(self) -> int:
        """How many nobody has taken."""
        with self._lock:
            return len(self._pairs) - self._next

    def close(self) -> None:
        """Hand out no more."""
        with self._lock:
            self._next = len(self._pairs)

    def fail(self, failure: Failure, number: int | None = None) -> None:
        """A case failed, or where no number is given, a worker that has not taken any."""
        with self._lock:
            self._failures.append((len(self._pairs) if number is None else number, failure))
        if not failure.excused:
            self.close()

    @property
    def failures(self) -> list[Failure]:
        """Those so far, in the order of their cases."""
        with self._lock:
            return [failure for _, failure in sorted(self._failures, key=itemgetter(0))]
