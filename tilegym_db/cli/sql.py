"""``tilegym-db sql``: read-only SQL over the database."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from tilegym_db.cli.output import note, print_csv, print_json, print_table


def command(
    statement: Annotated[str, typer.Argument(help="One SELECT; '-' reads it from standard input.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of rows.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header line.")] = False,
) -> None:
    """Run one read-only statement over the views definitions, solutions, workloads, traces, best and leaderboard.

    Example: tilegym-db sql "SELECT definition, solution, latency_us FROM best WHERE gpu = 'h200' ORDER BY ALL"
    """
    from tilegym_db.errors import UsageError
    from tilegym_db.store.sql import run_user_query

    if as_json and as_csv:
        raise UsageError("--json and --csv are two formats; give one of them.")
    result = run_user_query(sys.stdin.read() if statement == "-" else statement)
    columns, rows = result.columns, result.rows
    if result.warning:
        note(f"note: {result.warning}")
    if as_json:
        names = unique_names(columns)
        print_json([dict(zip(names, row, strict=True)) for row in rows])
    elif as_csv:
        print_csv(columns, rows)
    else:
        print_table(columns, rows)
        note(f"{len(rows)} row" + ("" if len(rows) == 1 else "s"))


def unique_names(columns: Sequence[str]) -> list[str]:
    """Column names that can be keys: a repeated one gets a number, so that no value is lost."""
    seen: dict[str, int] = {}
    names = []
    for column in columns:
        seen[column] = seen.get(column, 0) + 1
        names.append(column if seen[column] == 1 else f"{column}_{seen[column]}")
    return names
