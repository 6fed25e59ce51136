"""``tilegym-db dev``: try a kernel at one shape after each edit, without adding it to the catalog."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.kit.formats import AsJson
from tilegym_db.cli.kit.options import (
    Axes,
    Dtypes,
    Implements,
    MachineGpu,
    complete_language,
    complete_target,
    parse_axes,
    parse_pairs,
    regular_file,
)
from tilegym_db.cli.kit.output import json_text, note, print_line, spelled_number

if TYPE_CHECKING:
    from tilegym_db.measurement.dev import DevReport, Problem


def existing_kernel(path: Path) -> Path:
    """Return the path of a kernel; refuse one that is not there, with the command that writes a draft."""
    if not path.exists():
        raise typer.BadParameter(
            f"path '{path}' does not exist. To write one: tilegym-db new solution OPERATOR --language triton"
        )
    return regular_file(path)


def command(
    path: Annotated[
        Path,
        typer.Argument(
            help="A .py file that defines run(), or the folder or .json of a solution.",
            metavar="KERNEL.py",
            readable=True,
            callback=existing_kernel,
        ),
    ],
    definition: Implements = None,
    language: Annotated[
        str | None,
        typer.Option("--language", "-l", help="Its language; default: from imports.", autocompletion=complete_language),
    ] = None,
    entry: Annotated[str, typer.Option(help="The function of a .py file that is called.")] = "run",
    axes: Axes = None,
    dtype: Dtypes = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Compile for it ahead of time; default: sm_90a without a GPU, else not.",
            autocompletion=complete_target,
        ),
    ] = None,
    gpu: MachineGpu = "auto",
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Repeat when the file or shared code changes, until Ctrl-C.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Scan, compile, check and time a kernel at one shape, in seconds; nothing is stored.

    The shape is the smallest workload tagged 'tiny', with the sizes of --axes and --dtype. The check is that of bench at this
    shape, without fuzz cases. On a CPU a tile language is interpreted, so there is no time. Exit status 1 if a step fails.
    With --json, one object a line for each round.
    """
    from tilegym_db.measurement.machine import refuse_absent_gpu

    refuse_absent_gpu(gpu)
    sizes, dtypes = parse_axes(axes), parse_pairs("--dtype", dtype)
    from tilegym_db.catalog import Catalog

    catalog = Catalog.default()
    if definition is not None:
        catalog.definition(definition)  # an unknown one is refused before PyTorch is loaded
    from tilegym_db.measurement.dev import DevOptions, kernel_rounds  # loads PyTorch, which takes seconds

    options = DevOptions(path, definition, language, entry, sizes, dtypes, target, gpu)
    passed = True
    try:
        with closing(kernel_rounds(options, watch=watch, catalog=catalog)) as reports:
            for report in reports:
                passed = report.passed
                _print(report, as_json)
                if watch:
                    note(f"watching {path}; Ctrl-C ends")
    except KeyboardInterrupt:
        if not watch:
            raise
        return
    if not passed:
        raise typer.Exit(1)


def _print(report: DevReport, as_json: bool) -> None:
    if as_json:
        print_line(json_text(record_of(report), indent=None))
    else:
        for line in lines_of(report):
            print_line(line)
    sys.stdout.flush()  # a program may read each round from a pipe


# ---- One round as JSON ----------------------------------------------------------------------------------


def record_of(report: DevReport) -> dict[str, Any]:
    """Return a round as JSON-ready content."""
    problem, compiled, errors, timed = report.problem, report.compiled, report.errors, report.performance
    record, workload = report.solution, report.workload
    return {
        "path": str(report.path),
        "definition": None if record is None else record.definition,
        "language": None if record is None else record.spec.language,
        "entry_point": None if record is None else record.spec.entry_point,
        "axes": None if workload is None else workload.axes,
        "dtypes": None if workload is None else workload.dtypes,
        "gpu": report.machine.gpu,
        "passed": report.passed,
        "open_places": list(report.open_places),
        "findings": [{**vars(finding), "severity": str(finding.severity)} for finding in report.findings],
        "compile": None
        if compiled is None
        else {
            "target": report.target,
            "status": compiled.status,
            "seconds": compiled.seconds,
            "kernels": [{"kernel": item.kernel, "bytes": item.bytes} for item in compiled.artifacts],
            "log": compiled.log,
        },
        "interpreted": report.interpreted,
        "errors": None if errors is None else vars(errors),
        "latency_us": None if timed is None else timed.latency_us,
        "speedup": report.speedup,
        "timer": None if timed is None else timed.timer,
        "problem": None if problem is None else _problem_record(problem),
        "seconds": round(report.seconds, 3),
    }


