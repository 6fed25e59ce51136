"""The shared memory in which all Solutions of one workload are timed, each in its turn.

They all work on the very same bytes: where a block of memory lies decides up to a tenth of what a memory-bound kernel takes,
so kernels that are compared must not lie in different places (``docs/decisions/timing.md``, 0007).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilegym_db.bench.machine import Machine
from tilegym_db.records import Definition
from tilegym_db.verify.expected import Expected
from tilegym_db.verify.verifier import fill_slot
from tilegym_db.verify.worker.shared_buffers import SharedBuffers, fill_with_garbage, plan_slot, tensor_view

__all__ = ["BufferPool", "pool_bytes"]

MIN_SLOTS, MAX_SLOTS, MAX_SLOTS_ON_CPU = 4, 32, 16
"""Calls go round over this many addresses, so that none is asked for twice in a row; a CPU takes long to fill them."""


CPU_BYTES, MAX_GPU_BYTES = 256 << 20, 4 << 30


def pool_bytes(machine: Machine) -> int:
    """At most so much of a machine's device is for the pool of one workload."""
    return min(MAX_GPU_BYTES, machine.memory_bytes // 32) if machine.is_gpu else CPU_BYTES


class BufferPool:
    """Shared buffers whose slots hold the content sets of a workload in turn. Close it when every runner has detached."""

    def __init__(self, definition: Definition, contents: Sequence[Expected], device: str, buffer_bytes: int) -> None:
        """Allocate as many slots as fit in ``buffer_bytes``, within bounds, and fill them.

        Raises:
            StoreError: there is not that much memory.
        """
        self.definition = definition
        self.contents = contents
        plan = plan_slot(definition, contents[0].case)
        most = MAX_SLOTS_ON_CPU if device == "cpu" else MAX_SLOTS
        slots = max(MIN_SLOTS, len(contents), min(most, buffer_bytes // plan.size))
        self.buffers = SharedBuffers(plan, slots, device)
        self._rotation = 0
        self.fill()

    @property
    def slots(self) -> int:
        """How many calls can be made on addresses of their own."""
        return self.buffers.slots

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
            fill_slot(self.buffers, slot, self.definition, expected, None)
        self.buffers.settle()

    def prepare(self, slots: Iterable[int], *, poison: bool, byte: int | None = None) -> None:
        """Before a block: what the last one overwrote in place, as it was; with ``poison``, garbage in the outputs.

        Garbage is random, or that ``byte`` over and over, which takes no time.
        """
        if not poison and not self.definition.in_place:
            return
        for index in set(slots):
            memory = self.buffers.slot(index)
            for plan in self.buffers.plan.inputs:
                if plan.name in self.definition.in_place:
                    tensor_view(memory, plan).copy_(self.contents[self.content_of(index)].inputs[plan.name])
            for plan in self.buffers.plan.outputs if poison else ():
                output = memory[plan.offset : plan.offset + plan.span]
                fill_with_garbage(output) if byte is None else output.fill_(byte)
        self.buffers.settle()

    def close(self) -> None:
        """Give the memory back."""
        self.buffers.close()
