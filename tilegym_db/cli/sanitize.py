"""``tilegym-db sanitize``: compute-sanitizer over solutions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.options import Language, MachineGpu, Names
from tilegym_db.cli.output import note, print_json, print_table

if TYPE_CHECKING:
    from tilegym_db.bench.instruments.sanitize import Sanitized


def command(
    names: Names = None,
    tool: Annotated[
        str, typer.Option(help="Of memcheck, racecheck, initcheck and synccheck; several with commas.")
    ] = "memcheck,racecheck,initcheck,synccheck",
    language: Language = None,
    gpu: MachineGpu = "auto",
    cases: Annotated[int, typer.Option(help="Fuzz cases of each solution.", min=2, max=1000)] = 12,
    as_json: Annotated[bool, typer.Option("--json", help="Print every finding as JSON.")] = False,
) -> None:
    """Run kernels under compute-sanitizer at fuzz shapes; a finding is a failed verdict, with kernel and line.

    Names are solutions, definitions, or folders with drafts; without any, every kernel that this GPU can run. A finding in a
    solution of the catalog is stored as a failed trace, which takes its earlier passes on this GPU back. The calls run
    outside of the sandbox, which lets no tool attach, so only sources that the scan passes are run. Exit status 1 where
    something was found or did not run, 2 where compute-sanitizer is not installed.
    """
    from tilegym_db.bench.machine import refuse_absent_gpu

    refuse_absent_gpu(gpu)
    from tilegym_db.bench.instruments.sanitize import sanitize
    from tilegym_db.cli.programs import needing_program

    with needing_program("compute-sanitizer"):
        results = sanitize(
            tuple(names or ()),
            tools=tuple(filter(None, tool.split(","))),
            language=language,
            gpu=gpu,
            cases=cases,
            starting=note if sys.stderr.isatty() or not as_json else lambda what: None,
        )
    if as_json:
        print_json([record_of(result) for result in results])
    else:
        print_results(results)
    if not all(result.is_clean for result in results):
        raise typer.Exit(1)


def record_of(result: Sanitized) -> dict[str, Any]:
    """For JSON."""
    cases = result.chosen.cases
    return {
        "solution": result.chosen.files.name,
        "tool": result.tool,
        "cases": len(cases),
        "problem": result.problem,
        "findings": [
            {**vars(finding), "case": str(cases[finding.case]) if finding.case < len(cases) else ""}
            for finding in result.findings
        ],
    }


def print_results(results: Sequence[Sanitized]) -> None:
    """What was found, line by line, and a table with a row for each solution and tool that is not clean."""
    for result in results:
        for finding in result.findings:
            kind = "warning: " if finding.is_warning else ""
            case = result.chosen.cases[finding.case]
            print_line = f"{result.chosen.files.name}, {result.tool}: {kind}{finding} ({finding.times}x) at {case}"
            typer.echo(print_line)
    bad = [result for result in results if not result.is_clean]
    if bad:
        rows = [(item.chosen.files.name, item.tool, len(item.errors), item.problem or None) for item in bad]
        print_table(("solution", "tool", "findings", "problem"), rows, prose=("problem",))
    solutions = {result.chosen.files.name for result in results}
    cases = sum(len(result.chosen.cases) for result in results)
    note(f"{len(solutions)} solutions, {cases} calls under a tool, {len(bad)} of {len(results)} runs not clean")
