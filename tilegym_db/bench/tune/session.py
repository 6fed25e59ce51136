"""``tune``: from what is asked for to winning configs in the database. Resumable, journaled step by step."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tilegym_db.bench.contents import ExpectedCache, WorkloadContents
from tilegym_db.bench.executor.local import CANNOT_VERIFY, LocalExecutor
from tilegym_db.bench.machine import Machine, leaving_processors, select_machine
from tilegym_db.bench.member import Member
from tilegym_db.bench.plan import DefinitionPlan, DoneKey, Options, PairKey, Plan, Skipped, make_plan
from tilegym_db.bench.rigor import SCREEN
from tilegym_db.bench.session import unusable_languages
from tilegym_db.bench.stage import Stage
from tilegym_db.bench.tournament import Effort
from tilegym_db.bench.tracing import RunContext
from tilegym_db.bench.tune.candidates import Candidate, History, candidate_order, history_of, is_faulty, nearest_winners
from tilegym_db.bench.tune.compile_ahead import CompileAhead
from tilegym_db.bench.tune.search import Search, SearchEffort, Step
from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.errors import UsageError
from tilegym_db.paths import home
from tilegym_db.records import Config, Definition, Trace, Workload, axes_key
from tilegym_db.records.solution import config_id
from tilegym_db.records.trace import new_run_id
from tilegym_db.scratch import scratch_folder
from tilegym_db.store.connection import open_store
from tilegym_db.store.ingest import ingest_journals
from tilegym_db.store.journal import Journal
from tilegym_db.store.queries import done_keys, failed_screen, tuned_configs
from tilegym_db.store.tuning import TuningLog, TuningStep, read_tuning_steps
from tilegym_db.verify.verifier import Failure

__all__ = ["DEFAULT_BUDGET_S", "TuneObserver", "TuneReport", "Tuned", "tune"]

DEFAULT_BUDGET_S = 60.0
QUICK_BUDGET_S = 10.0


@dataclass(frozen=True)
class Tuned:
    """What came of one Solution on one Workload.

    ``config`` is the one that won and passed the screen, empty where that is the source's own defaults, None where none
    passed. ``tried`` counts configs of this run, ``left`` those that a larger budget would try. ``gain`` is the time of the
    defaults over that of the winner, both from the screen of this run; None where they were not screened side by side.
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
class TuneObserver:
    """What a caller may watch: how many pairs there are, what starts, each step, each result."""

    planned: Callable[[int, Machine], None] = lambda pairs, machine: None
    starting: Callable[[str], None] = lambda what: None
    stepped: Callable[[TuningStep], None] = lambda step: None
    finished: Callable[[Tuned], None] = lambda result: None


@dataclass
class TuneReport:
    """What a run did. ``interrupted`` is true after Ctrl-C; every step before it is kept."""

    run_id: str
    machine: Machine
    skipped: list[Skipped]
    results: list[Tuned] = field(default_factory=list)
    steps: list[TuningStep] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    interrupted: bool = False

    @property
    def outcomes(self) -> Counter[str]:
        """How many configs ended in each way."""
        return Counter(step.outcome for step in self.steps if step.outcome != "leads")


