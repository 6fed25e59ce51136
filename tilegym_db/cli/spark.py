"""Latency by size in a few characters, for a terminal: one character a size, smallest first, on a scale of logarithms."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from tilegym_db.cli.output import table_width
from tilegym_db.cli.table import cut

__all__ = ["Spark", "by_size", "print_by_size", "spark_line", "spark_wanted"]

Spark = Annotated[
    bool | None,
    typer.Option("--spark/--no-spark", help="Latency by size as a line of blocks; by default on a terminal only."),
]

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-~=+*#"
"""Where the terminal cannot print blocks."""
WIDTH = 10
LEAST_SIZES = 3
"""Fewer are no line."""


def spark_wanted(asked: bool | None) -> bool:
    """What the option says; without it, whether a person reads the output."""
    return sys.stdout.isatty() if asked is None else asked


def spark_line(values: Sequence[float], low: float, high: float, *, width: int = WIDTH, ramp: str | None = None) -> str:
    """The values as one character each, at most ``width``: of more, evenly spaced ones with the first and the last.

    Args:
        values: positive, in the order of their sizes.
        low, high: what the lowest and the highest character stand for.
        ramp: the characters, lowest first; by default what the output can print.
    """
    ramp = ramp or (BLOCKS if _prints_blocks() else ASCII)
    if len(values) > width:
        values = [values[round(at * (len(values) - 1) / (width - 1))] for at in range(width)]
    span = math.log(high / low) if high > low else 0.0
    steps = [math.log(value / low) / span if span else 0.0 for value in values]
    return "".join(ramp[min(int(step * len(ramp)), len(ramp) - 1)] for step in steps)


def by_size(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], str]:
    """(definition, GPU, solution) -> line; solutions of one operator and GPU share a scale, so that they can be compared.

    Args:
        rows: as :func:`tilegym_db.store.queries.fastest.size_rows` returns them.
    """
    limits: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        limits.setdefault((row["definition"], row["gpu"]), []).extend(row["latencies_us"])
    lines = {}
    for row in rows:
        group = limits[row["definition"], row["gpu"]]
        if len(row["latencies_us"]) >= LEAST_SIZES:
            line = spark_line(row["latencies_us"], min(group), max(group))
            lines[row["definition"], row["gpu"], row["solution"]] = line
    return lines


def print_by_size(rows: Sequence[Mapping[str, Any]], label: str) -> None:
    """A line of text for each row with enough sizes: what it is of, its line, and the times at both ends."""
    for row in rows:
        values = row["latencies_us"]
        if len(values) >= LEAST_SIZES:
            ends = f"{values[0]:.4g} to {values[-1]:.4g} us at {len(values)} sizes"
            free = table_width() - len(ends) - len(":  ")
            what = cut(label.format(**row), max(free - WIDTH, WIDTH))
            width = max(WIDTH, min(3 * WIDTH, free - len(what)))
            typer.echo(f"{what}: {spark_line(values, min(values), max(values), width=width)} {ends}")


def _prints_blocks() -> bool:
    if os.environ.get("TERM") == "dumb":
        return False
    try:
        BLOCKS.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
