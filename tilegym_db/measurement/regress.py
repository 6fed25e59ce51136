"""Regression check: old versions of Solutions against those of today, timed now on this machine in the same rounds.

Earlier measurements are not comparable: drivers, clocks and libraries change. So the old source is fetched from git,
verified and timed together with the new one. A control (stock code, entered twice) measures the noise of the session.
Nothing is stored.
"""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

from tilegym_db.catalog import Catalog, SolutionFiles, stock_of
from tilegym_db.catalog.record_files import (
    FAMILY_NAME,
    LIBRARY,
    RECORD_NAME,
    family_names,
    file_of,
    solution_of_family,
    write_sources,
)
from tilegym_db.errors import NotFoundError, RecordError, UsageError
from tilegym_db.measurement.devices.messages import Session, WorkloadDone
from tilegym_db.measurement.devices.pool import Callbacks, DevicePool
from tilegym_db.measurement.local_executor import LocalExecutor
from tilegym_db.measurement.machine import DevicesLike, Machine, parse_devices
from tilegym_db.measurement.plan import Options, Plan
from tilegym_db.measurement.run_setup import Observer, RunSetup, open_run, timing_budget
from tilegym_db.measurement.runner import Runner
from tilegym_db.measurement.timing import Interval, TimedCandidate, TimingBudget, median, paired_ratio, verdict_of
from tilegym_db.paths import scratch_folder
from tilegym_db.records import Definition, Solution, Trace, Workload, axes_key
from tilegym_db.records.hardware import CPU
from tilegym_db.store.queries.measured import solutions_of_run
from tilegym_db.verification.worker_handle import SCREEN

BEFORE, CONTROL = ".before", ".control"
"""Suffixes of the names of an old version, and of the second copy of the control."""


def regress(
    against: str,
    names: tuple[str, ...] = (),
    *,
    devices: DevicesLike = "auto",
    workload: str | None = None,
    quick: bool = False,
    bars: Bars | None = None,
    catalog: Catalog | None = None,
    store_home: Path | None = None,
    observer: Observer | None = None,
) -> RegressionReport:
    """Measure every Solution whose source changed since ``against``, with old and new versions interleaved.

    Args:
        against: a run of the store, or a git revision of the catalog.
        devices: as for :func:`tilegym_db.bench`, like the other arguments; both versions and the control are on one of them.
        bars: thresholds of a change; by default those of the device.

    Raises:
        HardwareError: the requested GPU is not the one in this machine.
        NotFoundError: a name is neither a Definition nor a Solution, or ``against`` is neither a run nor a revision.
        UsageError: git is not installed, or the catalog is not in a repository.
    """
    watch = observer or Observer()
    with open_run(parse_devices(devices), catalog, store_home, watch.starting) as (setup, pool):
        options = Options(workload=workload, quick=quick, force=True, tier="promotion")
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
    """Find the changed Solutions and compare their versions.

    The tier of the options excludes kernels that the device could only interpret.
    """
    chosen = _chosen(setup.catalog, names)
    with setup.store() as store:
        measured = solutions_of_run(store, against)
    pairs = pairs_of_run(against, measured, chosen) if measured else pairs_of_revision(against, chosen)
    report = RegressionReport(against, setup.machine, pairs.others)
    if pairs.changed:
        with scratch_folder() as folder:
            own_bars = bars or bars_for(setup.machine.gpu)
            _Comparison(setup, report, own_bars, folder, observer, pool).run(pairs.changed, options)
    return report


def _chosen(catalog: Catalog, names: Sequence[str]) -> list[SolutionFiles]:
    catalog.refuse_unknown(names)
    return [s for s in catalog.solutions.values() if not names or {s.name, s.record.definition} & set(names)]


# -- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class _Comparison:
    """One session: a temporary catalog with both versions of all Solutions, and their timed rounds."""

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

        def conclude(message: WorkloadDone) -> None:
            self.rounds.update({(name, message.uuid): rounds for name, rounds in message.rounds.items()})

        callbacks = Callbacks(self._keep_trace, self.observer.at_work, concluded=conclude)
        outcome = pool.run(session, pool.divided(plan.definitions), callbacks)
        if outcome.interrupted:
            raise KeyboardInterrupt
        self.report.notes += [*outcome.notes, *outcome.unfinished]

    def _write(self, root: Path, records: Catalog, pairs: Sequence[Pair]) -> list[Pair]:
        """Write both versions, the controls, and their records; return the pairs whose old version is still valid."""
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

    def _leave_out(self, pair: Pair, reason: str) -> None:
        self.report.rows.append(self._row(pair, "not comparable", reason, workload=""))

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
        """Add a row for each pair of one Workload, and a reason to void the session if its control asks for it."""
        where = ", ".join(text for text in (axes_key(workload.axes), *workload.dtypes.values()) if text)
        control = self._control_of(workload)
        if isinstance(control, Control):
            reason = void_reason(control, self.bars)
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
    """Return the control of a Definition: its stock code, else its first PyTorch code."""
    solutions = catalog.solutions_for(definition)
    stock = stock_of(solutions)
    plain = [s for s in solutions if s.record.spec.language == "python"]
    if stock is None and not plain:
        raise UsageError(
            f"{definition} has no stock code and no other PyTorch code, so there is no control for it.",
            code="control_missing",
        )
    return stock or plain[0]