def tune(
    names: tuple[str, ...] = (),
    *,
    gpu: str = "auto",
    language: str | None = None,
    workload: str | None = None,
    budget_s: float | None = None,
    quick: bool = False,
    again: bool = False,
    catalog: Catalog | None = None,
    store_home: Path | None = None,
    observer: TuneObserver | None = None,
) -> TuneReport:
    """Search the tunables of Solutions, Workload by Workload; screen and store what wins.

    The winner is verified under that config over the fuzz shapes and timed against the defaults and stock code, in fresh
    processes: the screen of :func:`~tilegym_db.benchmark`. From then on ``bench`` and ``promote`` measure it beside the
    defaults. Configs that were given up in an earlier run are not tried again.

    Args:
        names: Definitions or Solutions; empty means all.
        gpu: ``auto``, ``cpu``, or the slug or family of the GPU in this machine.
        language: only Solutions in this language.
        workload: glob over uuid, tags and axes key.
        budget_s: seconds of search for each Solution and Workload. The wave that runs then is finished, and so is the
            screen of the winner.
        quick: few workloads, few rounds, and a small budget unless one is given.
        again: forget what earlier runs tried.
        catalog: the records; the shipped ones and the user's overlay by default.
        store_home: folder of the store; ``$TILEGYM_DB_HOME`` or the user data folder by default.
        observer: callbacks for progress.

    Raises:
        HardwareError: the GPU asked for is not the one in this machine.
        NotFoundError: a name that is neither a Definition nor a Solution.
        StoreError: the store cannot be used.
        UsageError: a budget that is not positive, or nothing to tune.
    """
    if budget_s is None:
        budget_s = QUICK_BUDGET_S if quick else DEFAULT_BUDGET_S
    if not budget_s > 0:
        raise UsageError(f"--budget is a number of seconds above 0, not {budget_s:g}.")
    records, folder, watch = catalog or Catalog.default(), store_home or home(), observer or TuneObserver()
    machine = select_machine(gpu)
    known = _Known.read(records, folder, machine.gpu, again=again)
    # The tier at which only what can be timed here takes part: an interpreter's times would choose the wrong config.
    options = Options(tuple(names), language, workload, quick, again=True, tier="promotion")
    plan = make_plan(records, machine, options, (), unusable_languages())
    pairs = _tunable_pairs(plan, machine)
    watch.planned(sum(map(len, pairs.values())), machine)
    run_id = new_run_id(machine.gpu)
    report = TuneReport(run_id, machine, plan.skipped)
    with (
        Journal(run_id, folder) as journal,
        TuningLog(run_id, folder) as log,
        scratch_folder() as scratch,
        leaving_processors(machine),
    ):

        def emit(trace: Trace) -> None:
            journal.append(trace)
            report.traces.append(trace)

        def remember(step: TuningStep) -> None:
            log.append(step)
            known.steps.setdefault(step.pair, []).append(step)
            report.steps.append(step)
            watch.stepped(step)

        def finish(result: Tuned) -> None:
            same = (result.solution, result.workload_uuid)
            report.results = [item for item in report.results if (item.solution, item.workload_uuid) != same]
            report.results.append(result)
            watch.finished(result)

        context = RunContext(run_id, machine, secrets.randbits(62), command="tune")
        executor = LocalExecutor(context, scratch, Effort.quick() if quick else Effort(), SCREEN, emit, watch.starting)
        effort = SearchEffort.quick() if quick else SearchEffort()
        try:
            for item in plan.definitions:
                tuner = _Tuner(item, executor, known, report.traces, remember, effort, budget_s)
                tuner.run(pairs[item.definition.name], finish)
        except KeyboardInterrupt:
            report.interrupted = True
    with open_store(folder, catalog=records) as store:
        ingest_journals(store)
    return report


@dataclass
class _Known:
    """What earlier runs found out on this GPU: steps, config id -> status of what failed, screens passed, winners."""

    steps: dict[PairKey, list[TuningStep]] = field(default_factory=dict)
    failed: dict[PairKey, dict[str, str]] = field(default_factory=dict)
    screened: set[DoneKey] = field(default_factory=set)
    winners: dict[PairKey, Config] = field(default_factory=dict)
    leaders: dict[PairKey, Config] = field(default_factory=dict)
    """What leads in this run and was not screened yet: no winner, but a good first guess for a neighbour."""

    @classmethod
    def read(cls, catalog: Catalog, folder: Path, gpu: str, *, again: bool) -> _Known:
        """With ``again``, only what won: a search that starts anew still begins with that."""
        with open_store(folder, catalog=catalog) as store:
            ingest_journals(store)
            known = cls(winners=tuned_configs(store, gpu))
            if again:
                return known
            failed = failed_screen(store, gpu)
            known.screened = done_keys(store, gpu, SCREEN.tier) - set(failed)
        for (*pair, config), status in failed.items():
            known.failed.setdefault((pair[0], pair[1], pair[2]), {})[config] = status
        for step in read_tuning_steps(folder, gpu, catalog):
            known.steps.setdefault(step.pair, []).append(step)
        return known

    def history(self, pair: PairKey) -> History:
        """Of one pair. A config that fails on one Workload is not tried on any other of the same Definition."""
        failed = dict(self.failed.get(pair, {}))
        for other in {*self.failed, *self.steps}:
            if other != pair and other[:2] == pair[:2]:
                steps = self.steps.get(other, [])
                said = {config_id(step.config): step.status for step in steps if step.status is not None}
                found = {**self.failed.get(other, {}), **said}
                failed |= {config: status for config, status in found.items() if is_faulty(status)}
        return history_of(self.steps.get(pair, []), failed)


def _tunable_pairs(plan: Plan, machine: Machine) -> dict[str, list[tuple[Workload, SolutionFiles]]]:
    """Definition -> what can be tuned, Workload by Workload; what cannot is added to the plan's skipped."""
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


