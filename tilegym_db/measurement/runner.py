"""Runners: a runner verifies and times one Solution under one config, in the worker of its handle.

The module also has the shared buffers for timing and the wall-clock check of latencies.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tilegym_db.catalog import SolutionFiles
from tilegym_db.measurement.machine import Machine
from tilegym_db.paths import number_of_setting
from tilegym_db.records import Config, Definition, Workload
from tilegym_db.records.hardware import CPU
from tilegym_db.records.solution import name_with_config
from tilegym_db.records.verdicts import MACHINE_SLOW
from tilegym_db.sandbox.processes import stolen_us
from tilegym_db.sandbox.protocol import KernelUse
from tilegym_db.sandbox.shared_buffers import (
    SharedBuffers,
    SlotPlan,
    fill_with_garbage,
    plan_slot,
    same_bytes,
    tensor_view,
)
from tilegym_db.verification.expected import OracleCase
from tilegym_db.verification.session import Verification, VerifiedWorkload
from tilegym_db.verification.verifier import Failure, fill_slot, judge, read_outputs
from tilegym_db.verification.worker_handle import WorkerHandle


@dataclass
class Runner:
    """A Solution under one config. Verification and timing share one handle, so that the timed code is the verified code.

    ``sm`` is the machine's compute capability as Solutions declare it; ``notes`` are soft findings of the static scan.
    """

    handle: WorkerHandle
    sm: str
    notes: tuple[str, ...] = ()
    waits: Waits = field(default_factory=lambda: Waits())
    """The waits for a processor during the timed blocks on a CPU."""
    _has_been_timed: bool = False

    def __post_init__(self) -> None:
        """Create the verification."""
        self.verification = Verification(self.handle)

    @property
    def name(self) -> str:
        """The Solution's name, with the config if there is one: a Solution may run under several."""
        return name_with_config(self.solution.name, self.config)

    @property
    def definition(self) -> Definition:
        """The operator that the Solution implements."""
        return self.handle.definition

    @property
    def solution(self) -> SolutionFiles:
        """The Solution that is verified and timed."""
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
        """Return the reason why the Solution's declared limits exclude this workload, or None."""
        # On a CPU, tile languages run in their interpreters, for any targets.
        target = self.sm if self.device != CPU else CPU if self.solution.record.spec.language == "python" else None
        return self.solution.record.unsupported_at(self.definition, workload, target)

    # -- timing -------------------------------------------------------------------------------------------------------

    def enter(self, pool: BufferPool) -> Failure | None:
        """Map the shared memory for timing. If the verified worker was lost, start a fresh one first."""
        if self.handle.is_given_up:
            return self.handle.broken
        self._has_been_timed, self.waits = False, Waits()
        return self.handle.load() or self.handle.attach(pool.buffers, pool.contents[0].case)

    def leave(self) -> None:
        """Unmap the pool."""
        self.handle.detach()

    def time_block(self, slots: Sequence[int]) -> tuple[list[float], list[float]] | Failure:
        """Return the (device, host) microseconds of one call on each slot, in order, by the worker's clocks."""
        limits = self.handle.limits
        # A fresh worker compiles now, and so does a worker whose compiler caches only a few shapes.
        timeout_s = limits.call_s if self._has_been_timed else limits.first_call_s
        with self._waiting():
            reply = self.handle.ask("time", timeout_s, slots=list(slots))
        if isinstance(reply, Failure):
            return replace(reply, reason=f"while it was timed: {reply.reason}")
        device, host = reply.content.get("device_us"), reply.content.get("host_us")
        if not _are_times(device, len(slots)) or not _are_times(host, len(slots)):
            return Failure("REJECTED", "the worker's timing reply is not a list of positive times", gate="timing reply")
        self._has_been_timed = True
        return device, host  # type: ignore[return-value]

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Add the time that a block on a CPU ran, and the time that it waited, to :attr:`waits`.

        The first block is left out, because it may compile.
        """
        worker = self.handle.worker
        if self.device != CPU or worker is None or not self._has_been_timed:
            yield
            return
        stolen_before, queued, start = stolen_us(), worker.queued_us, time.perf_counter_ns()
        yield
        wall = (time.perf_counter_ns() - start) / 1e3
        stolen = max((now - then for then, now in zip(stolen_before, stolen_us(), strict=False)), default=0.0)
        self.waits = self.waits.plus(wall, max(worker.queued_us - queued, 0.0) + stolen)

    def check_timed_outputs(self, pool: BufferPool, verified: VerifiedWorkload, slots: Sequence[int]) -> Failure | None:
        """Return a failure if the timed calls left other outputs in their slots than the verified calls on the same
        contents.
        """
        record = self.solution.record
        for slot in slots:
            found = read_outputs(pool.buffers, slot, self.definition)
            number = pool.content_of(slot)
            if record.spec.deterministic:
                wrong = [name for name, want in verified.outputs[number].items() if not same_bytes(found[name], want)]
            else:
                outcome = judge(self.definition, record, pool.contents[number].with_tensors(), found)
                wrong = [outcome.output or ""] if isinstance(outcome, Failure) else []
            if wrong:
                reason = f"{wrong[0]}: the timed calls left another result than the verified ones"
                return Failure("REJECTED", reason, gate="timed output", case=pool.contents[number].case)
        return None

    # -- audits of the promotion tier ---------------------------------------------------------------------------------

    def run_calls(self, slots: Sequence[int], busy_us: float) -> Elapsed | Failure:
        """Return the time from the request for one call on each slot to the reply, by this process's clock."""
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
        """Return the device activities of one call on each slot."""
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


