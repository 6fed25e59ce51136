"""The two commands of the harness for Python: ``benchmark`` screens Solutions or a function, ``promote`` verifies for good."""

from __future__ import annotations

import contextlib
import inspect
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tilegym_db.bench.calibrate import peaks_or_reason
from tilegym_db.bench.devices.devices import MeasuringDevice
from tilegym_db.bench.devices.messages import Peaks, Session
from tilegym_db.bench.devices.places import open_pool
from tilegym_db.bench.devices.pool import Callbacks, DevicePool
from tilegym_db.bench.local_executor import LocalExecutor
from tilegym_db.bench.machine import Machine, leaving_processors
from tilegym_db.bench.plan import BenchReport, Options, Plan, names_of, refuse_omitting
from tilegym_db.bench.promotions import limits_here, may_lack_confinement, note_of, record_promotions
from tilegym_db.bench.run_setup import Observer, RunContext, RunSetup, timing_budget
from tilegym_db.bench.timing import TimingBudget
from tilegym_db.catalog import Catalog
from tilegym_db.catalog.writers import add_solution
from tilegym_db.errors import UsageError
from tilegym_db.paths import scratch_folder
from tilegym_db.records import Definition, Solution, Trace
from tilegym_db.records.base import length_prefixed_digest
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.records.solution import signature_problem
from tilegym_db.records.trace import new_run_id
from tilegym_db.sandbox.worker import prepare_workers
from tilegym_db.scaffold.function_source import function_source, language_of
from tilegym_db.store.journal import Journal
from tilegym_db.store.queries import done_keys, failed_screen, likely_fastest_of, read_peaks, tuned_configs
from tilegym_db.verify.inputs import draws_spread
from tilegym_db.verify.worker_handle import INTERPRETER, PROMOTION, SCREEN, UNTIMED, TierPolicy


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
    executor: str | None = None,
    catalog: Catalog | None = None,
    store_home: Path | None = None,
    observer: Observer | None = None,
) -> BenchReport:
    """Screen Solutions: verify and time them, and store a Trace for each (solution, workload) pair.

    Args:
        names: Definitions or Solutions; empty means all. Or a function, which is screened and never served: see
            :func:`~tilegym_db.bench.benchmark.benchmark_function`.
        definition: the operator that a function implements; for a function only.
        gpu: ``auto``, ``cpu``, or the slug or family of the GPU in this machine.
        language: only Solutions in this language; stock code and verified Solutions that may be the fastest come along.
        workload: glob over uuid, tags and axes key, such as ``stage:decode`` or ``M=1,*``; or several, of which one has to match.
        quick, again: few workloads and few samples; measure pairs anew that have a trace already.
        promote: afterwards run the promotion tier on what passed, as :func:`promote` does; its traces are in the report.
        allow_unsandboxed: promote anything on a machine that cannot confine a worker; the traces say so and are never published.
            Without it, what the package ships is promoted there, for the user of that machine, and nothing else.
        gpus: measure on several GPUs of this host, all of one kind, each with a process of its own: ``all``, a number
            (``2``), or indices (``0,2``). By default one GPU, in this process.
        executor: ``ray`` or ``ray:HOST:PORT`` for the devices of a Ray cluster in place of those of this host; ``gpus`` is
            then how many of them at most. ``gpu="cpu"`` takes the processors of its nodes.
        catalog: the records; the shipped ones and the user's overlay by default.
        store_home, observer: folder of the store, ``$TILEGYM_DB_HOME`` or the user data folder by default; callbacks.

    Raises:
        HardwareError: the GPU asked for is not the one in this machine; or it cannot confine a worker; or no cluster answers.
        MissingPackageError: the executor needs a package that is not installed.
        NotFoundError: a name that is neither a Definition nor a Solution.
        StoreError: the store cannot be used.
        UsageError: a function without ``definition``, or ``definition`` without a function.
    """
    with _candidates(names, definition, catalog, promote=promote) as (candidates, records):
        options = Options(candidates, language, workload, quick, again)
        places = (gpu, gpus, records, store_home)
        return run_tiers(
            options, *places, observer, confined=not allow_unsandboxed, then_promote=promote, executor=executor
        )


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
    executor: str | None = None,
    catalog: Catalog | None = None,
    store_home: Path | None = None,
    observer: Observer | None = None,
) -> BenchReport:
    """Verify Solutions for good: fresh processes, fresh secrets, all fuzz cases and every audit.

    Only what passes here is verified: ``best``, the resolver and patched models use nothing else. Pairs whose newest screen
    failed are left out. Whatever is verified already and within a little of the fastest is promoted again beside what is
    new, so that who is the fastest comes of the same rounds. Arguments and errors are those of :func:`benchmark`.
    """
    options = Options(names_of(names), language, workload, quick, again, "promotion")
    places = (gpu, gpus, catalog, store_home)
    return run_tiers(options, *places, observer, confined=not allow_unsandboxed, executor=executor)


