"""Timing of the Solutions that passed verification on a Workload: audits of their times, and a Trace for each Solution."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from tilegym_db.measurement.audit import PROFILED_CALLS, AuditWorker, Ownership, audit_clock, audit_ownership
from tilegym_db.measurement.machine import require_healthy, timing_lock
from tilegym_db.measurement.plan import DefinitionPlan
from tilegym_db.measurement.run_setup import RunContext, extent_of, fuzz_cases_of
from tilegym_db.measurement.runner import BufferPool, Runner, Waits, max_waiting_share, why_too_busy
from tilegym_db.measurement.timing import ClockWatch, TimedCandidate, TimingBudget, time_interleaved
from tilegym_db.records import Definition, Solution, Trace, Workload
from tilegym_db.records.call import is_code_selecting
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.roofline import GpuPeaks, below_floor, sol_ratio, speed_of_light, stated_peaks
from tilegym_db.records.trace import Audit, Performance
from tilegym_db.records.verdicts import UNTIMED_TIERS
from tilegym_db.verification.expected import (
    KEPT_BYTES,
    ExpectedCache,
    WorkloadContents,
    give_back_memory,
    raising_out_of_memory,
)
from tilegym_db.verification.phases import CLOCK, LONG_RUN, OWNERSHIP, ROUNDS, TIME, WAIT
from tilegym_db.verification.session import VerifiedWorkload
from tilegym_db.verification.verifier import CANNOT_VERIFY, Failure

Emit = Callable[[Trace], None]
AfterTiming = Callable[[Workload, Sequence[TimedCandidate[Runner]]], None]

CLOCK_INTERVAL_S = 0.02
"""Seconds between two clock samples. It is shorter than a round, so that each round is sampled while the device works; the
clock of an idle device says nothing.
"""


@dataclass
class WorkloadTiming:
    """Timing and conclusion of the workloads of a run, one after the other, on a quiet device.

    Args:
        after_timing: called after each workload with the workload and its candidates; their rounds are the raw times.
        audit_worker: measures the cost of an empty request; None if the tier has no audits.
    """

    context: RunContext
    budget: TimingBudget
    emit: Emit
    after_timing: AfterTiming
    peaks: GpuPeaks | None
    audit_worker: AuditWorker | None

    def conclude(self, workload_run: WorkloadRun) -> None:
        """Emit a trace for each runner: its failure in verification, its pass, or its failure in timing."""
        candidates: list[TimedCandidate[Runner]] = []
        for runner in workload_run.runners:
            if runner.name not in workload_run.outcomes:
                continue  # it was only to be compared with, and nothing is left to compare
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
            contents.free_verified()
            self._time(workload_run, contents, timed)

    def _time(
        self, workload_run: WorkloadRun, contents: WorkloadContents, candidates: list[TimedCandidate[Runner]]
    ) -> None:
        order, device = random.Random(self.context.seed).randrange(1 << 62), self.context.machine.device
        try:
            buffer_bytes = candidates[0].runner.handle.limits.buffer_bytes
            with raising_out_of_memory():
                pool: BufferPool | Failure = BufferPool(
                    workload_run.plan.definition, contents.sets, device, buffer_bytes
                )
        except CANNOT_VERIFY as error:
            pool = Failure("UNSUPPORTED", f"cannot be timed here: {error}")
        if isinstance(pool, Failure):
            give_back_memory(device)
            for candidate in candidates:
                self._fail(workload_run, candidate.runner, pool)
            return
        try:
            for candidate in candidates:
                candidate.failure = candidate.runner.enter(pool)
            with ExitStack() as stack:
                with self.context.phases(WAIT):
                    stack.enter_context(timing_lock(device))
                clocks = stack.enter_context(ClockWatch(device, CLOCK_INTERVAL_S))
                stack.enter_context(self.context.phases(TIME))
                with self.context.phases(ROUNDS, workload_run.plan.definition.name):
                    results = self._results(candidates, pool, order, clocks)
                self.after_timing(contents.workload, candidates)
                for candidate in candidates:
                    self._judge(workload_run, contents, pool, candidate, results[candidate.runner.name])
        finally:
            for candidate in candidates:
                candidate.runner.leave()
            pool.close()

    def _results(
        self, candidates: list[TimedCandidate[Runner]], pool: BufferPool, order: int, clocks: ClockWatch
    ) -> dict[str, Performance | Failure]:
        """Return the outcome of the timing. On a busy CPU it is repeated once. If the CPU is still busy, passes are
        UNSUPPORTED.
        """
        results = time_interleaved(candidates, pool, self.budget, order, clocks)
        if self.audit_worker is None or self._why_too_busy(candidates) is None:
            return results
        for candidate in candidates:
            candidate.forget()
            candidate.runner.waits = Waits()
        results = time_interleaved(candidates, pool, self.budget, order + 1, clocks)
        busy = self._why_too_busy(candidates)
        if busy is None:
            return results
        return {
            name: found if isinstance(found, Failure) else Failure("UNSUPPORTED", busy)
            for name, found in results.items()
        }

    @staticmethod
    def _why_too_busy(candidates: Sequence[TimedCandidate[Runner]]) -> str | None:
        waits = {candidate.runner.name: candidate.runner.waits for candidate in candidates}
        return why_too_busy(waits, max_waiting_share(), os.getloadavg()[0])

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
            result = check_time(result, definition, runner.solution.record, workload, self.peaks)
        audit: Audit | Failure | None = None
        if not isinstance(result, Failure) and self.audit_worker is not None:
            audit = self._audit(runner, self.audit_worker, pool, contents, result)
        failure = result if isinstance(result, Failure) else audit
        if isinstance(failure, Failure):
            self._fail(workload_run, runner, failure)
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
        """Check whose kernels ran, then whether the time is plausible. The second check overwrites the pool's contents."""
        owned: Ownership | None = None
        phases, name = self.context.phases, runner.solution.name
        if self.context.machine.is_gpu:
            pool.fill()
            with phases(OWNERSHIP, name):
                found = audit_ownership(runner, pool)
            if isinstance(found, Failure):
                return found
            owned = found
        unchecked = ""
        try:
            with raising_out_of_memory():
                with phases(LONG_RUN, name):
                    changed_inputs = audit_long_run(runner, pool, performance, self.context.seed)
                if changed_inputs is not None:
                    return changed_inputs
                activities = 0 if owned is None else owned.activities
                with phases(CLOCK, name):
                    wall_us = audit_clock(runner, audit_worker, pool, contents, performance, activities)
        except CANNOT_VERIFY as error:
            unchecked = f"its time cannot be checked on this machine: {error}"
        if unchecked:
            give_back_memory(self.context.machine.device)
            return Failure("UNSUPPORTED", unchecked)
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

    def _fail(self, workload_run: WorkloadRun, runner: Runner, failure: Failure) -> None:
        """Clean up after a failure during timing and emit its trace."""
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
        if contents.other is not None and not verified.is_other_excused:
            calls.append(contents.other.case.call.scalars)
        ranges = _scalar_ranges(definition, calls)
        reached = extent_of(definition, verified.fuzz.large)
        slices = verified.fuzz.slices + verified.verdict.slices
        cases = [*verified.fuzz.passed, *(str(expected.case) for expected in contents.verified)]
        self.emit(
            self.context.passed(
                definition,
                runner.solution,
                workload_run.workload,
                runner.handle.policy.tier,
                verified.verdict.correctness("as_written" if definition.oracle == "as_written" else "fp64"),
                performance,
                fuzz_cases_of(
                    cases, [*verified.fuzz.dropped, *contents.dropped], self.context.seed, ranges, reached, slices
                ),
                audit,
                runner.config,
                runner.handle.sandbox_level,
            )
        )


