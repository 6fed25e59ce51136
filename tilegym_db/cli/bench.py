"""``tilegym-db bench``: verify and time Solutions on this machine."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tilegym_db.cli.options import Executor, Gpus, MachineGpu, Names, WorkloadGlob
from tilegym_db.cli.output import note

if TYPE_CHECKING:
    from tilegym_db.bench.bench_report import BenchReport
    from tilegym_db.bench.summary import SummaryRow


def command(
    names: Names = None,
    language: Annotated[
        str | None, typer.Option(help="Only solutions in this language, and those that they are compared with.")
    ] = None,
    gpu: MachineGpu = "auto",
    gpus: Gpus = None,
    executor: Executor = None,
    workload: WorkloadGlob = None,
    quick: Annotated[bool, typer.Option(help="Few workloads and samples.")] = False,
    again: Annotated[bool, typer.Option(help="Measure anew what has a trace already.")] = False,
    promote: Annotated[bool, typer.Option("--promote", help="Then promote what passed (see promote).")] = False,
    allow_unsandboxed: Annotated[
        bool, typer.Option(help="Promote where workers cannot be confined; such traces are never published.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the traces as JSON lines.")] = False,
) -> None:
    """Build, verify and time solutions; every result becomes a trace in the database.

    This is the screen: what passes it is a candidate, and counts as verified once it is promoted. Interrupt it at any time:
    what was measured is kept, and the next run goes on from there.
    """
    from tilegym_db.bench.machine import refuse_absent_gpu
    from tilegym_db.cli.known_names import refuse_unknown_names

    refuse_absent_gpu(gpu, gpus, executor)
    refuse_unknown_names(names or ())
    from tilegym_db.bench.benchmark import benchmark
    from tilegym_db.cli.bench_progress import Progress

    with Progress(quiet=as_json and not sys.stderr.isatty()) as progress:
        report = benchmark(
            tuple(names or ()),
            gpu=gpu,
            gpus=gpus,
            executor=executor,
            language=language,
            workload=workload,
            quick=quick,
            again=again,
            promote=promote,
            allow_unsandboxed=allow_unsandboxed,
            observer=progress.observer(),
        )
    finish(report, as_json=as_json)


def finish(report: BenchReport, *, as_json: bool) -> None:
    """Print a run and leave with its exit status: 130 interrupted, 1 where something failed."""
    if as_json:
        for trace in report.traces:
            typer.echo(trace.to_json())
    else:
        print_summary(report)
    for promotion in report.promotions:
        note(
            f"{promotion.id}: {promotion.ratio:.2f}x over {promotion.baseline} (99% interval from {promotion.ci_low:.2f})"
        )
    for remark in (*report.notes, *report.plan.refused):
        note(remark)
    for reason in report.unfinished:
        note(f"not measured: {reason}")
    if report.interrupted:
        raise typer.Exit(130)
    failed = any(status not in ("PASSED", "UNSUPPORTED") for status in report.counts)
    if report.plan.refused or report.unfinished or failed:
        raise typer.Exit(1)


def print_summary(report: BenchReport) -> None:
    """One row per solution: workloads passed, geometric mean against stock, and each kind of failure with its reason."""
    from rich.console import Console
    from rich.markup import escape

    from tilegym_db.bench.summary import summarise
    from tilegym_db.cli.output import print_table

    console = Console()
    rows = summarise(report.traces)
    if rows:
        console.print(f"{report.machine.gpu_name} ({report.machine.gpu}), run {report.run_id}", highlight=False)
        columns = ("solution", "language", "passed", "vs stock", "vs best", "of light", "note")
        print_table(columns, [_summary_cells(row) for row in rows], prose=("note",), least=("of light", "vs best"))
    skipped: dict[str, int] = {}
    for item in report.plan.skipped:
        skipped[item.reason] = skipped.get(item.reason, 0) + 1
    for reason, count in skipped.items():
        console.print(f"[dim]{count} not run: {escape(reason)}[/dim]", highlight=False)
    if len(report.devices) > 1:
        measured = ", ".join(f"{count} on {device}" for device, count in sorted(report.devices.items()))
        console.print(f"traces measured: {measured}", highlight=False)
    counts = json.dumps(dict(report.counts)) if report.traces else "nothing new"
    screened = bool(report.traces) and all(trace.tier != "promotion" for trace in report.traces)
    after = f"promote --gpu {report.machine.gpu}" if screened else f"best --gpu {report.machine.gpu}"
    console.print(f"traces: {counts}. Next: tilegym-db {after}", highlight=False)


def _summary_cells(row: SummaryRow) -> tuple[str, ...]:
    speedup, over_best = ("" if ratio is None else f"{ratio:.2f}x" for ratio in (row.speedup, row.over_best))
    note = row.note if len(row.note) <= 200 else row.note[:197] + "..."
    light = "" if row.sol_ratio is None else f"{row.sol_ratio:.0%}"
    return row.solution, row.language, f"{row.passed}/{row.total}", speedup, over_best, light, note
