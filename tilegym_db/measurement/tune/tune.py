"""Entry point of tuning: :func:`tune` searches configs, journals each step, and stores the winners. A run can be resumed."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.errors import UsageError
from tilegym_db.measurement.devices.messages import Session, WorkItem
from tilegym_db.measurement.devices.pool import Callbacks, DevicePool
from tilegym_db.measurement.local_executor import LocalExecutor
from tilegym_db.measurement.machine import DevicesLike, Machine, leaving_processors, parse_devices
from tilegym_db.measurement.plan import DefinitionPlan, DoneKey, Options, PairKey, Plan, Skipped, names_of
from tilegym_db.measurement.run_setup import RunContext, RunSetup, attempts_of, open_run, timing_budget
from tilegym_db.measurement.runner import BufferPool, Runner
from tilegym_db.measurement.timing import TimingBudget
from tilegym_db.measurement.tune.search import (
    CompileAhead,
    ConfigCandidate,
    Search,
    SearchBudget,
    SearchHistory,
    Step,
    candidate_order,
    history_of,
    is_faulty,
    nearest_winners,
)
from tilegym_db.measurement.tune.tile_sizes import OF_EXPERTS, Start, TunedSizes, read_tile_sizes, starts
from tilegym_db.paths import scratch_folder
from tilegym_db.records import Config, Definition, Trace, Workload, axes_key
from tilegym_db.records.solution import config_id
from tilegym_db.store.answer import html_table
from tilegym_db.store.journal import Journal
from tilegym_db.store.queries.measured import done_keys, failed_screen, tuned_configs
from tilegym_db.store.side_files import TuningLog, TuningStep, read_tuning_steps
from tilegym_db.verification.expected import ExpectedCache, WorkloadContents
from tilegym_db.verification.verifier import CANNOT_VERIFY, Failure, cannot_verify
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
    start: Path | None = None,
    catalog: Catalog | None = None,
    store_home: Path | None = None,
    observer: TuneObserver | None = None,
) -> TuneReport:
    """Search the tunables of Solutions, Workload by Workload; screen and store the winners.

    A winner passes the screen of :func:`~tilegym_db.bench` in fresh processes: its config is compared with the reference on
    the fuzz shapes, and timed against the defaults and stock code. From then on ``bench`` and ``verify`` measure it together
    with the defaults. Configs that lost in an earlier run are not tried again. Other arguments are those of ``bench``.

    Args:
        budget_s: seconds of search per Solution and Workload. After that the current wave and the screen of the winner are
            completed.
        quick: few workloads, few rounds, and a small budget unless one is given.
        force: ignore what earlier runs tried.
        start: a file of tile sizes that vLLM tuned for its fused_moe; the nearest configs are tried first.

    Raises:
        HardwareError: the requested GPU is not the one in this machine.
        NotFoundError: a name that is neither a Definition nor a Solution.
        StoreError: the store cannot be used.
        UsageError: a budget that is not positive, nothing to tune, or a file that is no such table.
    """
    if budget_s is None:
        budget_s = QUICK_BUDGET_S if quick else DEFAULT_BUDGET_S
    if not budget_s > 0:
        raise UsageError(f"--budget is a number of seconds above 0, not {budget_s:g}.", code="budget_invalid")
    tuned = None if start is None else read_tile_sizes(start)
    # In this tier only Solutions that can be timed here take part: times of an interpreter would choose the wrong config.
    options = Options(names_of(names), language, workload, quick, force=True, tier="promotion")
    watch = observer or TuneObserver()
    with open_run(parse_devices(devices), catalog, store_home, watch.starting) as (setup, pool):
        return _search_all(setup, options, KnownResults.read(setup, force=force), budget_s, watch, pool, tuned)


def _search_all(
    setup: RunSetup,
    options: Options,
    known: KnownResults,
    budget_s: float,
    observer: TuneObserver,
    pool: DevicePool | None,
    tuned: TunedSizes | None = None,
) -> TuneReport:
    if tuned is not None:
        _refuse_others(tuned, options, setup.catalog)
    plan = setup.plan(options)
    pairs = _tunable_pairs(plan, setup.machine)
    unused = [] if tuned is None else _take_starts(tuned, plan, pairs, known)
    observer.planned(sum(map(len, pairs.values())), setup.machine)
    context = setup.context(command="tune")
    left_out = [*plan.skipped, *(Skipped("*", "*", reason) for reason in plan.refused)]
    report = TuneReport(context.run_id, setup.machine, left_out, notes=unused)
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
            self.log.append(content)
            self.report.steps.append(content)
            self.observer.stepped(content)
            return
        same = (content.solution, content.workload_uuid)
        others = [item for item in self.report.results if (item.solution, item.workload_uuid) != same]
        self.report.results = [*others, content]
        self.observer.finished(content)


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
                reason = solution.record.unsupported_at(
                    item.definition, workload, machine.sm if machine.is_gpu else None
                )
                if reason is None:
                    pairs.append((workload, solution))
                else:
                    plan.skipped.append(Skipped(solution.name, axes_key(workload.axes), reason))
    return found


def _refuse_others(tuned: TunedSizes, options: Options, catalog: Catalog) -> None:
    """Raise if tile sizes of experts are given, and only operators without experts are asked for."""
    solutions = catalog.solution_paths
    asked = [catalog.solution(name).record.definition if name in solutions else name for name in options.names]
    if asked and not any(catalog.definition(name).axes.keys() >= OF_EXPERTS for name in asked):
        raise UsageError(
            f"{tuned.file} is for operators with the axes {', '.join(sorted(OF_EXPERTS))}, and {asked[0]} has others. "
            "Leave out --start, or name another: tilegym-db list moe_experts",
            code="tile_sizes_unused",
        )


def _take_starts(
    tuned: TunedSizes, plan: Plan, pairs: Mapping[str, list[tuple[Workload, SolutionFiles]]], known: KnownResults
) -> list[str]:
    """Add the configs nearest to another project's sizes to ``known``; return notes on the pairs with and without such configs.

    Raise :class:`UsageError` if no pair has one, because the search would then ignore the file.
    """
    reasons: list[str] = []
    for item in plan.definitions:
        for workload, solution in pairs[item.definition.name]:
            found = starts(tuned, solution, item.definition, workload)
            if isinstance(found, str):
                reasons.append(found)
            else:
                known.starts[solution.digest, item.definition.digest, workload.uuid] = found
    if not reasons and not known.starts:  # the report has the reasons for no pairs
        return [f"{tuned.file}: not used, because nothing can be tuned here"]
    if not known.starts:
        raise UsageError(
            f"{tuned.file} is of no use here: {reasons[0]}. Leave out --start, or name a kernel of experts with its sizes.",
            code="tile_sizes_unused",
        )
    used = f"{tuned.file}: tried first on {len(known.starts)} pairs of solution and workload"
    return [used, *(f"{tuned.file}: not used, {reason}" for reason in dict.fromkeys(reasons))]


# ---- one Solution ---------------------------------------------------------------------------------
# Tuning of the Solutions of one Definition: a search per Workload, then one screen of all leading configs.


@dataclass(frozen=True)
class TuneResult:
    """The result of tuning one Solution on one Workload.

    ``config`` won and passed the screen; it is empty for the source's own defaults, and None if no config passed. ``tried``
    counts the configs of this run, ``left`` those that a larger budget would try. ``gain`` is the time of the defaults over
    that of the winner, both from the screen of this run; None if they were not screened together.
    """

    solution: str
    workload_uuid: str
    axes: Mapping[str, int]
    dtypes: Mapping[str, str]
    config: Config | None
    reason: str
    tried: int = 0
    left: int = 0
    gain: float | None = None


@dataclass
class Tuner:
    """Tuner of the Solutions of one Definition. Each Solution has one worker for all its searches."""

    item: DefinitionPlan
    executor: LocalExecutor
    known: KnownResults
    traces: list[Trace]
    """All traces of the run so far."""
    remember: Callable[[TuningStep], None]
    budget: SearchBudget
    budget_s: float

    @property
    def context(self) -> RunContext:
        """The context of the run."""
        return self.executor.context

    @property
    def definition(self) -> Definition:
        """The operator that the Solutions implement."""
        return self.item.definition

    def run(self, pairs: Sequence[tuple[Workload, SolutionFiles]], finish: Callable[[TuneResult], None]) -> None:
        """Search for each pair in turn, then screen all leading configs together; search again if a leader fails.

        Compilers work one pair ahead. Workers end with this method.
        """
        runners: dict[str, Runner] = {}
        cache = ExpectedCache(self.definition, self.context.machine.device, roots=self.item.roots)
        with ExitStack() as stack:
            for solution in {solution.name: solution for _, solution in pairs}.values():
                runners[solution.name] = self.executor.make_runner(self.definition, solution, {})
                stack.callback(runners[solution.name].handle.close)
            races = [
                PairSearch(self, workload, solution, runners[solution.name], cache) for workload, solution in pairs
            ]
            waiting = races
            while waiting:
                for race, following in itertools.zip_longest(waiting, waiting[1:]):
                    race.compile_ahead(stack)
                    if following is not None:
                        following.compile_ahead(stack)
                    race.search()
                    if following is not None and following.workload.uuid != race.workload.uuid:
                        cache.clear()
                self._screen([race for race in waiting if race.wants_screen])
                for race in waiting:
                    if race.result is not None:
                        finish(race.result)
                waiting = [race for race in races if race.result is None or self._has_failed(race)]

    def _screen(self, races: Sequence[PairSearch]) -> None:
        """Screen the leading configs together with the defaults and stock code, each in a fresh process."""
        if not races:
            return
        stock = [solution for solution in self.item.timed if solution.record.spec.provides == "stock"]
        solutions = {race.solution.name: race.solution for race in races}
        timed = [*stock, *solutions.values()]
        plan = DefinitionPlan(self.definition, self.item.workloads, timed, roots=self.item.roots)
        for race in races:
            pair = (race.solution.name, race.workload.uuid)
            plan.pairs.add(pair)
            if race.leader:
                plan.tuned[pair] = race.leader
        before = len(self.traces)
        self.executor.run([plan])
        traces = {
            (trace.solution_digest, trace.workload_uuid, config_id(trace.config)): trace
            for trace in self.traces[before:]
        }
        for race in races:
            own = (race.solution.digest, race.workload.uuid)
            race.take_verdict(traces[*own, config_id(race.leader or {})], traces[*own, config_id({})])

    def _has_failed(self, race: PairSearch) -> bool:
        """Return True if the winner of a pair later failed on another Workload."""
        config = race.result.config if race.result is not None else None
        return config is not None and config_id(config) in self.known.history(race.key).settled


@dataclass
class PairSearch:
    """Search for one Solution on one Workload. It ends with a ``result``, or with a ``leader`` to be screened."""

    tuner: Tuner
    workload: Workload
    solution: SolutionFiles
    runner: Runner
    cache: ExpectedCache
    leader: Config | None = None
    result: TuneResult | None = None
    tried: int = 0
    left: int = 0
    searched_s: float = 0.0
    _ahead: CompileAhead | None = None

    @property
    def key(self) -> PairKey:
        """The digests of Solution and Definition, and the Workload's uuid."""
        return self.solution.digest, self.tuner.definition.digest, self.workload.uuid

    @property
    def wants_screen(self) -> bool:
        """True if the search found a config that is not screened yet."""
        return self.result is None and self.leader is not None

    def compile_ahead(self, stack: ExitStack) -> None:
        """Start to compile the next candidates in other processes, which end with ``stack`` or earlier."""
        if self._ahead is not None or self.runner.handle.broken is not None:
            return
        candidates = self._candidates(self.tuner.known.history(self.key))
        if candidates:
            machine = self.tuner.context.machine
            self._ahead = CompileAhead(self.tuner.definition, self.solution, self.workload, machine.sm)
            stack.enter_context(self._ahead)
            self._ahead.start(candidates)

    def search(self) -> None:
        """Try the remaining candidates within the budget."""
        known, runner = self.tuner.known, self.runner
        self.leader = self.result = None
        if runner.handle.broken is not None:
            self.result = self._result(None, f"{runner.handle.broken.status}: {runner.handle.broken.reason}")
            return
        history = known.history(self.key)
        candidates = self._candidates(history)
        leader = history.leader
        if candidates:
            found = self._search(candidates, leader)
            if isinstance(found, Failure):
                self.result = self._result(None, f"{found.status}: {found.reason}")
                return
            leader = known.history(self.key).leader
        if leader is None:
            self.result = self._result(None, "no config passes on this workload")
        elif (*self.key, config_id(leader)) in known.screened:
            self.result = self._result(leader, self._why(leader))
        else:
            self.leader = known.leaders[self.key] = leader

    def take_verdict(self, verdict: Trace, defaults: Trace) -> None:
        """Record the screen of the leader. If it did not pass, store a failed step; there is no result yet."""
        config = self.leader
        assert config is not None
        known = self.tuner.known
        del known.leaders[self.key]
        if verdict.status != "PASSED":
            reason = f"its screen says {verdict.status}: {verdict.reason}"
            self._step(Step(config, "failed", reason, status=verdict.status))
            return
        known.screened.add((*self.key, config_id(config)))
        gain = None
        if config:
            known.winners[self.key] = config
            if defaults.performance is not None and verdict.performance is not None:
                gain = round(defaults.performance.latency_us / verdict.performance.latency_us, 4)
        self.result = self._result(config, self._why(config), gain)

    def _candidates(self, history: SearchHistory) -> list[ConfigCandidate]:
        definition, known = self.tuner.definition, self.tuner.known
        won = {**known.winners, **known.leaders}
        winners = {uuid: won[key] for key in won if key[:2] == self.key[:2] for uuid in key[2:]}
        near = nearest_winners(definition, self.workload, self.tuner.item.workloads, winners)
        first = [ConfigCandidate(one.config, one.reason) for one in known.starts.get(self.key, ())]
        return candidate_order(
            self.solution.record, near, history, f"{self.solution.digest} {self.workload.uuid}", first
        )

    def _search(self, candidates: Sequence[ConfigCandidate], leader: Config | None) -> Failure | None:
        tuner, runner, begun = self.tuner, self.runner, time.monotonic()
        machine = tuner.context.machine
        axes = " ".join(f"{name}={size}" for name, size in self.workload.axes.items())
        tuner.executor.starting(f"{self.solution.name} {axes}")
        failure = runner.handle.load()
        if failure is not None:
            return failure
        try:
            contents = WorkloadContents.draw(tuner.definition, self.workload, tuner.context.seed, self.cache)
            if not contents.sets:
                return Failure("UNSUPPORTED", "the reference itself passes no content set at this shape")
            pool = BufferPool(tuner.definition, contents.sets, machine.device, runner.handle.limits.buffer_bytes)
        except CANNOT_VERIFY as error:
            return cannot_verify(error)
        try:
            assert self._ahead is not None
            with self._ahead as ahead:
                search = Search(
                    runner, contents, pool, machine, tuner.budget, tuner.context.seed, leader, self._step, self._failed
                )
                self.left = search.run(candidates, ahead, begun + tuner.budget_s - self.searched_s)
        finally:
            pool.close()
        self._ahead = None
        self.searched_s += time.monotonic() - begun
        self.tried += len(candidates) - self.left
        return None

    def _why(self, config: Config) -> str:
        steps = self.tuner.known.steps.get(self.key, [])
        return next((s.reason for s in reversed(steps) if s.outcome == "leads" and s.config == config), "it leads")

    def _step(self, step: Step) -> None:
        context = self.tuner.context
        self.tuner.remember(
            TuningStep(
                run_id=context.run_id,
                timestamp=datetime.now(UTC),
                gpu=context.machine.gpu,
                solution=self.solution.name,
                solution_digest=self.solution.digest,
                definition_digest=self.tuner.definition.digest,
                workload_uuid=self.workload.uuid,
                **vars(step),
            )
        )

    def _failed(self, config: Config, failure: Failure) -> None:
        """Emit a failed trace: it revokes earlier passes of the config."""
        executor, level = self.tuner.executor, self.runner.handle.sandbox_level
        definition, tier = self.tuner.definition, SCREEN.tier
        executor.emit(executor.context.failed(definition, self.solution, self.workload, tier, failure, config, level))

    def _result(self, config: Config | None, reason: str, gain: float | None = None) -> TuneResult:
        definition = self.tuner.definition
        return TuneResult(
            self.solution.name,
            self.workload.uuid,
            definition.bind_axes(self.workload.axes),
            definition.bind_dtypes(self.workload.dtypes),
            config,
            reason,
            self.tried,
            self.left,
            gain,
        )


