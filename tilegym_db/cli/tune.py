"""``tilegym-db tune``: search the tunables of Solutions on this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.options import Executor, Gpus, Language, MachineGpu, Names, WorkloadGlob, finite_seconds

if TYPE_CHECKING:
    from tilegym_db.bench.tune.tune import TuneReport
    from tilegym_db.bench.tune.tuner import Tuned


Budget = Annotated[
    float | None,
    typer.Option(
        help="Seconds of search for each solution and workload; default 60, quick 10.", callback=finite_seconds
    ),
]


def command(
    names: Names = None,
    language: Language = None,
    gpu: MachineGpu = "auto",
    gpus: Gpus = None,
    executor: Executor = None,
    workload: WorkloadGlob = None,
    budget: Budget = None,
    quick: Annotated[bool, typer.Option(help="Few workloads and rounds.")] = False,
    again: Annotated[bool, typer.Option(help="Forget what earlier runs tried.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print results and every config tried as JSON.")] = False,
) -> None:
    """Find the fastest config of each solution per workload; it is verified as that config and becomes a trace.

    What is searched are the tunables that a solution declares, and nothing is ever tuned at run time. Interrupt it at any
    time: configs that were given up are not tried again. Exit status 1 where a declared config gives a wrong result.
    """
    from tilegym_db.bench.machine import refuse_absent_gpu
    from tilegym_db.cli.known_names import refuse_unknown_names

    refuse_absent_gpu(gpu, gpus, executor)
    refuse_unknown_names(names or ())
    from tilegym_db.bench.tune.tune import tune
    from tilegym_db.cli.bench_progress import Progress
    from tilegym_db.cli.output import note, print_json

    with Progress(quiet=as_json and not sys.stderr.isatty()) as progress:
        report = tune(
            tuple(names or ()),
            gpu=gpu,
            gpus=gpus,
            executor=executor,
            language=language,
            workload=workload,
            budget_s=budget,
            quick=quick,
            again=again,
            observer=progress.tune_observer(),
        )
    if as_json:
        print_json(report_record(report))
    else:
        print_report(report)
    for remark in report.notes:
        note(remark)
    if report.interrupted:
        raise typer.Exit(130)
    if report.unfinished or report.outcomes["failed"] or any(result.config is None for result in report.results):
        raise typer.Exit(1)


COLUMNS = ("solution", "axes", "dtypes", "config", "vs defaults", "tried", "left", "why")


def print_report(report: TuneReport) -> None:
    """One row per pair, what was left out and why, and the next step."""
    from tilegym_db.cli.output import note, print_table

    if report.results:
        print_table(COLUMNS, [_cells(result) for result in report.results], prose=("why",), least=("left", "dtypes"))
    skipped: dict[str, int] = {}
    for item in report.skipped:
        skipped[item.reason] = skipped.get(item.reason, 0) + 1
    for reason, count in skipped.items():
        note(f"{count} not tuned: {reason}")
    spelled = ", ".join(f"{count} {outcome}" for outcome, count in sorted(report.outcomes.items())) or "nothing new"
    note(f"configs given up: {spelled}. Next: tilegym-db promote --gpu {report.machine.gpu}")


def _cells(result: Tuned) -> tuple[Any, ...]:
    from tilegym_db.cli.output import spelled_map
    from tilegym_db.records.solution import spell_config

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
    """A run as JSON: what won, every config that was judged, and what was left out."""
    return {
        "run_id": report.run_id,
        "gpu": report.machine.gpu,
        "interrupted": report.interrupted,
        "results": [vars(result) for result in report.results],
        "steps": [step.to_dict() for step in report.steps],
        "skipped": [vars(item) for item in report.skipped],
    }
