"""Where the time of a harness goes: seconds by phase.

One phase of the main thread follows the other: :data:`START`, then :data:`IDLE` or :data:`AT_WORK`, which consists of
:data:`PREPARE`, :data:`VERIFY`, :data:`WAIT`, :data:`TIME` and what lies between them. The phases in :data:`SIDE_BY_SIDE` are
what the threads of a verification do at the same time; their sums exceed the time that passes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tilegym_db.sandbox.processes import descendants

START = "start"
"""From the start of the process until its device answers: PyTorch is imported, and confinement is tried."""
IDLE = "idle"
"""It has no order, or has not started yet."""
AT_WORK = "at work"
PREPARE = "prepare"
"""Calibration, where this device has none, and the check that workers can be confined."""
VERIFY = "verify"
WAIT = "wait for the lock"
"""Another process times on this device."""
TIME = "time"
"""Timed rounds and audits: the device does nothing else."""

COMPILE = "start and load workers"
DRAW = "draw contents"
ORACLE = "wait for the oracle"
"""Computing it included."""
SIDE_BY_SIDE = (COMPILE, DRAW, ORACLE)

PROCESSORS = "processor time"
"""Seconds on a processor of this process, its fork server and its workers, while it was at work."""


class Phases:
    """Adds up seconds by phase; safe to use from several threads."""

    def __init__(self) -> None:
        """Nothing has taken any time yet."""
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """What the block takes counts for a phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - began)

    def add(self, phase: str, seconds: float) -> None:
        """So many seconds more."""
        with self._lock:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        with self._lock:
            taken, self._seconds = self._seconds, {}
        return {phase: round(seconds, 4) for phase, seconds in taken.items()}


def added(*parts: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase, of all parts together."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def processor_seconds() -> float:
    """What this process and everything that stems from it have spent on processors so far, those that have ended included."""
    ticks = 0
    for process in (os.getpid(), *descendants(os.getpid())):
        with contextlib.suppress(OSError):  # it has ended, and counts for its parent
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            # Its own user and system time, and those of children that it waited for.
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
