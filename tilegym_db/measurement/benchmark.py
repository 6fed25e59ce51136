"""Entry points of the harness for Python: :func:`bench` screens Solutions or a function, :func:`verify` verifies Solutions.

A run of one tier goes from the plan to the database. Each trace is journaled as it arrives, so a run can be interrupted and
resumed.
"""

from __future__ import annotations

import contextlib
import inspect
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tilegym_db.catalog import Catalog
from tilegym_db.catalog.reader import is_place
from tilegym_db.catalog.writers import add_solution
from tilegym_db.errors import UsageError, check_kind
from tilegym_db.measurement.awards import may_lack_confinement, record_awards, sandbox_note, unverifiable_here
from tilegym_db.measurement.devices.messages import Peaks, Session
from tilegym_db.measurement.devices.pool import Callbacks, DevicePool
from tilegym_db.measurement.drafts import catalog_with_drafts
from tilegym_db.measurement.local_executor import LocalExecutor
from tilegym_db.measurement.machine import Devices, DevicesLike, Machine, leaving_processors, parse_devices
from tilegym_db.measurement.plan import (
    BenchReport,
    Options,
    Plan,
    current_best_alone,
    names_of,
    omitting,
    refuse_omitting,
)
from tilegym_db.measurement.run_setup import Observer, RunContext, RunSetup, open_run, peaks_or_reason, timing_budget
from tilegym_db.measurement.timing import TimingBudget
from tilegym_db.paths import scratch_folder
from tilegym_db.records import Definition, Solution, Trace
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.records.solution import signature_problem
from tilegym_db.records.text import length_prefixed_digest
from tilegym_db.records.trace import new_run_id
from tilegym_db.sandbox.worker import prepare_workers
from tilegym_db.scaffold.solution_draft import function_source, language_of
from tilegym_db.store.journal import Journal
from tilegym_db.store.queries.measured import done_keys, failed_screen, likely_fastest_of, read_peaks, tuned_configs
from tilegym_db.store.queries.publishing import disagreements
from tilegym_db.verification.inputs import draws_spread
from tilegym_db.verification.worker_handle import INTERPRETER, PROMOTION, SCREEN, UNTIMED, TierPolicy


