"""The shared memory in which all Solutions of one workload are timed, each in its turn.

They all work on the very same bytes: where a block of memory lies decides up to a tenth of what a memory-bound kernel takes,
so kernels that are compared must not lie in different places (``docs/decisions/0007-one-shared-arena.md``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilegym_db.bench.machine import Machine
from tilegym_db.records import Definition
from tilegym_db.verify.sandbox.arena import Arena, fill_with_garbage, plan_slot, tensor_view
from tilegym_db.verify.verifier import Expected, fill_slot

__all__ = ["Stage", "stage_bytes"]

MIN_SLOTS, MAX_SLOTS, MAX_SLOTS_ON_CPU = 4, 32, 16
"""Calls go round over this many addresses, so that none is asked for twice in a row; a CPU takes long to fill them."""


CPU_BYTES, MAX_GPU_BYTES = 256 << 20, 4 << 30


def stage_bytes(machine: Machine) -> int:
    """At most so much of a machine's device is for the stage of one workload."""
    return min(MAX_GPU_BYTES, machine.memory_bytes // 32) if machine.is_gpu else CPU_BYTES


class Stage:
    """One arena whose slots hold the content sets of a workload in turn. Close it when every member has detached."""

    def __init__(self, definition: Definition, contents: Sequence[Expected], device: str, arena_bytes: int) -> None:
        """Allocate as many slots as fit in ``arena_bytes``, within bounds, and fill them.

        Raises:
            StoreError: there is not that much memory.
        """
        self.definition = definition
        self.contents = contents
        plan = plan_slot(definition, contents[0].case)
        most = MAX_SLOTS_ON_CPU if device == "cpu" else MAX_SLOTS
        slots = max(MIN_SLOTS, len(contents), min(most, arena_bytes // plan.size))
        self.arena = Arena(plan, slots, device)
        self._rotation = 0
        self.fill()

    @property
    def slots(self) -> int:
        """How many calls can be made on addresses of their own."""
        return self.arena.slots

    def content_of(self, slot: int) -> int:
        """Index of the content set that a slot holds."""
        return (slot + self._rotation) % len(self.contents)

    def fill(self) -> None:
        """Other contents than before and random garbage in every slot.

        An output that is remembered by its address is then a wrong one.
        """
        self._rotation += 1
        self.fill_with(self.contents[self.content_of(slot)] for slot in range(self.slots))

    def fill_with(self, contents: Iterable[Expected]) -> None:
        """The given contents, slot by slot, and random garbage in the outputs; returns when they have arrived."""
        for slot, expected in enumerate(contents):
            fill_slot(self.arena, slot, self.definition, expected, None)
        self.arena.settle()

    def prepare(self, slots: Iterable[int], *, poison: bool) -> None:
        """Before a block: what the last one overwrote in place, as it was; with ``poison``, garbage in the outputs."""
        if not poison and not self.definition.in_place:
            return
        for index in set(slots):
            memory = self.arena.slot(index)
            for plan in self.arena.plan.inputs:
                if plan.name in self.definition.in_place:
                    tensor_view(memory, plan).copy_(self.contents[self.content_of(index)].inputs[plan.name])
            for plan in self.arena.plan.outputs if poison else ():
                fill_with_garbage(memory[plan.offset : plan.offset + plan.span])
        self.arena.settle()

    def close(self) -> None:
        """Give the memory back."""
        self.arena.close()
