"""Time of a harness by phase, in seconds.

The phases of the main thread follow each other: :data:`START`, then :data:`IDLE` or :data:`AT_WORK`, which consists of
:data:`PREPARE`, :data:`VERIFY`, :data:`WAIT`, :data:`TIME` and the time between them. The phases in :data:`SIDE_BY_SIDE`
run in parallel threads of a verification, so their sum may exceed the elapsed time.

The time of single Solutions and Definitions is in :class:`Spent`. Its phases in :data:`INSIDE` are parts of others.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
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

START_WORKER = "start worker"
"""Start of the process, its context on the device, and the profiler."""
LOAD = "load source"
"""Import of the toolchain and of the source."""
FUZZ = "fuzz cases"
LARGE = "large cases"
SEQUENCES = "sequences"
OWN_SHAPE = "own shape"
ROUNDS = "timed rounds"
OWNERSHIP = "audit of kernels"
LONG_RUN = "long run"
CLOCK = "audit of the clock"
MAKE_ORACLE = "compute oracle"
"""Drawing the inputs of a case, and its reference in float64; of a Definition, shared by its Solutions."""
UNCERTAINTY = "move inputs"
"""Evaluations of the oracle with moved inputs, for elements that may be ill-conditioned."""
FIRST_CALLS = "first calls"
"""The first call at a shape, which compiles; the harness waits for the worker."""
CALLS = "other calls"
INSIDE = (MAKE_ORACLE, UNCERTAINTY, FIRST_CALLS, CALLS)
"""Parts of other phases."""

PROCESSORS = "processor time"
"""Processor seconds of this process, its fork server and its workers while at work."""


@dataclass(frozen=True)
class Spent:
    """Time in one phase of one Solution or Definition: the sum over all blocks, and when the first began and the last ended.

    ``began`` and ``ended`` are seconds since the epoch, so that processes of one host can be compared.
    """

    of: str
    phase: str
    seconds: float
    times: int
    began: float
    ended: float

    def plus(self, other: Spent) -> Spent:
        """Return the sum of two parts of the same phase."""
        return Spent(
            self.of,
            self.phase,
            self.seconds + other.seconds,
            self.times + other.times,
            min(self.began, other.began),
            max(self.ended, other.ended),
        )


def merged(parts: Iterable[Spent]) -> tuple[Spent, ...]:
    """Return one entry per phase and Solution or Definition, in the order in which they began."""
    found: dict[tuple[str, str], Spent] = {}
    for part in parts:
        key = part.of, part.phase
        found[key] = found[key].plus(part) if key in found else part
    return tuple(sorted(found.values(), key=lambda part: part.began))


class Phases:
    """Sums of seconds by phase; thread-safe."""

    def __init__(self) -> None:
        """Start with no time in any phase."""
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._spent: dict[tuple[str, str], Spent] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str, of: str = "") -> Iterator[None]:
        """Add the time of the block to a phase, of one Solution or Definition if it is named."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - began, of)

    def add(self, phase: str, seconds: float, of: str = "") -> None:
        """Add seconds that end now to a phase, of one Solution or Definition if it is named."""
        with self._lock:
            if not of:
                self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
                return
            now, key = time.time(), (of, phase)
            part = Spent(of, phase, seconds, 1, now - seconds, now)
            self._spent[key] = self._spent[key].plus(part) if key in self._spent else part

    def take(self) -> dict[str, float]:
        """Return the seconds by phase since the last call, and reset them."""
        with self._lock:
            taken, self._seconds = self._seconds, {}
        return {phase: round(seconds, 4) for phase, seconds in taken.items()}

    def take_spent(self) -> tuple[Spent, ...]:
        """Return the time of single Solutions and Definitions since the last call, and reset it."""
        with self._lock:
            taken, self._spent = self._spent, {}
        return merged(taken.values())


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
