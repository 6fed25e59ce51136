"""Entry point of tuning: :func:`tune` searches configs, journals each step, and stores the winners. A run can be resumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.errors import UsageError
from tilegym_db.measurement.devices.devices import DevicesLike, parse_devices
from tilegym_db.measurement.devices.messages import Session, WorkItem
from tilegym_db.measurement.devices.places import open_pool
from tilegym_db.measurement.devices.pool import Callbacks, DevicePool
from tilegym_db.measurement.local_executor import LocalExecutor
from tilegym_db.measurement.machine import Machine, leaving_processors
from tilegym_db.measurement.plan import Options, Plan, Skipped, names_of
from tilegym_db.measurement.run_setup import RunContext, RunSetup, attempts_of, timing_budget
from tilegym_db.measurement.timing import TimingBudget
from tilegym_db.measurement.tune.search import SearchBudget
from tilegym_db.measurement.tune.tuner import KnownResults, TuneResult, TuneTask, search
from tilegym_db.paths import scratch_folder
from tilegym_db.records import Definition, Trace, Workload, axes_key
from tilegym_db.store.answer import html_table
from tilegym_db.store.journal import Journal
from tilegym_db.store.tuning import TuningLog, TuningStep
from tilegym_db.verification.worker_handle import SCREEN

DEFAULT_BUDGET_S = 60.0
QUICK_BUDGET_S = 10.0


@dataclass
class TuneObserver:
    """Callbacks for progress: the number of pairs, each start, each step, each result."""

    planned: Callable[[int, Machine], None] = lambda pairs, machine: None
    starting: Callable[[str], None] = lambda what: None
    stepped: Callable[[TuningStep], None] = lambda step: None
    finished: Callable[[TuneResult], None] = lambda result: None
    at_work: Callable[[str, str], None] = lambda device, what: None


@dataclass(repr=False)
class TuneReport:
    """The result of a run. ``interrupted`` is true after Ctrl-C; all earlier steps are kept."""

    run_id: str
    machine: Machine
    skipped: list[Skipped]
    results: list[TuneResult] = field(default_factory=list)
    steps: list[TuningStep] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)
    """Losses during the run, and the work that was done again."""
    unfinished: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        """Return the run, the device and the number of results."""
        return f"<TuneReport {self.run_id} on {self.machine.gpu}: {len(self.results)} results, {len(self.skipped)} left out>"

    def _repr_html_(self) -> str:
        """Return a table with the config of each solution and workload."""
        rows = [
            (one.solution, axes_key(dict(one.axes)), one.config, one.gain, one.tried, one.reason)
            for one in self.results
        ]
        return html_table(("solution", "axes", "config", "vs defaults", "tried", "why"), rows, repr(self))

    @property
    def outcomes(self) -> Counter[str]:
        """The number of configs per outcome."""
        return Counter(step.outcome for step in self.steps if step.outcome != "leads")


def tune(
    names: str | tuple[str, ...] = (),
    *,
    devices: DevicesLike = "auto",
    language: str | None = None,
    workload: str | tuple[str, ...] | None = None,
    budget_s: float | None = None,
    quick: bool = False,
    force: bool = False,
    catalog: Catalog | None = None,
    store_home: Path | None = None,
    observer: TuneObserver | None = None,
) -> TuneReport:
    """Search the tunables of Solutions, Workload by Workload; screen and store the winners.

    A winner passes the screen of :func:`~tilegym_db.bench` in fresh processes: its config is compared with the reference on
    the fuzz shapes, and timed against the defaults and stock code. From then on ``bench`` and ``verify`` measure it together
    with the defaults. Configs that lost in an earlier run are not tried again.

    Args:
        names: Definitions or Solutions; empty means all.
        devices: as for :func:`~tilegym_db.bench`.
        language: only Solutions in this language.
        workload: glob over uuid, tags and axes key.
        budget_s: seconds of search per Solution and Workload. After that the current wave and the screen of the winner are
            completed.
        quick: few workloads, few rounds, and a small budget unless one is given.
        force: ignore what earlier runs tried.
        catalog: the records; the shipped ones and the user's overlay by default.
        store_home: folder of the store; by default ``$TILEGYM_DB_HOME`` or the user data folder.
        observer: callbacks for progress.

    Raises:
        HardwareError: the requested GPU is not the one in this machine.
        NotFoundError: a name that is neither a Definition nor a Solution.
        StoreError: the store cannot be used.
        UsageError: a budget that is not positive, or nothing to tune.
    """
    if budget_s is None:
        budget_s = QUICK_BUDGET_S if quick else DEFAULT_BUDGET_S
    if not budget_s > 0:
        raise UsageError(f"--budget is a number of seconds above 0, not {budget_s:g}.", code="budget_invalid")
    # In this tier only Solutions that can be timed here take part: times of an interpreter would choose the wrong config.
    options = Options(names_of(names), language, workload, quick, force=True, tier="promotion")
    watch = observer or TuneObserver()
    asked = parse_devices(devices)
    with open_pool(asked, watch.starting) as pool:
        setup = RunSetup.on(pool, asked.gpu, catalog, store_home)
        return _search_all(setup, options, KnownResults.read(setup, force=force), budget_s, watch, pool)


def _search_all(
    setup: RunSetup,
    options: Options,
    known: KnownResults,
    budget_s: float,
    observer: TuneObserver,
    pool: DevicePool | None,
) -> TuneReport:
    plan = setup.plan(options)
    pairs = _tunable_pairs(plan, setup.machine)
    observer.planned(sum(map(len, pairs.values())), setup.machine)
    context = setup.context(command="tune")
    left_out = [*plan.skipped, *(Skipped("*", "*", reason) for reason in plan.refused)]
    report = TuneReport(context.run_id, setup.machine, left_out)
    with (
        Journal(context.run_id, setup.home) as journal,
        TuningLog(context.run_id, setup.home) as log,
    ):
        keep = _TuneSink(report, known, journal, log, observer)
        budget = SearchBudget.quick() if options.quick else SearchBudget()
        pieces = tuple((item, pairs[item.definition.name]) for item in plan.definitions)
        task = TuneTask(pieces, known, budget, budget_s)
        if pool is not None:
            _search_on(pool, task, context, setup, timing_budget(options), keep)
        else:
            _search_here(task, context, timing_budget(options), keep)
    setup.ingest()
    return report


def _search_here(task: TuneTask, context: RunContext, budget: TimingBudget, keep: _TuneSink) -> None:
    with scratch_folder() as scratch, leaving_processors(context.machine):
        executor = LocalExecutor(context, scratch, budget, SCREEN, keep.trace, keep.observer.starting)
        try:
            search(task, executor, keep.take)
        except KeyboardInterrupt:
            keep.report.interrupted = True


def _search_on(
    pool: DevicePool, task: TuneTask, context: RunContext, setup: RunSetup, budget: TimingBudget, keep: _TuneSink
) -> None:
    """Divide the searches over the devices of a pool. Each piece starts with all results known by then."""
    session = Session(
        "tune", context.run_id, setup.machine.gpu, context.seed, setup.home, budget, SCREEN,
        command=context.command,
    )  # fmt: skip
    pairs = {plan.definition.name: found for plan, found in task.pieces}
    plans = [plan.restricted_to({workload.uuid for workload, _ in found}) for plan, found in task.pieces]

    def extra(item: WorkItem) -> TuneTask:
        chosen = set(item.uuids)
        pieces = tuple(
            (plan, [pair for pair in pairs[plan.definition.name] if pair[0].uuid in chosen]) for plan in item.plans
        )
        digests = {plan.definition.digest for plan in item.plans}
        return replace(task, pieces=pieces, known=task.known.about(digests), attempts=attempts_of(keep.report.traces))

    callbacks = Callbacks(keep.trace, keep.observer.at_work, job_message=keep.take, extra=extra, immediate=True)
    outcome = pool.run(session, pool.divided(plans), callbacks)
    keep.report.notes += [*outcome.notes, *outcome.unfinished]
    keep.report.unfinished, keep.report.interrupted = outcome.unfinished, outcome.interrupted


@dataclass
class _TuneSink:
    """Sink for traces, steps and results: it writes them to disk and the report, and calls the observer."""

    report: TuneReport
    known: KnownResults
    journal: Journal
    log: TuningLog
    observer: TuneObserver

    def trace(self, trace: Trace) -> None:
        self.journal.append(trace)
        self.report.traces.append(trace)

    def take(self, content: TuningStep | TuneResult) -> None:
        if isinstance(content, TuningStep):
            self.step(content)
        else:
            self.result(content)

    def step(self, step: TuningStep) -> None:
        self.log.append(step)
        self.report.steps.append(step)
        self.observer.stepped(step)

    def result(self, result: TuneResult) -> None:
        same = (result.solution, result.workload_uuid)
        report = self.report
        report.results = [item for item in report.results if (item.solution, item.workload_uuid) != same]
        report.results.append(result)
        self.observer.finished(result)


def _tunable_pairs(plan: Plan, machine: Machine) -> dict[str, list[tuple[Workload, SolutionFiles]]]:
    """Return the tunable (workload, solution) pairs per Definition; add the others to the plan's skipped."""
    found: dict[str, list[tuple[Workload, SolutionFiles]]] = {}
    for item in plan.definitions:
        tunable = []
        for solution in item.timed:
            spec = solution.record.spec
            if spec.tunables and spec.role == "kernel":
                tunable.append(solution)
            elif spec.role == "kernel":
                plan.skipped.append(Skipped(solution.name, "*", "it declares no tunables"))
        pairs = found[item.definition.name] = []
        for workload in item.workloads:
            for solution in tunable:
                reason = _excluded(item.definition, solution, workload, machine)
                if reason is None:
                    pairs.append((workload, solution))
                else:
                    plan.skipped.append(Skipped(solution.name, axes_key(workload.axes), reason))
    return found


def _excluded(definition: Definition, solution: SolutionFiles, workload: Workload, machine: Machine) -> str | None:
    axes, dtypes = definition.bind_axes(workload.axes), definition.bind_dtypes(workload.dtypes)
    target = machine.sm if machine.is_gpu else None
    return solution.record.unsupported(axes, dtypes, workload.layout_classes(definition), target=target)
