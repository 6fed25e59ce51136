"""``tilegym-db reproduce``: one solution at one case, alone. Failure reports print the whole command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.completion import complete_name
from tilegym_db.cli.options import Axes, MachineGpu
from tilegym_db.cli.output import print_json, print_line
from tilegym_db.cli.pairs import parse_axes, parse_pairs, parse_scalars, parse_tunables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tilegym_db.bench.reproduce import Reproduction
    from tilegym_db.records import Definition
    from tilegym_db.records.dtypes import Scalar


def command(
    name: Annotated[str, typer.Argument(help="The solution.", metavar="SOLUTION", autocompletion=complete_name)],
    axes: Axes = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Dtypes: T=bfloat16.", metavar="T=DTYPE,...")] = None,
    scalar: Annotated[list[str] | None, typer.Option(help="Scalars: eps=1e-5.", metavar="S=VALUE,...")] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(help="A layout as workloads spell it; absent: contiguous.", metavar="X=LAYOUT,..."),
    ] = None,
    config: Annotated[list[str] | None, typer.Option(help="Tunables: BLOCK_M=2.", metavar="NAME=VALUE,...")] = None,
    contents: Annotated[
        str, typer.Option(help="The distribution of the inputs; outliers:typical spreads ids as in a model.")
    ] = "normal",
    seed: Annotated[int, typer.Option(help="Of the drawing.")] = 0,
    offset: Annotated[int, typer.Option(help="Elements off alignment.", min=0, max=4096)] = 0,
    gpu: MachineGpu = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Verify one case of one solution and say what every gate found. Exit status 1 where it fails."""
    from tilegym_db.bench.machine import refuse_absent_gpu

    refuse_absent_gpu(gpu)
    from tilegym_db.loop.submission_catalog import with_candidates

    catalog = with_candidates()
    definition = catalog.definition(catalog.solution(name).record.definition)
    sizes, values = parse_axes("--axes", axes), parse_scalars("--scalar", scalar)
    places = parse_pairs("--layout", layout)
    _check_values(definition, sizes, values, places)
    from tilegym_db.bench.reproduce import reproduce  # loads PyTorch, which takes seconds

    result = reproduce(
        name,
        axes=sizes,
        dtypes=parse_pairs("--dtype", dtype),
        scalars=values,
        layouts=places,
        config=parse_tunables("--config", config),
        contents=contents,
        seed=seed,
        offset=offset,
        gpu=gpu,
        catalog=catalog,
    )
    _print(describe(result), as_json)
    if result.failure is not None:
        raise typer.Exit(1)


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
    from tilegym_db.catalog.call_rules import check_layouts, check_scalar_values
    from tilegym_db.errors import RecordError, UsageError

    try:
        check_scalar_values(definition, scalars)
        check_layouts(definition, axes, layouts)
    except RecordError as error:
        raise UsageError(str(error), code=error.code) from None


def describe(result: Reproduction) -> dict[str, Any]:
    """What to show of a result."""
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