def _problem_record(problem: Problem) -> dict[str, Any]:
    failure = problem.failure
    verdict = None if failure is None else failure.verdict
    return {
        "step": problem.step,
        "code": problem.code,
        "reason": problem.reason,
        "log": problem.log,
        "status": None if failure is None else failure.status,
        "case": None if failure is None or failure.case is None else str(failure.case),
        "output": None if failure is None else failure.output,
        "index": None if verdict is None else list(verdict.index),
        "expected": None if verdict is None else verdict.expected,
        "got": None if verdict is None else verdict.got,
    }


# ---- One round as text ----------------------------------------------------------------------------------


def lines_of(report: DevReport) -> list[str]:
    """Return the compact block of a round: one line per step, and more for the step that failed."""
    lines = []
    if report.solution is not None and report.workload is not None:
        call = " ".join(f"{name}={value}" for name, value in {**report.workload.axes, **report.workload.dtypes}.items())
        lines.append(f"{report.path}: {report.solution.definition} {call} on {report.machine.gpu}")
    steps = (("scan", _scan_lines), ("compile", _compile_lines), ("check", _check_lines), ("time", _time_lines))
    for step, spelled in steps:
        if report.problem is not None and report.problem.step in (step, "read"):
            break
        said = spelled(report)
        if said:
            lines.append(_labelled(step, said[0]))
            lines += [f"  {line}" for line in said[1:]]
    if report.problem is not None:
        lines += _problem_lines(report.problem)
    if report.open_places:
        lines.append(_labelled("draft", f"to replace before it can be added: {report.open_places[0]}"))
        lines += [f"  {place}" for place in report.open_places[1:]]
    return lines


def _labelled(step: str, said: str) -> str:
    return f"{step:<8} {said}"


def _scan_lines(report: DevReport) -> list[str]:
    return ["ok", *map(str, report.findings)]  # the other findings are notes


def _compile_lines(report: DevReport) -> list[str]:
    compiled = report.compiled
    if compiled is None:
        return []
    if compiled.status != "compiled":
        return [f"{compiled.status} for {report.target}", *compiled.log.strip().splitlines()]
    kernels = len(compiled.artifacts)
    return [f"{report.target} in {compiled.seconds:.1f} s, {kernels} kernel{'' if kernels == 1 else 's'}"]


def _check_lines(report: DevReport) -> list[str]:
    errors = report.errors
    assert errors is not None
    figures = f"rel_fro {errors.rel_fro:.2g}, worst row {errors.worst_row_rel:.2g}, max_abs {errors.max_abs:.2g}"
    return [f"PASSED {figures}"]


def _time_lines(report: DevReport) -> list[str]:
    timed = report.performance
    if timed is None:
        return ["none: the kernel was interpreted on a CPU" if report.interpreted else "none: it omits outputs"]
    ratio = "" if report.speedup is None else f", {report.speedup:.2f}x stock"
    return [f"{spelled_number(timed.latency_us)} us{ratio}"]


def _problem_lines(problem: Problem) -> list[str]:
    """Return the failed step: its code and reason, and the compiler's or the worker's output indented."""
    reason = problem.reason.splitlines() or [""]
    lines = [_labelled(problem.step, f"FAILED {problem.code}" + ("" if len(reason) > 1 else f": {reason[0]}"))]
    shown = reason if len(reason) > 1 else []
    shown = [*shown, *problem.log.strip().splitlines()]
    return [*lines, *(f"  {line}" for line in shown)]
