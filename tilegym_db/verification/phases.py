"""Time of a harness by phase, in seconds.

The phases of the main thread follow each other: :data:`START`, then :data:`IDLE` or :data:`AT_WORK`, which consists of
:data:`PREPARE`, :data:`VERIFY`, :data:`WAIT`, :data:`TIME` and the time between them. The phases in :data:`SIDE_BY_SIDE`
run in parallel threads of a verification, so their sum may exceed the elapsed time.
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
"""From the start of the process until its device is ready: importing PyTorch and testing confinement."""
IDLE = "idle"
"""Without an order, or before the start."""
AT_WORK = "at work"
PREPARE = "prepare"
"""Calibration, if this device has none, and the check that workers can be confined."""
VERIFY = "verify"
WAIT = "wait for the lock"
"""Waiting while another process times on this device."""
TIME = "time"
"""Timed rounds and audits, during which the device does nothing else."""

COMPILE = "start and load workers"
DRAW = "draw contents"
ORACLE = "wait for the oracle"
"""Includes computing the oracle."""
SIDE_BY_SIDE = (COMPILE, DRAW, ORACLE)

PROCESSORS = "processor time"
"""Processor seconds of this process, its fork server and its workers while at work."""


class Phases:
    """Sums of seconds by phase; thread-safe."""

    def __init__(self) -> None:
        """Start with no time in any phase."""
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - began)

    def add(self, phase: str, seconds: float) -> None:
        """Add seconds to a phase."""
        with self._lock:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds by phase since the last call, and reset them."""
        with self._lock:
            taken, self._seconds = self._seconds, {}
        return {phase: round(seconds, 4) for phase, seconds in taken.items()}


def added(*parts: Mapping[str, float]) -> dict[str, float]:
    """Return the sums of seconds by phase over all parts."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def processor_seconds() -> float:
    """Return the processor seconds of this process and all its descendants, including ended ones."""
    ticks = 0
    for process in (os.getpid(), *descendants(os.getpid())):
        with contextlib.suppress(OSError):  # it has ended, and its parent's counters include it
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            # User and system time of the process, and of its children that it waited for.
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
