"""Messages between the planning process and the supervisors of its devices, and the division of a plan into work items.

Messages are pickled between processes of the same package version.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tilegym_db.measurement.machine import Machine
from tilegym_db.measurement.plan import DefinitionPlan
from tilegym_db.measurement.timing import TimingBudget
from tilegym_db.records import Trace
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.verification.phases import Spent
from tilegym_db.verification.worker_handle import TierPolicy


@dataclass(frozen=True)
class Session:
    """Data that all work items of a run share, on every device.

    ``gpu`` is the slug that the device must have, ``seed`` the run's secret. With ``calibrate``, a GPU without ``peaks`` is
    calibrated first. With ``confined``, a host that cannot confine workers as verification requires is refused. ``command``
    is as in RunContext.
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
    """Order for one work item; ``extra`` is additional data for the job."""

    session: Session
    item: WorkItem
    extra: Any = None


@dataclass(frozen=True)
class Ready:
    """The supervisor has its device, the ``machine``, after ``seconds``, and waits for work."""

    seconds: float
    machine: Machine


@dataclass(frozen=True)
class ProgressMessage:
    """Description of the next step."""

    what: str


@dataclass(frozen=True)
class Peaks:
    """Peaks of the device, or notes on why they are unknown."""

    peaks: GpuPeaks | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TraceMessage:
    """A trace of a workload that is not concluded yet."""

    trace: Trace


