"""``tilegym-db debug``: examine solutions with NVIDIA's tools, or case by case."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.commands import command_group
from tilegym_db.cli.kit.formats import AsJson
from tilegym_db.cli.kit.options import (
    Axes,
    Dtypes,
    Implements,
    Language,
    MachineGpu,
    Names,
    Scalars,
    SolutionToRun,
    Tunables,
    complete_name,
    needing_program,
    parse_axes,
    parse_pairs,
    parse_scalars,
    parse_tunables,
)
from tilegym_db.cli.kit.output import note, print_json, print_line, print_table
from tilegym_db.errors import RecordError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tilegym_db.measurement.instruments.profile import KernelProfile
    from tilegym_db.measurement.instruments.sanitize import Sanitized
    from tilegym_db.measurement.reproduce import Reproduction
    from tilegym_db.records import Definition
    from tilegym_db.records.dtypes import Scalar


app = command_group("Run a solution under NVIDIA's tools, or verify one case of it.")


@app.command("sanitize")
def sanitize_command(
    names: Names = None,
    tool: Annotated[
        str, typer.Option(help="Of memcheck, racecheck, initcheck and synccheck; several with commas.")
    ] = "memcheck,racecheck,initcheck,synccheck",
    language: Language = None,
    gpu: MachineGpu = "auto",
    cases: Annotated[int, typer.Option(help="Fuzz cases of each solution.", min=2, max=1000)] = 12,
    as_json: AsJson = False,
) -> None:
    """Run kernels under compute-sanitizer at fuzz shapes; a finding is a failed verdict, with kernel and line.

    Names are solutions, definitions, or folders with drafts; by default every kernel that this GPU can run. A finding in a
    solution of the catalog is stored as a failed trace, which revokes its earlier passes on this GPU. The calls run outside of
    the sandbox, because tools cannot attach inside, so only sources that pass the scan are run. Exit status 1 if something was
    found or did not run, 2 if compute-sanitizer is not installed.
    """
    from tilegym_db.measurement.machine import refuse_absent_gpu

    refuse_absent_gpu(gpu)
    from tilegym_db.measurement.instruments.sanitize import sanitize

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
    """Return a result as JSON-ready content."""
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
    """Print the findings line by line, and a table of the solutions and tools with problems."""
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


# ---- Profile --------------------------------------------------------------------------------------------

STALLS_SHOWN = 6


@app.command("profile")
def profile_command(
    name: SolutionToRun,
    workload: Annotated[
        str, typer.Option(help="Glob over uuid, axes (M=1,*) and tags; the largest of several matches is used.")
    ],
    config: Tunables = None,
    gpu: MachineGpu = "auto",
    as_json: AsJson = False,
) -> None:
    """Profile one call with Nsight Compute: bandwidth, occupancy, registers, and the reasons for stalls.

    Metrics are stored as JSON next to the database, one file per source, workload and GPU. Times are taken kernel by kernel with
    cold caches and unlocked clocks, so they explain a time of bench but do not replace it. Exit status 2 if Nsight Compute is not
    installed.
    """
    from tilegym_db.measurement.machine import refuse_absent_gpu

    refuse_absent_gpu(gpu)
    from tilegym_db.measurement.instruments.profile import profile

    tunables = parse_tunables(config)
    with needing_program("ncu"):
        found, path = profile(name, workload=workload, config=tunables, gpu=gpu)
    if as_json:
        print_json(found.to_dict())
    else:
        axes = ", ".join(f"{axis}={size}" for axis, size in found.axes.items())
        typer.echo(f"{found.solution} at {axes} on {found.gpu}")
        print_kernels(found.kernels)
    note(f"stored in {path}")


def print_kernels(kernels: Sequence[KernelProfile]) -> None:
    """Print one row per kernel, and below it the reasons for its stalls."""
    columns = ("kernel", "us", "GB/s", "DRAM %", "SM %", "occupancy %", "of", "registers", "shared B", "grid", "block")
    names = (
        "dram_share", "sm_share", "occupancy", "occupancy_limit", "registers", "shared_bytes", "grid", "block",
    )  # fmt: skip
    rows = [
        (
            kernel.kernel,
            kernel.time_us,
            None if kernel.bytes_per_s is None else kernel.bytes_per_s / 1e9,
            *(kernel.metrics.get(name) for name in names),
        )
        for kernel in kernels
    ]
    print_table(columns, rows, least=("grid", "block", "SM %"))
    for kernel in kernels:
        stalls = list(kernel.stalls.items())[:STALLS_SHOWN]
        if stalls:
            said = ", ".join(f"{reason.replace('_', ' ')} {warps:.2f}" for reason, warps in stalls)
            typer.echo(f"{kernel.kernel}: warps waiting at each issue: {said}")


# ---- Reproduce ------------------------------------------------------------------------------------------
# Failure reports print the complete command.


@app.command("reproduce")
def reproduce_command(
    name: Annotated[
        str,
        typer.Argument(help="The solution, or the path of one.", metavar="SOLUTION", autocompletion=complete_name),
    ],
    implements: Implements = None,
    axes: Axes = None,
    dtype: Dtypes = None,
    scalar: Scalars = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(help="A layout as workloads spell it; absent: contiguous.", metavar="X=LAYOUT,..."),
    ] = None,
    config: Tunables = None,
    distribution: Annotated[
        str, typer.Option(help="The distribution of the inputs; outliers:typical spreads ids as in a model.")
    ] = "normal",
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    offset: Annotated[int, typer.Option(help="Elements by which every tensor is misaligned.", min=0, max=4096)] = 0,
    gpu: MachineGpu = "auto",
    as_json: AsJson = False,
) -> None:
    """Verify one case of one solution and print the result of every gate. Exit status 1 if it fails."""
    from tilegym_db.measurement.machine import refuse_absent_gpu

    refuse_absent_gpu(gpu)
    from tilegym_db.measurement.drafts import catalog_with, with_candidates

    sizes, values, given = parse_axes(axes), parse_scalars(scalar), name
    places = parse_pairs("--layout", layout)
    with catalog_with(name, with_candidates(), implements) as (name, catalog):
        definition = catalog.definition(catalog.solution(name).record.definition)
        _check_values(definition, sizes, values, places)
        from tilegym_db.measurement.reproduce import reproduce  # loads PyTorch, which takes seconds

        result = reproduce(
            name,
            axes=sizes,
            dtypes=parse_pairs("--dtype", dtype),
            scalars=values,
            layouts=places,
            config=parse_tunables(config),
            contents=distribution,
            seed=seed,
            offset=offset,
            gpu=gpu,
            catalog=catalog,
        )
    _print(describe(result), as_json)
    if result.failure is not None:
        raise typer.Exit(1)
    if result.verdict is not None:
        of = "" if implements is None else f" -d {shlex.quote(implements)}"
        note(
            "this call alone passes. If it failed in a run, calls before it are part of the cause: something is kept from call "
            f"to call. To repeat the run: tilegym-db bench {shlex.quote(given)}{of} --gpu {gpu} --force"
        )


def _print(answer: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(answer)
        return
    for key, value in answer.items():
        if value not in (None, "", []):
            print_line(f"{key}: {value}")


def _check_values(
    definition: Definition, axes: Mapping[str, int], scalars: Mapping[str, Scalar], layouts: Mapping[str, str]
) -> None:
    from tilegym_db.catalog.writers import check_layouts, check_scalar_values

    try:
        check_scalar_values(definition, scalars)
        check_layouts(definition, axes, layouts, expanded=True)
    except RecordError as error:
        raise UsageError(str(error), code=error.code) from None


def describe(result: Reproduction) -> dict[str, Any]:
    """Return a result as labelled values."""
    shown: dict[str, Any] = {"case": str(result.case)}
    if result.failure is not None:
        failure, verdict = result.failure, result.failure.verdict
        shown |= {"status": failure.status, "gate": failure.gate, "reason": failure.reason}
        if verdict is not None:
            shown |= {
                "output": failure.output,
                "first wrong index": list(verdict.index),
                "expected": verdict.expected,
                "got": verdict.got,
                "worst row": verdict.worst_row,
            }
        return shown | {"log": failure.log}
    if result.verdict is None:
        return shown | {"status": "proves nothing: the reference as written does not pass this case itself"}
    verdict_of = result.verdict
    return shown | {
        "status": "PASSED",
        "relative Frobenius error": verdict_of.rel_fro,
        "worst row": verdict_of.worst_row_rel,
        "largest error": verdict_of.max_abs,
    }