# ---- workload run ---------------------------------------------------------------------------------
# The state of one Workload between its contents and its traces, and the runners of one Definition.


@dataclass
class WorkloadRun:
    """One workload in a batch: its runners, their contents, and the outcome of each verification."""

    plan: DefinitionPlan
    workload: Workload
    runners: list[Runner]
    cache: ExpectedCache
    contents: Future[WorkloadContents | Failure] | None = None
    outcomes: dict[str, tuple[VerifiedWorkload | Failure, int]] = field(default_factory=dict)
    """Runner name -> its outcome, and the sandbox level of its worker."""

    def is_asked(self, runner: Runner) -> bool:
        """Return True if the runner is planned for itself, and not only to compare others with it."""
        return self.plan.is_asked(runner.solution, self.workload, runner.config)

    @property
    def has_winner(self) -> bool:
        """True if a runner that is planned for itself passed its verification."""
        return any(
            self.is_asked(runner) and not isinstance(self.outcomes[runner.name][0], Failure)
            for runner in self.runners
            if runner.name in self.outcomes
        )

    @property
    def lacked_memory(self) -> bool:
        """True if the GPU ran out of memory for a runner while others were verified in parallel."""
        return any(isinstance(outcome, Failure) and outcome.no_memory for outcome, _ in self.outcomes.values())

    def __str__(self) -> str:
        return f"{self.plan.definition.name} {' '.join(f'{k}={v}' for k, v in self.workload.axes.items())}"


