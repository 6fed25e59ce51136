"""What the process that plans and the supervisors of its devices tell each other; pickled, between processes of one package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tilegym_db.bench.gpus.work import WorkItem
from tilegym_db.bench.interleaved import TimingBudget
from tilegym_db.bench.machine import Machine
from tilegym_db.bench.tier_policy import TierPolicy
from tilegym_db.records import Trace
from tilegym_db.records.peaks import GpuPeaks

__all__ = ["Concluded", "Done", "Failed", "Order", "Peaks", "Ready", "Session", "Starting", "Told", "Traced"]


@dataclass(frozen=True)
class Session:
    """What all pieces of one run share, on whatever device.

    ``gpu`` is the slug that the device must have, ``seed`` the run's secret. With ``calibrate`` a GPU without ``peaks`` is
    calibrated first; with
    ``confined`` a host that cannot confine workers as a promotion asks for is refused. ``command`` is as in RunContext.
    """

    job: Literal["measure", "tune"]
    run_id: str
    gpu: str
    seed: int
    home: Path
    budget: TimingBudget
    policy: TierPolicy
    command: str | None = None
    peaks: GpuPeaks | None = None
    calibrate: bool = False
    confined: bool = False
    keeps_rounds: bool = False


@dataclass(frozen=True)
class Order:
    """Do this; ``extra`` is what the job needs beyond it."""

    session: Session
    item: WorkItem
    extra: Any = None


@dataclass(frozen=True)
class Ready:
    """The supervisor has its device, the ``machine``, after so many ``seconds``, and waits for work."""

    seconds: float
    machine: Machine


@dataclass(frozen=True)
class Starting:
    """What is about to happen."""

    what: str


@dataclass(frozen=True)
class Peaks:
    """What the device can do, or why that is not known."""

    peaks: GpuPeaks | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Traced:
    """A trace of a workload that is not concluded yet."""

    trace: Trace


@dataclass(frozen=True)
class Concluded:
    """Every trace of a workload was sent; ``rounds`` are the raw times by runner, where the session keeps them."""

    uuid: str
    rounds: Mapping[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Told:
    """Anything else that a job tells who ordered it."""

    content: Any


@dataclass(frozen=True)
class Done:
    """The order is carried out; ``seconds`` is where its time went."""

    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """The supervisor ends. ``is_device`` says that nothing more is to be tried on its device."""

    reason: str
    is_device: bool