@contextlib.contextmanager
def _candidates(
    names: str | tuple[str, ...] | Callable[..., Any],
    definition: str | None,
    catalog: Catalog | None,
    *,
    promote: bool,
) -> Iterator[tuple[tuple[str, ...], Catalog | None]]:
    """The names to screen, and the catalog that has them; a function has a name for as long as it is measured."""
    if not callable(names):
        if definition is not None:
            raise UsageError(
                "definition= goes with a function; an operator is named first: benchmark('...').",
                code="definition_without_function",
            )
        yield names_of(names), catalog
        return
    if definition is None:
        raise UsageError(
            "a function implements an operator: benchmark(function, definition='...').", code="definition_missing"
        )
    if promote:
        raise UsageError(ONLY_SCREENED, code="function_not_promoted")
    with catalog_with_function(names, definition, catalog) as (name, records):
        yield (name,), records


# ---- tier run -------------------------------------------------------------------------------------
# One tier of a bench run from plan to database: resumable, journaled trace by trace, safe to interrupt.

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
    """Return the tier asked for, then the promotion of what passed it, as one report; ``confined``: no promotion
    without a sandbox.

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
    """What may not be promoted here since workers cannot be confined, and why; None if they can.

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
    """Return one tier: plan, run, and ingest what came of it."""
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


# ---- cross check ----------------------------------------------------------------------------------
# Whether the two clocks of a promotion agree: CUDA events, which decide, and CUPTI, which listens. Pure.
#
# Events enclose the launch as well, so that a call of one kernel takes them as much longer as an empty kernel takes
# at all: 3 to 4 us, by the host (``docs/decisions/timing.md``, 0022). Nothing is compared where a call launches
# several kernels, since events count the gaps between them.

AGREE_US, AGREE_SHARE = 2.0, 0.05
"""They agree within the larger of both: CUPTI sees two calls of each Solution, at the clocks of that moment."""
ENOUGH = 10
"""Fewer calls say nothing of a clock."""
SUSPECT_SHARE = 0.2
"""Where a larger share disagrees, a clock is wrong; single calls that do are of kernels whose time varies."""


@dataclass(frozen=True)
class TwoClocks:
    """How many calls of one kernel were timed by both clocks, and on how many of them both agree."""

    compared: int
    agree: int
    launch_us: float

    @property
    def problem(self) -> str | None:
        """Why the times of the run are not to be trusted, or None."""
        if self.compared < ENOUGH or self.compared - self.agree <= SUSPECT_SHARE * self.compared:
            return None
        return (
            f"CUDA events and CUPTI agree on {self.agree} of {self.compared} calls of one kernel only (within {AGREE_US:g} us or "
            f"{AGREE_SHARE:.0%}, less the {self.launch_us:.3g} us that an empty kernel takes): what these times say is "
            "uncertain. Repeat the run on a quiet machine, after tilegym-db calibrate"
        )


def cross_check(traces: Iterable[Trace], peaks: GpuPeaks) -> TwoClocks:
    """Hold the events' time of every promoted call of one kernel against CUPTI's.

    Args:
        traces: of one run.
        peaks: of the device that they were measured on; its launch must have been timed by the same clock.
    """
    compared = agree = 0
    for trace in traces:
        measured, audit = trace.performance, trace.audit
        if trace.status != "PASSED" or measured is None or audit is None or measured.timer != peaks.timer:
            continue
        if audit.profiled_us is None or len(audit.kernels) != 1:
            continue
        compared += 1
        difference_us = measured.latency_us - peaks.launch_us.value - audit.profiled_us
        agree += abs(difference_us) <= max(AGREE_US, AGREE_SHARE * measured.latency_us)
    return TwoClocks(compared, agree, peaks.launch_us.value)