def bench(
    names: str | Path | Iterable[str | Path] | Callable[..., Any] = (),
    *,
    definition: str | None = None,
    dtypes: Mapping[str, Sequence[str]] | None = None,
    layouts: Mapping[str, str] | None = None,
    devices: DevicesLike = "auto",
    language: str | None = None,
    workload: str | tuple[str, ...] | None = None,
    quick: bool = False,
    force: bool = False,
    verify: bool = False,
    allow_unsandboxed: bool = False,
    catalog: Catalog | None = None,
    store_home: Path | None = None,
    observer: Observer | None = None,
) -> BenchReport:
    """Screen Solutions or a function: compare them with the reference, time them, and store a Trace for each Workload.

    A function is written to a file together with the definitions that it uses. The file runs in a worker like every Solution,
    beside stock code. Its traces are of the screen tier, so it is never served. To keep it, save the file and run
    ``tilegym-db add-solution``.

    Args:
        names: Definitions or Solutions; empty means all. A Solution that is not in the catalog is given by its path: a folder, a
            record or a ``.py`` file. Or a function that is called like the Definition's reference, with or without its outputs
            as last arguments.
        definition: the operator that a function or a ``.py`` file implements.
        dtypes: dtype variable -> the dtypes that a function supports; by default all of the Definition.
        layouts: tensor -> the layout that a function needs, if not ``contiguous``.
        devices: ``auto`` (the GPU of this machine if it has one, else its CPU), ``cpu``, or the slug or family of the GPU in
            this machine. Several GPUs of this host, all of one kind and with one process each: ``all``, an index or a list of
            indices. The devices of a Ray cluster: ``ray`` or ``ray:HOST:PORT``.
        language: only Solutions in this language, with stock code and the verified Solutions that may be the fastest.
        workload: glob over uuid, tags and axes key, such as ``stage:decode`` or ``M=1,*``; or several globs, of which one
            must match.
        quick: few workloads and few samples.
        force: also measure pairs that already have a trace.
        verify: then verify what passed, as :func:`verify` does; on a GPU, verify at once. The report contains its traces. Not
            for a function or path.
        allow_unsandboxed: verify every source even if this machine cannot confine a worker; such traces are marked and
            never published. Without it, such a machine verifies only sources that the package ships, for its own user.
        catalog: the records; the shipped ones and the user's overlay by default.
        store_home: folder of the store; by default ``$TILEGYM_DB_HOME`` or the user data folder.
        observer: callbacks for progress.

    Raises:
        HardwareError: the requested GPU is not the one in this machine, the machine cannot confine a worker, or no cluster
            answers.
        MissingPackageError: a cluster needs a package that is not installed.
        NotFoundError: a name that is neither a Definition nor a Solution.
        RecordError: the Definition has no such ``dtypes`` or ``layouts``.
        StoreError: the store cannot be used.
        UsageError: a function without ``definition`` or with ``verify``, an argument for functions without one, a function
            that cannot be written to a file, or one with other parameters than the Definition.
    """
    asked = parse_devices(devices)

    def run(candidates: tuple[str, ...], records: Catalog | None) -> BenchReport:
        options = Options(candidates, language, workload, quick, force)
        confined = not allow_unsandboxed
        return run_tiers(options, asked, records, store_home, observer, confined=confined, then_verify=verify)

    if callable(names):
        return _bench_function(names, definition, dtypes, layouts, catalog, run, verify=verify)
    records = catalog or Catalog.default()
    check_kind(names, (Iterable, Path), "names are those of solutions or definitions, or paths: one, or several")
    asked_for: tuple[str | Path, ...] = (names,) if isinstance(names, str | Path) else tuple(names)
    places = [name for name in asked_for if is_place(name, records)]
    if places and verify:
        raise UsageError(f"{places[0]}: {ONLY_SCREENED}", code="draft_not_verified")
    for argument, value in (("definition", definition), ("dtypes", dtypes), ("layouts", layouts)):
        if value is not None and not (places and argument == "definition"):
            raise UsageError(
                f"{argument}= is only for a function; name an operator as the first argument: bench('...').",
                code="definition_without_function",
            )
    if not places:
        return run(tuple(map(str, asked_for)), catalog)
    with catalog_with_drafts(places, records, definition) as (drafts, extended):
        plain = [str(name) for name in asked_for if name not in places]
        report = run((*plain, *(draft.name for draft in drafts)), extended)
    report.drafts = {draft.name: draft for draft in drafts}
    return report


def verify(
    names: str | Iterable[str] = (),
    *,
    devices: DevicesLike = "auto",
    language: str | None = None,
    workload: str | tuple[str, ...] | None = None,
    quick: bool = False,
    force: bool = False,
    allow_unsandboxed: bool = False,
    catalog: Catalog | None = None,
    store_home: Path | None = None,
    observer: Observer | None = None,
) -> BenchReport:
    """Verify Solutions: fresh processes, fresh secrets, all fuzz cases and every audit.

    Only Solutions that pass here are verified; ``best``, the resolver and patched models use no others. Pairs whose newest
    screen failed are left out. Verified Solutions that are nearly the fastest are measured again together with new ones, so
    that the ranking comes from the same rounds. Arguments and errors are those of :func:`bench`.
    """
    options = Options(names_of(names), language, workload, quick, force, "promotion")
    asked = parse_devices(devices)
    return run_tiers(options, asked, catalog, store_home, observer, confined=not allow_unsandboxed)


# ---- tier run -------------------------------------------------------------------------------------
# One tier of a run, from the plan to the database.

POLICIES: Mapping[Literal["screen", "promotion"], TierPolicy] = {"screen": SCREEN, "promotion": PROMOTION}


def run_tiers(
    options: Options,
    devices: Devices,
    catalog: Catalog | None,
    store_home: Path | None,
    observer: Observer | None,
    *,
    confined: bool,
    then_verify: bool = False,
) -> BenchReport:
    """Run the requested tier, then verify what passed if ``then_verify``; return one report.

    With ``confined``, nothing is verified without a sandbox. Other arguments and errors are those of :func:`bench`.
    """
    watch = observer or Observer()
    confined = confined and (then_verify or options.tier == "promotion")
    with open_run(devices, catalog, store_home, watch.starting) as (setup, pool):
        if pool is None:
            prepare_workers(setup.machine.device)
        limits = _limits(setup, options, pool) if confined else None
        confined = confined and limits is None
        verifies = then_verify or options.tier == "promotion"
        untimed = omitting(setup.catalog, options.names) if verifies else {}
        first, *others = tiers_of(options, then_verify=then_verify, on_gpu=setup.machine.is_gpu, omits=bool(untimed))
        if first == "promotion":
            refuse_omitting(untimed)
        report = _run(setup, replace(options, tier=first), watch, pool, limits, confined=confined)
        for tier in () if report.interrupted else others:
            final = replace(options, tier=tier)
            report = report.followed_by(_run(setup, final, watch, pool, limits, confined=confined))
    if limits is not None:
        report.notes.append(sandbox_note(setup.machine, limits))
    return report


