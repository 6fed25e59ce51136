"""Times what passed a Workload, audits the times where the tier asks for it, and writes a Trace of everybody."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from tilegym_db.bench.audit import PROFILED_CALLS, AuditWorker, audit_clock, audit_ownership
from tilegym_db.bench.buffer_pool import BufferPool
from tilegym_db.bench.clocks import ClockWatch
from tilegym_db.bench.contents import WorkloadContents
from tilegym_db.bench.device_lock import timing_lock
from tilegym_db.bench.executor.workload_run import WorkloadRun
from tilegym_db.bench.interleaved import TimedCandidate, TimingBudget, time_interleaved
from tilegym_db.bench.long_run import audit_long_run
from tilegym_db.bench.machine import require_healthy
from tilegym_db.bench.phases import TIME, WAIT
from tilegym_db.bench.physics import judge_time
from tilegym_db.bench.runner import Runner
from tilegym_db.bench.tracing import RunContext, fuzz_cases_of
from tilegym_db.records import Trace, Workload
from tilegym_db.records.peaks import GpuPeaks
from tilegym_db.records.trace import UNTIMED_TIERS, Audit, Performance
from tilegym_db.verify.outcome import CANNOT_VERIFY, Failure
from tilegym_db.verify.ownership import Ownership
from tilegym_db.verify.variation import scalar_ranges

__all__ = ["AfterTiming", "Emit", "WorkloadTiming"]

Emit = Callable[[Trace], None]
AfterTiming = Callable[[Workload, Sequence[TimedCandidate[Runner]]], None]

CLOCK_INTERVAL_S = 0.02
"""Shorter than a round, so that each is seen while the device works: one that idles does not say that it is hot."""


@dataclass
class WorkloadTiming:
    """How the workloads of a run are timed and concluded; one after the other, on a quiet device.

    Args:
        context: run id, machine and secret seed.
        budget: how long to time.
        emit: called with every trace the moment it exists.
        after_timing: called after every workload with its workload and candidates, whose rounds are the raw times.
        peaks: what this device can do; None where that is not known.
        audit_worker: what asking a worker costs; None where the tier audits nothing.
    """

    context: RunContext
    budget: TimingBudget
    emit: Emit
    after_timing: AfterTiming
    peaks: GpuPeaks | None
    audit_worker: AuditWorker | None

    def conclude(self, workload_run: WorkloadRun) -> None:
        """A trace of every runner: of the failure that verification found, of the pass, or of what timing found."""
        candidates: list[TimedCandidate[Runner]] = []
        for runner in workload_run.runners:
            outcome, level = workload_run.outcomes[runner.name]
            if isinstance(outcome, Failure):
                self._emit_failure(workload_run, runner, outcome, level)
            else:
                is_best = workload_run.plan.is_current_best(runner.solution, workload_run.workload, runner.config)
                candidates.append(TimedCandidate(runner, outcome, current_best=is_best))
        if not candidates:
            return
        assert workload_run.contents is not None
        contents = workload_run.contents.result()
        assert not isinstance(contents, Failure)
        timed = []
        for candidate in candidates:
            if candidate.runner.handle.policy.tier in UNTIMED_TIERS:
                self._emit_pass(workload_run, candidate, contents, None, None)
            else:
                timed.append(candidate)
        if timed:
            self._time(workload_run, contents, timed)

    def _time(
        self, workload_run: WorkloadRun, contents: WorkloadContents, candidates: list[TimedCandidate[Runner]]
    ) -> None:
        order, device = random.Random(self.context.seed).randrange(1 << 62), self.context.machine.device
        try:
            buffer_bytes = candidates[0].runner.handle.limits.buffer_bytes
            pool = BufferPool(workload_run.plan.definition, contents.sets, device, buffer_bytes)
        except CANNOT_VERIFY as error:
            for candidate in candidates:
                self._lose(workload_run, candidate.runner, Failure("UNSUPPORTED", f"cannot be timed here: {error}"))
            return
        try:
            for candidate in candidates:
                candidate.failure = candidate.runner.enter(pool)
            with ExitStack() as stack:
                with self.context.phases(WAIT):
                    stack.enter_context(timing_lock(device))
                clocks = stack.enter_context(ClockWatch(device, CLOCK_INTERVAL_S))
                stack.enter_context(self.context.phases(TIME))
                results = time_interleaved(candidates, pool, self.budget, order, clocks)
                self.after_timing(contents.workload, candidates)
                for candidate in candidates:
                    self._judge(workload_run, contents, pool, candidate, results[candidate.runner.name])
        finally:
            for candidate in candidates:
                candidate.runner.leave()
            pool.close()

    def _judge(
        self,
        workload_run: WorkloadRun,
        contents: WorkloadContents,
        pool: BufferPool,
        candidate: TimedCandidate[Runner],
        result: Performance | Failure,
    ) -> None:
        runner = candidate.runner
        if not isinstance(result, Failure) and self.peaks is not None:
            definition, workload = workload_run.plan.definition, workload_run.workload
            result = judge_time(result, definition, runner.solution.record, workload, self.peaks)
        audit: Audit | Failure | None = None
        if not isinstance(result, Failure) and self.audit_worker is not None:
            audit = self._audit(runner, self.audit_worker, pool, contents, result)
        failure = result if isinstance(result, Failure) else audit
        if isinstance(failure, Failure):
            self._lose(workload_run, runner, failure)
        else:
            assert not isinstance(result, Failure)
            self._emit_pass(workload_run, candidate, contents, result, failure)

    def _audit(
        self,
        runner: Runner,
        audit_worker: AuditWorker,
        pool: BufferPool,
        contents: WorkloadContents,
        performance: Performance,
    ) -> Audit | Failure:
        """Who did the work, then whether the time can be true: the second overwrites the pool's contents."""
        owned: Ownership | None = None
        if self.context.machine.is_gpu:
            pool.fill()
            found = audit_ownership(runner, pool)
            if isinstance(found, Failure):
                return found
            owned = found
        try:
            worn = audit_long_run(runner, pool, performance, self.context.seed)
            if worn is not None:
                return worn
            activities = 0 if owned is None else owned.activities
            wall_us = audit_clock(runner, audit_worker, pool, contents, performance, activities)
        except CANNOT_VERIFY as error:
            return Failure("UNSUPPORTED", f"its time cannot be checked on this machine: {error}")
        if isinstance(wall_us, Failure):
            return wall_us
        changed = runner.handle.check_state()
        if changed is not None:
            return changed
        return Audit(
            wall_us=round(wall_us, 3),
            owned_share=None if owned is None else round(owned.share, 4),
            profiled_us=None if owned is None else round(owned.total_us / PROFILED_CALLS, 3),
            kernels=() if owned is None else owned.kernels,
            notes=runner.notes,
        )

    # -- traces -------------------------------------------------------------------------------------------------------

    def _lose(self, workload_run: WorkloadRun, runner: Runner, failure: Failure) -> None:
        """What is to be done after a failure while timing."""
        level = runner.handle.sandbox_level
        if runner.handle.after_failure(failure):
            require_healthy(self.context.machine)
        self._emit_failure(workload_run, runner, failure, level)

    def _emit_failure(self, workload_run: WorkloadRun, runner: Runner, failure: Failure, level: int) -> None:
        tier, definition, workload = runner.handle.policy.tier, workload_run.plan.definition, workload_run.workload
        self.emit(self.context.failed(definition, runner.solution, workload, tier, failure, runner.config, level))

    def _emit_pass(
        self,
        workload_run: WorkloadRun,
        candidate: TimedCandidate[Runner],
        contents: WorkloadContents,
        performance: Performance | None,
        audit: Audit | None,
    ) -> None:
        verified, runner, definition = candidate.verified, candidate.runner, workload_run.plan.definition
        calls = [*verified.fuzz.scalars, contents.workload.scalars()]
        if contents.other is not None:
            calls.append(contents.other.case.scalars)
        ranges = scalar_ranges(definition, calls)
        cases = [*verified.fuzz.passed, *(str(expected.case) for expected in contents.verified)]
        self.emit(
            self.context.passed(
                definition,
                runner.solution,
                workload_run.workload,
                runner.handle.policy.tier,
                verified.verdict.correctness("as_written" if definition.oracle == "as_written" else "fp64"),
                performance,
                fuzz_cases_of(cases, [*verified.fuzz.dropped, *contents.dropped], self.context.seed, ranges),
                audit,
                runner.config,
                runner.handle.sandbox_level,
            )
        )