def _folder(root: Path, definition: Definition, name: str) -> Path:
    return root / "solutions" / definition.op_type / definition.name / name


def _write_solution(
    root: Path, definition: Definition, name: str, record: Solution, sources: Mapping[str, bytes]
) -> None:
    """Write a Solution under another name. Its digest covers definition, spec and sources, so it stays the same."""
    folder = _folder(root, definition, name)
    write_sources(folder, sources)
    _write(folder / "solution.json", record.model_copy(update={"name": name}).to_json().encode())


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


# ---- regression -----------------------------------------------------------------------------------
# Decide if a new version of a Solution is slower than the old one, from rounds in which both were timed. Pure.
#
# A control, the same source entered twice, is timed in the same rounds, and its two times should agree. A difference must
# exceed their scatter. If the two times differ too much, the whole session is void.

ChangeVerdict = Literal["regression", "improvement", "same"]
RowVerdict = Literal[ChangeVerdict, "broken", "unchanged", "not comparable"]
FINDINGS: tuple[RowVerdict, ...] = ("regression", "broken")
"""Verdicts that are a reason to stop."""


@dataclass(frozen=True)
class Bars:
    """Thresholds of a change. Shares have no unit.

    A smaller change than ``threshold`` does not count, nor one within ``control_mads`` median absolute deviations of the
    control's ratios, nor one below ``floor_us`` microseconds. If the control differs from itself by more than
    ``control_shift``, the session is void.
    """

    threshold: float = 0.03
    control_mads: float = 3.0
    floor_us: float = 0.5
    control_shift: float = 0.02


# Processes on one CPU always differ by some percent, by the place of their memory and their core.
_BARS = {CPU: Bars(threshold=0.1, control_shift=0.1)}


def bars_for(gpu: str) -> Bars:
    """Return the thresholds for a device, by its slug."""
    return _BARS.get(gpu, Bars())


@dataclass(frozen=True)
class Control:
    """Comparison of one source with itself: the ratio (ideally 1), its scatter, and the difference in microseconds."""

    ratio: Interval
    mad: float
    apart_us: float

    @property
    def shift(self) -> float:
        """The share by which one of the two was slower; no unit."""
        return max(self.ratio.median, 1 / self.ratio.median) - 1


@dataclass(frozen=True)
class Change:
    """The change of a Solution. ``change`` is the share by which it takes longer now (below 0: less)."""

    verdict: ChangeVerdict
    old_us: float
    new_us: float
    change: float
    threshold: float
    reason: str


@dataclass(frozen=True)
class RegressionRow:
    """One Solution on one Workload, or without a Workload if its versions were not timed.

    ``broken``: the old version passes here and the new one does not. ``commit``: the commit of the old version.
    """

    solution: str
    verdict: RowVerdict
    reason: str
    definition: str = ""
    workload: str = ""
    commit: str = ""
    change: Change | None = None


