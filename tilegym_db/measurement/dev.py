"""One round of a kernel's author: read a source, scan it, compile it, and check and time it at one shape.

Nothing is added to the catalog or stored: a round is no trace. A session keeps the drawn contents, the compiler process and the
worker of the stock code, so that later rounds only pay for what changed.
"""

from __future__ import annotations

import os
import secrets
import shlex
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from tilegym_db.backends.aot import CompileJob, CompileResult, CompilerProcess
from tilegym_db.backends.toolchains import interpreted_here, toolchain_status
from tilegym_db.catalog import Catalog, SolutionFiles, stock_of
from tilegym_db.catalog.record_files import library_file, record_path, write_solution
from tilegym_db.catalog.writers import check_call
from tilegym_db.errors import RecordError, TilegymDBError, UsageError
from tilegym_db.measurement.drafts import language_in
from tilegym_db.measurement.machine import Machine, leaving_processors, select_machine, timing_lock
from tilegym_db.measurement.runner import BufferPool, Runner, pool_bytes
from tilegym_db.measurement.time_workload import CLOCK_INTERVAL_S
from tilegym_db.measurement.timing import ClockWatch, TimedCandidate, TimingBudget, time_interleaved
from tilegym_db.paths import remove_tree, scratch_folder
from tilegym_db.records import TILE_LANGUAGES, Definition, Solution, Workload
from tilegym_db.records.call import scalars_with_axes
from tilegym_db.records.hardware import normalise_target
from tilegym_db.records.trace import Performance
from tilegym_db.records.workload import SafetensorsInput
from tilegym_db.sandbox.scan import Finding, hard_findings, scan_sources
from tilegym_db.sandbox.worker import prepare_workers
from tilegym_db.scaffold.solution_draft import unfinished
from tilegym_db.verification.add import Sources, read_draft
from tilegym_db.verification.admission import require_returning_reference, trial_scalars
from tilegym_db.verification.expected import ExpectedCache, WorkloadContents
from tilegym_db.verification.session import VerifiedWorkload
from tilegym_db.verification.verifier import CANNOT_VERIFY, Failure, WorstErrors, cannot_verify
from tilegym_db.verification.worker_handle import INTERPRETER, SCREEN, RunnerLimits, WorkerHandle

Step = Literal["read", "scan", "compile", "check", "time"]
TINY = "tiny"
DEFAULT_TARGET = "sm_90a"
POLL_S = 0.3


@dataclass(frozen=True)
class Problem:
    """The step that failed, a stable ``code`` and the reason.

    The code is that of the error (read), ``scan_refused``, ``compile_failed``, or the failed gate or status (check, time).
    """

    step: Step
    code: str
    reason: str
    log: str = ""
    failure: Failure | None = None
    """The failed verification, with case, gate, index, expected and actual value."""


@dataclass(frozen=True)
class DevReport:
    """The result of one round. Later steps are missing if an earlier one failed."""

    path: Path
    machine: Machine
    solution: Solution | None = None
    """The draft; None if it could not be read."""
    findings: tuple[Finding, ...] = ()
    """All findings of the static scan, including notes."""
    open_places: tuple[str, ...] = ()
    """Each TODO of the draft that is still there. With one it can be tried, and not added."""
    workload: Workload | None = None
    """The one shape of the round."""
    target: str | None = None
    """The compile target; None if nothing was compiled ahead of time."""
    compiled: CompileResult | None = None
    interpreted: bool = False
    """True if the kernel ran in the interpreter of its language, which gives no time."""
    errors: WorstErrors | None = None
    performance: Performance | None = None
    problem: Problem | None = None
    seconds: float = 0.0
    """Duration of the round."""

    @property
    def passed(self) -> bool:
        """True if no step failed."""
        return self.problem is None

    @property
    def speedup(self) -> float | None:
        """The time of the stock code over that of the kernel; None if they were not timed together."""
        compared = self.performance.comparisons if self.performance is not None else ()
        return next((item.ratio for item in compared if item.provides == "stock"), None)


@dataclass(frozen=True)
class DevOptions:
    """The kernel to try, and the shape and device to try it on.

    Args:
        path: a ``.py`` file, or the folder or ``.json`` of a Solution.
        definition: the operator. Only a ``.py`` file needs it.
        language: of a ``.py`` file; by default from its imports.
        entry: the function of a ``.py`` file that is called.
        axes: sizes that replace those of the smallest Workload tagged ``tiny``.
        dtypes: dtypes that replace those of that Workload.
        target: compile for this target; by default ``sm_90a`` on a machine without a GPU, and on a GPU the first call compiles.
        gpu: as for :func:`tilegym_db.bench`.
    """

    path: Path
    definition: str | None = None
    language: str | None = None
    entry: str = "run"
    axes: Mapping[str, int] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None
    gpu: str = "auto"


