"""``tilegym-db leaderboard``: how every solution fares over all shapes of its operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilegym_db.cli.formats import AsArrow, AsCsv, AsJson, AsParquet, OutputFile, Wide, chosen_form, write_records
from tilegym_db.cli.options import DefinitionName, Gpu, OpType, Trust, check_op_type
from tilegym_db.cli.output import note, print_table
from tilegym_db.cli.spark import Spark, by_size, spark_wanted


def command(
    name: DefinitionName = None,
    op_type: OpType = None,
    gpu: Gpu = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    as_parquet: AsParquet = False,
    as_arrow: AsArrow = False,
    output: OutputFile = None,
    wide: Wide = False,
    trust: Trust = False,
    spark: Spark = None,
) -> None:
    """Rank solutions per operator and GPU: shapes measured, shapes won, geometric means.

    Exit status 3 where nothing is verified.
    """
    from tilegym_db.catalog import Catalog
    from tilegym_db.cli.best import chosen_gpu, none_verified
    from tilegym_db.cli.reader import open_reader, unverified_note
    from tilegym_db.store.queries import leaderboard_rows, measured_gpus, size_rows

    form = chosen_form(as_json, as_csv, as_parquet, as_arrow, output, wide)
    if name is not None:
        Catalog.default().definition(name)
    check_op_type(op_type, name)
    chosen = chosen_gpu(gpu)
    with open_reader(trust=trust) as store:
        rows = leaderboard_rows(store, definition=name, op_type=op_type, gpu=chosen)
        sized = size_rows(store, name, op_type, chosen) if form.is_table and spark_wanted(spark) else []
        unverified = unverified_note(store, definition=name, op_type=op_type, gpu=chosen)
        measured = measured_gpus(store)
    if not rows:
        raise none_verified(name, op_type, f" on {chosen}" if chosen else "", measured, unverified)
    if not form.is_table:
        write_records(form, rows, KEYS)
        return
    print_leaderboard(rows, sized, wide=wide)
    note("speedup: against the model's own code; sol: share of the speed of light; both geometric means over shapes.")
    if unverified:
        note(unverified)


KEYS = (
    "definition", "gpu", "solution", "language", "role", "shapes", "wins", "geomean_speedup", "geomean_sol_ratio",
    "origin",
)  # fmt: skip
COLUMNS = ("definition", "gpu", "solution", "language", "role", "shapes", "wins", "speedup", "sol", "origin")
BY_SIZE = "by size"
LEAST = ("origin", "role", "language", "sol", BY_SIZE)


def print_leaderboard(
    rows: list[dict[str, Any]], sized: Sequence[Mapping[str, Any]] = (), *, wide: bool = False
) -> None:
    """The table of the rows of the view ``leaderboard``; with latencies by size, a line of them in a last column."""
    lines = by_size(sized)
    columns = (*COLUMNS, BY_SIZE) if lines else COLUMNS
    cells = [tuple(row[key] for key in KEYS) for row in rows]
    if lines:
        cells = [
            (*cell, lines.get((row["definition"], row["gpu"], row["solution"])))
            for cell, row in zip(cells, rows, strict=True)
        ]
        note(f"{BY_SIZE}: latency from the smallest size to the largest, on one scale for each operator and GPU")
    print_table(columns, cells, wide=wide, least=LEAST)