def tiers_of(
    options: Options, *, then_verify: bool, on_gpu: bool, omits: bool
) -> tuple[Literal["screen", "promotion"], ...]:
    """Return the tiers to run, in order.

    A verification on a GPU goes without a screen: it finds a wrong kernel as soon, and its cases include those of a screen. On a
    CPU, kernels of tile languages have nothing but a screen. ``omits``: a named Solution omits an output, and is only screened.
    """
    if not then_verify:
        return (options.tier,)
    return ("promotion",) if on_gpu and not options.quick and not omits else ("screen", "promotion")


def _limits(setup: RunSetup, options: Options, pool: DevicePool | None) -> dict[str, str] | None:
    """Return Solution -> the reason why it may not be verified with the confinement of this host; None without such limits.

    Supervisors check the sandbox themselves and refuse their work if it fails. Only a kernel without Landlock is known in
    advance, for this host but not for the nodes of a cluster.
    """
    if pool is not None and (setup.site is not None or not may_lack_confinement()):
        return None
    return unverifiable_here(setup.machine, setup.catalog, options.names)


def _run(
    setup: RunSetup,
    options: Options,
    observer: Observer,
    pool: DevicePool | None,
    limits: Mapping[str, str] | None,
    *,
    confined: bool,
) -> BenchReport:
    """Run one tier: plan it, measure, and ingest the traces."""
    machine, policy = setup.machine, POLICIES[options.tier]
    plan, known = _planned(setup, options, policy, limits)
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
            report.awards, _ = record_awards(store, report.traces, setup.home)
            passed = {trace.solution for trace in report.traces if trace.status == "PASSED"}
            found = disagreements(store, machine.gpu, passed) if passed else []
            report.notes += [f"a pass does not count ({one.code}): {one.reason}" for one in found]
    return report


def _planned(
    setup: RunSetup, options: Options, policy: TierPolicy, limits: Mapping[str, str] | None
) -> tuple[Plan, GpuPeaks | None]:
    """Return what is left to measure in one tier, and the peaks of this GPU if they are known."""
    machine, catalog = setup.machine, setup.catalog
    with setup.store() as store:
        done = done_keys(store, machine.gpu, policy.tier)
        if policy is SCREEN:
            done |= done_keys(store, machine.gpu, INTERPRETER.tier) | done_keys(store, machine.gpu, UNTIMED.tier)
        known = read_peaks(store, machine.gpu, gpu_name=machine.gpu_name, driver=machine.driver, own=True)
        failed = failed_screen(store, machine.gpu) if policy is PROMOTION and not options.force else {}
        spread = [name for name, definition in catalog.definitions.items() if draws_spread(definition)]
        tuned, all_likely = tuned_configs(store, machine.gpu), likely_fastest_of(store, machine.gpu, spread)
    whole = {catalog.definition(name).digest for name in spread}
    likely_fastest = current_best_alone(all_likely, whole, options.names, catalog)
    excluded = {key: f"did not pass the screen: {status}" for key, status in failed.items()}
    refused = limits or {} if policy is PROMOTION else {}
    return setup.plan(options, done, excluded, tuned, likely_fastest, refused), known


def _kept_by(journal: Journal, report: BenchReport, observer: Observer) -> Callable[[Trace], None]:
    """Return a callback that takes each trace.

    It writes to the journal first, so that only traces that are kept are reported.
    """

    def keep(trace: Trace) -> None:
        journal.append(trace)
        report.traces.append(trace)
        report.arrived.append(round(time.time() - report.began, 3))
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
    """Run a plan on several devices; return the report and their peaks, as known or as the first device measured them."""
    report = BenchReport(new_run_id(setup.machine.gpu), setup.machine, plan)
    own = known if pool.site is None else None  # peaks of this host; devices of other hosts are calibrated there
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
    report.seconds, report.spent = outcome.seconds, outcome.spent
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
    """Run a plan and journal its traces; the caller ingests them. The database is closed while workers run."""
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
    report.seconds[machine.gpu], report.spent[machine.gpu] = context.phases.take(), context.phases.take_spent()
    return report