def kernel_rounds(
    options: DevOptions, *, watch: bool = False, catalog: Catalog | None = None
) -> Generator[DevReport, None, None]:
    """Scan, compile, check and time a kernel at one shape; with ``watch``, do so again after each change, without an end.

    Nothing is stored. The check is that of ``bench`` at the workload's own shape, without fuzz cases: enough to go on, not to
    trust the kernel. Changes are those of the kernel and of shared code that it imports. Close the iterator to end the workers.
    """
    with DevSession(options, catalog) as session:
        yield session.round()
        while watch:
            session.wait_for_change()
            yield session.round()


class DevSession:
    """Rounds of one kernel, with everything that stays the same between them."""

    def __init__(self, options: DevOptions, catalog: Catalog | None = None) -> None:
        """Check the options; workers start on first use. Errors are those of :func:`kernel_rounds`."""
        if not options.path.exists():
            raise UsageError(f"{options.path}: there is no such file or folder.", code="file_missing")
        if options.path.suffix == ".py" and options.definition is None:
            raise UsageError(
                f"{options.path}: a single file needs a definition. Try: tilegym-db dev {shlex.quote(str(options.path))} -d NAME",
                code="options_missing",
            )
        self.options = options
        self.catalog = catalog or Catalog.default()
        self.machine = select_machine(options.gpu)
        default = None if self.machine.is_gpu else DEFAULT_TARGET
        target = options.target or default
        self.target = None if target is None else normalise_target(target)
        self._seed = secrets.randbits(62)
        self._rounds = 0
        self._seen: dict[Path, State] = {}
        self._shapes: dict[str, _Shape] = {}
        self._compilers: dict[str, CompilerProcess] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        prepare_workers(self.machine.device)
        self._scratch = self._stack.enter_context(scratch_folder())
        self._stack.enter_context(leaving_processors(self.machine))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    # -- rounds -------------------------------------------------------------------------------------------------------

    def round(self) -> DevReport:
        """Read the source and try it. A fault of the source is a problem in the report, not an error."""
        begun = time.monotonic()
        # Later rounds report every error of the source: the author is in the middle of an edit.
        faults = TilegymDBError if self._seen else RecordError
        self._seen = _states([*_own_files(self.options.path), *self._seen])
        report = DevReport(self.options.path, self.machine)
        try:
            record, sources = self._read()
        except faults as error:
            problem = Problem("read", error.code, str(error))
            return replace(report, problem=problem, seconds=time.monotonic() - begun)
        for file in self._files_of(sources):
            self._seen.setdefault(file, _state(file))
        report = self._try(replace(report, solution=record), sources)
        return replace(report, seconds=time.monotonic() - begun)

    def wait_for_change(self) -> None:
        """Return when a file of the last round has changed and is at rest; a file that is gone is waited for.

        An editor empties a file before it writes it, so a state counts once it lasts from one look to the next.
        """
        last = self._seen
        while True:
            time.sleep(POLL_S)
            now = _states(self._seen)
            if now == last != self._seen and now[self.options.path] is not None:
                return
            last = now

    def _read(self) -> tuple[Solution, Sources]:
        options = self.options
        language = options.language
        if language is None and options.path.suffix == ".py" and options.path.is_file():
            language = language_in(options.path)
        return read_draft(
            options.path, self.catalog, definition=options.definition, language=language, entry=options.entry
        )

    def _files_of(self, sources: Sources) -> list[Path]:
        """Return the files that the sources were read from."""
        record = record_path(self.options.path)
        found = [record]
        for name in sources:
            beside = record.parent / name
            found.append(beside if beside.exists() else library_file(self.catalog.roots, name) or beside)
        return found

    def _try(self, report: DevReport, sources: Sources) -> DevReport:
        record = report.solution
        assert record is not None
        definition = self.catalog.definition(record.definition)
        workload = choose_workload(
            definition, self.catalog.workloads_for(definition.name), record, self.options.axes, self.options.dtypes
        )
        findings = scan_sources(record, sources)
        places = tuple(unfinished(record, sources, definition))
        report = replace(report, findings=findings, open_places=places, workload=workload)
        refused = hard_findings(findings)
        if refused:
            reason = "\n".join(map(str, refused))
            return replace(report, problem=Problem("scan", "scan_refused", reason))
        status = toolchain_status(record.spec.language)
        if not status.available:
            reason = f"{record.spec.language} cannot be used here: {status.detail}. Fix: {status.fix}"
            return replace(report, problem=Problem("compile", "toolchain_missing", reason))
        if (file := self.catalog.untried(definition)) is not None:
            require_returning_reference(definition, file)
        self._rounds += 1
        folder = self._scratch / str(self._rounds) / definition.op_type / definition.name / record.name
        try:
            files = write_solution(folder, record, sources)
            report = self._compile(report, definition, files, workload)
            report = report if report.problem is not None else self._check(report, definition, files, workload)
        finally:
            remove_tree(self._scratch / str(self._rounds))
        return _with_own_paths(report, folder, record_path(self.options.path).parent)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _compile(
        self, report: DevReport, definition: Definition, files: SolutionFiles, workload: Workload
    ) -> DevReport:
        language = files.record.spec.language
        if self.target is None or language not in TILE_LANGUAGES:
            return report
        compiler = self._compilers.get(language)
        if compiler is None:
            compiler = self._compilers[language] = self._stack.enter_context(CompilerProcess(language))
        result = compiler.compile_supported(CompileJob(definition, files, workload, self.target))
        report = replace(report, target=self.target, compiled=result)
        if result.status != "failed":
            return report
        problem = Problem("compile", "compile_failed", f"it does not compile for {self.target}", result.log)
        return replace(report, problem=problem)

    def _check(self, report: DevReport, definition: Definition, files: SolutionFiles, workload: Workload) -> DevReport:
        interpret = interpreted_here(files.record.spec.language, on_gpu=self.machine.is_gpu)
        report = replace(report, interpreted=interpret)
        shape = self._shapes.get(workload.uuid) or _Shape(self, definition, workload)
        if isinstance(shape.contents, WorkloadContents):  # memory may suffice in a later round
            self._shapes[workload.uuid] = shape
        with ExitStack() as stack:
            runner = self.make_runner(definition, files, interpret=interpret)
            stack.callback(runner.handle.close)
            outcome = shape.verify(runner)
            if isinstance(outcome, Failure):
                return replace(report, problem=_problem("check", outcome))
            report = replace(report, errors=outcome.verdict)
            if interpret or files.record.spec.omits:
                return report
            timed = shape.time(runner, outcome)
        if isinstance(timed, Failure):
            return replace(report, problem=_problem("time", timed))
        return replace(report, performance=timed)

    def make_runner(self, definition: Definition, files: SolutionFiles, *, interpret: bool = False) -> Runner:
        """Return a runner that is not started yet."""
        handle = WorkerHandle(
            definition,
            files,
            self.machine.device,
            self._scratch,
            policy=INTERPRETER if interpret else SCREEN,
            interpret=interpret,
            profiled=False,
            limits=RunnerLimits(buffer_bytes=pool_bytes(self.machine)),
        )
        return Runner(handle, self.machine.sm)

    def contents(self, definition: Definition, workload: Workload) -> WorkloadContents | Failure:
        """Return the contents of a Workload, with their oracle outputs."""
        cache = ExpectedCache(definition, self.machine.device, roots=self.catalog.roots)
        try:
            drawn = WorkloadContents.draw(definition, workload, self._seed, cache)
        except CANNOT_VERIFY as error:
            return cannot_verify(error)
        if not drawn.sets:
            return Failure("UNSUPPORTED", "the reference itself passes no content set at this shape")
        return drawn

    def stock(self, definition: Definition) -> Runner | None:
        """Return a runner of the stock code, which lives as long as the session; None if the catalog has none."""
        files = stock_of(self.catalog.solutions_for(definition.name))
        if files is None:
            return None
        runner = self.make_runner(definition, files)
        self._stack.callback(runner.handle.close)
        return runner