# ---- of function ----------------------------------------------------------------------------------
# Measures a function of a notebook or a script: as a Solution of its own for this one run, in the screen tier.


def benchmark_function(
    function: Callable[..., Any],
    definition: str,
    *,
    dtypes: Mapping[str, Sequence[str]] | None = None,
    layouts: Mapping[str, str] | None = None,
    catalog: Catalog | None = None,
    **options: Any,
) -> BenchReport:
    """Verify and time a function against a Definition, beside stock code, without adding it to any catalog.

    The function is written with what it uses into a file of its own, which runs in a worker as every Solution does. Its
    traces are of the screen tier: they say what was measured, and never make it served. To keep it, save the file and run
    ``tilegym-db add-solution``.

    Args:
        function: called as the Definition's reference is, with or without its outputs as last arguments.
        definition: the name of the operator.
        dtypes: dtype variable -> what the function supports; by default all that the Definition has.
        layouts: tensor -> the layout that the function needs, where that is not ``contiguous``.
        catalog: the records; the shipped ones and the user's by default.
        options: as for :func:`~tilegym_db.bench.benchmark.benchmark`, but not ``promote``.

    Raises:
        UsageError: the function's source is not known, it uses what cannot be written into a file, or its parameters are not
            those of the Definition.
        NotFoundError: no such Definition.
        RecordError: ``dtypes`` or ``layouts`` are none of the Definition's.
    """
    if "promote" in options:
        raise UsageError(ONLY_SCREENED, code="function_not_promoted")
    with catalog_with_function(function, definition, catalog, dtypes, layouts) as (name, records):
        return benchmark((name,), catalog=records, **options)


# ---- function solution ----------------------------------------------------------------------------
# A function of a notebook or a script as a Solution of its own, for as long as it is measured.

FILE = "kernel.py"
ONLY_SCREENED = "a function is only screened: what is promoted needs a name. Try: tilegym-db add-solution FILE"


@contextlib.contextmanager
def catalog_with_function(
    function: Callable[..., Any],
    definition: str,
    catalog: Catalog | None = None,
    dtypes: Mapping[str, Sequence[str]] | None = None,
    layouts: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, Catalog]]:
    """The name that a function has as a Solution, and a catalog with it in it; arguments and errors are those of
    :func:`~tilegym_db.bench.benchmark.benchmark_function`.
    """
    catalog = catalog or Catalog.default()
    record = catalog.definition(definition)
    source = function_source(function).encode()
    solution = _solution_of(function, source, record, dtypes or record.dtypes, layouts or {})
    with scratch_folder() as root:
        catalog = catalog.reread(root)
        add_solution(catalog, solution, {FILE: source}, root)
        yield solution.name, catalog.reread(root)


def _solution_of(
    function: Callable[..., Any],
    source: bytes,
    definition: Definition,
    dtypes: Mapping[str, Sequence[str]],
    layouts: Mapping[str, str],
) -> Solution:
    """Return the record of a function, named after its source; :class:`UsageError` where its parameters do not fit."""
    language = language_of(source.decode())
    writes = next(iter(definition.outputs)) in inspect.signature(function).parameters
    spec = {
        "language": language,
        "destination_passing_style": writes or language != "python",
        "entry_point": f"{FILE}::{function.__name__}",
        "dtypes": {key: list(values) for key, values in dtypes.items()},
        "layouts": dict(layouts),
    }
    name = f"{definition.name}_function_{length_prefixed_digest([source])[:12]}"
    solution = Solution.from_dict(
        {"name": name, "definition": definition.name, "author": "a function", "spec": spec, "sources": [{"path": FILE}]}
    )
    problem = signature_problem(solution, source, definition)
    if problem is not None:
        raise UsageError(f"'{function.__name__}': {problem}.", code="signature_differs")
    return solution
