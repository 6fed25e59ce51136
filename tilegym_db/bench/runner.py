"""A runner: one Solution under one config as the harness verifies and times it, in the worker of its handle."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilegym_db.bench.buffer_pool import BufferPool
from tilegym_db.bench.verification import Verification, Verified
from tilegym_db.bench.worker_handle import WorkerHandle
from tilegym_db.catalog import SolutionFiles
from tilegym_db.confinement.processes import stolen_us
from tilegym_db.records import Config, Definition, Workload
from tilegym_db.records.hardware import CPU
from tilegym_db.records.solution import name_with_config
from tilegym_db.verify.verifier import Failure, judge, read_outputs, same_bytes
from tilegym_db.verify.wall_clock import Elapsed
from tilegym_db.verify.worker.reply import KernelUse

__all__ = ["Runner"]


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
        """Why the Solution's declared limits exclude this workload, or None."""
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
        """The timed calls must have left in their slots what the verified calls gave on the same contents."""
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
