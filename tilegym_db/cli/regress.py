"""``tilegym-db regress``: is anything slower than it was?"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tilegym_db.cli.options import Executor, Gpus, MachineGpu, Names, WorkloadGlob
from tilegym_db.cli.output import note, print_json, print_table

if TYPE_CHECKING:
    from tilegym_db.bench.regress import RegressionReport

VOID = 4
"""Exit status of a session whose times cannot be believed."""


def command(
    against: Annotated[
        str, typer.Option(help="A git revision of the catalog (HEAD~1, main, v0.1), or the id of a run.")
    ],
    names: Names = None,
    gpu: MachineGpu = "auto",
    gpus: Gpus = None,
    executor: Executor = None,
    workload: WorkloadGlob = None,
    quick: Annotated[bool, typer.Option(help="Few workloads and samples.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time every solution that changed since then, old and new version interleaved on this machine.

    Exit status 1 where a new version is slower by more than noise, or fails where the old one passes; 4 where a control,
    one source timed against itself, shows that the session cannot be believed. Nothing is stored.
    """
    from tilegym_db.bench.machine import refuse_absent_gpu
    from tilegym_db.cli.known_names import refuse_unknown_names

    refuse_absent_gpu(gpu, gpus, executor)
    refuse_unknown_names(names or ())
    from tilegym_db.bench.regress import regress
    from tilegym_db.cli.bench_progress import Progress

    with Progress(quiet=as_json and not sys.stderr.isatty()) as progress:
        report = regress(
            against,
            tuple(names or ()),
            gpu=gpu,
            gpus=gpus,
            executor=executor,
            workload=workload,
            quick=quick,
            observer=progress.observer(),
        )
    if as_json:
        rows = [dataclasses.asdict(row) for row in report.rows]
        print_json({"against": report.against, "gpu": report.machine.gpu, "void": report.void, "rows": rows})
    else:
        print_report(report)
    if report.findings:
        raise typer.Exit(1)
    if report.void:
        raise typer.Exit(VOID)


def print_report(report: RegressionReport) -> None:
    """One row per solution and workload; on stderr what follows from them."""
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
        note("no time of this session counts: something else used the device, or its clocks moved. Repeat it")
    note(f"{len(report.findings)} regressions against {report.against} on {report.machine.gpu_name}")
