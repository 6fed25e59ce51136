"""Divides a plan into pieces of work for several devices, and decides what becomes of a piece that was lost. Pure.

All candidates of a Workload are in one piece, so that they are compared in the same rounds on the same device.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tilegym_db.bench.plan import DefinitionPlan

__all__ = ["MAX_LOSSES", "WorkItem", "WorkQueue", "divide"]

MAX_LOSSES = 3
"""A workload that was in flight so many times when its supervisor died is given up."""
FIXED_PAIRS = 4
"""What starting and fuzzing one candidate costs wherever its Definition is measured, in timed pairs."""
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
        """What is left of it; None where nothing is."""
        left = {uuid for uuid in self.uuids if uuid not in done}
        plans = [plan.restricted_to(left) for plan in self.plans]
        plans = [plan for plan in plans if any(map(plan.is_wanted, plan.workloads))]
        return replace(self, plans=tuple(plans)) if plans else None

    def one_by_one(self) -> list[WorkItem]:
        """An item for each of its workloads."""
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
        """The next one, or None."""
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
    """Pieces of about equal cost per device, the largest first; every planned workload is in exactly one of them.

    A Definition is divided only where it is more than half of a piece, since its candidates are started and fuzzed once more
    in every piece that has a part of it.
    """
    wanted = {id(plan): list(filter(plan.is_wanted, plan.workloads)) for plan in plans}
    plans = [plan for plan in plans if wanted[id(plan)]]
    if not plans:
        return []
    costs = {id(plan): _fixed(plan) + _pairs(plan, {w.uuid for w in wanted[id(plan)]}) for plan in plans}
    total = sum(costs.values())
    phases = max((n for n in SIZES if n == 1 or total / (devices * n) >= 2 * total / len(plans)), default=1)
    size = total / (devices * phases)
    pieces: list[tuple[DefinitionPlan, set[str]]] = []
    for plan in plans:
        uuids = [workload.uuid for workload in wanted[id(plan)]]
        parts = 1 if devices == 1 else min(len(uuids), math.ceil(2 * costs[id(plan)] / size))
        # Workloads that stand next to each other are of like size: dealt in turn, each part has small and large ones.
        pieces += [(plan, set(uuids[part::parts])) for part in range(parts)]
    shares = [share for share in SIZES[phases] for _ in range(devices)] if devices > 1 else [1.0]
    return _packed(pieces, shares)


def _packed(pieces: list[tuple[DefinitionPlan, set[str]]], shares: Sequence[float]) -> list[WorkItem]:
    """Pieces into bags of these shares: the costliest first, each where it ends earliest."""
    bags: list[dict[int, tuple[DefinitionPlan, set[str]]]] = [{} for _ in shares]
    loads = [0.0] * len(shares)
    for plan, uuids in sorted(pieces, key=lambda piece: -_fixed(piece[0]) - _pairs(*piece)):
        costs = [_pairs(plan, uuids) + (0 if id(plan) in bag else _fixed(plan)) for bag in bags]
        best = min(range(len(bags)), key=lambda n: (loads[n] + costs[n]) / shares[n])
        loads[best] += costs[best]
        bags[best].setdefault(id(plan), (plan, set()))[1].update(uuids)
    filled = sorted(((load, bag) for load, bag in zip(loads, bags, strict=True) if bag), key=lambda pair: -pair[0])
    return [WorkItem(tuple(plan.restricted_to(uuids) for plan, uuids in bag.values())) for _, bag in filled]


def _fixed(plan: DefinitionPlan) -> float:
    return FIXED_PAIRS * len(plan.candidates())


def _pairs(plan: DefinitionPlan, uuids: set[str]) -> float:
    return sum(
        plan.takes_part(solution, workload, config)
        for solution, config in plan.candidates()
        for workload in plan.workloads
        if workload.uuid in uuids
    )
