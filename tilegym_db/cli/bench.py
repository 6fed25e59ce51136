"""``tilegym-db bench``, ``verify``, ``tune`` and ``regress``: measure and verify Solutions on this machine."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from tilegym_db.cli.app import INTERRUPTED
from tilegym_db.cli.kit.formats import AsJson
from tilegym_db.cli.kit.options import (
    AllowUnsandboxed,
    Executor,
    Force,
    Gpus,
    Implements,
    Language,
    MachineGpu,
    Names,
    Quick,
    WorkloadGlob,
    complete_name,
    finite_seconds,
    path_given,
)
from tilegym_db.cli.kit.output import note, print_json, print_table, spelled_map
from tilegym_db.cli.kit.progress import Progress
from tilegym_db.files import refuse_unwritable
from tilegym_db.records.solution import spell_config

if TYPE_CHECKING:
    from tilegym_db.measurement.machine import Devices
    from tilegym_db.measurement.plan import BenchReport, SummaryRow
    from tilegym_db.measurement.regress import RegressionReport
    from tilegym_db.measurement.tune.tune import TuneReport, TuneResult
    from tilegym_db.records import Trace
    from tilegym_db.verification.phases import Spent


LanguageWithOthers = Annotated[
    str | None,
    typer.Option("--language", help="Only solutions in this language, and those that they are compared with."),
]
Times = Annotated[
    Path | None, typer.Option("--times", help="Save the time by phase to this file as JSON, and print a summary.")
]
TraceLines = Annotated[bool, typer.Option("--json", help="Print the traces as JSON lines.")]


@contextmanager
def progress_of(
    names: list[str] | None,
    gpu: str,
    gpus: str | None,
    executor: str | None,
    workload: str | None,
    *,
    as_json: bool,
    drafts: bool = False,
) -> Iterator[tuple[Devices, Progress]]:
    """Refuse absent GPUs, unknown names and a glob without a match before the slow imports; then show progress on stderr.

    With ``drafts``, a name may be the path of a Solution.

    Yields the devices that the options name, and the progress.
    """
    from tilegym_db.catalog import Catalog
    from tilegym_db.catalog.reader import is_place
    from tilegym_db.measurement.machine import begin_workers, devices_of_options
    from tilegym_db.measurement.plan import refuse_unmatched

    devices = devices_of_options(gpu, gpus, executor)
    catalog = Catalog.default()
    catalog.refuse_unknown(names or (), drafts=drafts)
    if not any(is_place(name, catalog) for name in names or ()):
        refuse_unmatched(names or (), workload, catalog)
    begin_workers(devices)

    with Progress(quiet=as_json and not sys.stderr.isatty()) as progress:
        yield devices, progress


# ---- Bench and verify ---------------------------------------------------------------------------------


def bench_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Definitions, solutions, or paths of solutions that are not in the catalog; none means all.",
            autocompletion=complete_name,
        ),
    ] = None,
    definition: Implements = None,
    language: LanguageWithOthers = None,
    gpu: MachineGpu = "auto",
    gpus: Gpus = None,
    executor: Executor = None,
    workload: WorkloadGlob = None,
    quick: Quick = False,
    force: Force = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Then verify what passed (see verify); on a GPU, verify at once.")
    ] = False,
    allow_unsandboxed: AllowUnsandboxed = False,
    times: Times = None,
    as_json: TraceLines = False,
) -> None:
    """Build, verify and time solutions; every result becomes a trace in the database.

    This is the screen. What passes is a candidate, and counts as verified once 'verify' passes it. Interrupt it at any time:
    results are kept, and the next run continues. The path of a kernel measures it before it is added; --definition names the
    operator of a .py file.
    """
    options = {"quick": quick, "force": force, "allow_unsandboxed": allow_unsandboxed}
    own = {"definition": definition, "verify": verify}
    _measure("bench", names, language, workload, gpu, gpus, executor, options, times, as_json=as_json, own=own)


def verify_command(
    names: Names = None,
    language: LanguageWithOthers = None,
    gpu: MachineGpu = "auto",
    gpus: Gpus = None,
    executor: Executor = None,
    workload: WorkloadGlob = None,
    quick: Quick = False,
    force: Force = False,
    allow_unsandboxed: AllowUnsandboxed = False,
    times: Times = None,
    as_json: TraceLines = False,
) -> None:
    """Verify what passed a screen. Only what passes here is used by best, the resolver and patched models.

    It runs in fresh confined processes, with fresh secrets and all fuzz cases, and its traces have the tier 'promotion'. It
    requires five bitwise equal runs, device time that belongs to the solution's own kernels, and a time that the harness's own
    clock confirms.
    """
    options = {"quick": quick, "force": force, "allow_unsandboxed": allow_unsandboxed}
    _measure("verify", names, language, workload, gpu, gpus, executor, options, times, as_json=as_json)


def _measure(
    verb: Literal["bench", "verify"],
    names: list[str] | None,
    language: str | None,
    workload: str | None,
    gpu: str,
    gpus: str | None,
    executor: str | None,
    options: Mapping[str, bool],
    times: Path | None,
    *,
    as_json: bool,
    own: Mapping[str, Any] | None = None,
) -> None:
    """Run ``bench`` or ``verify`` of the harness and print the report; ``own`` are the options that only ``bench`` has."""
    if times is not None:
        refuse_unwritable(times, "a file of times")  # before anything is measured
    own = own or {}
    with progress_of(names, gpu, gpus, executor, workload, as_json=as_json, drafts=verb == "bench") as (
        devices,
        progress,
    ):
        from tilegym_db.measurement import benchmark

        run = benchmark.bench if verb == "bench" else benchmark.verify
        asked_for, given = tuple(names or ()), {"language": language, "workload": workload, **options, **own}
        report = run(asked_for, devices=devices, observer=progress.observer(), **given)
    asked = spelled_words(names, language=language, workload=workload)
    where = {"gpu": None if gpu == "auto" else gpu, "gpus": gpus, "executor": executor}
    flags = {"quick": options["quick"], "verify": own.get("verify", False)}
    again = verb + asked + spelled_words(None, definition=own.get("definition"), **where)
    again += "".join(f" --{name}" for name, is_given in flags.items() if is_given)
    screens = verb == "bench" and not own["verify"]
    finish(report, as_json=as_json, times=times, asked=asked, screens=screens, again=again)


def spelled_words(names: Sequence[str] | None, **options: str | None) -> str:
    """Return names and options as words of a command line, each after a space."""
    named = [word for option, value in options.items() if value is not None for word in (f"--{option}", value)]
    return "".join(f" {shlex.quote(word)}" for word in (*(names or ()), *named))


def finish(
    report: BenchReport,
    *,
    as_json: bool,
    times: Path | None = None,
    asked: str = "",
    screens: bool = False,
    again: str = "",
) -> None:
    """Print a run and exit: status 130 if interrupted, 1 if something failed. Save its times by phase to ``times``.

    Args:
        screens: the command verifies nothing for good.
        again: the command that was run, without the program's name.
    """
    if as_json:
        for trace in report.traces:
            typer.echo(trace.to_json())
    else:
        print_summary(report, asked, screens=screens, again=again)
    if times is not None:
        times.parent.mkdir(parents=True, exist_ok=True)
        times.write_text(json.dumps(report.times, indent=1) + "\n")
        note_times(report)
    for award in report.awards:
        note(f"{award.id}: {award.ratio:.2f}x over {award.baseline} (99% interval from {award.ci_low:.2f})")
    for remark in (*report.notes, *report.plan.refused):
        note(remark)
    for reason in report.unfinished:
        note(f"not measured: {reason}")
    smallest = report.smallest_failure
    if smallest is not None and smallest.failure is not None:
        sizes = spelled_map(smallest.failure.axes)
        note(f"smallest failing case: {smallest.solution} at {sizes}, {smallest.failure.gate}. To see it again:")
        note(report.command_again(smallest))
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    failed = any(status not in ("PASSED", "UNSUPPORTED") for status in report.counts)
    if report.plan.refused or report.unfinished or failed:
        raise typer.Exit(1)


def note_times(report: BenchReport) -> None:
    """Print the time by phase to stderr: the sum over all parallel threads, and the Solution that took longest."""
    for device, parts in report.spent.items():
        note(f"{device}: " + ", ".join(f"{phase} {found:.1f} s" for phase, found in report.seconds[device].items()))
        by_phase: dict[str, list[Spent]] = {}
        for part in parts:
            by_phase.setdefault(part.phase, []).append(part)
        for phase, found in by_phase.items():
            longest = max(found, key=lambda part: part.seconds)
            since = min(part.began for part in found) - report.began
            until = max(part.ended for part in found) - report.began
            note(
                f"  {phase:<20} {sum(part.seconds for part in found):8.1f} s in {sum(part.times for part in found):5} blocks, "
                f"from {since:.1f} to {until:.1f} s; {longest.of} {longest.seconds:.1f} s"
            )
    if report.arrived:
        note(f"first trace after {report.arrived[0]:.1f} s, last after {report.arrived[-1]:.1f} s")


def print_summary(report: BenchReport, asked: str = "", *, screens: bool = False, again: str = "") -> None:
    """Print one row per solution: workloads passed, geometric mean against stock, and the failures with their reasons."""
    from rich.markup import escape

    console = Console(soft_wrap=True)
    _print_figures(console, report)
    if report.interrupted:
        kept = f"{len(report.traces)} traces are kept" if report.traces else "no trace was finished"
        console.print(f"interrupted: {kept}. The same command continues", highlight=False)
        return
    counts = json.dumps(dict(report.counts)) if report.traces else "nothing new"
    step = _next_step(report, asked, screens=screens, again=again)
    console.print(f"traces: {counts}. {escape(step)}", highlight=False)


def _print_figures(console: Console, report: BenchReport) -> None:
    """Print the table of solutions, what was not run, and what each of several devices measured."""
    from rich.markup import escape

    from tilegym_db.measurement.plan import summarise

    rows = summarise(report.traces)
    if rows:
        console.print(f"{report.machine.gpu_name} ({report.machine.gpu}), run {report.run_id}", highlight=False)
        columns = ("solution", "language", "passed", "vs stock", "vs best", "of light", "note")
        print_table(columns, [_summary_cells(row) for row in rows], prose=("note",), least=("of light", "vs best"))
    for reason, count in Counter(item.reason for item in report.plan.skipped).items():
        console.print(f"[dim]{count} not run: {escape(reason)}[/dim]", highlight=False)
    if len(report.devices) > 1:
        measured = ", ".join(f"{count} on {device}" for device, count in sorted(report.devices.items()))
        console.print(f"traces measured: {measured}", highlight=False)


def _next_step(report: BenchReport, asked: str, *, screens: bool, again: str) -> str:
    """Return the step after a run that was not interrupted: to a failure, to a draft that passed, or to the next command."""
    from tilegym_db.measurement.plan import ALREADY_MEASURED, VERIFICATION
    from tilegym_db.records.verdicts import MACHINE_SLOW, is_wrong

    last = [trace for trace in report.traces if trace.tier == VERIFICATION] or report.traces
    tried = [trace for trace in last if trace.role == "kernel"] or last  # stock code beside a kernel passes
    # A wrong number on one workload outweighs the passes of its source on all others.
    wrong = {trace.solution for trace in tried if is_wrong(trace.status, trace.failure.gate if trace.failure else None)}
    if tried and not any(trace.status == "PASSED" and trace.solution not in wrong for trace in tried):
        failed = next((trace for trace in tried if trace.status not in ("UNSUPPORTED", "PASSED")), None)
        busy = failed is None and any(trace.reason.startswith(MACHINE_SLOW) for trace in tried)
        if busy and again:
            return f"Next, once the machine is less busy: tilegym-db {again}"
        return f"Next: tilegym-db show {(failed or tried[0]).trace_id[:8]}"
    measured = {item.solution for item in report.plan.skipped if item.reason == ALREADY_MEASURED}
    if again and not report.traces and measured & report.drafts.keys():  # its verdicts may be failures
        return f"Next: tilegym-db {again} --force"
    if report.drafts:
        return f"Next: {next(iter(report.drafts.values())).add_command}"
    return f"Next: tilegym-db {_next_command(report, tried, asked, screens=screens)}"


def _next_command(report: BenchReport, tried: Sequence[Trace], asked: str, *, screens: bool) -> str:
    """Return the command after a run that failed nothing, without the program's name."""
    from tilegym_db.measurement.plan import ALREADY_MEASURED, VERIFICATION

    gpu = report.machine.gpu
    if tried and all(trace.tier == "interpreter" for trace in tried):
        # Nothing verifies an interpreted kernel on this machine.
        names = " ".join(dict.fromkeys(trace.solution for trace in tried))
        return f"compile {names}, then on a machine with a GPU: tilegym-db bench {names}"
    if report.traces:
        waiting = all(trace.tier != VERIFICATION for trace in report.traces)
    else:
        waiting = screens and any(item.reason == ALREADY_MEASURED for item in report.plan.skipped)
    if waiting:
        return f"verify{asked} --gpu {gpu}"
    definitions = {trace.definition for trace in report.traces}
    return f"best {definitions.pop()} --gpu {gpu}" if len(definitions) == 1 else f"best --gpu {gpu}"


