"""``tilegym-db best``: the fastest verified solution per operator, shape and GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.formats import AsArrow, AsCsv, AsJson, AsParquet, OutputFile, Wide, chosen_form, write_records
from tilegym_db.cli.options import Axes, DefinitionName, Gpu, Language, OpType, Trust, check_op_type
from tilegym_db.cli.output import note, print_table, spelled_call, spelled_map
from tilegym_db.cli.spark import Spark, print_by_size, spark_wanted

if TYPE_CHECKING:
    from tilegym_db.errors import NoSolutionError


MOST_ROWS = 1 << 31


def command(
    name: DefinitionName = None,
    op_type: OpType = None,
    gpu: Gpu = None,
    axes: Axes = None,
    language: Language = None,
    limit: Annotated[int | None, typer.Option(min=1, max=MOST_ROWS, help="So many rows at most.")] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    as_parquet: AsParquet = False,
    as_arrow: AsArrow = False,
    output: OutputFile = None,
    wide: Wide = False,
    trust: Trust = False,
    spark: Spark = None,
) -> None:
    """Print the fastest verified solution per operator, shape and GPU. Exit status 3 where there is none."""
    from tilegym_db.catalog import Catalog
    from tilegym_db.cli.add_solution import normalise_language
    from tilegym_db.cli.pairs import parse_axes
    from tilegym_db.cli.reader import open_reader, unverified_note
    from tilegym_db.store.queries import best_rows, measured_gpus, size_rows

    form = chosen_form(as_json, as_csv, as_parquet, as_arrow, output, wide)
    sizes, spoken = parse_axes("--axes", axes), normalise_language(language)
    if name is not None:
        Catalog.default().definition(name)
    check_op_type(op_type, name)
    chosen = chosen_gpu(gpu)
    with open_reader(trust=trust) as store:
        rows = best_rows(store, definition=name, op_type=op_type, gpu=chosen, axes=sizes, language=spoken, limit=limit)
        measured = measured_gpus(store)
        drawn = name is not None and form.is_table and spark_wanted(spark)
        sized = size_rows(store, name, gpu=chosen, all_dtypes=True) if drawn else []
        unverified = unverified_note(store, definition=name, op_type=op_type, gpu=chosen)
    if not rows:
        raise none_verified(name, op_type, _where(chosen, sizes, spoken), measured, unverified)
    if not form.is_table:
        write_records(form, rows)
    else:
        print_table(COLUMNS, [best_cells(row) for row in rows], wide=wide, least=LEAST)
        print_by_size(_of_fastest(sized, rows), "{solution} on {gpu}, {dtypes_key}")
        note("speedup: against the model's own code. Why this one: tilegym-db explain NAME")
        if unverified:
            note(unverified)


def none_verified(
    name: str | None, op_type: str | None, where: str, measured: Sequence[str], unverified: str | None
) -> NoSolutionError:
    """What to say where nothing that was asked for is verified; ``where`` limits the question."""
    from tilegym_db.errors import NoSolutionError

    what = name or (f"op_type {op_type}" if op_type else "any definition")
    return NoSolutionError(
        f"no verified solution for {what}{where}; GPUs with verified traces: {', '.join(measured) or 'none'}. "
        + (unverified or f"Try: tilegym-db bench --promote {name or ''}".rstrip()),
        code="no_solution",
    )


def _of_fastest(sized: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of times by size those of what is the fastest somewhere."""
    keys = ("gpu", "dtypes_key", "solution")
    fastest = {tuple(row[key] for key in keys) for row in rows}
    return [row for row in sized if tuple(row[key] for key in keys) in fastest]


def _where(gpu: str | None, sizes: Mapping[str, int], language: str | None) -> str:
    """What limits a question, as the end of a sentence."""
    where = f" on {gpu}" if gpu else ""
    where += f" at {spelled_map(sizes)}" if sizes else ""
    return where + (f" in {language}" if language else "")


COLUMNS = (
    "definition",
    "gpu",
    "axes",
    "dtypes",
    "scalars",
    "layouts",
    "solution",
    "language",
    "config",
    "latency_us",
    "speedup",
    "sol_ratio",
    "workload_uuid",
    "origin",
)
LEAST = ("origin", "workload_uuid", "config", "sol_ratio", "layouts", "scalars", "language", "dtypes")


def best_cells(row: dict[str, Any]) -> tuple[Any, ...]:
    """The cells of one row of the view ``best`` under :data:`COLUMNS`."""
    return (
        row["definition"],
        row["gpu"],
        spelled_call(row),
        row["dtypes_key"],
        row["scalars_key"] or None,
        row["layouts_key"] or None,
        row["solution"],
        row["language"],
        row["config_key"] or None,
        row["latency_us"],
        row["speedup"],
        row["sol_ratio"],
        row["workload_uuid"],
        row["origin"],
    )


def chosen_gpu(gpu: str | None) -> str | None:
    """The slug or family that ``--gpu`` names; ``auto`` is the device of this machine, None stays None.

    Raises:
        HardwareError: no such GPU.
    """
    from tilegym_db.records.hardware import parse_gpu

    if gpu is None:
        return None
    if gpu.strip().lower() == "auto":
        from tilegym_db.bench.machine import select_machine

        return select_machine("auto").gpu
    return parse_gpu(gpu)