@dataclass(frozen=True)
class WorkloadDone:
    """All traces of a workload were sent. ``rounds`` are the raw times by runner, if the session keeps them."""

    uuid: str
    rounds: Mapping[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class JobMessage:
    """Any other message of a job to the process that ordered it."""

    content: Any


@dataclass(frozen=True)
class Done:
    """The order is complete; ``seconds`` is its time by phase, ``spent`` that of single Solutions and Definitions."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    spent: tuple[Spent, ...] = ()


@dataclass(frozen=True)
class Failed:
    """The supervisor ends. If ``is_device`` is true, its device is not used again."""

    reason: str
    is_device: bool


# ---- work -----------------------------------------------------------------------------------------
# Division of a plan into work items for several devices, and retries of lost items. Pure.
#
# All candidates of a Workload are in one item, so that they are compared in the same rounds on the same device.

MAX_LOSSES = 3
"""A workload is given up if its supervisor died this many times while it was in flight."""
FIXED_PAIRS = 6
"""Cost of starting, compiling and fuzzing one candidate wherever its Definition is measured, in timed pairs. 24 candidates
took 106 s on an H200 that timed 176 pairs in 136 s.
"""
MAX_TIME_SHARE = 0.98
"""A Definition is divided only if the whole run then ends within this share of the time. Predictions are not more precise."""
SIZES: dict[int, tuple[float, ...]] = {1: (1.0,), 2: (0.65, 0.35), 3: (0.5, 0.3, 0.2)}
"""Sizes of the items within a device's share: large ones first, so that all devices end at about the same time."""


@dataclass(frozen=True)
class WorkItem:
    """The work that one device does at a time.

    ``plans`` are restricted to the item's workloads; ``losses`` are the reasons why it was lost before.
    """

    plans: tuple[DefinitionPlan, ...]
    losses: tuple[str, ...] = ()

    @property
    def uuids(self) -> list[str]:
        """The uuids of the workloads with planned work."""
        return [workload.uuid for plan in self.plans for workload in plan.workloads if plan.is_wanted(workload)]

    @property
    def label(self) -> str:
        """The Definitions of the item, and the number of workloads of each."""
        counts = [(plan.definition.name, sum(map(plan.is_wanted, plan.workloads))) for plan in self.plans]
        return ", ".join(f"{name} ({count} workload{'s' * (count > 1)})" for name, count in counts)

    def without(self, done: set[str]) -> WorkItem | None:
        """Return the item without some workloads; None if nothing is left."""
        left = {uuid for uuid in self.uuids if uuid not in done}
        plans = [plan.restricted_to(left) for plan in self.plans]
        plans = [plan for plan in plans if any(map(plan.is_wanted, plan.workloads))]
        return replace(self, plans=tuple(plans)) if plans else None

    def one_by_one(self) -> list[WorkItem]:
        """Return one item per workload."""
        return [
            replace(self, plans=(plan.restricted_to({workload.uuid}),))
            for plan in self.plans
            for workload in plan.workloads
            if plan.is_wanted(workload)
        ]


@dataclass
class WorkQueue:
    """The items left to do, and the items given up, each with all reasons of its losses."""

    waiting: deque[WorkItem]
    given_up: list[WorkItem] = field(default_factory=list)

    @classmethod
    def of(cls, items: Sequence[WorkItem]) -> WorkQueue:
        """Return a queue of the items in this order."""
        return cls(deque(items))

    def take(self) -> WorkItem | None:
        """Remove and return the next item, or None."""
        return self.waiting.popleft() if self.waiting else None

    def lose(self, item: WorkItem, done: set[str], reason: str) -> None:
        """Put back the rest of an item whose supervisor died, at the front.

        The first time it is retried as it is, then workload by workload, so that one that ends its supervisor does not
        affect others. Then it is given up.
        """
        left = item.without(done)
        if left is None:
            return
        left = replace(left, losses=(*left.losses, reason))
        if len(left.losses) >= MAX_LOSSES:
            self.given_up.append(left)
        elif len(left.losses) == MAX_LOSSES - 1:
            self.waiting.extendleft(reversed(left.one_by_one()))
        else:
            self.waiting.appendleft(left)


def divide(plans: Sequence[DefinitionPlan], devices: int) -> list[WorkItem]:
    """Return work items with which all devices end at about the same time, the largest item first.

    Every planned workload is in exactly one item. The candidates of a Definition are started, compiled and fuzzed again in
    every item with a part of it. So a Definition is divided only if all devices together then end earlier.
    """
    whole = [part for part in map(_Part.of, plans) if part.pairs]
    if not whole:
        return []
    if devices == 1:
        return [_item(whole)]
    total = sum(part.cost for part in whole)
    phases = max((n for n in SIZES if n == 1 or total / (devices * n) >= 2 * total / len(whole)), default=1)
    shares = [share for share in SIZES[phases] for _ in range(devices)]
    counts = [1] * len(whole)
    bags = _packed(whole, shares)
    while True:
        ends = _ends(bags, devices)
        last = {id(part.plan) for part in bags[ends.index(max(ends))]}
        finer = [
            [count + (place == number) for place, count in enumerate(counts)]
            for number, part in enumerate(whole)
            if id(part.plan) in last and counts[number] < len(part.pairs)
        ]
        tries = []
        for more in finer:
            packed = _divided(whole, more, shares)
            tries.append((max(_ends(packed, devices)), more, packed))
        end, more, packed = min(tries, key=lambda made: made[0], default=(math.inf, counts, bags))
        if end > MAX_TIME_SHARE * max(ends):
            return [_item(bag) for bag in bags]
        counts, bags = more, packed


def _divided(whole: Sequence[_Part], counts: Sequence[int], shares: Sequence[float]) -> list[list[_Part]]:
    """Return bags of the parts that are left when each Definition is divided into so many."""
    return _packed([one for part, count in zip(whole, counts, strict=True) for one in part.split(count)], shares)


@dataclass(frozen=True)
class _Part:
    """Some workloads of a Definition: uuid -> number of planned pairs.

    ``fixed`` is the cost of the Definition's candidates in pairs. Every device that measures a part of it pays this cost.
    """

    plan: DefinitionPlan
    pairs: Mapping[str, int]
    fixed: float

    @classmethod
    def of(cls, plan: DefinitionPlan) -> _Part:
        candidates = plan.candidates()
        pairs = {
            workload.uuid: sum(plan.takes_part(solution, workload, config) for solution, config in candidates)
            for workload in plan.workloads
            if plan.is_wanted(workload)
        }
        return cls(plan, pairs, FIXED_PAIRS * len(candidates))

    @property
    def timed(self) -> int:
        return sum(self.pairs.values())

    @property
    def cost(self) -> float:
        return self.fixed + self.timed

    def split(self, count: int) -> list[_Part]:
        """Split the workloads in turn. Neighbours are of similar size, so each part gets small and large ones."""
        uuids = list(self.pairs)
        return [replace(self, pairs={uuid: self.pairs[uuid] for uuid in uuids[n::count]}) for n in range(count)]


def _packed(parts: Sequence[_Part], shares: Sequence[float]) -> list[list[_Part]]:
    """Pack parts into bags of these shares, the costliest part first, each where it ends earliest.

    Return the costliest bag first.
    """
    bags: list[list[_Part]] = [[] for _ in shares]
    loads = [0.0] * len(shares)
    for part in sorted(parts, key=lambda part: -part.cost):
        added = [part.timed + (0 if any(one.plan is part.plan for one in bag) else part.fixed) for bag in bags]
        best = min(range(len(bags)), key=lambda n: (loads[n] + added[n]) / shares[n])
        loads[best] += added[best]
        bags[best].append(part)
    return sorted((bag for bag in bags if bag), key=lambda bag: -_load(bag))


def _load(bag: Sequence[_Part]) -> float:
    return sum(part.timed for part in bag) + sum({id(part.plan): part.fixed for part in bag}.values())


def _ends(bags: Sequence[Sequence[_Part]], devices: int) -> list[float]:
    """Return the end of each bag, in pairs, if each free device takes the next bag."""
    free, ends = [0.0] * devices, []
    for bag in bags:
        device = free.index(min(free))
        free[device] += _load(bag)
        ends.append(free[device])
    return ends


def _item(bag: Sequence[_Part]) -> WorkItem:
    uuids: dict[int, tuple[DefinitionPlan, set[str]]] = {}
    for part in bag:
        uuids.setdefault(id(part.plan), (part.plan, set()))[1].update(part.pairs)
    return WorkItem(tuple(plan.restricted_to(chosen) for plan, chosen in uuids.values()))
