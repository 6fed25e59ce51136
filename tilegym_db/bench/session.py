"""One bench run from plan to database: resumable, journaled trace by trace, safe to interrupt."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from tilegym_db.backends.toolchains import TOOLCHAINS, toolchain_status
from tilegym_db.bench.calibrate import current_peaks
from tilegym_db.bench.cross_check import cross_check
from tilegym_db.bench.executor.local import LocalExecutor
from tilegym_db.bench.machine import Machine, leaving_processors, select_machine
from tilegym_db.bench.plan import Options, Plan, make_plan
from tilegym_db.bench.rigor import INTERPRETER, MIN_SANDBOX_LEVEL, PROMOTION, SCREEN, Rigor
from tilegym_db.bench.tournament import Effort
from tilegym_db.bench.tracing import RunContext
from tilegym_db.catalog import Catalog
from tilegym_db.errors import HardwareError, RecordError
from tilegym_db.paths import home
from tilegym_db.records import Trace
from tilegym_db.records.peaks import GpuPeaks
from tilegym_db.records.trace import new_run_id
from tilegym_db.scratch import scratch_folder
from tilegym_db.store.connection import open_store
from tilegym_db.store.ingest import ingest_journals
from tilegym_db.store.journal import Journal
from tilegym_db.store.queries import contenders_of, done_keys, failed_screen, read_peaks, tuned_configs
from tilegym_db.verify.sandbox.levels import best_level
from tilegym_db.verify.sandbox.process import prepare_workers

__all__ = ["BenchReport", "Observer", "benchmark", "promote", "run_plan"]


@dataclass
class Observer:
    """What a caller may watch: the plan before it starts, each step, each trace."""

    planned: Callable[[Plan, Machine], None] = lambda plan, machine: None
    starting: Callable[[str], None] = lambda what: None
    traced: Callable[[Trace], None] = lambda trace: None


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

    def followed_by(self, later: BenchReport) -> BenchReport:
        """This run and the one after it on the same machine, as one report named after the later."""
        traces = [*self.traces, *later.traces]
        notes = list(dict.fromkeys([*self.notes, *later.notes]))
        return BenchReport(later.run_id, later.machine, later.plan, traces, later.interrupted, notes)

    @property
    def counts(self) -> Counter[str]:
        """How many traces ended with each status."""
        return Counter(trace.status for trace in self.traces)


def benchmark(
    names: tuple[str, ...] = (),
    *,
    gpu: str = "auto",
    language: str | None = None,
    workload: str | None = None,
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
        workload: glob over uuid, tags and axes key, such as ``stage:decode`` or ``M=1,*``.
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
    session = _Session(gpu, catalog, store_home, observer)
    if promote:
        session.require_sandbox(allow_unsandboxed)
    report = session.run(options, SCREEN)
    if promote and not report.interrupted:
        report = report.followed_by(session.run(replace(options, tier="promotion"), PROMOTION))
    return report


def promote(
    names: tuple[str, ...] = (),
    *,
    gpu: str = "auto",
    language: str | None = None,
    workload: str | None = None,
    quick: bool = False,
    again: bool = False,
    allow_unsandboxed: bool = False,
    catalog: Catalog | None = None,
    store_home: Path | None = None,
    observer: Observer | None = None,
) -> BenchReport:
    """Verify Solutions for good: fresh processes, fresh secrets, the whole fuzz envelope and every audit.

    Only what passes here is verified: ``best``, the resolver and patched models use nothing else. Pairs whose newest screen
    failed are left out. Whatever is verified already and within a little of the fastest is promoted again beside what is
    new, so that who is the fastest comes of the same rounds. Arguments and errors are those of :func:`benchmark`.
    """
    session = _Session(gpu, catalog, store_home, observer)
    session.require_sandbox(allow_unsandboxed)
    return session.run(Options(tuple(names), language, workload, quick, again, "promotion"), PROMOTION)


class _Session:
    """One machine, one catalog and one store, for one run or two."""

    def __init__(self, gpu: str, catalog: Catalog | None, store_home: Path | None, observer: Observer | None) -> None:
        self.machine = select_machine(gpu)
        prepare_workers(self.machine.device)
        self.catalog = catalog or Catalog.default()
        self.home = store_home or home()
        self.observer = observer or Observer()

    def require_sandbox(self, allow_unsandboxed: bool) -> None:
        sandbox = best_level(self.machine.device)
        if sandbox.level < MIN_SANDBOX_LEVEL and not allow_unsandboxed:
            raise HardwareError(
                f"promotion needs workers confined at level {MIN_SANDBOX_LEVEL} or better, and this machine reaches "
                f"{sandbox.level}: {'; '.join(sandbox.reasons)}. With --allow-unsandboxed the traces are recorded as such "
                "and never published."
            )

    def run(self, options: Options, rigor: Rigor) -> BenchReport:
        with open_store(self.home, catalog=self.catalog) as store:
            ingest_journals(store)
            done = done_keys(store, self.machine.gpu, rigor.tier)
            if rigor is SCREEN:
                done |= done_keys(store, self.machine.gpu, INTERPRETER.tier)
            known = read_peaks(
                store, self.machine.gpu, gpu_name=self.machine.gpu_name, driver=self.machine.driver, own=True
            )
            failed = failed_screen(store, self.machine.gpu) if rigor is PROMOTION and not options.again else {}
            tuned, contenders = tuned_configs(store, self.machine.gpu), contenders_of(store, self.machine.gpu)
        excluded = {key: _screen_failure(status) for key, status in failed.items()}
        plan = make_plan(self.catalog, self.machine, options, done, unusable_languages(), excluded, tuned, contenders)
        self.observer.planned(plan, self.machine)
        effort = Effort.quick() if options.quick else Effort.screening() if rigor is SCREEN else Effort()
        peaks, notes = self._peaks(known) if plan.pair_count else (None, [])
        report = run_plan(plan, self.machine, self.home, effort, rigor, self.observer, peaks)
        report.notes += notes
        if peaks is not None and rigor.audited:
            problem = cross_check(report.traces, peaks).problem
            if problem is not None:
                report.notes.append(problem)
        with open_store(self.home, catalog=self.catalog) as store:
            ingest_journals(store)
        return report

    def _peaks(self, known: GpuPeaks | None) -> tuple[GpuPeaks | None, list[str]]:
        """What times are held against, and a remark where a GPU could not be calibrated: that stops no measurement."""
        if self.machine.is_gpu and known is None:
            self.observer.starting(f"calibrating {self.machine.gpu_name}")
        try:
            return current_peaks(self.machine, known, self.home), []
        except (HardwareError, RecordError, RuntimeError, OSError) as error:  # whatever the driver refuses
            return None, [f"the traces have no speed of light and no physics floor: {error}"]


def _screen_failure(status: str) -> str:
    return f"did not pass the screen: {status}"


def unusable_languages() -> dict[str, str]:
    """Language -> why its Solutions cannot run here and what to install. A trace would blame them for it."""
    statuses = {language: toolchain_status(language) for language in TOOLCHAINS}
    return {
        language: f"{language} cannot be used here: {status.detail}. Fix: {status.fix}"
        for language, status in statuses.items()
        if not status.available
    }


def run_plan(
    plan: Plan,
    machine: Machine,
    store_home: Path,
    effort: Effort,
    rigor: Rigor,
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

        executor = LocalExecutor(context, scratch, effort, rigor, emit, observer.starting, peaks)
        try:
            executor.run(plan.definitions)
        except KeyboardInterrupt:
            report.interrupted = True
    return report
