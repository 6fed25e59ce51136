"""A runner: one Solution under one config as the harness verifies and times it, in the worker of its handle."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tilegym_db.bench.machine import Machine
from tilegym_db.catalog import SolutionFiles
from tilegym_db.records import Config, Definition, Workload
from tilegym_db.records.hardware import CPU
from tilegym_db.records.solution import name_with_config
from tilegym_db.sandbox.processes import stolen_us
from tilegym_db.sandbox.protocol import KernelUse
from tilegym_db.sandbox.shared_buffers import SharedBuffers, fill_with_garbage, plan_slot, tensor_view
from tilegym_db.verify.expected import Expected
from tilegym_db.verify.session import Verification, Verified
from tilegym_db.verify.verifier import Failure, fill_slot, judge, read_outputs, same_bytes
from tilegym_db.verify.worker_handle import WorkerHandle


@dataclass
class Runner:
    """Verification and timing of one Solution share one handle, so that what is timed is what was verified.

    ``sm`` is the machine's compute capability as Solutions declare it; ``notes`` are soft findings of the static scan.
    """

    handle: WorkerHandle
    sm: str
    notes: tuple[str, ...] = ()
    _has_been_timed: bool = False

    def __post_init__(self) -> None:
        """Nothing is verified yet."""
        self.verification = Verification(self.handle)

    @property
    def name(self) -> str:
        """The Solution's name, with the config where it has one: one Solution may run under several."""
        return name_with_config(self.solution.name, self.config)

    @property
    def definition(self) -> Definition:
        """What it computes."""
        return self.handle.definition

    @property
    def solution(self) -> SolutionFiles:
        """What is verified and timed."""
        return self.handle.solution

    @property
    def config(self) -> Config:
        """A value per tunable; empty for the source's own defaults."""
        return self.handle.config

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda:<n>``."""
        return self.handle.device

    def unsupported(self, workload: Workload) -> str | None:
        """Return why the Solution's declared limits exclude this workload, or None."""
        # On a CPU a tile language runs in its interpreter, whatever its targets are.
        target = self.sm if self.device != CPU else CPU if self.solution.record.spec.language == "python" else None
        return self.solution.record.unsupported(
            self.definition.bind_axes(workload.axes),
            self.definition.bind_dtypes(workload.dtypes),
            workload.layout_classes(self.definition),
            target=target,
        )

    # -- timing -------------------------------------------------------------------------------------------------------

    def enter(self, pool: BufferPool) -> Failure | None:
        """Map the memory that all runners are timed in; in a fresh worker where the one that was verified is lost."""
        if self.handle.is_given_up:
            return self.handle.broken
        self._has_been_timed = False
        return self.handle.load() or self.handle.attach(pool.buffers, pool.contents[0].case)

    def leave(self) -> None:
        """Let go of the pool."""
        self.handle.detach()

    def time_block(self, slots: Sequence[int]) -> tuple[list[float], list[float]] | Failure:
        """(device, host) microseconds of one call on each slot, in order, by the worker's clocks."""
        limits = self.handle.limits
        # A fresh worker compiles now, as does one whose compiler keeps a few shapes only.
        timeout_s = limits.call_s if self._has_been_timed else limits.first_call_s
        reply = self.handle.ask("time", timeout_s, slots=list(slots))
        if isinstance(reply, Failure):
            return replace(reply, reason=f"while it was timed: {reply.reason}")
        device, host = reply.content.get("device_us"), reply.content.get("host_us")
        if not _are_times(device, len(slots)) or not _are_times(host, len(slots)):
            return Failure("REJECTED", "the worker's timing reply is not a list of positive times", gate="timing reply")
        self._has_been_timed = True
        return device, host  # type: ignore[return-value]

    def check_timed_outputs(self, pool: BufferPool, verified: Verified, slots: Sequence[int]) -> Failure | None:
        """Return the timed calls must have left in their slots what the verified calls gave on the same contents."""
        record = self.solution.record
        for slot in slots:
            found = read_outputs(pool.buffers, slot, self.definition)
            number = pool.content_of(slot)
            if record.spec.deterministic:
                wrong = [name for name, want in verified.outputs[number].items() if not same_bytes(found[name], want)]
            else:
                outcome = judge(self.definition, record, pool.contents[number], found)
                wrong = [outcome.output or ""] if isinstance(outcome, Failure) else []
            if wrong:
                reason = f"{wrong[0]}: the timed calls left another result than the verified ones"
                return Failure("REJECTED", reason, gate="timed output", case=pool.contents[number].case)
        return None

    # -- the audits of a promotion ------------------------------------------------------------------------------------

    def run_calls(self, slots: Sequence[int], busy_us: float) -> Elapsed | Failure:
        """What it took from asking for one call on each slot to the answer that all is done, by this process's clock."""
        worker = self.handle.worker
        assert worker is not None
        stolen_before, before = stolen_us(), worker.processor_use()
        start = time.perf_counter_ns()
        reply = self.handle.ask("run", self.handle.limits.call_s, slots=list(slots), busy_us=busy_us)
        wall_us = (time.perf_counter_ns() - start) / 1e3
        after, stolen_after = worker.processor_use(), stolen_us()
        if isinstance(reply, Failure):
            return reply
        stolen = (now - then for then, now in zip(stolen_before, stolen_after, strict=False))
        return Elapsed(wall_us, after[0] - before[0], after[1] - before[1], max(stolen, default=0.0))

    def profile(self, slots: Sequence[int]) -> list[KernelUse] | Failure:
        """What ran on the device because of one call on each slot."""
        reply = self.handle.ask("profile", self.handle.limits.call_s, slots=list(slots))
        if isinstance(reply, Failure):
            return reply
        found = reply.content.get("activities")
        used = [KernelUse.from_message(item) for item in found] if isinstance(found, list) else [None]
        if any(use is None for use in used):
            return Failure("REJECTED", "the worker's profile is not a list of kernels", gate="ownership")
        return [use for use in used if use is not None]


