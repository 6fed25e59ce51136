"""One bench run from plan to database: resumable, journaled trace by trace, safe to interrupt."""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tilegym_db.bench.calibrate import peaks_or_reason
from tilegym_db.bench.confined import require_sandbox
from tilegym_db.bench.cross_check import cross_check
from tilegym_db.bench.executor.local import LocalExecutor
from tilegym_db.bench.gpus.devices import MeasuringDevice, devices_of
from tilegym_db.bench.gpus.messages import Peaks, Session
from tilegym_db.bench.gpus.pool import Callbacks, DevicePool
from tilegym_db.bench.gpus.work import divide
from tilegym_db.bench.interleaved import TimingBudget
from tilegym_db.bench.machine import Machine, leaving_processors
from tilegym_db.bench.phases import added
from tilegym_db.bench.plan import Options, Plan, names_of
from tilegym_db.bench.promotions import record_promotions
from tilegym_db.bench.run_setup import Observer, RunSetup, timing_budget
from tilegym_db.bench.summary import summarise
from tilegym_db.bench.tier_policy import INTERPRETER, PROMOTION, SCREEN, TierPolicy
from tilegym_db.bench.tracing import RunContext
from tilegym_db.catalog import Catalog
from tilegym_db.errors import UsageError
from tilegym_db.records import Trace
from tilegym_db.records.loop import Promotion
from tilegym_db.records.peaks import GpuPeaks
from tilegym_db.records.trace import new_run_id
from tilegym_db.scratch import scratch_folder
from tilegym_db.store.html_table import html_table
from tilegym_db.store.journal import Journal
from tilegym_db.store.queries import done_keys, failed_screen, likely_fastest_of, read_peaks, tuned_configs
from tilegym_db.verify.inputs import draws_spread
from tilegym_db.verify.worker.process import prepare_workers

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
    unfinished: list[str] = field(default_factory=list)
    """What could not be measured because device after device was lost with it, and how."""
    devices: Counter[str] = field(default_factory=Counter)
    """How many traces each device measured, where there are several."""
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """Where the time of each of them went, by the names of :mod:`tilegym_db.bench.phases`."""
    promotions: list[Promotion] = field(default_factory=list)
    """Those that its traces earned, and those of the same sources that stood before."""

    def followed_by(self, later: BenchReport) -> BenchReport:
        """This run and the one after it on the same machine, as one report named after the later."""
        traces = [*self.traces, *later.traces]
        notes = list(dict.fromkeys([*self.notes, *later.notes]))
        unfinished = [*self.unfinished, *later.unfinished]
        return replace(
            later,
            traces=traces,
            notes=notes,
            unfinished=unfinished,
            devices=self.devices + later.devices,
            seconds={device: added(self.seconds.get(device, {}), found) for device, found in later.seconds.items()},
        )

    @property
    def counts(self) -> Counter[str]:
        """How many traces ended with each status."""
        return Counter(trace.status for trace in self.traces)

    def _repr_html_(self) -> str:
        """One row per Solution, as the command prints it; the caption names the device and the tiers."""
        tiers = " and ".join(dict.fromkeys(trace.tier for trace in self.traces)) or "nothing new"
        rows = [
            (row.solution, row.language, f"{row.passed}/{row.total}", row.speedup, row.sol_ratio, row.note)
            for row in summarise(self.traces)
        ]
        columns = ("solution", "language", "passed", "speedup over stock", "of the speed of light", "note")
        return html_table(columns, rows, f"{self.machine.gpu_name} ({self.machine.gpu}), {tiers}, run {self.run_id}")


def benchmark(
    names: str | tuple[str, ...] | Callable[..., Any] = (),
    *,
    definition: str | None = None,
    gpu: str = "auto",
    language: str | None = None,
    workload: str | tuple[str, ...] | None = None,
    quick: bool = False,
    again: bool = False,
    promote: bool = False,
    allow_unsandboxed: bool = False,
    gpus: str | Sequence[MeasuringDevice] | None = None,
    catalog: Catalog | None = None,
    store_home: Path | None = None,
    observer: Observer | None = None,
) -> BenchReport:
    """Screen Solutions: verify and time them, and store a Trace for each (solution, workload) pair.

    Args:
        names: Definitions or Solutions; empty means all. Or a function, which is screened and never served: see
            :func:`~tilegym_db.bench.of_function.benchmark_function`.
        definition: the operator that a function implements; for a function only.
        gpu: ``auto``, ``cpu``, or the slug or family of the GPU in this machine.
        language: only Solutions in this language. Stock code always comes along, to compare with, and so do the verified
            Solutions that may be the fastest, wherever another is measured.
        workload: glob over uuid, tags and axes key, such as ``stage:decode`` or ``M=1,*``; or several, of which one has to match.
        quick: few workloads and few samples.
        again: measure pairs anew that have a trace already.
        promote: afterwards run the promotion tier on what passed, as :func:`promote` does; its traces are in the report.
        allow_unsandboxed: promote on a machine that cannot confine a worker; the traces say so and are never published.
        gpus: measure on several GPUs of this host, all of one kind, each with a process of its own: ``all``, a number
            (``2``), or indices (``0,2``). By default one GPU, in this process.
        catalog: the records; the shipped ones and the user's overlay by default.
        store_home: folder of the store; ``$TILEGYM_DB_HOME`` or the user data folder by default.
        observer: callbacks for progress.

    Raises:
        HardwareError: the GPU asked for is not the one in this machine; or it cannot confine a worker.
        NotFoundError: a name that is neither a Definition nor a Solution.
        StoreError: the store cannot be used.
        UsageError: a function without ``definition``, or ``definition`` without a function.
    """
    if callable(names):
        from tilegym_db.bench.of_function import benchmark_function  # it screens with this function

        if definition is None:
            raise UsageError("a function implements an operator: benchmark(function, definition='...').")
        if promote:
            raise UsageError(
                "a function is only screened: what is promoted needs a name. Try: tilegym-db add-solution FILE"
            )
        return benchmark_function(
            names, definition, gpu=gpu, language=language, workload=workload, quick=quick, again=again, gpus=gpus,
            catalog=catalog, store_home=store_home, observer=observer,
        )  # fmt: skip
    if definition is not None:
        raise UsageError("definition= goes with a function; an operator is named first: benchmark('...').")
    options = Options(names_of(names), language, workload, quick, again)
    devices = devices_of(gpus, gpu)
    watch = observer or Observer()
    with _supervisors(devices) as pool:
        setup = _prepared(devices, gpu, catalog, store_home, confined=promote and not allow_unsandboxed)
        report = _run(setup, options, SCREEN, watch, pool)
        if promote and not report.interrupted:
            options = replace(options, tier="promotion")
            report = report.followed_by(_run(setup, options, PROMOTION, watch, pool, confined=not allow_unsandboxed))
    return report