@dataclass
class _Tuner:
    """Tunes the Solutions of one Definition. Each has one worker for all its searches."""

    item: DefinitionPlan
    executor: LocalExecutor
    known: _Known
    traces: list[Trace]
    """Every trace of the run so far."""
    remember: Callable[[TuningStep], None]
    effort: SearchEffort
    budget_s: float

    @property
    def context(self) -> RunContext:
        return self.executor.context

    @property
    def definition(self) -> Definition:
        return self.item.definition

    def run(self, pairs: Sequence[tuple[Workload, SolutionFiles]], finish: Callable[[Tuned], None]) -> None:
        """Search for each pair in turn, then screen what leads, all together; again where a leader does not pass.

        Compilers are a pair ahead. Workers end with it.
        """
        members: dict[str, Member] = {}
        cache = ExpectedCache(self.definition, self.context.machine.device)
        with ExitStack() as stack:
            for solution in {solution.name: solution for _, solution in pairs}.values():
                members[solution.name] = self.executor.make_member(self.definition, solution, {})
                stack.callback(members[solution.name].close)
            races = [_Pair(self, workload, solution, members[solution.name], cache) for workload, solution in pairs]
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

    def _screen(self, races: Sequence[_Pair]) -> None:
        """The verdicts on those that lead, beside the defaults and stock code, each in a fresh process."""
        if not races:
            return
        stock = [solution for solution in self.item.timed if solution.record.spec.provides == "stock"]
        solutions = {race.solution.name: race.solution for race in races}
        plan = DefinitionPlan(self.definition, self.item.workloads, [*stock, *solutions.values()])
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

    def _has_failed(self, race: _Pair) -> bool:
        """Whether what won there was found faulty on another Workload afterwards."""
        config = race.result.config if race.result is not None else None
        return config is not None and config_id(config) in self.known.history(race.key).settled


@dataclass
class _Pair:
    """One Solution on one Workload: it searches, and then has a ``result``, or a ``leader`` that wants a screen."""

    tuner: _Tuner
    workload: Workload
    solution: SolutionFiles
    member: Member
    cache: ExpectedCache
    leader: Config | None = None
    result: Tuned | None = None
    tried: int = 0
    left: int = 0
    searched_s: float = 0.0
    _ahead: CompileAhead | None = None

    @property
    def key(self) -> PairKey:
        return self.solution.digest, self.tuner.definition.digest, self.workload.uuid

    @property
    def wants_screen(self) -> bool:
        return self.result is None and self.leader is not None

    def compile_ahead(self, stack: ExitStack) -> None:
        """Begin to compile what will be tried, in other processes; ``stack`` ends them at the latest."""
        if self._ahead is not None or self.member.broken is not None:
            return
        candidates = self._candidates(self.tuner.known.history(self.key))
        if candidates:
            machine = self.tuner.context.machine
            self._ahead = CompileAhead(self.tuner.definition, self.solution, self.workload, machine.sm)
            stack.enter_context(self._ahead)
            self._ahead.start(candidates)

    def search(self) -> None:
        """Try what is left to try, within the budget."""
        known, member = self.tuner.known, self.member
        self.leader = self.result = None
        if member.broken is not None:
            self.result = self._result(None, f"{member.broken.status}: {member.broken.reason}")
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
        """What the screen says of the leader. Where it is no pass, that is remembered, and there is no result yet."""
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

    def _candidates(self, history: History) -> list[Candidate]:
        definition, known = self.tuner.definition, self.tuner.known
        won = {**known.winners, **known.leaders}
        winners = {uuid: won[key] for key in won if key[:2] == self.key[:2] for uuid in key[2:]}
        near = nearest_winners(definition, self.workload, self.tuner.item.workloads, winners)
        return candidate_order(self.solution.record, near, history, f"{self.solution.digest} {self.workload.uuid}")

    def _search(self, candidates: Sequence[Candidate], leader: Config | None) -> Failure | None:
        tuner, member, begun = self.tuner, self.member, time.monotonic()
        machine = tuner.context.machine
        axes = " ".join(f"{name}={size}" for name, size in self.workload.axes.items())
        tuner.executor.starting(f"{self.solution.name} {axes}")
        failure = member.load()
        if failure is not None:
            return failure
        try:
            contents = WorkloadContents.draw(tuner.definition, self.workload, tuner.context.seed, self.cache)
            if not contents.sets:
                return Failure("UNSUPPORTED", "the reference itself passes no content set at this shape")
            stage = Stage(tuner.definition, contents.sets, machine.device, member.limits.arena_bytes)
        except CANNOT_VERIFY as error:
            return Failure("UNSUPPORTED", f"cannot be verified on this machine: {error}")
        try:
            assert self._ahead is not None
            with self._ahead as ahead:
                search = Search(
                    member, contents, stage, machine, tuner.effort, tuner.context.seed, leader, self._step, self._failed
                )
                self.left = search.run(candidates, ahead, begun + tuner.budget_s - self.searched_s)
        finally:
            stage.close()
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
        """A verdict of a worker is a trace, so that it takes back what the config may have passed before."""
        executor, level = self.tuner.executor, self.member.sandbox_level
        definition, tier = self.tuner.definition, SCREEN.tier
        executor.emit(executor.context.failed(definition, self.solution, self.workload, tier, failure, config, level))

    def _result(self, config: Config | None, reason: str, gain: float | None = None) -> Tuned:
        definition = self.tuner.definition
        return Tuned(
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