# ---- waiting --------------------------------------------------------------------------------------
# Decide whether other programs kept the timed calls on a CPU waiting for too long. Pure.
#
# Interleaved rounds share a slow machine fairly only if their calls wait alike. A call with two threads waits for the second one,
# and a call with one thread may find a free processor. On a busy machine a kernel seemed 1.76x as fast as stock code, with an
# interval from 1.59x, and was 0.98x as fast minutes later.

MAX_WAITING = "TILEGYM_DB_MAX_WAITING"
"""Variable for the maximum share of waiting, for a machine that is always busy, such as one that runs tests side by side."""


def max_waiting_share() -> float:
    """Return the maximum share of the time of timed calls on a CPU for which threads may wait for a processor."""
    return number_of_setting(MAX_WAITING, 0.25)


class Waits(NamedTuple):
    """Microseconds of timed blocks: by the clock, and those in which threads were ready and had no processor, or the host of a
    virtual machine withheld one.
    """

    wall_us: float = 0.0
    waited_us: float = 0.0

    def plus(self, wall_us: float, waited_us: float) -> Waits:
        """Return the sum with another block."""
        return Waits(self.wall_us + wall_us, self.waited_us + waited_us)


def why_too_busy(waits: Mapping[str, Waits], most: float, load: float) -> str | None:
    """Return the reason why the times of runners on a CPU decide nothing, or None.

    Times are compared with each other, so the runner that waited longest decides for all. ``load`` is for the reason.
    """
    shares = {name: found.waited_us / found.wall_us for name, found in waits.items() if found.wall_us > 0}
    name = max(shares, key=lambda one: shares[one], default="")
    if not name or shares[name] <= most:
        return None
    return (
        f"{MACHINE_SLOW}: threads of {name} waited for a processor for {shares[name]:.0%} of the time of its calls, and at most "
        f"{most:.0%} is allowed. Other programs were busy (load {load:.1f}); repeat the command when the machine is less busy"
    )


# ---- buffer pool ----------------------------------------------------------------------------------
# Shared memory in which all Solutions of one workload are timed, one after the other.
#
# All of them work on the same bytes: the place of a block in memory decides up to a tenth of the time of a memory-bound
# kernel (``docs/decisions/timing.md``, 0007).

MIN_SLOTS, MAX_SLOTS, MAX_SLOTS_ON_CPU = 4, 32, 16
"""Limits of the number of slots. Calls rotate over the slots, so that no address is used twice in a row. A CPU has fewer,
since filling them takes long.
"""


CPU_BYTES, MAX_GPU_BYTES = 256 << 20, 4 << 30


