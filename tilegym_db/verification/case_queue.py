"""The queue of fuzz cases from which a free worker takes the next, and the processors that such workers share."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from operator import itemgetter

from tilegym_db.verification.expected import OracleCase
from tilegym_db.verification.verifier import Failure

Pair = tuple[OracleCase, OracleCase | None]
"""A fuzz case, and another call of its shape that follows it."""


class CaseQueue:
    """A queue that hands out cases in order until one has failed for good; thread-safe.

    All cases before the failed one have been handed out and are checked to the end. The first failure in the order of the cases
    therefore does not depend on the number and speed of workers. Cases may be added in their order while others are checked.
    """

    def __init__(self, pairs: Sequence[Pair], coming: int = 0) -> None:
        """Start with some cases in the queue, and with the number of those that will be added."""
        self._pairs, self._coming, self._next = list(pairs), coming, 0
        self._failures: list[tuple[int, Failure]] = []
        self.slices = 0
        """Slices of the checked cases that had the same bits alone as in their call."""
        self._lock = threading.Condition()

    def __iter__(self) -> Iterator[tuple[int, Pair]]:
        """Yield the remaining cases with their numbers; wait for those that are coming."""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._next < len(self._pairs) or not self._coming)
                if self._next >= len(self._pairs):
                    return
                number = self._next
                self._next += 1
            yield number, self._pairs[number]

    def put(self, pair: Pair | None) -> None:
        """Add the next case that was coming, or with None, leave it out."""
        with self._lock:
            if self._coming:
                self._coming -= 1
                self._pairs += [] if pair is None else [pair]
            self._lock.notify_all()

    @property
    def left(self) -> int:
        """The number of remaining cases, including those that are coming."""
        with self._lock:
            return len(self._pairs) + self._coming - self._next

    def close(self) -> None:
        """Stop handing out cases."""
        with self._lock:
            self._next, self._coming = len(self._pairs), 0
            self._lock.notify_all()

    def fail(self, failure: Failure, number: int | None = None) -> None:
        """Record the failure of a case, or without a number, of a worker that has not taken a case."""
        with self._lock:
            self._failures.append((len(self._pairs) if number is None else number, failure))
        if not failure.excused:
            self.close()

    def count_slices(self, slices: int) -> None:
        """Add the slices of a checked case that had the same bits alone."""
        with self._lock:
            self.slices += slices

    @property
    def failures(self) -> list[Failure]:
        """The failures so far, in the order of their cases."""
        with self._lock:
            return [failure for _, failure in sorted(self._failures, key=itemgetter(0))]


# ---- processors -----------------------------------------------------------------------------------
# Processors of a machine are shared by Solutions that are verified in parallel, and by their helpers.


ALONE_PER_PROCESSOR = 4
"""Runners that share a processor if they compile little. They wait for the GPU and the harness most of the time."""


class Processors:
    """Budget of processes. Each runner has a processor until it is done; helpers use the rest.

    Thread-safe.
    """

    def __init__(self, total: int, runners: int = 1, alone: int = 0) -> None:
        """Start with ``runners``, running or waiting; ``alone`` of them compile little and never ask for a helper."""
        self._total, self._runners, self._alone, self._helpers = total, runners, alone, 0
        self._lock = threading.Lock()

    def take(self, workers: int) -> bool:
        """Take a processor for one more worker of a runner that has ``workers``; return False if there is none.

        A runner cannot take more than its share, so that later ones find processors too. Give the processor back with
        :meth:`give_back`.
        """
        with self._lock:
            alone = -(-self._alone // ALONE_PER_PROCESSOR)
            sharing = self._runners - self._alone
            share = -(-(self._total - alone) // max(sharing, 1))
            if sharing + alone + self._helpers >= self._total or workers >= share:
                return False
            self._helpers += 1
            return True

    def give_back(self) -> None:
        """Give back the processor of a helper that has ended."""
        with self._lock:
            self._helpers -= 1

    def done(self, *, alone: bool = False) -> None:
        """Release the processor of a runner that is done."""
        with self._lock:
            self._runners -= 1
            self._alone -= alone
