"""One bench run from plan to database: resumable, journaled trace by trace, safe to interrupt."""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from tilegym_db.bench.calibrate import current_peaks
from tilegym_db.bench.cross_check import cross_check
from tilegym_db.bench.executor.local import LocalExecutor
from tilegym_db.bench.interleaved import TimingBudget
from tilegym_db.bench.machine import Machine, leaving_processors
from tilegym_db.bench.plan import Options, Plan
from tilegym_db.bench.promotions import record_promotions
from tilegym_db.bench.run_setup import Observer, RunSetup, timing_budget
from tilegym_db.bench.tier_policy import INTERPRETER, MIN_SANDBOX_LEVEL, PROMOTION, SCREEN, TierPolicy
from tilegym_db.bench.tracing import RunContext
from tilegym_db.catalog import Catalog
from tilegym_db.errors import HardwareError, RecordError
from tilegym_db.records import Trace
from tilegym_db.records.loop import Promotion
from tilegym_db.records.peaks import GpuPeaks
from tilegym_db.records.trace import new_run_id
from tilegym_db.scratch import scratch_folder
from tilegym_db.store.journal import Journal
from tilegym_db.store.queries import done_keys, failed_screen, likely_fastest_of, read_peaks, tuned_configs
from tilegym_db.verify.worker.process import best_level, prepare_workers

__all__ = ["BenchReport", "benchmark", "promote", "run_plan"]


@dataclass
class BenchReport:
    """What a run did. ``interrupted`` is true after Ctrl-C; what was measured before it is kept."""

    run_id: str
    machine: Machine
    plan: Plan
    traces: list[Trace] = field(default_factory=list)
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)
    """What its traces lack, or why they may be wrong."""
    promotions: list[Promotion] = field(default_factory=list)
    """Those that its traces earned, and those of the same sources that stood before."""

    def followed_by(self, later: BenchReport) -> BenchReport:
        """This run and the one after it on the same machine, as one report named after the later."""
        traces = [*self.traces, *later.traces]
        notes = list(dict.fromkeys([*self.notes, *later.notes]))
        return BenchReport(later.run_id, later.machine, later.plan, traces, later.interrupted, notes, later.promotions)

    @property
    def counts(self) -> Counter[str]:
        """How many traces ended with each status."""
        return Counter(trace.status for trace in self.traces)


def benchmark(
    names: tuple[str, ...] = (),
    *,
    gpu: str = "auto",
    language: str | None = None,
    workload: str | tuple[str, ...] | None = None,
    quick: bool = False,
    again: bool = False,
    promote: bool = False,
    allow_unsandboxed: bool = False,
    catalog: Catalog | None = None,
    store_home: Path | None = None,
    observer: Observer | None = None,
) -> BenchReport:
    """Screen Solutions: verify and time them, and store a Trace for each (solution, workload) pair.

    Args:
        names: Definitions or Solutions; empty means all.
        gpu: ``auto``, ``cpu``, or the slug or family of the GPU in this machine.
        language: only Solutions in this language. Stock code always comes along, to compare with, and so do the verified
            Solutions that may be the fastest, wherever another is measured.
        workload: glob over uuid, tags and axes key, such as ``stage:decode`` or ``M=1,*``; or several, of which one has to match.
        quick: few workloads and few samples.
        again: measure pairs anew that have a trace already.
        promote: afterwards run the promotion tier on what passed, as :func:`promote` does; its traces are in the report.
        allow_unsandboxed: promote on a machine that cannot confine a worker; the traces say so and are never published.
        catalog: the records; the shipped ones and the user's overlay by default.
        store_home: folder of the store; ``$TILEGYM_DB_HOME`` or the user data folder by default.
        observer: callbacks for progress.

    Raises:
        HardwareError: the GPU asked for is not the one in this machine; or it cannot confine a worker.
        NotFoundError: a name that is neither a Definition nor a Solution.
        StoreError: the store cannot be used.
    """
    options = Options(tuple(names), language, workload, quick, again)
    setup, watch = RunSetup.of(gpu, catalog, store_home), observer or Observer()
    prepare_workers(setup.machine.device)
    if promote:
        _require_sandbox(setup.machine, allow_unsandboxed)
    report = _run(setup, options, SCREEN, watch)
    if promote and not report.interrupted:
        report = report.followed_by(_run(setup, replace(options, tier="promotion"), PROMOTION, watch))
    return report


