"""``tilegym-db leaderboard``: how every solution fares over all shapes of its operator."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tilegym_db.cli.output import note, print_json, print_table


def command(
    name: Annotated[str | None, typer.Argument(help="A definition; none means all.")] = None,
    op_type: Annotated[str | None, typer.Option(help="Only this family: norm, activation, gemm, ...")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Only this GPU: h100, h200, cpu, ..., or auto for the one here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """Rank solutions per operator and GPU: shapes measured, shapes won, geometric means."""
    from tilegym_db.catalog import Catalog
    from tilegym_db.cli.best import chosen_gpu
    from tilegym_db.cli.reader import open_reader, unverified_note
    from tilegym_db.store.queries import leaderboard_rows

    if name is not None:
        Catalog.default().definition(name)
    chosen = chosen_gpu(gpu)
    with open_reader() as store:
        rows = leaderboard_rows(store, definition=name, op_type=op_type, gpu=chosen)
        unverified = unverified_note(store, definition=name, op_type=op_type, gpu=chosen)
    if as_json:
        print_json(rows)
        return
    if rows:
        print_leaderboard(rows)
        note(
            "speedup: against the model's own code; sol: share of the speed of light; both geometric means over shapes."
        )
    elif not unverified:
        note("nothing verified yet. Try: tilegym-db bench --promote")
    if unverified:
        note(unverified)


def print_leaderboard(rows: list[dict[str, Any]]) -> None:
    """The table of the rows of the view ``leaderboard``."""
    columns = ("definition", "gpu", "solution", "language", "role", "shapes", "wins", "speedup", "sol")
    keys = (
        "definition",
        "gpu",
        "solution",
        "language",
        "role",
        "shapes",
        "wins",
        "geomean_speedup",
        "geomean_sol_ratio",
    )
    print_table(columns, [tuple(row[key] for key in keys) for row in rows])
