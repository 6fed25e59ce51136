"""``tilegym-db best``: the fastest verified solution per operator, shape and GPU."""

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
    """Print the fastest verified solution per operator, shape and GPU. Exit status 3 where there is none."""
    from tilegym_db.catalog import Catalog
    from tilegym_db.cli.reader import open_reader, unverified_note
    from tilegym_db.errors import NoSolutionError
    from tilegym_db.store.queries import best_rows, measured_gpus

    if name is not None:
        Catalog.default().definition(name)
    chosen = chosen_gpu(gpu)
    with open_reader() as store:
        rows = best_rows(store, definition=name, op_type=op_type, gpu=chosen)
        measured = measured_gpus(store)
        unverified = unverified_note(store, definition=name, op_type=op_type, gpu=chosen)
    if not rows:
        what = name or (f"op_type {op_type}" if op_type else "any definition")
        where = f" on {chosen}" if chosen else ""
        raise NoSolutionError(
            f"no verified solution for {what}{where}; GPUs with verified traces: {', '.join(measured) or 'none'}. "
            + (unverified or f"Try: tilegym-db bench --promote {name or ''}".rstrip())
        )
    if as_json:
        print_json(rows)
    else:
        print_table(COLUMNS, [best_cells(row) for row in rows])
        note("speedup: against the model's own code. Why this one: tilegym-db explain NAME")
        if unverified:
            note(unverified)


COLUMNS = (
    "definition",
    "gpu",
    "dtypes",
    "axes",
    "layouts",
    "solution",
    "language",
    "latency_us",
    "speedup",
    "sol_ratio",
)


def best_cells(row: dict[str, Any]) -> tuple[Any, ...]:
    """The cells of one row of the view ``best`` under :data:`COLUMNS`."""
    config = ", ".join(f"{key}={value}" for key, value in (row["config"] or {}).items())
    solution = f"{row['solution']} [{config}]" if config else row["solution"]
    return (
        row["definition"],
        row["gpu"],
        row["dtypes_key"],
        row["axes_key"],
        row["layouts_key"] or None,
        solution,
        row["language"],
        row["latency_us"],
        row["speedup"],
        row["sol_ratio"],
    )


def chosen_gpu(gpu: str | None) -> str | None:
    """The slug or family that ``--gpu`` names; ``auto`` is the device of this machine, None stays None.

    Raises:
        HardwareError: no such GPU.
    """
    from tilegym_db.records.hardware import parse_gpu

    if gpu is None:
        return None
    if gpu == "auto":
        from tilegym_db.bench.machine import select_machine

        return select_machine("auto").gpu
    return parse_gpu(gpu)