@dataclass(repr=False)
class RegressionReport:
    """Comparison of the versions of ``against`` with those of today. If ``void`` has reasons, its times cannot be trusted."""

    against: str
    machine: Machine
    rows: list[RegressionRow] = field(default_factory=list)
    void: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Losses during the run, if several devices measured."""

    def __repr__(self) -> str:
        """Return what was compared, and the number of rows and findings."""
        found = f"{len(self.rows)} rows, {len(self.findings)} findings" + (", void" if self.void else "")
        return f"<RegressionReport against {self.against} on {self.machine.gpu}: {found}>"

    @property
    def findings(self) -> list[RegressionRow]:
        """The rows that are a reason to stop: Solutions that fail now or, unless the session is void, take longer."""
        counted = ("broken",) if self.void else FINDINGS
        return [row for row in self.rows if row.verdict in counted]


def compare_control(one: Sequence[float], other: Sequence[float]) -> Control:
    """Return a control from the block medians, in microseconds, of its two candidates in the same rounds."""
    logs = [math.log(b / a) for a, b in zip(one, other, strict=True)]
    middle = median(logs)
    mad = median([abs(value - middle) for value in logs])
    return Control(paired_ratio(one, other), mad, abs(median(one) - median(other)))


def void_reason(control: Control, bars: Bars) -> str | None:
    """Return the reason why a control makes this session void, or None."""
    if control.shift <= bars.control_shift or control.apart_us <= bars.floor_us:
        return None
    return f"differs from itself by {control.shift:.1%} ({control.apart_us:.3g} us); at most {bars.control_shift:.0%} is allowed"


def compare_versions(old: Sequence[float], new: Sequence[float], control: Control, bars: Bars) -> Change:
    """Compare two versions of one Solution on one Workload, by the block medians in microseconds of the same rounds."""
    ratio = paired_ratio(new, old)
    old_us, new_us = median(old), median(new)
    change = 1 / ratio.median - 1
    size = max(ratio.median, 1 / ratio.median) - 1
    threshold = max(bars.threshold, bars.control_mads * control.mad)
    proved = verdict_of(ratio)
    verdict: ChangeVerdict = "same"
    if size <= threshold:
        reason = f"{size:.1%} is not above {threshold:.1%}, the noise of this session"
    elif abs(new_us - old_us) <= bars.floor_us:
        reason = f"{abs(new_us - old_us):.2g} us is not above {bars.floor_us} us"
    elif proved == "tie":
        reason = "the rounds do not agree on which is faster"
    else:
        verdict = "regression" if proved == "slower" else "improvement"
        reason = f"{size:.1%} is above {threshold:.1%}, and the rounds agree"
    return Change(verdict, old_us, new_us, change, threshold, reason)


# ---- against --------------------------------------------------------------------------------------
# Choice of the old version of each Solution: that of a git revision, or that of a run of the store.


@dataclass(frozen=True)
class Pair:
    """A Solution as it is now, and the old version that it is compared with."""

    new: SolutionFiles
    old: Version


@dataclass
class Pairs:
    """The pairs to measure, and a row with the reason for each other Solution."""

    changed: list[Pair] = field(default_factory=list)
    others: list[RegressionRow] = field(default_factory=list)

    def leave_out(self, solution: SolutionFiles, verdict: RowVerdict, reason: str) -> None:
        """Add a row without a measurement."""
        self.others.append(RegressionRow(solution.name, verdict, reason, solution.record.definition))


def pairs_of_revision(revision: str, chosen: Sequence[SolutionFiles]) -> Pairs:
    """Return the pairs of Solutions that changed since a git revision, which the catalog of one of them must have."""
    history_of, pairs, unknown = cache(SourceHistory), Pairs(), []
    for solution in chosen:
        try:
            history = history_of(solution.root)
            commit = history.commit(revision)
            if commit is None:
                raise UsageError(f"{history.root} has no revision '{revision}'", code="revision_unknown")
            old = history.at(commit, solution)
        except (UsageError, RecordError) as error:
            pairs.leave_out(solution, "not comparable", str(error))
            unknown += [str(error)] if isinstance(error, UsageError) else []
            continue
        if old is None:
            pairs.leave_out(solution, "not comparable", f"did not exist at {revision}")
        elif old.digest == solution.digest:
            pairs.leave_out(solution, "unchanged", f"the same source and spec as at {revision}")
        else:
            pairs.changed.append(Pair(solution, old))
    if unknown and len(unknown) == len(chosen):
        raise NotFoundError(
            f"'{revision}' is not a run of the store, and {'; '.join(sorted(set(unknown)))}. List the runs: "
            'tilegym-db sql "SELECT DISTINCT run_id FROM traces"',
            code="run_unknown",
        )
    return pairs


def pairs_of_run(run_id: str, measured: Mapping[str, str], chosen: Sequence[SolutionFiles]) -> Pairs:
    """Return the pairs of Solutions that changed since a run. ``measured`` are the Solutions of the run (name -> digest)."""
    history_of, pairs = cache(SourceHistory), Pairs()
    concerned = [solution for solution in chosen if solution.name in measured]
    if not concerned:
        raise NotFoundError(
            f"run {run_id} measured none of the requested solutions. It measured: {', '.join(measured)}.",
            code="run_without_solutions",
        )
    for solution in concerned:
        digest = measured[solution.name]
        if digest == solution.digest:
            pairs.leave_out(solution, "unchanged", f"the same source and spec as in run {run_id}")
            continue
        try:
            old = history_of(solution.root).with_digest(solution, digest)
        except UsageError as error:
            pairs.leave_out(solution, "not comparable", str(error))
            continue
        if old is None:
            reason = (
                f"the source of that run (digest {digest[:12]}) is not in any commit, so it cannot be measured again"
            )
            pairs.leave_out(solution, "not comparable", reason)
        else:
            pairs.changed.append(Pair(solution, old))
    return pairs


# ---- history --------------------------------------------------------------------------------------
# Earlier versions of a Solution, from the git history of its catalog. Read-only.

TIMEOUT_S = 60


@dataclass(frozen=True)
class Version:
    """A Solution as of a commit."""

    record: Solution
    sources: Mapping[str, bytes] = field(repr=False)
    commit: str

    @cached_property
    def digest(self) -> str:
        """The digest, as in :attr:`tilegym_db.catalog.SolutionFiles.digest`."""
        return self.record.digest(self.sources)


class SourceHistory:
    """The git repository of one root of the catalog."""

    def __init__(self, root: Path) -> None:
        """Open the repository. ``root`` contains ``solutions/``; it may be any folder of the repository."""
        self.root = root
        answer = self._run("rev-parse", "--git-dir")
        if answer.returncode != 0:
            said = answer.stderr.decode(errors="replace").strip()
            raise UsageError(f"{root} has no history to compare with: {said}", code="git_failed")

    def commit(self, revision: str) -> str | None:
        """Return the commit id of a revision (a branch, a tag, ``HEAD~3``, ...), or None."""
        found = self._try("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
        return None if found is None else found.decode().strip()

    def at(self, commit: str, solution: SolutionFiles) -> Version | None:
        """Return the version in a commit, or None if the commit has no Solution with that name and Definition."""
        for place, name in _places(solution):
            text = self._blob(commit, f"{place}/{name}")
            if text is None:
                continue
            where = f"{place}/{name} at {commit[:10]}"
            if name != FAMILY_NAME:
                return self._read(commit, place, Solution.from_json(text, where), where)
            if solution.name in family_names(text, where):
                return self._read(commit, place, solution_of_family(text, where, solution.name), where)
        return None

    def _read(self, commit: str, place: str, record: Solution, where: str) -> Version:
        sources = {}
        for source in record.sources:
            content = self._blob(commit, f"{place}/{source.path}")
            if content is None and source.path.startswith(f"{LIBRARY}/"):
                content = self._blob(commit, f"solutions/{source.path}")
            if content is None:
                raise RecordError(f"{where}: its source '{source.path}' is not in that commit.", code="source_missing")
            sources[source.path] = content
        return Version(record, sources, commit)

    def with_digest(self, solution: SolutionFiles, digest: str) -> Version | None:
        """Return the version with a digest, from the newest commit; None if it was never committed."""
        for commit in self._commits(solution):
            try:
                version = self.at(commit, solution)
            except RecordError:
                continue  # a version that today's package cannot read cannot have this digest
            if version is not None and version.digest == digest:
                return version
        return None

    def _commits(self, solution: SolutionFiles) -> Iterator[str]:
        places = [place for place, _ in _places(solution)]
        if any(name.startswith(f"{LIBRARY}/") for name in solution.sources):
            places.append(f"solutions/{LIBRARY}")
        listed = self._try("log", "--all", "--full-history", "--format=%H", "--", *places)
        yield from (listed or b"").decode().split()

    def _blob(self, commit: str, path: str) -> bytes | None:
        return self._try("cat-file", "blob", f"{commit}:./{path}")

    def _try(self, *arguments: str) -> bytes | None:
        answer = self._run(*arguments)
        return answer.stdout if answer.returncode == 0 else None

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        # In a git hook, environment variables may point to another repository.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        command = ["git", "-C", str(self.root), *arguments]
        try:
            return subprocess.run(command, capture_output=True, env=environment, timeout=TIMEOUT_S, check=False)
        except FileNotFoundError:
            raise UsageError(
                "old versions are read from git, and git is not installed. Install git.", code="git_absent"
            ) from None
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"git did not answer within {TIMEOUT_S} s: {' '.join(command)}", code="git_timeout"
            ) from None


def _places(solution: SolutionFiles) -> list[tuple[str, str]]:
    """Return the folders below the root and the file names that the record of a Solution may have or have had.

    The current ones are first, then those in the folder of its family, then those without a family.
    """
    folder = solution.folder.resolve().relative_to(solution.root).as_posix()
    record = solution.record
    own = f"{'/'.join(folder.split('/')[:2])}/{record.definition}/{record.name}"
    beside = f"{record.name}.json"
    here = file_of(solution.path).name
    return list(dict.fromkeys([(folder, here), (folder, FAMILY_NAME), (folder, beside), (own, RECORD_NAME)]))