@dataclass
class SolutionGroup:
    """All runners of one Definition, and the cache of oracle outputs that they share."""

    plan: DefinitionPlan
    cache: ExpectedCache
    runners: list[Runner] = field(default_factory=list)

    def workload_run(self, workload: Workload) -> WorkloadRun:
        """Return the run of a workload with the runners that are planned for it."""
        takes_part = self.plan.takes_part
        runners = [runner for runner in self.runners if takes_part(runner.solution, workload, runner.config)]
        return WorkloadRun(self.plan, workload, runners, self.cache)

    def rest(self) -> None:
        """Clear the cache after a batch, and end workers that run under a tuned config.

        Each workload may have another config, so such workers would pile up.
        """
        self.cache.clear()
        for runner in self.runners:
            if runner.config:
                runner.handle.close()

    def close_workers(self) -> None:
        """End every worker to free the memory of the device. A worker starts again when it is needed."""
        self.cache.clear()
        for runner in self.runners:
            runner.handle.close()


# ---- physics --------------------------------------------------------------------------------------
# Compare a measured time with the peaks of the GPU: compute its share of the speed of light, or reject it.

GATE = "physics floor"


def check_time(
    performance: Performance, definition: Definition, solution: Solution, workload: Workload, peaks: GpuPeaks
) -> Performance | Failure:
    """Return the performance with ``sol_us`` and ``sol_ratio``, or a rejection if no implementation could be that fast.

    The share is of the stated peaks of the GPU model, so that figures of all machines are of one scale. A GPU without stated
    peaks has those of its calibration. A Definition without a cost has no speed of light; its performance is returned unchanged.
    """
    light = speed_of_light(
        definition,
        definition.bind_axes(workload.axes),
        definition.bind_dtypes(workload.dtypes),
        stated_peaks(peaks.gpu) or peaks,
        math_mode=solution.spec.math,
    )
    if light is None:
        return performance
    impossible = below_floor(performance.latency_us, light, peaks, cold_l2=performance.cold_l2, timer=performance.timer)
    if impossible is not None:
        return Failure("REJECTED", impossible, gate=GATE)
    ratio = sol_ratio(light, performance.latency_us)
    return performance.model_copy(update={"sol_us": round(light.us, 4), "sol_ratio": round(ratio, 4)})


# ---- long run -------------------------------------------------------------------------------------
# Calls before the clock audit, during which the harness watches the inputs. The sequences of verification make many more.

LONG_RUN_CALLS = 1000
LONG_RUN_S = 0.2
"""Seconds of a long run. A slow call is repeated less often."""


def long_run_calls(performance: Performance, seed: int) -> int:
    """Return how often to repeat a call. The number is secret, so that a kernel cannot count up to it."""
    call_us = max(performance.latency_us, performance.host_us or 0.0)
    most = max(8, min(LONG_RUN_CALLS, int(LONG_RUN_S * 1e6 / call_us)))
    return random.Random(seed).randint(most // 2, most)


def audit_long_run(runner: Runner, pool: BufferPool, performance: Performance, seed: int) -> Failure | None:
    """Repeat the call on a few slots while this process watches the inputs, which must not change even for a moment.

    The outputs are not checked here. The clock audit follows in the same process and checks outputs on fresh contents.
    """
    slots = range(1 if pool.buffers.plan.size > KEPT_BYTES else min(2, pool.slots))  # each is kept as a copy
    pool.prepare(slots, poison=True)
    watch = _InputWatch(pool, slots)
    watch.start()
    made = runner.handle.repeat_calls(slots, long_run_calls(performance, seed))
    watch.stop()
    if isinstance(made, Failure):
        return made
    if watch.changed:
        reason = f"its input {watch.changed} held other contents while it was called, if only for a moment"
        return Failure("REJECTED", reason, gate="borrowed input")
    return None


class _InputWatch(threading.Thread):
    """Thread of the harness that compares the inputs of some slots with their copies, over and over."""

    def __init__(self, pool: BufferPool, slots: range) -> None:
        super().__init__(daemon=True)
        self.changed = ""
        self._done = threading.Event()
        replaced = pool.definition.in_place
        names = [plan.name for plan in pool.buffers.plan.inputs if plan.name not in replaced]
        self._pairs = [
            (name, view, view.clone()) for name in names for slot in slots for view in [pool.buffers.tensor(slot, name)]
        ]

    def run(self) -> None:
        while not self._done.is_set() and not self.changed:
            for name, view, before in self._pairs:
                if not torch.equal(view.contiguous().view(torch.uint8), before.contiguous().view(torch.uint8)):
                    self.changed = name
            self._done.wait(0.001)

    def stop(self) -> None:
        """Stop, after the current comparison has ended."""
        self._done.set()
        self.join()


def _scalar_ranges(definition: Definition, calls: list[Mapping[str, Scalar]]) -> dict[str, tuple[float, float]]:
    """Return continuous scalar -> its smallest and largest value among the verified calls."""
    found: dict[str, tuple[float, float]] = {}
    for name, spec in definition.inputs.items():
        if spec.is_scalar and name not in definition.size_scalars and not is_code_selecting(definition, name):
            values = [float(call[name]) for call in calls if isinstance(call.get(name), int | float)]  # type: ignore[arg-type]
            if values:
                found[name] = min(values), max(values)
    return found
