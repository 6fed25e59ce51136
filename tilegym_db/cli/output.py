"""How commands print: a table for people, JSON or CSV for programs. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import typer

__all__ = ["note", "print_csv", "print_json", "print_table", "spelled_map", "spelled_number"]

WIDTH_OF_A_FILE = 10_000  # rich would fold a table into 80 columns where stdout is no terminal


def note(text: str) -> None:
    """A remark or a next step, on stderr, so that a pipe carries results only."""
    typer.echo(text, err=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table; numbers are right-aligned, None is an empty cell."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [tuple(row) for row in rows]
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, column in enumerate(columns):
        values = [row[index] for row in cells if row[index] is not None]
        numeric = bool(values) and all(
            isinstance(value, int | float) and not isinstance(value, bool) for value in values
        )
        table.add_column(Text(column), justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(_cell(value)) for value in row))
    console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE)
    for line in _lines(console, table):
        typer.echo(line)


def _lines(console: Any, table: Any) -> list[str]:
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return spelled_number(value)
    if isinstance(value, Mapping):
        return spelled_map(value)
    return str(value)


def spelled_number(value: float) -> str:
    """Four significant digits, without an exponent where a person would not write one."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.4g}" if 1e-4 <= abs(value) < 1e4 else f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.3e}"


def spelled_map(value: Mapping[str, Any]) -> str:
    """``M=4096, N=4096``."""
    return ", ".join(f"{key}={item}" for key, item in value.items())


def print_json(value: Any) -> None:
    """One JSON document. A number that JSON cannot say (NaN, infinity) is null; a date is ISO 8601."""
    typer.echo(json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return str(value)


def print_csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """RFC 4180 text with a header line; a nested value is written as JSON."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(
            [json.dumps(_plain(cell)) if isinstance(cell, Mapping | list | tuple) else cell for cell in row]
        )
