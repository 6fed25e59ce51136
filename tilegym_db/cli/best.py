"""``tilegym-db best`` and ``compare``: rank verified solutions per operator, shape and GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.kit.formats import TABLE, Form, open_reader, schema_of, unverified_note, with_form, write_records
from tilegym_db.cli.kit.options import (
    Axes,
    DefinitionName,
    Gpu,
    Language,
    OpType,
    Trust,
    check_op_type,
    complete_solution,
    parse_axes,
)
from tilegym_db.cli.kit.output import (
    Spark,
    by_size,
    note,
    print_by_size,
    print_table,
    spark_wanted,
    spelled_call,
    spelled_map,
)
from tilegym_db.errors import NoSolutionError, UsageError

if TYPE_CHECKING:
    from tilegym_db.catalog import Catalog
    from tilegym_db.store.connection import Store


MAX_ROWS = 1 << 31
MAX_TABLE_ROWS = 500
"""Rows of a table without ``--limit``; more are read by programs only, and would be half of the time of the command."""


@with_form
def best_command(
    name: DefinitionName = None,
    rank: Annotated[
        bool, typer.Option("--rank", help="Rank all solutions instead: shapes measured, shapes won, geometric means.")
    ] = False,
    op_type: OpType = None,
    gpu: Gpu = None,
    axes: Axes = None,
    language: Language = None,
    limit: Annotated[int | None, typer.Option(min=1, max=MAX_ROWS, help="Maximum number of rows.")] = None,
    form: Form = TABLE,
    trust: Trust = False,
    spark: Spark = None,
) -> None:
    """Print the fastest verified solution per operator, shape and GPU. Exit status 3 if there is none."""
    from tilegym_db.catalog import Catalog
    from tilegym_db.store.queries.measured import best_rows, measured_gpus, size_rows

    sizes, spoken, catalog = parse_axes(axes), _spoken(language), Catalog.default()
    if name is not None and name not in catalog.definition_paths:
        catalog.definition(name)
    check_op_type(op_type, name)
    chosen = chosen_gpu(gpu)
    if rank:
        if sizes or spoken or limit is not None:
            raise UsageError(
                "--rank counts every size and every solution; leave --axes, --language and --limit out.",
                code="options_clash",
            )
        rank_solutions(form, name, op_type, chosen, trust=trust, spark=spark)
        return
    with open_reader(trust=trust) as store:
        most = MAX_TABLE_ROWS + 1 if form.is_table and limit is None else limit
        rows = best_rows(store, name, op_type, chosen, axes=sizes, language=spoken, limit=most, for_table=form.is_table)
        measured, schema = [] if rows else measured_gpus(store), schema_of(form, store, "best")
        drawn = name is not None and form.is_table and spark_wanted(spark)
        sized = size_rows(store, name, gpu=chosen, all_dtypes=True) if drawn else []
        unverified = unverified_note(store, definition=name, op_type=op_type, gpu=chosen)
    if not rows:
        if name is not None:
            catalog.definition(name)  # a broken record is the reason that matters
        raise none_verified(name, op_type, _where(chosen, sizes, spoken), measured, unverified, chosen)
    if not form.is_table:
        write_records(form, rows, schema=schema)
        return
    shown = rows if limit is not None else rows[:MAX_TABLE_ROWS]
    print_table(
        BEST_COLUMNS,
        [best_cells(row) for row in shown],
        wide=form.wide,
        least=BEST_DROPPED_FIRST,
        most=BEST_DROPPED_LAST,
        key=BEST_KEY,
    )
    if len(shown) < len(rows):
        note(f"only the first {MAX_TABLE_ROWS} rows; all of them: --csv or --json, or --limit with another number")
    print_by_size(_of_fastest(sized, rows), "{solution} on {gpu}, {dtypes_key}")
    from tilegym_db.records.text import explain_command

    first = shown[0]
    why = explain_command(first["definition"], first["axes_key"], first["dtypes_key"], first["gpu"])
    note(f"speedup: against the model's own code. Why the first: {why}")
    if unverified:
        note(unverified)


def _spoken(language: str | None) -> str | None:
    if language is None:
        return None
    from tilegym_db.records.solution import normalise_language

    return normalise_language(language)


def none_verified(
    name: str | None,
    op_type: str | None,
    where: str,
    measured: Sequence[str],
    unverified: str | None,
    gpu: str | None = None,
) -> NoSolutionError:
    """Return the error if no verified solution matches. ``where`` describes the filter, and ``gpu`` is the one asked for."""
    from tilegym_db.records.hardware import CPU

    words = ["tilegym-db bench", *([name] if name else []), *(["--gpu", gpu] if gpu else []), "--verify"]
    there = f"Try, on a machine with {gpu}: " if gpu and gpu != CPU else "Try: "
    what = name or (f"op_type {op_type}" if op_type else "any definition")
    return NoSolutionError(
        f"no verified solution for {what}{where}; GPUs with verified traces: {', '.join(measured) or 'none'}. "
        + (unverified or there + " ".join(words)),
        code="no_solution",
    )


def _of_fastest(sized: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of latencies by size for solutions that are the fastest somewhere."""
    keys = ("gpu", "dtypes_key", "solution")
    fastest = {tuple(row[key] for key in keys) for row in rows}
    return [row for row in sized if tuple(row[key] for key in keys) in fastest]