# ---- cross check ----------------------------------------------------------------------------------
# Compare the two clocks of the promotion tier: CUDA events, which decide, and CUPTI.
#
# Events include the launch: a call of one kernel takes longer by the time of an empty kernel, 3 to 4 us, depending on the
# host (``docs/decisions/timing.md``, 0022). Calls that launch several kernels are not compared, since events also count the gaps
# between them.

MAX_DIFFERENCE_US, MAX_DIFFERENCE_SHARE = 2.0, 0.05
"""Two clocks agree within the larger of the two. CUPTI sees only two calls of each Solution, at the current clocks."""
MIN_COMPARED = 10
"""Minimum number of calls for a statement about a clock."""
MAX_DISAGREEING_SHARE = 0.2
"""If a larger share of calls disagrees, a clock is wrong. Single calls disagree if the time of their kernel varies."""


@dataclass(frozen=True)
class TwoClocks:
    """The number of calls of one kernel that both clocks timed, and the number of those on which they agree."""

    compared: int
    agree: int
    launch_us: float

    @property
    def problem(self) -> str | None:
        """The reason not to trust the times of the run, or None."""
        if self.compared < MIN_COMPARED or self.compared - self.agree <= MAX_DISAGREEING_SHARE * self.compared:
            return None
        return (
            f"CUDA events and CUPTI agree on {self.agree} of {self.compared} single-kernel calls (within "
            f"{MAX_DIFFERENCE_US:g} us or {MAX_DIFFERENCE_SHARE:.0%}, less the {self.launch_us:.3g} us of an empty kernel), so "
            "the times are uncertain. Repeat the run on a quiet machine, after tilegym-db doctor calibrate"
        )


def cross_check(traces: Iterable[Trace], peaks: GpuPeaks) -> TwoClocks:
    """Compare the time of each verified call of one kernel by CUDA events with its time by CUPTI."""
    compared = agree = 0
    for trace in traces:
        measured, audit = trace.performance, trace.audit
        if trace.status != "PASSED" or measured is None or audit is None or measured.timer != peaks.timer:
            continue
        if audit.profiled_us is None or len(audit.kernels) != 1:
            continue
        compared += 1
        difference_us = measured.latency_us - peaks.launch_us.value - audit.profiled_us
        agree += abs(difference_us) <= max(MAX_DIFFERENCE_US, MAX_DIFFERENCE_SHARE * measured.latency_us)
    return TwoClocks(compared, agree, peaks.launch_us.value)


# ---- A function of a notebook or script -----------------------------------------------------------
# Screen a function as a temporary Solution.

FILE = "kernel.py"
ONLY_SCREENED = "what is not in the catalog can only be screened. Add it first: tilegym-db add-solution FILE"


def _bench_function(
    function: Callable[..., Any],
    definition: str | None,
    dtypes: Mapping[str, Sequence[str]] | None,
    layouts: Mapping[str, str] | None,
    catalog: Catalog | None,
    run: Callable[[tuple[str, ...], Catalog], BenchReport],
    *,
    verify: bool,
) -> BenchReport:
    """Screen a function by ``run``, which gets its temporary name and a catalog that contains it."""
    if definition is None:
        raise UsageError(
            "name the operator that the function implements: bench(function, definition='...').",
            code="definition_missing",
        )
    if verify:
        raise UsageError(ONLY_SCREENED, code="function_not_verified")
    with catalog_with_function(function, definition, catalog, dtypes, layouts) as (name, records):
        return run((name,), records)


@contextlib.contextmanager
def catalog_with_function(
    function: Callable[..., Any],
    definition: str,
    catalog: Catalog | None = None,
    dtypes: Mapping[str, Sequence[str]] | None = None,
    layouts: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, Catalog]]:
    """Yield the name of a function as a Solution, and a catalog that contains it while the block runs.

    Arguments and errors are those of :func:`bench`.
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
    """Return the record of a function, named after its source. Raise :class:`UsageError` if its parameters do not fit."""
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
