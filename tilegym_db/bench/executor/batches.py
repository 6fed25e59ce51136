"""Groups what is planned into batches: what is verified side by side, and then timed one by one on a quiet device. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilegym_db.bench.buffer_pool import pool_bytes
from tilegym_db.bench.contents import CONTENT_SETS, unusual_distributions
from tilegym_db.bench.machine import Machine
from tilegym_db.bench.plan import DefinitionPlan
from tilegym_db.records import Workload
from tilegym_db.records.case import Case
from tilegym_db.verify.worker.shared_buffers import plan_slot

__all__ = ["BATCH_WORKLOADS", "COMPILED_WORKLOADS", "Batch", "Capacity", "DefinitionGroup", "make_definition_groups"]

BATCH_WORKLOADS = 12
"""Of one Definition in one batch. The last kernel of a batch compiles alone, so that a few large batches end before many small
ones; but nothing is known of a workload before its batch has been verified."""
COMPILED_WORKLOADS = 6
"""The same where torch.compile takes part. It keeps eight graphs of a function: in a screen of one dtype, those of the fuzz cases
and of so many workloads, so that what is compiled while verifying is still there when it is timed. And where workers live under
the configs of workloads, of which there are as many."""
GPU_RUNNER_BYTES, HOST_RUNNER_BYTES = 2 << 30, 3 << 30
"""What a worker holds while it waits: its CUDA context, its kernels and what its compiler has imported."""
SUPERVISOR_BYTES = 6 << 30
"""What the measuring process holds: its CUDA context, oracles and comparisons in fp64, and the worker that audits the clock."""
MEMORY_SHARE = 3
"""One part in so many of the device's memory is for contents and outputs that wait to be timed."""
ORACLE_SIZE = 4
"""An oracle's output in fp64 takes at most so many times the memory of the output of a kernel in 16 bits."""

Batch = tuple[tuple[DefinitionPlan, Workload], ...]
"""Workloads that are verified together, in the order in which they are timed."""


@dataclass(frozen=True)
class Capacity:
    """What a machine has room for at a time: workers, bytes of contents, and workloads of one Definition."""

    runners: int
    contents_bytes: int
    workloads: int

    @classmethod
    def of(cls, machine: Machine, host_bytes: int) -> Capacity:
        """Of this machine; ``host_bytes`` is its main memory.

        A CPU is measured one workload at a time: there is nothing to gain, and every trace comes as soon as it can.
        """
        if not machine.is_gpu:
            return cls(runners=1, contents_bytes=0, workloads=1)
        contents_bytes = machine.memory_bytes // MEMORY_SHARE
        left_bytes = machine.memory_bytes - contents_bytes - pool_bytes(machine) - SUPERVISOR_BYTES
        runners = min(left_bytes // GPU_RUNNER_BYTES, host_bytes // HOST_RUNNER_BYTES)
        return cls(max(runners, 1), contents_bytes, BATCH_WORKLOADS)


@dataclass(frozen=True)
class DefinitionGroup:
    """Definitions whose workers live at the same time, and the batches that they go through."""

    plans: tuple[DefinitionPlan, ...]
    batches: tuple[Batch, ...]


def make_definition_groups(plans: Sequence[DefinitionPlan], capacity: Capacity) -> list[DefinitionGroup]:
    """Every workload that something is planned for in exactly one batch, those of one plan in their order.

    A group has at least one Definition and a batch at least one workload, whatever the capacity.
    """
    return [DefinitionGroup(group, tuple(_batches(group, capacity))) for group in _groups(plans, capacity)]


def _groups(plans: Sequence[DefinitionPlan], capacity: Capacity) -> Iterator[tuple[DefinitionPlan, ...]]:
    group: list[DefinitionPlan] = []
    taken = 0
    for plan in plans:
        wanted = _workers(plan, capacity)
        if group and taken + wanted > capacity.runners:
            yield tuple(group)
            group, taken = [], 0
        group.append(plan)
        taken += wanted
    if group:
        yield tuple(group)


def _batches(plans: Sequence[DefinitionPlan], capacity: Capacity) -> Iterator[Batch]:
    left = {id(plan): list(filter(plan.is_wanted, plan.workloads)) for plan in plans}
    while any(left.values()):
        batch: list[tuple[DefinitionPlan, Workload]] = []
        taken_bytes = 0
        for plan in plans:
            waiting = left[id(plan)]
            for _ in range(min(_at_a_time(plan, capacity), len(waiting))):
                wanted_bytes = _contents_bytes(plan, waiting[0])
                if batch and taken_bytes + wanted_bytes > capacity.contents_bytes:
                    break
                taken_bytes += wanted_bytes
                batch.append((plan, waiting.pop(0)))
        yield tuple(batch)


def _workers(plan: DefinitionPlan, capacity: Capacity) -> int:
    """How many live at a time: one for each Solution, and those under a config of one batch."""
    return len(plan.timed) + len(plan.interpreted) + _at_a_time(plan, capacity) * _configured(plan)


def _at_a_time(plan: DefinitionPlan, capacity: Capacity) -> int:
    """How many of its workloads go into one batch at most."""
    compiled = any(solution.uses_torch_compile for solution in plan.timed)
    return min(capacity.workloads, COMPILED_WORKLOADS) if compiled or _configured(plan) else capacity.workloads


def _configured(plan: DefinitionPlan) -> int:
    return max(map(plan.configured, plan.workloads), default=0)


def _contents_bytes(plan: DefinitionPlan, workload: Workload) -> int:
    """At most so much is kept of a workload until it is timed: every content set, and every runner's outputs for it."""
    runners = len(plan.timed) + len(plan.interpreted) + plan.configured(workload)
    case = Case.of_workload(plan.definition, workload, distribution=CONTENT_SETS[0], seed=0)
    slot = plan_slot(plan.definition, case)
    written = [*slot.outputs, *(tensor for tensor in slot.inputs if tensor.name in plan.definition.in_place)]
    inputs, outputs = sum(tensor.span for tensor in slot.inputs), sum(tensor.span for tensor in written)
    kept = len(CONTENT_SETS) + len(unusual_distributions(plan.definition, workload, 0))
    return kept * (inputs + outputs * (ORACLE_SIZE + runners))
