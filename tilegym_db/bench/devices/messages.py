"""What the process that plans and the supervisors of its devices tell each other; pickled, between processes of one package."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tilegym_db.bench.machine import Machine
from tilegym_db.bench.plan import DefinitionPlan
from tilegym_db.bench.timing import TimingBudget
from tilegym_db.records import Trace
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.verify.worker_handle import TierPolicy


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


# ---- work -----------------------------------------------------------------------------------------
# Divides a plan into pieces of work for several devices, and decides what becomes of a piece that was lost. Pure.
#
# All candidates of a Workload are in one piece, so that they are compared in the same rounds on the same device.

MAX_LOSSES = 3
"""A workload that was in flight so many times when its supervisor died is given up."""
FIXED_PAIRS = 6
"""What starting, compiling and fuzzing one candidate costs wherever its Definition is measured, in timed pairs: 106 s for 24 of
them on an H200 that timed 176 pairs in 136 s."""
LEAST_GAIN = 0.98
"""A Definition is divided where all ends in that share of the time: what is predicted is not known any better."""
SIZES: dict[int, tuple[float, ...]] = {1: (1.0,), 2: (0.65, 0.35), 3: (0.5, 0.3, 0.2)}
"""How a device's share is divided: large pieces first, so that all end at about the same time."""


@dataclass(frozen=True)
class WorkItem:
    """What one device does at a time.

    ``plans`` are restricted to the item's workloads, ``losses`` are the reasons why it was lost before.
    """

    plans: tuple[DefinitionPlan, ...]
    losses: tuple[str, ...] = ()

    @property
    def uuids(self) -> list[str]:
        """Of the workloads that something is planned for."""
        return [workload.uuid for plan in self.plans for workload in plan.workloads if plan.is_wanted(workload)]

    @property
    def label(self) -> str:
        """Its Definitions and how many workloads of each."""
        counts = [(plan.definition.name, sum(map(plan.is_wanted, plan.workloads))) for plan in self.plans]
        return ", ".join(f"{name} ({count} workload{'s' * (count > 1)})" for name, count in counts)

    def without(self, done: set[str]) -> WorkItem | None:
        """What is left of it; None if nothing is."""
        left = {uuid for uuid in self.uuids if uuid not in done}
        plans = [plan.restricted_to(left) for plan in self.plans]
        plans = [plan for plan in plans if any(map(plan.is_wanted, plan.workloads))]
        return replace(self, plans=tuple(plans)) if plans else None

    def one_by_one(self) -> list[WorkItem]:
        """Return an item for each of its workloads."""
        return [
            replace(self, plans=(plan.restricted_to({workload.uuid}),))
            for plan in self.plans
            for workload in plan.workloads
            if plan.is_wanted(workload)
        ]


@dataclass
class WorkQueue:
    """What is left to do, and what was given up, each with every reason why it was lost."""

    waiting: deque[WorkItem]
    given_up: list[WorkItem] = field(default_factory=list)

    @classmethod
    def of(cls, items: Sequence[WorkItem]) -> WorkQueue:
        """In this order."""
        return cls(deque(items))

    def take(self) -> WorkItem | None:
        """Return the next one, or None."""
        return self.waiting.popleft() if self.waiting else None

    def lose(self, item: WorkItem, done: set[str], reason: str) -> None:
        """What was in flight when a supervisor died goes first: once as it is, then workload by workload, so that one which
        takes its supervisor down does not take others along; then it is given up."""
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
    """Pieces that devices end with at about the same time, the largest first; every planned workload is in exactly one of them.

    The candidates of a Definition are started, compiled and fuzzed once more in every piece that has a part of it. So one is
    divided only where all devices together end earlier for it.
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
        tries = []
        for number, part in enumerate(whole):
            if id(part.plan) in last and counts[number] < len(part.pairs):
                more = [count + (place == number) for place, count in enumerate(counts)]
                parts = [one for part, count in zip(whole, more, strict=True) for one in part.split(count)]
                packed = _packed(parts, shares)
                tries.append((max(_ends(packed, devices)), more, packed))
        end, more, packed = min(tries, key=lambda made: made[0], default=(math.inf, counts, bags))
        if end > LEAST_GAIN * max(ends):
            return [_item(bag) for bag in bags]
        counts, bags = more, packed


@dataclass(frozen=True)
class _Part:
    """Some workloads of a Definition: uuid -> how many pairs are planned for it.

    ``fixed``: what its candidates cost wherever a part of it is measured, in pairs.
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
        """Workloads that stand next to each other are of like size: dealt in turn, each part has small and large ones."""
        uuids = list(self.pairs)
        return [replace(self, pairs={uuid: self.pairs[uuid] for uuid in uuids[n::count]}) for n in range(count)]


def _packed(parts: Sequence[_Part], shares: Sequence[float]) -> list[list[_Part]]:
    """Parts into bags of these shares, the costliest part first, each where it ends earliest; the costliest bag first."""
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
    """When each bag ends, in pairs, where the device that is free takes the next one."""
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
