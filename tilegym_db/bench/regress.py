"""Old versions of Solutions against those of today, both timed now on this machine, in the same rounds.

What was measured earlier is no evidence: drivers, clocks and libraries change. So the old source is fetched from git, verified
and timed beside the new one, and beside a control (stock code, entered twice) that says how far to trust it. Nothing is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tilegym_db.bench.against import Pair, pairs_of_revision, pairs_of_run
from tilegym_db.bench.executor.local import LocalExecutor
from tilegym_db.bench.gpus.devices import MeasuringDevice
from tilegym_db.bench.gpus.messages import Concluded, Session
from tilegym_db.bench.gpus.places import open_pool
from tilegym_db.bench.gpus.pool import Callbacks, DevicePool
from tilegym_db.bench.interleaved import TimedCandidate, TimingBudget
from tilegym_db.bench.plan import Options, Plan
from tilegym_db.bench.regression import (
    Bars,
    Change,
    Control,
    RegressionReport,
    RegressionRow,
    RowVerdict,
    bars_for,
    compare_control,
    compare_versions,
    voiding,
)
from tilegym_db.bench.run_setup import Observer, RunSetup, timing_budget
from tilegym_db.bench.runner import Runner
from tilegym_db.bench.tier_policy import SCREEN
from tilegym_db.catalog import Catalog, SolutionFiles, stock_of
from tilegym_db.errors import NotFoundError, RecordError, UsageError, did_you_mean
from tilegym_db.records import Definition, Solution, Trace, Workload, axes_key
from tilegym_db.scratch import scratch_folder
from tilegym_db.store.queries import solutions_of_run

__all__ = ["RegressionReport", "regress"]

BEFORE, CONTROL = ".before", ".control"
"""Suffixes of the names under which an old version, and the control's second self, take part."""


def regress(
    against: str,
    names: tuple[str, ...] = (),
    *,
    gpu: str = "auto",
    workload: str | None = None,
    quick: bool = False,
    bars: Bars | None = None,
    catalog: Catalog | None = None,
    store_home: Path | None = None,
    observer: Observer | None = None,
    gpus: str | Sequence[MeasuringDevice] | None = None,
    executor: str | None = None,
) -> RegressionReport:
    """Measure every Solution whose source changed since ``against``, old and new interleaved.

    Args:
        against: a run of the store, or a git revision of the catalog.
        names: Definitions or Solutions; empty means all.
        gpu: as for :func:`tilegym_db.benchmark`.
        workload: glob over uuid, tags and axes key.
        quick: few workloads and few samples.
        bars: what counts as a change; by default those of the device.
        catalog: today's records.
        store_home: folder of the store, where ``against`` is looked for first.
        observer: callbacks for progress.
        gpus, executor: as for :func:`tilegym_db.benchmark`; both versions and the control are always on one GPU.

    Raises:
        HardwareError: the GPU asked for is not the one in this machine.
        NotFoundError: a name that is neither a Definition nor a Solution; or ``against`` is neither run nor revision.
        UsageError: no git, or no repository around the catalog.
    """
    watch = observer or Observer()
    with open_pool(executor, gpus, gpu, watch.starting) as pool:
        setup = RunSetup.on(pool, gpu, catalog, store_home)
        options = Options(workload=workload, quick=quick, again=True, tier="promotion")
        return _regress(setup, against, names, options, bars, watch, pool)


def _regress(
    setup: RunSetup,
    against: str,
    names: Sequence[str],
    options: Options,
    bars: Bars | None,
    observer: Observer,
    pool: DevicePool | None,
) -> RegressionReport:
    """The tier of the options keeps kernels out that the device could only interpret."""
    chosen = _chosen(setup.catalog, names)
    with setup.store() as store:
        measured = solutions_of_run(store, against)
    pairs = pairs_of_run(against, measured, chosen) if measured else pairs_of_revision(against, chosen)
    report = RegressionReport(against, setup.machine, pairs.others)
    if pairs.changed:
        with scratch_folder() as folder:
            own_bars = bars or bars_for(setup.machine.gpu)
            session = _Comparison(setup, report, own_bars, folder, observer, pool)
            session.run(pairs.changed, options)
    return report


