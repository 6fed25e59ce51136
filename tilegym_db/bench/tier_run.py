"""One tier of a bench run from plan to database: resumable, journaled trace by trace, safe to interrupt."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from tilegym_db.bench.bench_report import BenchReport
from tilegym_db.bench.calibrate import peaks_or_reason
from tilegym_db.bench.confined import limits_here, may_lack_confinement, note_of
from tilegym_db.bench.cross_check import cross_check
from tilegym_db.bench.executor.local import LocalExecutor
from tilegym_db.bench.gpus.devices import MeasuringDevice
from tilegym_db.bench.gpus.messages import Peaks, Session
from tilegym_db.bench.gpus.places import open_pool
from tilegym_db.bench.gpus.pool import Callbacks, DevicePool
from tilegym_db.bench.interleaved import TimingBudget
from tilegym_db.bench.machine import Machine, leaving_processors
from tilegym_db.bench.plan import Options, Plan
from tilegym_db.bench.planning import refuse_omitting
from tilegym_db.bench.promotions import record_promotions
from tilegym_db.bench.run_setup import Observer, RunSetup, timing_budget
from tilegym_db.bench.tier_policy import INTERPRETER, PROMOTION, SCREEN, UNTIMED, TierPolicy
from tilegym_db.bench.tracing import RunContext
from tilegym_db.catalog import Catalog
from tilegym_db.records import Trace
from tilegym_db.records.peaks import GpuPeaks
from tilegym_db.records.trace import new_run_id
from tilegym_db.scratch import scratch_folder
from tilegym_db.store.journal import Journal
from tilegym_db.store.queries import done_keys, failed_screen, likely_fastest_of, read_peaks, tuned_configs
from tilegym_db.verify.inputs import draws_spread
from tilegym_db.verify.worker.process import prepare_workers

__all__ = ["run_plan", "run_tiers"]

POLICIES: Mapping[Literal["screen", "promotion"], TierPolicy] = {"screen": SCREEN, "promotion": PROMOTION}


def run_tiers(
    options: Options,
    gpu: str,
    gpus: str | Sequence[MeasuringDevice] | None,
    catalog: Catalog | None,
    store_home: Path | None,
    observer: Observer | None,
    *,
    confined: bool,
    then_promote: bool = False,
    executor: str | None = None,
) -> BenchReport:
    """The tier asked for, then the promotion of what passed it, as one report; ``confined``: no promotion without a sandbox.

    Arguments and errors are those of :func:`~tilegym_db.bench.benchmark.benchmark`.
    """
    watch = observer or Observer()
    confined = confined and (then_promote or options.tier == "promotion")
    with open_pool(executor, gpus, gpu, watch.starting) as pool:
        setup = _prepared(pool, gpu, catalog, store_home)
        limits = _limits(setup, options, pool) if confined else None
        confined = confined and limits is None
        if options.tier == "promotion":
            refuse_omitting(setup.catalog, options.names)
        report = _run(setup, options, watch, pool, limits, confined=confined)
        if then_promote and not report.interrupted:
            promotion = replace(options, tier="promotion")
            report = report.followed_by(_run(setup, promotion, watch, pool, limits, confined=confined))
    if limits is not None:
        report.notes.append(note_of(setup.machine, limits))
    return report


def _limits(setup: RunSetup, options: Options, pool: DevicePool | None) -> dict[str, str] | None:
    """What may not be promoted here since workers cannot be confined, and why; None where they can.

    Where there are supervisors, each tries its own, and refuses its work where it fails; only a kernel without Landlock is known
    of before, and of this machine, not of a cluster's nodes.
    """
    if pool is not None and (setup.site is not None or not may_lack_confinement()):
        return None
    return limits_here(setup.machine, setup.catalog, options.names)


def _prepared(pool: DevicePool | None, gpu: str, catalog: Catalog | None, store_home: Path | None) -> RunSetup:
    """What a run needs; where this process measures itself, it is ready to have workers."""
    setup = RunSetup.on(pool, gpu, catalog, store_home)
    if pool is None:
        prepare_workers(setup.machine.device)
    return setup


def _run(
    setup: RunSetup,
    options: Options,
    observer: Observer,
    pool: DevicePool | None,
    limits: Mapping[str, str] | None,
    *,
    confined: bool,
) -> BenchReport:
    """One tier: plan, run, and ingest what came of it."""
    machine, policy = setup.machine, POLICIES[options.tier]
    with setup.store() as store:
        done = done_keys(store, machine.gpu, policy.tier)
        if policy is SCREEN:
            done |= done_keys(store, machine.gpu, INTERPRETER.tier) | done_keys(store, machine.gpu, UNTIMED.tier)
        known = read_peaks(store, machine.gpu, gpu_name=machine.gpu_name, driver=machine.driver, own=True)
        failed = failed_screen(store, machine.gpu) if policy is PROMOTION and not options.again else {}
        spread = [name for name, definition in setup.catalog.definitions.items() if draws_spread(definition)]
        tuned, likely_fastest = tuned_configs(store, machine.gpu), likely_fastest_of(store, machine.gpu, spread)
    excluded = {key: _screen_failure(status) for key, status in failed.items()}
    refused = limits or {} if policy is PROMOTION else {}
    plan = setup.plan(options, done, excluded, tuned, likely_fastest, refused)
    observer.planned(plan, machine)
    screening = policy is SCREEN and not options.quick
    budget = TimingBudget.screening() if screening else timing_budget(options)
    if pool is not None:
        report, peaks = _run_on(pool, plan, setup, budget, policy, observer, known, confined)
    else:
        if plan.pair_count and machine.is_gpu and known is None:
            observer.starting(f"calibrating {machine.gpu_name}")
        peaks, notes = peaks_or_reason(machine, known, setup.home) if plan.pair_count else (None, [])
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


def _screen_failure(status: str) -> str:
    return f"did not pass the screen: {status}"


def _kept_by(journal: Journal, report: BenchReport, observer: Observer) -> Callable[[Trace], None]:
    """What a trace is given to: the journal first, so that nobody is told of one that is not kept."""

    def keep(trace: Trace) -> None:
        journal.append(trace)
        report.traces.append(trace)
        observer.traced(trace)

    return keep


def _run_on(
    pool: DevicePool,
    plan: Plan,
    setup: RunSetup,
    budget: TimingBudget,
    policy: TierPolicy,
    observer: Observer,
    known: GpuPeaks | None,
    confined: bool,
) -> tuple[BenchReport, GpuPeaks | None]:
    """:func:`run_plan` on several devices, and what they can do: as known, or as one of them measured first."""
    report = BenchReport(new_run_id(setup.machine.gpu), setup.machine, plan)
    own = known if pool.site is None else None  # of this host; each device of others is calibrated where it is
    peaks = [own] if own is not None else []
    session = Session(
        "measure", report.run_id, setup.machine.gpu, secrets.randbits(62), setup.home, budget, policy,
        peaks=own, calibrate=True, confined=confined and policy is PROMOTION,
    )  # fmt: skip
    with Journal(report.run_id, setup.home) as journal:

        def learn(found: Peaks) -> None:
            peaks.extend([found.peaks] if found.peaks is not None else [])
            report.notes += found.notes

        callbacks = Callbacks(_kept_by(journal, report, observer), observer.at_work, peaks=learn)
        outcome = pool.run(session, pool.divided(plan.definitions), callbacks)
    report.notes += outcome.notes
    report.unfinished, report.devices, report.interrupted = outcome.unfinished, outcome.traces, outcome.interrupted
    report.seconds = outcome.seconds
    return report, peaks[0] if peaks else None


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
        keep = _kept_by(journal, report, observer)
        executor = LocalExecutor(context, scratch, budget, policy, keep, observer.starting, peaks)
        try:
            executor.run(plan.definitions)
        except KeyboardInterrupt:
            report.interrupted = True
    return report
