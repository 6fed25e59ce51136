"""The processors of a machine, shared by the Solutions that are verified side by side and by their helpers."""

from __future__ import annotations

import threading

__all__ = ["Processors"]


class Processors:
    """Who may start one more process. Each runner has a processor until it is done; what is left over is for helpers.

    Safe to ask from several threads.
    """

    def __init__(self, total: int, runners: int = 1, alone: int = 0) -> None:
        """``runners`` are those that are, or wait to be, verified; ``alone`` are those of them that never ask for a helper."""
        self._total, self._runners, self._alone, self._helpers = total, runners, alone, 0
        self._lock = threading.Lock()

    def take(self, workers: int) -> bool:
        """A processor for one more worker of a runner that has so many; to be given back.

        Not where that were more than its share: those who ask later would find none.
        """
        with self._lock:
            share = -(-(self._total - self._alone) // max(self._runners - self._alone, 1))
            if self._runners + self._helpers >= self._total or workers >= share:
                return False
            self._helpers += 1
            return True

    def give_back(self) -> None:
        """A helper has ended."""
        with self._lock:
            self._helpers -= 1

    def done(self, *, alone: bool = False) -> None:
        """A runner has been verified, and leaves its processor to the others."""
        with self._lock:
            self._runners -= 1
            self._alone -= alone