class _Shape:
    """One Workload: its contents, and the stock code as verified on them."""

    def __init__(self, session: DevSession, definition: Definition, workload: Workload) -> None:
        self.session, self.definition, self.workload = session, definition, workload
        self.contents = session.contents(definition, workload)
        self._stock: tuple[Runner, VerifiedWorkload] | None = None
        self._has_tried_stock = False

    def verify(self, runner: Runner) -> VerifiedWorkload | Failure:
        """Check every content set by every gate."""
        if isinstance(self.contents, Failure):
            return self.contents
        unsupported = runner.unsupported(self.workload)
        if unsupported is not None:
            return Failure("UNSUPPORTED", unsupported)
        return runner.verification.own_shape(self.contents)

    def time(self, runner: Runner, verified: VerifiedWorkload) -> Performance | Failure:
        """Time a verified runner, interleaved with the stock code if that passes too."""
        assert isinstance(self.contents, WorkloadContents)
        device, sets = self.session.machine.device, self.contents.sets
        candidates = [TimedCandidate(runner, verified)]
        stock = self._stock_code()
        if stock is not None and stock[0].name != runner.name:
            candidates.append(TimedCandidate(*stock))
        try:
            pool = BufferPool(self.definition, sets, device, runner.handle.limits.buffer_bytes)
        except CANNOT_VERIFY as error:
            return cannot_verify(error)
        try:
            for candidate in candidates:
                candidate.failure = candidate.runner.enter(pool)
            with timing_lock(device), ClockWatch(device, CLOCK_INTERVAL_S) as clocks:
                results = time_interleaved(candidates, pool, TimingBudget.quick(), secrets.randbits(62), clocks)
        finally:
            for candidate in candidates:
                candidate.runner.leave()
            pool.close()
        return results[runner.name]

    def _stock_code(self) -> tuple[Runner, VerifiedWorkload] | None:
        if not self._has_tried_stock:
            self._has_tried_stock = True
            runner = self.session.stock(self.definition)
            verified = None if runner is None else self.verify(runner)
            if runner is not None and isinstance(verified, VerifiedWorkload):
                self._stock = runner, verified
        return self._stock