# ---- known results --------------------------------------------------------------------------------
# Results of earlier searches on this GPU and of this search so far.


@dataclass
class KnownResults:
    """Results of earlier runs on this GPU: steps, status of failed configs by config id, passed screens, winners."""

    steps: dict[PairKey, list[TuningStep]] = field(default_factory=dict)
    failed: dict[PairKey, dict[str, str]] = field(default_factory=dict)
    screened: set[DoneKey] = field(default_factory=set)
    winners: dict[PairKey, Config] = field(default_factory=dict)
    leaders: dict[PairKey, Config] = field(default_factory=dict)
    """Leading configs of this run that are not screened yet. They are not winners, but good first candidates for a
    neighbour.
    """
    starts: dict[PairKey, list[Start]] = field(default_factory=dict)
    """Configs to try first, from another project."""

    @classmethod
    def read(cls, setup: RunSetup, *, force: bool) -> KnownResults:
        """Read the results of earlier runs. With ``again``, read only the winners: a new search still starts with them."""
        gpu = setup.machine.gpu
        with setup.store() as store:
            known = cls(winners=tuned_configs(store, gpu))
            if force:
                return known
            failed = failed_screen(store, gpu)
            known.screened = done_keys(store, gpu, SCREEN.tier) - set(failed)
        for (*pair, config), status in failed.items():
            known.failed.setdefault((pair[0], pair[1], pair[2]), {})[config] = status
        for step in read_tuning_steps(setup.home, gpu, setup.catalog):
            known.steps.setdefault(step.pair, []).append(step)
        return known

    def about(self, definitions: Collection[str]) -> KnownResults:
        """Return the results of some Definitions, given by digest."""
        return KnownResults(
            {pair: steps for pair, steps in self.steps.items() if pair[1] in definitions},
            {pair: failed for pair, failed in self.failed.items() if pair[1] in definitions},
            {key for key in self.screened if key[1] in definitions},
            {pair: config for pair, config in self.winners.items() if pair[1] in definitions},
            starts={pair: found for pair, found in self.starts.items() if pair[1] in definitions},
        )

    def history(self, pair: PairKey) -> SearchHistory:
        """Return the history of one pair.

        A config that fails on one Workload is not tried on others of the same Definition.
        """
        failed = dict(self.failed.get(pair, {}))
        for other in {*self.failed, *self.steps}:
            if other != pair and other[:2] == pair[:2]:
                steps = self.steps.get(other, [])
                said = {config_id(step.config): step.status for step in steps if step.status is not None}
                found = {**self.failed.get(other, {}), **said}
                failed |= {config: status for config, status in found.items() if is_faulty(status)}
        return history_of(self.steps.get(pair, []), failed)


