"""Watches what a worker takes and says when that is too much; spends about a hundredth of one processor on it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tilegym_db.confinement.bounds import ResourceBounds, Usage, violation
from tilegym_db.confinement.processes import (
    descendants,
    hidden_file_bytes,
    memory_bytes,
    shared_out_memory_bytes,
    tree_size,
)

__all__ = ["Watch"]

_SHARE_OF_TIME = 0.01
_PROCESSES_EVERY_S = 0.05, 0.5
_FILES_EVERY_S = 0.5, 5.0
"""How often at most and at least: a fork bomb must not buy itself time by making it slow to look."""


class Watch:
    """What stems from one process, and one folder, held against bounds. ``check`` often; it looks when it is time to."""

    def __init__(self, ancestor: int, folder: Path, bounds: ResourceBounds, ignored: int = 0) -> None:
        """Begin; ``ignored`` processes of the sandbox's own are not counted."""
        self._ancestor, self._folder, self._bounds, self._ignored = ancestor, folder, bounds, ignored
        self._device = os.stat(folder).st_dev
        self._processes: list[int] = []
        self._memory = self._hidden_memory = self._disk = self._files = 0
        self._processes_due = self._files_due = 0.0

    def check(self, output_bytes: int) -> str | None:
        """The bound that is exceeded, in words, or None."""
        now = time.monotonic()
        if now >= self._processes_due:
            self._processes = descendants(self._ancestor)
            if len(self._processes) - self._ignored <= self._bounds.processes:  # of a bomb, no more need be known
                self._memory = memory_bytes(self._processes)
                if self._memory > self._bounds.memory_bytes:
                    self._memory = shared_out_memory_bytes(self._processes)
            self._processes_due = _next(now, _PROCESSES_EVERY_S)
        if now >= self._files_due:
            unnamed, self._hidden_memory = hidden_file_bytes(self._processes, self._device)
            named, self._files = tree_size(self._folder, self._bounds.files)
            self._disk = named + unnamed
            self._files_due = _next(now, _FILES_EVERY_S)
        processes = len(self._processes) - self._ignored
        # A file in memory that is mapped as well would otherwise count twice.
        memory = self._memory + max(0, self._hidden_memory - self._memory)
        return violation(Usage(memory, processes, output_bytes, self._disk, self._files), self._bounds)


def _next(started: float, every_s: tuple[float, float]) -> float:
    now = time.monotonic()
    shortest, longest = every_s
    return now + min(longest, max(shortest, (now - started) / _SHARE_OF_TIME))