def _chosen(catalog: Catalog, names: Sequence[str]) -> list[SolutionFiles]:
    known = {*catalog.definitions, *catalog.solutions}
    for name in names:
        if name not in known:
            catalog.refuse_broken(name)
            hint = did_you_mean(name, known)
            raise NotFoundError(
                f"'{name}' is no definition and no solution.{hint} Try: tilegym-db list", code="name_unknown"
            )
    return [s for s in catalog.solutions.values() if not names or {s.name, s.record.definition} & set(names)]


# -- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class _Comparison:
    """One session: a catalog of its own with both versions of everything, and the rounds that were timed."""

    setup: RunSetup
    report: RegressionReport
    bars: Bars
    folder: Path
    observer: Observer
    pool: DevicePool | None = None
    traces: dict[tuple[str, str], Trace] = field(default_factory=dict)
    rounds: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def run(self, pairs: Sequence[Pair], options: Options) -> None:
        root = self.folder / "catalog"
        pairs = self._write(root, self.setup.catalog, pairs)
        if not pairs:
            return
        plan = replace(self.setup, catalog=Catalog((root,))).plan(options)
        if plan.refused:
            raise RecordError(plan.refused[0], code="plan_refused")
        self.observer.planned(plan, self.setup.machine)
        if self.pool is not None:
            self._measure_on(self.pool, plan, timing_budget(options))
        else:
            self._measure_here(plan, timing_budget(options))
        for item in plan.definitions:
            for workload in item.workloads:
                self._conclude(item.definition, workload, pairs)
        timed = {row.solution for row in self.report.rows}
        for pair in pairs:
            if pair.new.name not in timed:
                reasons = {item.reason for item in plan.skipped if item.solution in (pair.new.name, "*")}
                reason = "; ".join(sorted(reasons)) or "no workload of it can be run here"
                self._leave_out(pair, reason)

    def _measure_here(self, plan: Plan, budget: TimingBudget) -> None:
        context, keep = self.setup.context("regress"), self._keep_rounds
        starting = self.observer.starting
        executor = LocalExecutor(context, self.folder, budget, SCREEN, self._keep_trace, starting, after_timing=keep)
        executor.run(plan.definitions)

    def _measure_on(self, pool: DevicePool, plan: Plan, budget: TimingBudget) -> None:
        setup = self.setup
        context, gpu = setup.context("regress"), setup.machine.gpu
        session = Session("measure", context.run_id, gpu, context.seed, setup.home, budget, SCREEN, keeps_rounds=True)

        def conclude(message: Concluded) -> None:
            self.rounds.update({(name, message.uuid): rounds for name, rounds in message.rounds.items()})

        callbacks = Callbacks(self._keep_trace, self.observer.at_work, concluded=conclude)
        outcome = pool.run(session, pool.divided(plan.definitions), callbacks)
        if outcome.interrupted:
            raise KeyboardInterrupt
        self.report.notes += [*outcome.notes, *outcome.unfinished]

    def _write(self, root: Path, records: Catalog, pairs: Sequence[Pair]) -> list[Pair]:
        """Both versions, the controls, and what they need; returns the pairs whose old version is still valid."""
        valid = []
        for name in {pair.new.record.definition: None for pair in pairs}:
            definition = records.definition(name)
            _write(root / "definitions" / definition.op_type / f"{name}.json", definition.to_json().encode())
            lines = "".join(workload.to_json() + "\n" for workload in records.workloads_for(name))
            _write(root / "workloads" / definition.op_type / f"{name}.jsonl", lines.encode())
        for pair in pairs:
            definition = records.definition(pair.new.record.definition)
            renamed = f"{pair.new.name}{BEFORE}"
            try:
                _write_solution(root, definition, renamed, pair.old.record, pair.old.sources)
                Catalog((root,)).solution(renamed)
            except RecordError as error:
                (_folder(root, definition, renamed) / "solution.json").unlink(missing_ok=True)
                reason = f"its version at {pair.old.commit[:10]} does not fit today's definition: {error}"
                self._leave_out(pair, reason)
                continue
            valid.append(pair)
            _write_solution(root, definition, pair.new.name, pair.new.record, pair.new.sources)
        for name in {pair.new.record.definition: None for pair in valid}:
            definition, control = records.definition(name), _control(records, name)
            for written in (control.name, f"{control.name}{CONTROL}"):
                _write_solution(root, definition, written, control.record, control.sources)
        return valid

    def _leave_out(self, pair: Pair, reason: str, workload: str = "") -> None:
        self.report.rows.append(self._row(pair, "not comparable", reason, workload))

    @staticmethod
    def _row(
        pair: Pair, verdict: RowVerdict, reason: str, workload: str, change: Change | None = None
    ) -> RegressionRow:
        name, definition = pair.new.name, pair.new.record.definition
        return RegressionRow(name, verdict, reason, definition, workload, pair.old.commit[:10], change)

    def _keep_trace(self, trace: Trace) -> None:
        self.traces[trace.solution, trace.workload_uuid] = trace
        self.observer.traced(trace)

    def _keep_rounds(self, workload: Workload, candidates: Sequence[TimedCandidate[Runner]]) -> None:
        for candidate in candidates:
            if candidate.failure is None:
                self.rounds[candidate.runner.name, workload.uuid] = candidate.rounds

    def _conclude(self, definition: Definition, workload: Workload, pairs: Sequence[Pair]) -> None:
        """A row for each pair of one Workload, and why the session is void where its control says so."""
        where = ", ".join(text for text in (axes_key(workload.axes), *workload.dtypes.values()) if text)
        control = self._control_of(workload)
        if isinstance(control, Control):
            reason = voiding(control, self.bars)
            if reason is not None:
                self.report.void.append(f"{definition.name} {where}: the control {reason}")
        for pair in pairs:
            if pair.new.record.definition == definition.name and (pair.new.name, workload.uuid) in self.traces:
                self.report.rows.append(self._compared(pair, workload, where, control))

    def _control_of(self, workload: Workload) -> Control | str:
        for name, uuid in self.traces:
            if uuid == workload.uuid and name.endswith(CONTROL):
                one = self.rounds.get((name.removesuffix(CONTROL), uuid))
                other = self.rounds.get((name, uuid))
                if one is not None and other is not None:
                    return compare_control(one, other)
                return f"the control failed: {self.traces[name, uuid].reason}"
        return "the control did not take part"

    def _compared(self, pair: Pair, workload: Workload, where: str, control: Control | str) -> RegressionRow:
        before, now = (f"{pair.new.name}{BEFORE}", workload.uuid), (pair.new.name, workload.uuid)
        old, new = self.rounds.get(before), self.rounds.get(now)
        if old is None:
            trace = self.traces.get(before)
            why = f"{trace.status}: {trace.reason}" if trace else "it did not take part"
            return self._row(pair, "not comparable", f"the old version was not timed: {why}", where)
        if new is None:
            trace = self.traces[now]
            return self._row(pair, "broken", f"passed before, now {trace.status}: {trace.reason}", where)
        if isinstance(control, str):
            return self._row(pair, "not comparable", control, where)
        change = compare_versions(old, new, control, self.bars)
        return self._row(pair, change.verdict, change.reason, where, change)


def _control(catalog: Catalog, definition: str) -> SolutionFiles:
    """The stock code, which every Definition is measured with; where one has none, its first PyTorch code."""
    solutions = catalog.solutions_for(definition)
    stock = stock_of(solutions)
    plain = [s for s in solutions if s.record.spec.language == "python"]
    if stock is None and not plain:
        raise UsageError(
            f"{definition} has no stock code and no other PyTorch code, so there is nothing to control with.",
            code="control_missing",
        )
    return stock or plain[0]


def _folder(root: Path, definition: Definition, name: str) -> Path:
    return root / "solutions" / definition.op_type / definition.name / name


def _write_solution(
    root: Path, definition: Definition, name: str, record: Solution, sources: Mapping[str, bytes]
) -> None:
    """A Solution under another name: its digest, which covers definition, spec and sources, stays the same."""
    folder = _folder(root, definition, name)
    for path, content in sources.items():
        _write(folder / path, content)
    _write(folder / "solution.json", record.model_copy(update={"name": name}).to_json().encode())


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
