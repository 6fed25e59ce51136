"""``tilegym-db compare``: two solutions of one operator, size by size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.completion import complete_solution
from tilegym_db.cli.formats import AsArrow, AsCsv, AsJson, AsParquet, OutputFile, Wide, chosen_form, write_records
from tilegym_db.cli.options import Gpu, Trust
from tilegym_db.cli.output import note, print_table, spelled_call

if TYPE_CHECKING:
    from tilegym_db.catalog import Catalog
    from tilegym_db.store.connection import Store

SolutionName = Annotated[str, typer.Argument(help="A solution.", autocompletion=complete_solution)]


def command(
    a: SolutionName,
    b: SolutionName,
    gpu: Gpu = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    as_parquet: AsParquet = False,
    as_arrow: AsArrow = False,
    output: OutputFile = None,
    wide: Wide = False,
    trust: Trust = False,
) -> None:
    """Set two solutions of one operator side by side, wherever both are verified. Exit status 3 where that is nowhere."""
    from tilegym_db.catalog import Catalog
    from tilegym_db.cli.best import chosen_gpu
    from tilegym_db.cli.reader import open_reader
    from tilegym_db.store.queries.solution_pairs import rows_of_both
    from tilegym_db.store.side_by_side import winner

    form = chosen_form(as_json, as_csv, as_parquet, as_arrow, output, wide)
    refuse_what_cannot_be_compared(Catalog.default(), a, b)
    chosen = chosen_gpu(gpu)
    with open_reader(trust=trust) as store:
        rows = rows_of_both(store, a, b, chosen)
        if not rows:
            raise nothing_in_common(store, a, b, chosen)
    for row in rows:
        which, row["why"] = winner(row)
        row["faster"] = {"a": a, "b": b, "neither": None}[which]
    if not form.is_table:
        write_records(form, rows)
        return
    print_table(COLUMNS, [cells(row) for row in rows], wide=wide, least=LEAST)
    for text in summary(rows, a, b):
        note(text)


COLUMNS = ("gpu", "axes", "dtypes", "scalars", "layouts", "a us", "b us", "b / a", "faster", "why")
LEAST = ("layouts", "scalars", "dtypes", "why")


def cells(row: dict[str, Any]) -> tuple[Any, ...]:
    """The cells of one row under :data:`COLUMNS`."""
    keys = ("dtypes_key", "scalars_key", "layouts_key", "a_us", "b_us", "ratio", "faster", "why")
    return (row["gpu"], spelled_call(row) or None, *(row[key] or None for key in keys))


def summary(rows: list[dict[str, Any]], a: str, b: str) -> list[str]:
    """One line per GPU: how often each is known to be faster, and the geometric mean of the ratios."""
    from statistics import geometric_mean

    lines = []
    for gpu in sorted({row["gpu"] for row in rows}):
        here = [row for row in rows if row["gpu"] == gpu]
        wins = {name: sum(row["faster"] == name for row in here) for name in (a, b)}
        mean = geometric_mean(row["ratio"] for row in here)
        lines.append(
            f"{gpu}: a = {a} is faster at {wins[a]} of {len(here)} sizes, b = {b} at {wins[b]}; at "
            f"{len(here) - wins[a] - wins[b]} it is not known which. Time of b over time of a, geometric mean: {mean:.3f}"
        )
    return lines


def refuse_what_cannot_be_compared(catalog: Catalog, a: str, b: str) -> None:
    """Refuse the same solution twice, and solutions of different operators.

    Raises:
        NotFoundError: no such solution.
        UsageError: they cannot be compared.
    """
    from tilegym_db.errors import UsageError

    definitions = [catalog.solution(name).record.definition for name in (a, b)]
    if a == b:
        raise UsageError(f"'{a}' is given twice: compare takes two solutions.", code="solution_repeated")
    if definitions[0] != definitions[1]:
        raise UsageError(
            f"'{a}' computes {definitions[0]} and '{b}' computes {definitions[1]}: only solutions of one definition can be "
            f"compared. Try: tilegym-db leaderboard {definitions[0]}",
            code="definitions_differ",
        )


def nothing_in_common(store: Store, a: str, b: str, gpu: str | None) -> Exception:
    """What to say where no size has a verified trace of both."""
    from tilegym_db.errors import NoSolutionError
    from tilegym_db.store.queries import measured_gpus

    where = f" on {gpu}" if gpu else ""
    return NoSolutionError(
        f"'{a}' and '{b}' are verified at no size in common{where}; GPUs with verified traces: "
        f"{', '.join(measured_gpus(store)) or 'none'}. Try: tilegym-db bench {a} {b} --promote",
        code="sizes_disjoint",
    )