def _summary_cells(row: SummaryRow) -> tuple[str, ...]:
    speedup, over_best = ("" if ratio is None else f"{ratio:.2f}x" for ratio in (row.speedup, row.over_best))
    if row.spread and row.spread[0] < row.spread[1]:
        speedup += f" [{row.spread[0]:.2f}-{row.spread[1]:.2f}]"
    note = row.note if len(row.note) <= 200 else row.note[:197] + "..."
    light = "" if row.sol_ratio is None else f"{row.sol_ratio:.0%}"
    return row.solution, row.language, f"{row.passed}/{row.total}", speedup, over_best, light, note


# ---- Tune ---------------------------------------------------------------------------------------------

Budget = Annotated[
    float | None,
    typer.Option(
        help="Seconds of search for each solution and workload; default 60, quick 10.", callback=finite_seconds
    ),
]


def tune_command(
    names: Names = None,
    language: Language = None,
    gpu: MachineGpu = "auto",
    gpus: Gpus = None,
    executor: Executor = None,
    workload: WorkloadGlob = None,
    budget: Budget = None,
    quick: Quick = False,
    force: Force = False,
    start: Annotated[
        Path | None,
        typer.Option(
            help="Tile sizes that vLLM tuned for fused_moe (E=..,N=..,device_name=...json): try the nearest configs first.",
            parser=path_given,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print results and every config tried as JSON.")] = False,
) -> None:
    """Find the fastest config of each solution per workload, verify it and store it as a trace.

    The search covers the tunables that a solution declares. Nothing is tuned at run time. Interrupt it at any time: rejected
    configs are not tried again. Exit status 1 if a declared config gives a wrong result.
    """
    with progress_of(names, gpu, gpus, executor, workload, as_json=as_json) as (devices, progress):
        from tilegym_db.measurement.tune.tune import tune

        report = tune(
            tuple(names or ()),
            devices=devices,
            language=language,
            workload=workload,
            budget_s=budget,
            quick=quick,
            force=force,
            start=start,
            observer=progress.tune_observer(),
        )
    if as_json:
        print_json(report_record(report))
    else:
        print_report(report, spelled_words(names, language=language, workload=workload))
    for remark in report.notes:
        note(remark)
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if report.unfinished or report.outcomes["failed"] or any(result.config is None for result in report.results):
        raise typer.Exit(1)


COLUMNS = ("solution", "axes", "dtypes", "config", "vs defaults", "tried", "left", "why")


def print_report(report: TuneReport, asked: str = "") -> None:
    """Print one row per pair, what was left out with the reasons, and the next step."""
    if report.results:
        print_table(COLUMNS, [_cells(result) for result in report.results], prose=("why",), least=("left", "dtypes"))
    skipped: dict[str, int] = {}
    for item in report.skipped:
        skipped[item.reason] = skipped.get(item.reason, 0) + 1
    for reason, count in skipped.items():
        note(f"{count} not tuned: {reason}")
    if not report.results and not report.interrupted:
        note("nothing was tuned.")
        return
    spelled = ", ".join(f"{count} {outcome}" for outcome, count in sorted(report.outcomes.items())) or "none"
    following = f"verify{asked} --gpu {report.machine.gpu}"
    after = "The same command continues" if report.interrupted else f"Next: tilegym-db {following}"
    note(f"configs given up: {spelled}. {after}")


def _cells(result: TuneResult) -> tuple[Any, ...]:
    return (
        result.solution,
        spelled_map(result.axes),
        ", ".join(result.dtypes.values()),
        "none" if result.config is None else spell_config(result.config),
        None if result.gain is None else f"{result.gain:.2f}x",
        result.tried,
        result.left,
        result.reason,
    )


def report_record(report: TuneReport) -> dict[str, Any]:
    """Return a run as JSON: the winners, every config that was judged, and what was left out."""
    return {
        "run_id": report.run_id,
        "gpu": report.machine.gpu,
        "interrupted": report.interrupted,
        "results": [vars(result) for result in report.results],
        "steps": [step.to_dict() for step in report.steps],
        "skipped": [vars(item) for item in report.skipped],
    }


# ---- Regress ------------------------------------------------------------------------------------------

VOID = 4
"""Exit status of a session whose times are not reliable."""


def regress_command(
    against: Annotated[
        str, typer.Option(help="A git revision of the catalog (HEAD~1, main, v0.1), or the id of a run.")
    ],
    names: Names = None,
    gpu: MachineGpu = "auto",
    gpus: Gpus = None,
    executor: Executor = None,
    workload: WorkloadGlob = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Time every solution that changed since a revision or run, with the old and the new version interleaved.

    Exit status 1 if a new version is slower by more than noise, or fails although the old one passes. Exit status 4 if a
    control, one source timed against itself, shows that the times are not reliable. Nothing is stored.
    """
    with progress_of(names, gpu, gpus, executor, workload, as_json=as_json) as (devices, progress):
        from tilegym_db.measurement.regress import regress

        report = regress(
            against,
            tuple(names or ()),
            devices=devices,
            workload=workload,
            quick=quick,
            observer=progress.observer(),
        )
    if as_json:
        rows = [dataclasses.asdict(row) for row in report.rows]
        print_json({"against": report.against, "gpu": report.machine.gpu, "void": report.void, "rows": rows})
    else:
        print_regressions(report)
    if report.findings:
        raise typer.Exit(1)
    if report.void:
        raise typer.Exit(VOID)


def print_regressions(report: RegressionReport) -> None:
    """Print one row per solution and workload, and the conclusions on stderr."""
    columns = ("solution", "workload", "verdict", "old_us", "new_us", "change", "noise", "why")
    rows = [
        (
            row.solution,
            row.workload or None,
            row.verdict,
            row.change and row.change.old_us,
            row.change and row.change.new_us,
            row.change and f"{row.change.change:+.1%}",
            row.change and f"{row.change.threshold:.1%}",
            row.reason,
        )
        for row in report.rows
        if row.verdict != "unchanged"
    ]
    if rows:
        print_table(columns, rows, prose=("why",), least=("noise", "workload"))
    unchanged = sum(row.verdict == "unchanged" for row in report.rows)
    if unchanged:
        note(f"{unchanged} solutions are the same as in {report.against}")
    for remark in report.notes:
        note(remark)
    for reason in report.void:
        note(f"void: {reason}")
    if report.void:
        note(
            "the times of this session are not reliable: something else used the device, or its clocks changed. Repeat it"
        )
    note(f"{len(report.findings)} regressions against {report.against} on {report.machine.gpu_name}")
