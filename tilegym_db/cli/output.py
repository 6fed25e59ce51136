"""How commands print: a table for people, JSON or CSV for programs. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

__all__ = [
    "note",
    "plain_value",
    "print_json",
    "print_line",
    "print_table",
    "printable",
    "printable_lines",
    "spelled_call",
    "spelled_map",
    "spelled_number",
    "table_width",
]

WIDTH_OF_A_FILE = 80
"""Of a table that goes into a pipe or a file, unless COLUMNS says otherwise."""
LONGEST_CELL = 2000
NAMES_IN_A_NOTE = 6


def note(text: str) -> None:
    """A remark or a next step, on stderr, so that a pipe carries results only."""
    print(printable_lines(text), file=sys.stderr, flush=True)


def print_line(text: str) -> None:
    """A line of a result, or several. Where lines are flushed is the stream's business: a terminal's is flushed at once."""
    print(printable_lines(text))


def table_width() -> int:
    """Characters of a line: the terminal's, or ``COLUMNS``, or 80."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return max(20, shutil.get_terminal_size((WIDTH_OF_A_FILE, 24)).columns)
    return WIDTH_OF_A_FILE


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    wide: bool = False,
    least: Sequence[str] = (),
    prose: Collection[str] = (),
) -> None:
    """A table in the width of the terminal; numbers are right-aligned, None is an empty cell.

    Args:
        wide: as wide as it takes, with every column.
        least: columns to leave out first where there is no room.
        prose: columns of sentences; each is wrapped below its row.
    """
    from tilegym_db.cli.table import lay_out

    given = [tuple(row) for row in rows]
    numeric = [name for index, name in enumerate(columns) if _is_numeric([row[index] for row in given])]
    cells = [[printable(_cell(value)) for value in row] for row in given]
    layout = lay_out(
        [printable(name) for name in columns],
        cells,
        width=None if wide else table_width(),
        numeric=numeric,
        least=least,
        prose=prose,
    )
    for line in layout.lines:
        print_line(line)
    if layout.dropped:
        named, more = layout.dropped[:NAMES_IN_A_NOTE], len(layout.dropped) - NAMES_IN_A_NOTE
        note(f"not shown: {', '.join(named)}" + (f" and {more} more" if more > 0 else "") + "; --wide shows all")


def _is_numeric(values: Sequence[Any]) -> bool:
    present = [value for value in values if value is not None]
    return bool(present) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in present)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return spelled_number(value)
    if isinstance(value, Mapping):
        return spelled_map(value)
    if isinstance(value, list | tuple):
        return ", ".join(_cell(item) for item in value)
    return str(value)[:LONGEST_CELL]


def printable(text: str) -> str:
    """Text that cannot move a terminal's cursor: a record, a log or a name may come from anyone's file."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def printable_lines(text: str) -> str:
    """:func:`printable` of each line."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


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


def spelled_call(row: Mapping[str, Any]) -> str:
    """``M=4096,N=4096``, and of contents that a file held the start of its sha256: ``ids@0dcd504eaad7``."""
    files = (entry.partition("=") for entry in row["blobs_key"].split(",") if entry)
    return " ".join([row["axes_key"], *(f"{name}@{sha256[:12]}" for name, _, sha256 in files)])


def print_json(value: Any) -> None:
    """One JSON document. A number that JSON cannot say (NaN, infinity) is null; a date is ISO 8601."""
    print_line(json_text(value))


def json_text(value: Any, indent: int | None = 2) -> str:
    """:func:`print_json`'s text."""
    import json

    text = json.dumps(plain_value(value), indent=indent, ensure_ascii=False, allow_nan=False)
    return _MAYBE_UNPRINTABLE.sub(lambda found: _escaped(found[0]), text)


_MAYBE_UNPRINTABLE = re.compile(r"[^\x20-\x7e\n]")


def _escaped(character: str) -> str:
    """As JSON may spell it too, so that a direction of writing or a control character in a record stays data."""
    import json

    return character if character.isprintable() else json.dumps(character)[1:-1]


def plain_value(value: Any) -> Any:
    """What JSON can hold of a value."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_value(item) for item in value]
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return str(value)