# ---- task -----------------------------------------------------------------------------------------
# A piece of tuning work, and its execution on one device.


@dataclass(frozen=True)
class TuneTask:
    """The pairs to tune, by Definition, and the budgets.

    ``attempts`` are those of the run so far, as in RunContext: if a piece is repeated, its traces get new ids.
    """

    pieces: tuple[tuple[DefinitionPlan, Sequence[tuple[Workload, SolutionFiles]]], ...]
    known: KnownResults
    budget: SearchBudget
    budget_s: float
    attempts: Mapping[tuple[str, str, str], int] = field(default_factory=dict)


def search(task: TuneTask, executor: LocalExecutor, report: Callable[[TuningStep | TuneResult], None]) -> None:
    """Tune all pairs of a task. Each step and result is passed to ``report`` at once; traces go to the executor's ``emit``."""
    traces: list[Trace] = []
    emit = executor.emit

    def keep(trace: Trace) -> None:
        traces.append(trace)
        emit(trace)

    def remember(step: TuningStep) -> None:
        task.known.steps.setdefault(step.pair, []).append(step)
        report(step)

    executor.emit = keep
    for plan, pairs in task.pieces:
        tuner = Tuner(plan, executor, task.known, traces, remember, task.budget, task.budget_s)
        tuner.run(pairs, report)