def _where(gpu: str | None, sizes: Mapping[str, int], language: str | None) -> str:
    """Describe the filter as the end of a sentence."""
    where = f" on {gpu}" if gpu else ""
    where += f" at {spelled_map(sizes)}" if sizes else ""
    return where + (f" in {language}" if language else "")


BEST_COLUMNS = (
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
    "profiled_us",
    "speedup",
    "strongest_baseline",
    "strongest_ratio",
    "sol_ratio",
    "workload_uuid",
    "origin",
)
BEST_DROPPED_FIRST = (
    "origin",
    "workload_uuid",
    "config",
    "profiled_us",
    "sol_ratio",
    "layouts",
    "scalars",
    "strongest_ratio",
    "language",
    "strongest_baseline",
    "dtypes",
)
BEST_KEY = ("definition", "gpu", "axes", "dtypes", "scalars", "layouts")
BEST_DROPPED_LAST = ("solution", "latency_us", "speedup")


def best_cells(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the cells of one row of the view ``best`` under :data:`BEST_COLUMNS`."""
    keys = {name: row[f"{name}_key"] or None for name in ("scalars", "layouts", "config")}
    shown = {**row, **keys, "axes": spelled_call(row), "dtypes": row["dtypes_key"]}
    return tuple(shown[name] for name in BEST_COLUMNS)


def chosen_gpu(gpu: str | None) -> str | None:
    """Return the slug or family of ``--gpu``. ``auto`` means the device of this machine; None stays None."""
    from tilegym_db.records.hardware import parse_gpu

    if gpu is None:
        return None
    if gpu.strip().lower() == "auto":
        from tilegym_db.measurement.machine import select_machine

        return select_machine("auto").gpu
    return parse_gpu(gpu, known_gpus(gpu))


def known_gpus(gpu: str) -> list[str]:
    """Return the GPUs that have traces in the store; empty without a look if a name is known without them."""
    from tilegym_db.records.hardware import is_known_gpu
    from tilegym_db.store.queries.measured import traced_gpus

    if is_known_gpu(gpu):
        return []
    with open_reader() as store:
        return traced_gpus(store)


# ---- Rank ---------------------------------------------------------------------------------------------


def rank_solutions(
    form: Form, name: str | None, op_type: str | None, chosen: str | None, *, trust: bool, spark: bool | None
) -> None:
    """Print the view ``leaderboard``. Raise :class:`NoSolutionError` if nothing is verified."""
    from tilegym_db.store.queries.measured import leaderboard_rows, measured_gpus, size_rows

    with open_reader(trust=trust) as store:
        rows = leaderboard_rows(store, definition=name, op_type=op_type, gpu=chosen)
        sized = size_rows(store, name, op_type, chosen) if form.is_table and spark_wanted(spark) else []
        unverified = unverified_note(store, definition=name, op_type=op_type, gpu=chosen)
        measured, schema = [] if rows else measured_gpus(store), schema_of(form, store, "leaderboard")
    if not rows:
        raise none_verified(name, op_type, f" on {chosen}" if chosen else "", measured, unverified, chosen)
    if not form.is_table:
        write_records(form, rows, KEYS, schema)
        return
    print_leaderboard(rows, sized, wide=form.wide)
    note(
        "speedup: against the model's own code; sol: share of the speed of light; both geometric means over shapes. "
        "range: the lowest and the highest speedup."
    )
    if unverified:
        note(unverified)


KEYS = (
    "definition", "gpu", "solution", "language", "role", "shapes", "wins", "geomean_speedup", "lowest_speedup",
    "highest_speedup", "geomean_sol_ratio", "lowest_sol_ratio", "highest_sol_ratio", "origin",
)  # fmt: skip
COLUMNS = ("definition", "gpu", "solution", "language", "role", "shapes", "wins", "speedup", "range", "sol", "origin")
BY_SIZE = "by size"
LEADERBOARD_DROPPED_FIRST = ("origin", "role", "sol", "language", "range", BY_SIZE)
LEADERBOARD_DROPPED_LAST = ("solution", "wins", "speedup")


def print_leaderboard(
    rows: list[dict[str, Any]], sized: Sequence[Mapping[str, Any]] = (), *, wide: bool = False
) -> None:
    """Print the rows of the view ``leaderboard``; with latencies by size, add a column of spark lines."""
    lines = by_size(sized)
    columns = (*COLUMNS, BY_SIZE) if lines else COLUMNS
    cells = [_leaderboard_cells(row) for row in rows]
    if lines:
        cells = [
            (*cell, lines.get((row["definition"], row["gpu"], row["solution"])))
            for cell, row in zip(cells, rows, strict=True)
        ]
        note(f"{BY_SIZE}: latency from the smallest size to the largest, on one scale for each operator and GPU")
    print_table(columns, cells, wide=wide, least=LEADERBOARD_DROPPED_FIRST, most=LEADERBOARD_DROPPED_LAST)


def _leaderboard_cells(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the cells of one row under :data:`COLUMNS`."""
    before = ("definition", "gpu", "solution", "language", "role", "shapes", "wins", "geomean_speedup")
    ends = (row["lowest_speedup"], row["highest_speedup"])
    spread = None if None in ends else f"{ends[0]:.3g} - {ends[1]:.3g}"
    return (*(row[key] for key in before), spread, row["geomean_sol_ratio"], row["origin"])


# ---- Compare ------------------------------------------------------------------------------------------

SolutionName = Annotated[str, typer.Argument(help="A solution.", autocompletion=complete_solution)]


@with_form
def compare_command(
    a: SolutionName,
    b: SolutionName,
    gpu: Gpu = None,
    form: Form = TABLE,
    trust: Trust = False,
) -> None:
    """Compare two solutions of one operator at every size at which both are verified. Exit status 3 without such a size."""
    from tilegym_db.catalog import Catalog
    from tilegym_db.store.queries.measured import rows_of_both, winner

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
    letters = {a: "a", b: "b"}  # as in the other columns; names that are cut look alike
    print_table(
        COMPARE_COLUMNS,
        [cells({**row, "faster": letters.get(row["faster"])}) for row in rows],
        wide=form.wide,
        least=COMPARE_DROPPED_FIRST,
        most=COMPARE_DROPPED_LAST,
        key=BEST_KEY,
    )
    for text in summary(rows, a, b):
        note(text)


COMPARE_COLUMNS = ("gpu", "axes", "dtypes", "scalars", "layouts", "a us", "b us", "b / a", "faster", "why")
COMPARE_DROPPED_FIRST = ("layouts", "scalars", "dtypes", "why")
COMPARE_DROPPED_LAST = ("axes", "a us", "b us", "b / a")


def cells(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the cells of one row under :data:`COMPARE_COLUMNS`."""
    keys = ("dtypes_key", "scalars_key", "layouts_key", "a_us", "b_us", "ratio", "faster", "why")
    return (row["gpu"], spelled_call(row) or None, *(row[key] or None for key in keys))


def summary(rows: list[dict[str, Any]], a: str, b: str) -> list[str]:
    """Return one line per GPU: how often each solution is faster, and the geometric mean of the ratios."""
    from statistics import geometric_mean

    lines = []
    for gpu in sorted({row["gpu"] for row in rows}):
        here = [row for row in rows if row["gpu"] == gpu]
        wins = {name: sum(row["faster"] == name for row in here) for name in (a, b)}
        ratios = [row["ratio"] for row in here]
        lines.append(
            f"{gpu}: a = {a} is faster at {wins[a]} of {len(here)} sizes, b = {b} at {wins[b]}; at "
            f"{len(here) - wins[a] - wins[b]} it is not known which. Time of b over time of a, geometric mean: "
            f"{geometric_mean(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}"
        )
    return lines


def refuse_what_cannot_be_compared(catalog: Catalog, a: str, b: str) -> None:
    """Raise if a solution is given twice or the solutions belong to different operators."""
    definitions = [catalog.solution(name).record.definition for name in (a, b)]
    if a == b:
        raise UsageError(
            f"'{a}' is given twice. Give two different solutions: tilegym-db compare A B", code="solution_repeated"
        )
    if definitions[0] != definitions[1]:
        raise UsageError(
            f"'{a}' computes {definitions[0]} and '{b}' computes {definitions[1]}: only solutions of one definition can be "
            f"compared. Try: tilegym-db best {definitions[0]} --rank",
            code="definitions_differ",
        )


def nothing_in_common(store: Store, a: str, b: str, gpu: str | None) -> Exception:
    """Return the error if no size has a verified trace of both solutions."""
    from tilegym_db.store.queries.measured import measured_gpus

    where = f" on {gpu}" if gpu else ""
    return NoSolutionError(
        f"'{a}' and '{b}' have no verified size in common{where}; GPUs with verified traces: "
        f"{', '.join(measured_gpus(store)) or 'none'}. Try: tilegym-db bench {a} {b} --verify",
        code="sizes_disjoint",
    )