def promote(
    names: tuple[str, ...] = (),
    *,
    gpu: str = "auto",
    language: str | None = None,
    workload: str | tuple[str, ...] | None = None,
    quick: bool = False,
    again: bool = False,
    allow_unsandboxed: bool = False,
    catalog: Catalog | None = None,
    store_home: Path | None = None,
    observer: Observer | None = None,
) -> BenchReport:
    """Verify Solutions for good: fresh processes, fresh secrets, all fuzz cases and every audit.

    Only what passes here is verified: ``best``, the resolver and patched models use nothing else. Pairs whose newest screen
    failed are left out. Whatever is verified already and within a little of the fastest is promoted again beside what is
    new, so that who is the fastest comes of the same rounds. Arguments and errors are those of :func:`benchmark`.
    """
    setup = RunSetup.of(gpu, catalog, store_home)
    prepare_workers(setup.machine.device)
    _require_sandbox(setup.machine, allow_unsandboxed)
    options = Options(tuple(names), language, workload, quick, again, "promotion")
    return _run(setup, options, PROMOTION, observer or Observer())


def _require_sandbox(machine: Machine, allow_unsandboxed: bool) -> None:
    sandbox = best_level(machine.device)
    if sandbox.level < MIN_SANDBOX_LEVEL and not allow_unsandboxed:
        raise HardwareError(
            f"promotion needs workers confined at level {MIN_SANDBOX_LEVEL} or better, and this machine reaches "
            f"{sandbox.level}: {'; '.join(sandbox.reasons)}. With --allow-unsandboxed the traces are recorded as such "
            "and never published."
        )


def _run(setup: RunSetup, options: Options, policy: TierPolicy, observer: Observer) -> BenchReport:
    """One tier: plan, run, and ingest what came of it."""
    machine = setup.machine
    with setup.store() as store:
        done = done_keys(store, machine.gpu, policy.tier)
        if policy is SCREEN:
            done |= done_keys(store, machine.gpu, INTERPRETER.tier)
        known = read_peaks(store, machine.gpu, gpu_name=machine.gpu_name, driver=machine.driver, own=True)
        failed = failed_screen(store, machine.gpu) if policy is PROMOTION and not options.again else {}
        tuned, likely_fastest = tuned_configs(store, machine.gpu), likely_fastest_of(store, machine.gpu)
    excluded = {key: _screen_failure(status) for key, status in failed.items()}
    plan = setup.plan(options, done, excluded, tuned, likely_fastest)
    observer.planned(plan, machine)
    screening = policy is SCREEN and not options.quick
    budget = TimingBudget.screening() if screening else timing_budget(options)
    peaks, notes = _peaks(setup, known, observer) if plan.pair_count else (None, [])
    report = run_plan(plan, machine, setup.home, budget, policy, observer, peaks)
    report.notes += notes
    if peaks is not None and policy.audited:
        problem = cross_check(report.traces, peaks).problem
        if problem is not None:
            report.notes.append(problem)
    with setup.store() as store:
        if policy is PROMOTION:
            report.promotions, _ = record_promotions(store, report.traces, setup.home)
    return report


def _peaks(setup: RunSetup, known: GpuPeaks | None, observer: Observer) -> tuple[GpuPeaks | None, list[str]]:
    """What times are held against, and a remark where a GPU could not be calibrated: that stops no measurement."""
    if setup.machine.is_gpu and known is None:
        observer.starting(f"calibrating {setup.machine.gpu_name}")
    try:
        return current_peaks(setup.machine, known, setup.home), []
    except (HardwareError, RecordError, RuntimeError, OSError) as error:  # whatever the driver refuses
        return None, [f"the traces have no speed of light and no physics floor: {error}"]


def _screen_failure(status: str) -> str:
    return f"did not pass the screen: {status}"


def run_plan(
    plan: Plan,
    machine: Machine,
    store_home: Path,
    budget: TimingBudget,
    policy: TierPolicy,
    observer: Observer,
    peaks: GpuPeaks | None = None,
) -> BenchReport:
    """Run a plan and journal its traces; the caller ingests them. No database is open while workers run."""
    run_id = new_run_id(machine.gpu)
    context = RunContext(run_id, machine, secrets.randbits(62))
    report = BenchReport(run_id, machine, plan)
    with Journal(run_id, store_home) as journal, scratch_folder() as scratch, leaving_processors(machine):

        def emit(trace: Trace) -> None:
            journal.append(trace)
            report.traces.append(trace)
            observer.traced(trace)

        executor = LocalExecutor(context, scratch, budget, policy, emit, observer.starting, peaks)
        try:
            executor.run(plan.definitions)
        except KeyboardInterrupt:
            report.interrupted = True
    return report