def _problem(step: Step, failure: Failure) -> Problem:
    return Problem(step, failure.gate or failure.status.lower(), failure.reason, failure.log, failure)


# ---- source ---------------------------------------------------------------------------------------


def _with_own_paths(report: DevReport, folder: Path, own: Path) -> DevReport:
    """Return the report with the author's folder in place of the scratch folder."""
    problem = report.problem
    if problem is None:
        return report
    shown = "" if own == Path() else f"{own}{os.sep}"
    reason, log = (text.replace(f"{folder}{os.sep}", shown) for text in (problem.reason, problem.log))
    return replace(report, problem=replace(problem, reason=reason, log=log))


State = tuple[int, int] | None
"""Time of the last change in nanoseconds, and size; None for a file that is gone."""


def _state(file: Path) -> State:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _own_files(path: Path) -> list[Path]:
    """Return the files to watch even if they cannot be read as a Solution: the path, its record and sources beside it."""
    if path.suffix == ".py":
        return [path]
    record = record_path(path)
    return [path, record, *sorted(record.parent.rglob("*.py"))]


def _states(files: Sequence[Path] | Mapping[Path, State]) -> dict[Path, State]:
    return {file: _state(file) for file in files}


# ---- shape ----------------------------------------------------------------------------------------


def choose_workload(
    definition: Definition,
    workloads: Sequence[Workload],
    record: Solution,
    axes: Mapping[str, int],
    dtypes: Mapping[str, str],
) -> Workload:
    """Return the smallest Workload tagged ``tiny`` that the Solution declares to support, or one of the given sizes and dtypes.

    Without a tiny Workload the smallest one is used. Sizes, dtypes and scalars that are not given come from the smallest one.
    """
    tiny = [workload for workload in workloads if TINY in workload.tags] or list(workloads)
    ordered = sorted(tiny, key=lambda workload: _elements(definition, workload))
    if axes or dtypes:
        return _workload_of(definition, ordered[0] if ordered else None, axes, dtypes)
    if not ordered:
        sizes = ",".join(f"{name}=64" for name in definition.var_axes)
        raise UsageError(
            f"{definition.name} has no workload, so its sizes are needed. Try: --axes {sizes}", code="workload_missing"
        )
    supported = (workload for workload in ordered if _unsupported(definition, record, workload) is None)
    return next(supported, ordered[0])


def _elements(definition: Definition, workload: Workload) -> int:
    axes = definition.bind_axes(workload.axes)
    return sum(_product(definition.shape_of(name, axes)) for name in (*definition.tensor_inputs, *definition.outputs))


def _product(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _unsupported(definition: Definition, record: Solution, workload: Workload) -> str | None:
    return record.unsupported(
        definition.bind_axes(workload.axes),
        definition.bind_dtypes(workload.dtypes),
        workload.layout_classes(definition),
    )


def _workload_of(
    definition: Definition, base: Workload | None, axes: Mapping[str, int], dtypes: Mapping[str, str]
) -> Workload:
    """Return a Workload of these sizes and dtypes; the rest is that of ``base``, with files replaced by random numbers."""
    sizes = {**(base.axes if base is not None else {}), **axes}
    chosen = {name: choices[0] for name, choices in definition.dtypes.items()}
    chosen |= {**(base.dtypes if base is not None else {}), **dtypes}
    scalars = scalars_with_axes(definition, {**trial_scalars(definition), **(base.scalars() if base else {})}, sizes)
    inputs = {
        name: spec.model_dump(mode="json")
        for name, spec in (base.inputs if base is not None else {}).items()
        if not isinstance(spec, SafetensorsInput)
    }
    inputs |= {name: {"type": "scalar", "value": value} for name, value in scalars.items()}
    layouts = base.layouts if base is not None and not axes else {}
    content = {"definition": definition.name, "axes": sizes, "dtypes": chosen, "inputs": inputs, "layouts": layouts}
    try:
        workload = Workload.from_dict(content, "the shape to try")
        check_call(definition, workload)
    except RecordError as error:
        raise UsageError(str(error), code=error.code) from None
    return workload