def _are_times(value: object, count: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(item, float) and 0 < item < 1e12 for item in value)
    )


# ---- buffer pool ----------------------------------------------------------------------------------
# The shared memory in which all Solutions of one workload are timed, each in its turn.
#
# They all work on the very same bytes: where a block of memory lies decides up to a tenth of what a memory-bound
# kernel takes, so kernels that are compared must not lie in different places (``docs/decisions/timing.md``, 0007).

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


# ---- wall clock -----------------------------------------------------------------------------------
# Bounds a claimed latency by the harness's own clock. Pure: times in, an estimate and a reason out.
#
# A worker reports device times, and a worker may lie. What it cannot change is how long the harness waits between
# asking for calls and having their outputs, on contents that the Solution has never seen. Two estimates of one call's
# time come from that:
#
# * the slope between a short and a long run, which everything constant (asking, waking up, the null kernel) drops out
# of; * the long run alone, less what the same request with no call costs.
#
# A Solution that dawdles in the short run makes the slope small, but not the second; neither can be made small by
# more waiting.
#
# Other programs on the machine make both large. So on a CPU a claim is refuted only if it is refuted by what the run
# would have taken alone, too: the processor time of the worker and of all that it started, or the wait less the time
# for which something that was ready to run did not get a processor. The kernel counts both. Sleeping adds to the
# second, spinning to the first.
#
# In a virtual machine, what has a processor may still wait while the host runs something else on it. The kernel knows
# what the machine lost that way, but not who waited. So it excuses nobody: where it may be why a claim looks false,
# nothing can be said.

GPU_FACTOR, GPU_FLOOR_US = 1.35, 4.0
"""Calls one after another, with a warm L2, may cost this much more than one alone: launch gaps between kernels."""

GPU_CONSTANT_US = 600.0
"""What a run of honest launches was seen to cost beyond the null request, whatever the number of calls, on an H200."""

CPU_FACTOR, CPU_FLOOR_US = 2.0, 60.0
"""A processor shared with others is noisier, and there are no launches to be hidden."""


class Elapsed(NamedTuple):
    """What one run took, in microseconds.

    ``wall_us`` by the harness's clock, ``processor_us`` of processor time, all processes together, and ``queued_us`` for
    which their threads, and the harness's, were ready to run and got no processor. ``stolen_us`` is how long the host of a
    virtual machine ran something else on that of its processors which lost most.
    """

    wall_us: float
    processor_us: float
    queued_us: float
    stolen_us: float = 0.0

    @property
    def unstolen(self) -> Elapsed:
        """The same run with what the host took counted as time in a queue."""
        return self._replace(queued_us=self.queued_us + self.stolen_us)


@dataclass(frozen=True)
class WallRun:
    """Two runs by the harness's clock, in microseconds: ``calls`` calls, then three times as many.

    ``null_us`` is the same request with no call, ``noise_us`` how far such requests lie apart, ``copies_us`` what the
    worker may spend on each call beside it, copying what it returned. On a CPU, ``alone_us`` is the least that one call of
    the long run can have taken had the machine been idle, and ``unstolen_us`` the same had its host been idle, too.
    """

    calls: int
    short_us: float
    long_us: float
    null_us: float
    noise_us: float
    copies_us: float = 0.0
    alone_us: float | None = None
    unstolen_us: float | None = None

    @property
    def slope_us(self) -> float:
        """One call, from the difference of the runs."""
        return (self.long_us - self.short_us) / (2 * self.calls)

    @property
    def absolute_us(self) -> float:
        """One call, from the long run less the null request."""
        return (self.long_us - self.null_us) / (3 * self.calls)


def alone_us(run: Elapsed, null_us: float, calls: int, processors: int) -> float:
    """Return the least that one call of a run on a CPU can have taken if nothing else had kept its threads waiting.

    Args:
        run: all calls together.
        null_us: the same request with no call.
        calls: how many.
        processors: how many may have worked on one call at once.
    """
    return max(run.processor_us / processors, run.wall_us - run.queued_us - null_us) / calls


def host_may_be_why(latency_us: float, run: WallRun) -> bool:
    """Return True if a run on a CPU refutes a claim only if the host of this virtual machine did not slow it down."""
    return judge_latency(latency_us, replace(run, alone_us=run.unstolen_us), on_gpu=False) is None


def judge_latency(latency_us: float, run: WallRun, *, on_gpu: bool) -> str | None:
    """Return why the claimed latency cannot be true, or None if the harness's clock allows it."""
    factor, floor_us = (GPU_FACTOR, GPU_FLOOR_US) if on_gpu else (CPU_FACTOR, CPU_FLOOR_US)
    credible = factor * latency_us + floor_us + run.copies_us
    if run.alone_us is not None and run.alone_us <= credible:
        return None
    constant_us = max(run.noise_us, GPU_CONSTANT_US) if on_gpu else run.noise_us
    for estimate, slack, how in (
        (run.slope_us, run.noise_us / (2 * run.calls), "the slope between a short and a long run"),
        (run.absolute_us, constant_us / (3 * run.calls), "a run less the cost of asking"),
    ):
        if estimate > credible + slack:
            return (
                f"the timed calls took {latency_us:.4g} us by the worker's clock, but {estimate:.4g} us by the harness's "
                f"({how}, on contents it had not seen before)"
            )
    return None