def pool_bytes(machine: Machine) -> int:
    """Return the maximum size of the pool of one workload on a machine's device, in bytes."""
    return min(MAX_GPU_BYTES, machine.memory_bytes // 32) if machine.is_gpu else CPU_BYTES


def slots_of(plan: SlotPlan, sets: int, device: str, buffer_bytes: int) -> int:
    """Return the number of slots of a pool for so many content sets."""
    most = MAX_SLOTS_ON_CPU if device == CPU else MAX_SLOTS
    return max(MIN_SLOTS, sets, min(most, buffer_bytes // plan.size))


class BufferPool:
    """Shared buffers whose slots hold the content sets of a workload in turn. Close it after every runner has detached."""

    def __init__(self, definition: Definition, contents: Sequence[OracleCase], device: str, buffer_bytes: int) -> None:
        """Allocate as many slots as fit in ``buffer_bytes``, within limits, and fill them."""
        self.definition = definition
        self.contents = contents
        plan = plan_slot(definition, contents[0].case)
        self.buffers = SharedBuffers(plan, slots_of(plan, len(contents), device, buffer_bytes), device)
        self._rotation = 0
        try:
            self.fill()
        except BaseException:
            self.close()  # the caller gets no pool to close
            raise

    @property
    def slots(self) -> int:
        """The number of slots; each has its own addresses."""
        return self.buffers.slots

    def content_of(self, slot: int) -> int:
        """Return the index of the content set in a slot."""
        return (slot + self._rotation) % len(self.contents)

    def fill(self) -> None:
        """Refill every slot with other contents than before, and the outputs with random garbage.

        A kernel that returns an output cached by address is then wrong.
        """
        self._rotation += 1
        self.fill_with(self.contents[self.content_of(slot)] for slot in range(self.slots))

    def fill_with(self, contents: Iterable[OracleCase]) -> None:
        """Fill the slots with the given contents, and the outputs with random garbage; return when the data has arrived."""
        for slot, expected in enumerate(contents):
            fill_slot(self.buffers, slot, self.definition, expected.with_inputs(), None)
        self.buffers.settle()

    def prepare(self, slots: Iterable[int], *, poison: bool, byte: int | None = None) -> None:
        """Prepare slots for a block: restore the inputs that were overwritten in place, and with ``poison`` fill the
        outputs with garbage.

        The garbage is random, or repeats ``byte``, which takes almost no time.
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
        """Free the memory."""
        self.buffers.close()


# ---- wall clock -----------------------------------------------------------------------------------
# Check a claimed latency with the harness's own clock. Pure.
#
# A worker reports device times, and these can be false. A worker cannot change how long the harness waits between a request
# and its outputs, on contents that the Solution has never seen. Two estimates of one call's time follow from that wait:
#
# 1. The slope between a short and a long run. All constant costs (request, wake-up, empty kernel) cancel.
# 2. The long run alone, less the time of an empty request. A Solution that is slow on purpose in the short run reduces the
# slope, but not this estimate.
#
# Other programs on the machine increase both estimates. So on a CPU, a claim is rejected only if the time that the run
# would have taken alone contradicts it as well. That time is the larger of two values from the kernel's counters: the
# processor time of the worker and its children, and the wait less the time in which ready threads had no processor.
# Sleeping increases the second, spinning the first.
#
# In a virtual machine, the host may run something else while a thread has a processor. The kernel counts this time for the
# machine, but not per process. If it may explain why a claim looks false, the check has no result.

GPU_FACTOR, GPU_FLOOR_US = 1.35, 4.0
"""Calls in sequence with a warm L2 may take this much longer than one call: there are launch gaps between kernels."""

GPU_CONSTANT_US = 600.0
"""Maximum cost of a run beyond the empty request, for any number of calls, as observed on an H200."""

CPU_FACTOR, CPU_FLOOR_US = 2.0, 60.0
"""Limits for a CPU. A shared processor is noisier, and there are no launches to hide."""


class Elapsed(NamedTuple):
    """The times of one run, in microseconds.

    ``wall_us`` is by the harness's clock. ``processor_us`` is the processor time of all processes together. ``queued_us``
    is the time in which their threads, or the harness's, were ready but had no processor. ``stolen_us`` is the time that
    the host of a virtual machine took from the processor that lost most.
    """

    wall_us: float
    processor_us: float
    queued_us: float
    stolen_us: float = 0.0

    @property
    def unstolen(self) -> Elapsed:
        """The run with the time stolen by the host added to the time in a queue."""
        return self._replace(queued_us=self.queued_us + self.stolen_us)


@dataclass(frozen=True)
class WallRun:
    """Two runs by the harness's clock, in microseconds: one of ``calls`` calls, and one of three times as many.

    Attributes:
        calls: those of the short run.
        short_us, long_us: the times of the two runs.
        null_us, noise_us: the time of an empty request, and its spread.
        copies_us: the time a call that the worker may spend on copying returned outputs.
        alone_us: on a CPU, the least that one call of the long run takes if no other program runs.
        unstolen_us: the same if no other guest of the host runs either.
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
        """Time of one call, from the difference of the runs."""
        return (self.long_us - self.short_us) / (2 * self.calls)

    @property
    def absolute_us(self) -> float:
        """Time of one call: the long run minus an empty request, divided by the calls."""
        return (self.long_us - self.null_us) / (3 * self.calls)


def alone_us(run: Elapsed, null_us: float, calls: int, processors: int) -> float:
    """Return the least microseconds of one call of a run on a CPU if nothing else had kept its threads waiting.

    ``null_us`` is the time of an empty request, and ``processors`` the most that worked on one call.
    """
    return max(run.processor_us / processors, run.wall_us - run.queued_us - null_us) / calls


def may_be_host_delay(latency_us: float, run: WallRun) -> bool:
    """Return True if a delay by the host of this virtual machine would explain a false-looking claim on a CPU."""
    return check_latency(latency_us, replace(run, alone_us=run.unstolen_us), on_gpu=False) is None


def check_latency(latency_us: float, run: WallRun, *, on_gpu: bool) -> str | None:
    """Return the reason why the claimed latency cannot be true, or None if the harness's clock allows it."""
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