def promote(
    names: str | tuple[str, ...] = (),
    *,
    gpu: str = "auto",
    language: str | None = None,
    workload: str | tuple[str, ...] | None = None,
    quick: bool = False,
    again: bool = False,
    allow_unsandboxed: bool = False,
    gpus: str | Sequence[MeasuringDevice] | None = None,
    catalog: Catalog | None = None,
    store_home: Path | None = None,
    observer: Observer | None = None,
) -> BenchReport:
    """Verify Solutions for good: fresh processes, fresh secrets, all fuzz cases and every audit.

    Only what passes here is verified: ``best``, the resolver and patched models use nothing else. Pairs whose newest screen
    failed are left out. Whatever is verified already and within a little of the fastest is promoted again beside what is
    new, so that who is the fastest comes of the same rounds. Arguments and errors are those of :func:`benchmark`.
    """
    devices = devices_of(gpus, gpu)
    options = Options(names_of(names), language, workload, quick, again, "promotion")
    with _supervisors(devices) as pool:
        setup = _prepared(devices, gpu, catalog, store_home, confined=not allow_unsandboxed)
        return _run(setup, options, PROMOTION, observer or Observer(), pool, confined=not allow_unsandboxed)


def _supervisors(devices: Sequence[MeasuringDevice]) -> contextlib.AbstractContextManager[DevicePool | None]:
    """Those of several devices, which load what they need while this process plans; None where it measures itself."""
    return DevicePool(devices, devices[0].gpu) if devices else contextlib.nullcontext()


def _prepared(
    devices: Sequence[MeasuringDevice], gpu: str, catalog: Catalog | None, store_home: Path | None, *, confined: bool
) -> RunSetup:
    """What a run needs; where this process measures itself, it is ready to have workers."""
    setup = RunSetup.on(devices, gpu, catalog, store_home)
    if not devices:
        prepare_workers(setup.machine.device)
        if confined:
            require_sandbox(setup.machine)
    return setup


def _run(
    setup: RunSetup,
    options: Options,
    policy: TierPolicy,
    observer: Observer,
    pool: DevicePool | None = None,
    *,
    confined: bool = False,
) -> BenchReport:
    """One tier: plan, run, and ingest what came of it."""
    machine = setup.machine
    with setup.store() as store:
        done = done_keys(store, machine.gpu, policy.tier)
        if policy is SCREEN:
            done |= done_keys(store, machine.gpu, INTERPRETER.tier)
        known = read_peaks(store, machine.gpu, gpu_name=machine.gpu_name, driver=machine.driver, own=True)
        failed = failed_screen(store, machine.gpu) if policy is PROMOTION and not options.again else {}
        spread = [name for name, definition in setup.catalog.definitions.items() if draws_spread(definition)]
        tuned, likely_fastest = tuned_configs(store, machine.gpu), likely_fastest_of(store, machine.gpu, spread)
    excluded = {key: _screen_failure(status) for key, status in failed.items()}
    plan = setup.plan(options, done, excluded, tuned, likely_fastest)
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
    peaks = [known] if known is not None else []
    session = Session(
        "measure", report.run_id, setup.machine.gpu, secrets.randbits(62), setup.home, budget, policy,
        peaks=known, calibrate=True, confined=confined,
    )  # fmt: skip
    with Journal(report.run_id, setup.home) as journal:

        def keep(trace: Trace) -> None:
            journal.append(trace)
            report.traces.append(trace)
            observer.traced(trace)

        def learn(found: Peaks) -> None:
            peaks.extend([found.peaks] if found.peaks is not None else [])
            report.notes += found.notes

        callbacks = Callbacks(keep, observer.at_work, peaks=learn)
        outcome = pool.run(session, divide(plan.definitions, len(pool.devices)), callbacks)
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
