"""Setup of a run for ``bench``, ``verify``, ``tune`` and ``regress``: machine, records, store and observer.

The second part builds Traces.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilegym_db.backends.toolchains import declared_libraries
from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.errors import HardwareError, RecordError, UsageError
from tilegym_db.measurement.calibrate import calibrate
from tilegym_db.measurement.devices.pool import DevicePool
from tilegym_db.measurement.machine import Devices, Machine, Missing, Site, devices_of, names_cluster, select_machine
from tilegym_db.measurement.plan import DoneKey, LikelyFastest, Options, PairKey, Plan, make_plan
from tilegym_db.measurement.timing import TimingBudget
from tilegym_db.paths import home
from tilegym_db.published.neighbours import largest_tensor
from tilegym_db.records import Config, Definition, Trace, Workload
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.records.text import canonical_json
from tilegym_db.records.trace import (
    Audit,
    Correctness,
    FailurePoint,
    FuzzCases,
    Performance,
    clip_log,
    new_run_id,
    new_trace_id,
)
from tilegym_db.records.verdicts import Tier
from tilegym_db.records.workload import Case
from tilegym_db.store.connection import Store
from tilegym_db.store.filling import ingest
from tilegym_db.store.opening import open_store
from tilegym_db.store.side_files import save_peaks
from tilegym_db.verification.admission import require_returning_reference
from tilegym_db.verification.phases import Phases
from tilegym_db.verification.verifier import Failure


@dataclass
class Observer:
    """Callbacks for progress: the plan before it starts, each step, each trace."""

    planned: Callable[[Plan, Machine], None] = lambda plan, machine: None
    starting: Callable[[str], None] = lambda what: None
    traced: Callable[[Trace], None] = lambda trace: None
    at_work: Callable[[str, str], None] = lambda device, what: None
    """Called with a device and its current step, if several devices measure."""


@dataclass(frozen=True)
class RunSetup:
    """Machine, catalog and store of a run. ``home`` is the folder of the store.

    ``site`` describes the devices if they are on other hosts.
    """

    machine: Machine
    catalog: Catalog
    home: Path
    site: Site | None = None

    @classmethod
    def of(cls, gpu: str, catalog: Catalog | None, store_home: Path | None) -> RunSetup:
        """Return the setup for the arguments of a public function."""
        return cls(select_machine(gpu), catalog or Catalog.default(), store_home or home())

    @contextlib.contextmanager
    def store(self) -> Iterator[Store]:
        """Yield the store after ingesting the journals. No worker may run while it is open."""
        with open_store(self.home, catalog=self.catalog) as store:
            ingest(store)
            yield store

    def ingest(self) -> None:
        """Ingest the journals into the store."""
        with self.store():
            pass

    def plan(
        self,
        options: Options,
        done: Collection[DoneKey] = (),
        excluded: Mapping[DoneKey, str] | None = None,
        tuned: Mapping[PairKey, Config] | None = None,
        likely_fastest: LikelyFastest | None = None,
        refused: Mapping[str, str] | None = None,
    ) -> Plan:
        """Return the plan for the options, with the languages and packages installed here.

        Arguments and errors are those of :func:`~tilegym_db.measurement.plan.make_plan`. ``refused`` maps the name of a Solution
        to the reason why it may not run.

        Raises:
            RecordError: the reference of a Definition requested by name does not return. If no names were given, that
                Definition is left out.
        """
        lacks = self._missing(options.names)
        lacks = replace(lacks, solutions={**lacks.solutions, **(refused or {})})
        plan = make_plan(self.catalog, self.machine, options, done, lacks, excluded, tuned, likely_fastest)
        return self._without_failing_references(plan, named=bool(options.names))

    def _missing(self, names: Sequence[str]) -> Missing:
        solutions = self.catalog.solutions_among(names).values()
        if self.site is not None:
            return self.site.missing(solutions)
        return Missing.here({files.name: files.record.spec.dependencies for files in solutions})

    def _without_failing_references(self, plan: Plan, *, named: bool) -> Plan:
        """Return the plan without Definitions whose reference does not return.

        This process computes with the references from here on, and such a reference would end or block it.
        """
        kept = []
        for item in plan.definitions:
            try:
                if (file := self.catalog.untried(item.definition)) is not None:
                    require_returning_reference(item.definition, file)
                kept.append(item)
            except RecordError as error:
                if named:
                    raise
                plan.refused.append(str(error))
        return replace(plan, definitions=kept)

    def context(self, run_id: str = "", command: str | None = None) -> RunContext:
        """Return the context of a run with a new secret seed and, by default, a new run id."""
        return RunContext(run_id or new_run_id(self.machine.gpu), self.machine, secrets.randbits(62), command=command)


@contextlib.contextmanager
def open_run(
    devices: Devices, catalog: Catalog | None, store_home: Path | None, waiting: Callable[[str], None]
) -> Iterator[tuple[RunSetup, DevicePool | None]]:
    """Yield the setup of a run and the supervisors of its devices, which start while this process plans.

    There are no supervisors if this process measures itself. With some, the machine is the first device, as all are of one kind.
    ``waiting`` is called with a description of a wait.
    """
    opened: AbstractContextManager[DevicePool]
    if devices.executor is not None and names_cluster(devices.executor):
        from tilegym_db.measurement.devices.places import cluster_pool

        if isinstance(devices.gpus, tuple):
            raise UsageError(
                "devices of this host cannot be given to another executor; name a number of GPUs, or leave them out.",
                code="devices_of_executor",
            )
        opened = cluster_pool(devices.executor, devices.gpus, devices.gpu, waiting)
    elif chosen := devices_of(devices):
        from tilegym_db.measurement.devices.places import host_pool

        opened = host_pool(chosen)
    else:
        yield RunSetup.of(devices.gpu, catalog, store_home), None
        return
    with opened as pool:
        first = pool.devices[0]
        machine = select_machine(first.gpu, first.index) if pool.site is None else pool.site.machine
        yield RunSetup(machine, catalog or Catalog.default(), store_home or home(), pool.site), pool


def timing_budget(options: Options) -> TimingBudget:
    """Return the timing budget of a verdict; it is small for a quick run."""
    return TimingBudget.quick() if options.quick else TimingBudget()


def peaks_or_reason(machine: Machine, known: GpuPeaks | None, home: Path) -> tuple[GpuPeaks | None, list[str]]:
    """Return the peaks of a GPU, the known ones or those that are measured and stored now; or None and a remark if that fails.

    A failed calibration does not stop the measurement. A CPU has no peaks. Published peaks are those of another machine, so times
    measured here are not compared with them.
    """
    if not machine.is_gpu or known is not None:
        return known, []
    try:
        found = calibrate(machine)
        save_peaks(found, home)
    except (HardwareError, RecordError, RuntimeError, OSError) as error:  # any error of the driver
        return None, [f"the traces have no speed of light and no physics floor: {error}"]
    return found, []


# ---- tracing --------------------------------------------------------------------------------------
# Construction of Traces: the provenance of the run, the verdict on one pair, and its times if there are any.

OWN_CONTENTS = "the workload's own"
TIER_COMMANDS: dict[Tier, str] = {"promotion": "verify", "screen": "bench", "untimed": "bench", "interpreter": "bench"}


@dataclass(frozen=True)
class RunContext:
    """The data that all traces of a run share. ``seed`` is secret until the run's traces state it.

    ``command`` is the subcommand that reproduces a failure of a whole workload, if it is not the tier's own. ``phases``
    sums up the time of the run.
    """

    run_id: str
    machine: Machine
    seed: int
    command: str | None = None
    attempts: dict[tuple[str, str, str], int] = field(default_factory=dict)
    phases: Phases = field(default_factory=Phases)

    def failed(
        self,
        definition: Definition,
        solution: SolutionFiles,
        workload: Workload,
        tier: Tier,
        failure: Failure,
        config: Config,
        sandbox_level: int,
    ) -> Trace:
        """Return the trace of a pair that did not pass."""
        correctness = failure.correctness if failure.status == "INCORRECT_NUMERICAL" else None
        verdict = {
            "status": failure.status,
            "reason": failure.reason,
            "log": clip_log(failure.log),
            "correctness": correctness,
            "failure": self._failure_point(failure, definition, solution, workload, tier, config),
        }
        return self._trace(definition, solution, workload, tier, config, sandbox_level, verdict)

    def _failure_point(
        self,
        failure: Failure,
        definition: Definition,
        solution: SolutionFiles,
        workload: Workload,
        tier: Tier,
        config: Config,
    ) -> FailurePoint | None:
        """Return the point of failure: one case, or the workload as a whole. None if nothing was checked."""
        words = ["tilegym-db", *(self.command or TIER_COMMANDS[tier]).split(), solution.name, "--gpu", self.machine.gpu]
        command = shlex.join([*words, "--workload", workload.uuid, "--force"])
        if failure.case is not None:
            point = _point_of_case(failure, failure.case, definition, solution, config, self.machine.gpu)
            if not failure.case.files:
                return point
            held = f"{failure.case.contents}, and {', '.join(failure.case.files)} as its file has it"
            return point.model_copy(update={"contents": held, "command": command})
        if failure.status == "UNSUPPORTED":
            return None
        return FailurePoint(
            gate=failure.gate or failure.status.lower(),
            axes=definition.bind_axes(workload.axes),
            dtypes=definition.bind_dtypes(workload.dtypes),
            layouts=workload.layout_classes(definition),
            contents=OWN_CONTENTS,
            seed=str(self.seed),
            command=command,
        )

    def passed(
        self,
        definition: Definition,
        solution: SolutionFiles,
        workload: Workload,
        tier: Tier,
        correctness: Correctness,
        performance: Performance | None,
        envelope: FuzzCases | None,
        audit: Audit | None,
        config: Config,
        sandbox_level: int,
    ) -> Trace:
        """Return the trace of a pair that passed; ``performance`` is None in a tier without timing."""
        verdict = {
            "status": "PASSED",
            "correctness": correctness,
            "performance": performance,
            "envelope": envelope,
            "audit": audit,
        }
        return self._trace(definition, solution, workload, tier, config, sandbox_level, verdict)

    def _trace(
        self,
        definition: Definition,
        solution: SolutionFiles,
        workload: Workload,
        tier: Tier,
        config: Config,
        sandbox_level: int,
        verdict: Mapping[str, Any],
    ) -> Trace:
        key = (solution.digest, workload.uuid, canonical_json(config))
        attempt = self.attempts.get(key, -1) + 1
        self.attempts[key] = attempt
        machine = self.machine
        return Trace(
            trace_id=new_trace_id(self.run_id, tier, attempt, solution.digest, config, workload.uuid),
            run_id=self.run_id,
            timestamp=datetime.now(UTC),
            definition=definition.name,
            definition_version=definition.version,
            definition_digest=definition.digest,
            op_type=definition.op_type,
            solution=solution.name,
            solution_digest=solution.digest,
            language=solution.record.spec.language,
            role=solution.record.spec.role,
            config=config,
            workload_uuid=workload.uuid,
            axes=definition.bind_axes(workload.axes),
            dtypes=definition.bind_dtypes(workload.dtypes),
            scalars=workload.scalars(),
            layouts=workload.layout_classes(definition),
            blobs={name: spec.sha256 for name, spec in workload.files().items() if spec.sha256 is not None},
            gpu=machine.gpu,
            gpu_name=machine.gpu_name,
            sm=machine.sm,
            driver=machine.driver,
            cuda=machine.cuda,
            libs=machine.libs | declared_libraries(solution.record.spec.dependencies),
            gpu_uuid=machine.gpu_uuid,
            host=machine.host,
            tier=tier,
            attempt=attempt,
            sandbox_level=sandbox_level,
            **verdict,
        )


def attempts_of(traces: Iterable[Trace]) -> dict[tuple[str, str, str], int]:
    """Return the highest attempt of each pair of a run so far, as :class:`RunContext` counts them."""
    found: dict[tuple[str, str, str], int] = {}
    for trace in traces:
        key = (trace.solution_digest, trace.workload_uuid, canonical_json(trace.config))
        found[key] = max(trace.attempt, found.get(key, -1))
    return found


def extent_of(definition: Definition, passed: Sequence[Mapping[str, int]]) -> tuple[dict[str, int], int]:
    """Return the largest size of each independent axis in large cases that passed, and the elements of their largest tensor."""
    sizes = {name: max(axes[name] for axes in passed) for name in definition.divisible_axes} if passed else {}
    return sizes, max((largest_tensor(definition, axes) for axes in passed), default=0)


def fuzz_cases_of(
    cases: list[str],
    dropped: list[str],
    seed: int,
    scalars: Mapping[str, tuple[float, float]] | None = None,
    reached: tuple[Mapping[str, int], int] = ({}, 0),
    slices: int = 0,
) -> FuzzCases:
    """Return the cases that a solution passed in this run, as a count and a digest of their descriptions.

    Scalars are ranges, ``reached`` is the extent of the large cases (:func:`extent_of`), and
    ``slices`` is the number of slices that had the same bits alone as in their call.
    """
    largest, elements = reached
    digest = hashlib.sha256("\n".join(sorted(cases)).encode()).hexdigest()
    return FuzzCases(
        cases=len(cases),
        digest=digest,
        seed=str(seed),
        dropped=tuple(dropped),
        scalars=dict(scalars or {}),
        largest=dict(largest),
        largest_elements=elements,
        batch_slices=slices,
    )


def _point_of_case(
    failure: Failure, case: Case, definition: Definition, solution: SolutionFiles, config: Config, gpu: str
) -> FailurePoint:
    verdict = failure.verdict
    return FailurePoint(
        gate=failure.gate or failure.status.lower(),
        axes=dict(case.call.axes),
        dtypes=dict(case.call.dtypes),
        layouts=dict(case.call.layouts),
        contents=case.contents,
        seed=str(case.seed),
        offset=case.offset,
        output=failure.output,
        index=verdict.index if verdict else (),
        expected=verdict.expected if verdict else "",
        got=verdict.got if verdict else "",
        worst_row=verdict.worst_row if verdict else None,
        command=reproduce_command(definition, solution.name, case, config, gpu),
    )


def reproduce_command(definition: Definition, solution: str, case: Case, config: Config, gpu: str) -> str:
    """Return the command that verifies this one case again. Seeds give other numbers on another kind of device."""
    variable = {name: size for name, size in case.call.axes.items() if name in definition.var_axes}
    words = ["tilegym-db", "debug", "reproduce", solution, "--gpu", gpu]
    for option, values in (
        ("--axes", variable),
        ("--dtype", case.call.dtypes),
        ("--scalar", case.call.scalars),
        ("--layout", case.call.layouts),
        ("--config", config),
    ):
        for name, value in values.items():
            words += [option, f"{name}={value}"]
    words += ["--distribution", case.contents, "--seed", str(case.seed)]
    return shlex.join(words + (["--offset", str(case.offset)] if case.offset else []))
