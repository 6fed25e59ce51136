"""Print tables for people and JSON for programs. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any

import typer

WIDTH_OF_A_FILE = 80
"""Width of a table in a pipe or a file, unless COLUMNS is set."""
MAX_CELL = 2000
NAMES_IN_A_NOTE = 6


def note(text: str) -> None:
    """Print a remark or a next step to stderr, so that a pipe carries only results."""
    print(printable_lines(text), file=sys.stderr, flush=True)


def print_line(text: str) -> None:
    """Print one or more lines of a result, without an explicit flush."""
    print(printable_lines(text))


def has_width() -> bool:
    """Return True if the reader's lines have a width: a terminal, or ``COLUMNS`` is set."""
    return sys.stdout.isatty() or "COLUMNS" in os.environ


def table_width() -> int:
    """Return the characters per line: the terminal's, ``COLUMNS``, or 80."""
    if has_width():
        return max(20, shutil.get_terminal_size((WIDTH_OF_A_FILE, 24)).columns)
    return WIDTH_OF_A_FILE


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    wide: bool | None = None,
    least: Sequence[str] = (),
    most: Collection[str] = (),
    prose: Collection[str] = (),
    key: Collection[str] = (),
) -> None:
    """Print a table in the width of the terminal. Numbers are right-aligned, and None is an empty cell.

    Args:
        wide: print every column in full, at any width. None: the command has no option ``--wide``.
        prose: columns of sentences, which are wrapped below their row.
        key: columns that identify a row together; those that tell rows apart stay if others can go in their place.
    """
    given = [tuple(row) for row in rows]
    numeric = [name for index, name in enumerate(columns) if _is_numeric([row[index] for row in given])]
    cells = [[printable(_cell(value)) for value in row] for row in given]
    layout = lay_out(
        [printable(name) for name in columns],
        cells,
        width=None if wide else table_width(),
        numeric=numeric,
        least=least,
        most=most,
        prose=prose,
        key=key,
        cuts_names=has_width(),
    )
    print("\n".join(layout.lines))  # in one write; the cells are printable
    if layout.repeated:
        stated = [f"{name} {value}" for name, value in layout.repeated[:NAMES_IN_A_NOTE]]
        more = len(layout.repeated) - len(stated)
        note(f"in every row: {', '.join(stated)}" + (f", and the same in {more} more columns" if more else ""))
    if layout.dropped:
        named, more = layout.dropped[:NAMES_IN_A_NOTE], len(layout.dropped) - NAMES_IN_A_NOTE
        how = f"COLUMNS={layout.full_width} before the command" if wide is None else "--wide"
        note(f"not shown: {', '.join(named)}" + (f" and {more} more" if more > 0 else "") + f"; {how} shows all")


def _is_numeric(values: Sequence[Any]) -> bool:
    """Return True for a column of numbers or times, which say nothing if they are cut."""
    present = [value for value in values if value is not None]
    kinds = int | float | datetime
    return bool(present) and all(isinstance(value, kinds) and not isinstance(value, bool) for value in present)


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value[:MAX_CELL]
    if value is None:
        return ""
    if isinstance(value, float):
        return spelled_number(value)
    if isinstance(value, Mapping):
        return spelled_map(value)
    if isinstance(value, list | tuple):
        return ", ".join(_cell(item) for item in value)
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="seconds")
    return str(value)[:MAX_CELL]


def printable(text: str) -> str:
    """Replace characters that could move a terminal's cursor, because records, logs and names are not trusted."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def printable_lines(text: str) -> str:
    """Apply :func:`printable` to each line."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def spelled_number(value: float) -> str:
    """Format a number with four significant digits, and with an exponent only if it is very small."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.4g}" if 1e-4 <= abs(value) < 1e4 else f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.3e}"


def spelled_map(value: Mapping[str, Any]) -> str:
    """Format a mapping as ``M=4096, N=4096``."""
    return ", ".join(f"{key}={item}" for key, item in value.items())


def spelled_call(row: Mapping[str, Any]) -> str:
    """Format a call as ``M=4096,N=4096``; inputs from a file show the start of its sha256: ``ids@0dcd504eaad7``."""
    files = (entry.partition("=") for entry in row["blobs_key"].split(",") if entry)
    return " ".join([row["axes_key"], *(f"{name}@{sha256[:12]}" for name, _, sha256 in files)])


def print_json(value: Any) -> None:
    """Print one JSON document. NaN and infinity become null, and dates ISO 8601."""
    print_line(json_text(value))


def json_text(value: Any, indent: int | None = 2) -> str:
    """Return the text of :func:`print_json`."""
    import json

    text = json.dumps(plain_value(value), indent=indent, ensure_ascii=False, allow_nan=False)
    return _MAYBE_UNPRINTABLE.sub(lambda found: _escaped(found[0]), text)


_MAYBE_UNPRINTABLE = re.compile(r"[^\x20-\x7e\n]")


def _escaped(character: str) -> str:
    """Escape an unprintable character as JSON allows, so that control characters in a record stay data."""
    import json

    return character if character.isprintable() else json.dumps(character)[1:-1]


def plain_value(value: Any) -> Any:
    """Convert a value to types that JSON supports."""
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


# ---- Table layout ---------------------------------------------------------------------------------------
# Fits cells into a given width. Texts are cut in the middle, because both ends distinguish names; then columns are
# dropped. If rows that differ would look alike, names stay whole, and where there is no room for them each row is a block of
# lines. Columns of sentences are wrapped below their row.

GAP = 2
READABLE_TEXT = 24
"""Minimum width of a cut text while less important columns can still be dropped."""
MIN_TEXT = 11
"""Minimum width of a cut text before other columns are dropped."""
MIN_TABLE = 80
"""Below this width, a row whose important columns do not fit is a block of lines."""
CUT = ".."
INDENT = 4


@dataclass(frozen=True)
class Layout:
    """The lines of a table, the dropped columns, and those of them that one line can state."""

    lines: list[str] = field(default_factory=list)
    dropped: tuple[str, ...] = ()
    repeated: tuple[tuple[str, str], ...] = ()
    """Name and cell of each dropped column that has the same cell in every row."""
    full_width: int = 0
    """Characters per line at which no column is dropped or cut."""


def lay_out(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int | None,
    numeric: Collection[str] = (),
    least: Sequence[str] = (),
    most: Collection[str] = (),
    prose: Collection[str] = (),
    key: Collection[str] = (),
    cuts_names: bool = True,
) -> Layout:
    """Lay out a table of one-line cells.

    Columns without any cell are left out if not every column fits. If rows that differ would look alike, names and key are
    whole; a row without room for them is a block of lines, with its other cells below the first.

    Args:
        least: columns to drop first, least important first; then those with the same cell in every row, and then from the right.
        most: columns to drop last.
        key: columns that identify a row together. One that tells rows apart, which otherwise look alike, stays as long as one
            that is the same in every row can go in its place.
        cuts_names: cut the first column and ``most`` like other texts. Otherwise other columns are dropped for them, a row
            keeps its line, and one that would look like another is longer: a program that reads a pipe looks for whole names.
    """
    below = [index for index, name in enumerate(columns) if name in prose and width is not None]
    shown = [index for index in range(len(columns)) if index not in below]
    empty = [index for index in shown if rows and not any(row[index] for row in rows)]
    natural = {
        index: max([text_width(columns[index]), *(text_width(row[index]) for row in rows)], default=0)
        for index in shown
    }
    table = _Table(columns, rows, natural, frozenset(numeric), tuple(least), frozenset(most), frozenset(key))
    full_width = _line_width(natural)
    sizes, in_blocks, same = natural, False, list[int]()
    if width is not None and full_width > width:
        shown = [index for index in shown if index not in empty] or shown[:1]
        same = table.repeated(shown)
        sizes, in_blocks = _sizes_within(table, shown, width, cuts_names=cuts_names)
    lines = (
        _lines_of_blocks(table, sizes, below, width or 0) if in_blocks else _lines_of_rows(table, sizes, below, width)
    )
    absent = [index for index in range(len(columns)) if index not in (*sizes, *below, *empty)]
    repeated = [index for index in absent if index in same]
    dropped = tuple(columns[index] for index in absent if index not in repeated)
    return Layout(lines, dropped, tuple((columns[index], rows[0][index]) for index in repeated), full_width)


def _sizes_within(table: _Table, shown: list[int], width: int, *, cuts_names: bool) -> tuple[dict[int, int], bool]:
    """Return the width of each column that stays, and True if a row is a block of lines; see :func:`lay_out`."""
    chosen = [index for index in shown if table.columns[index] in table.most]
    names = chosen if chosen and cuts_names else sorted({shown[0], *chosen})
    sizes = _fitting(table, shown, width, [] if cuts_names else names)
    least_left = READABLE_TEXT if cuts_names else _line_width(table.natural)
    of_names = (*table.most, *table.key)
    readable = {i: least_left for i in shown if width < MIN_TABLE or table.columns[i] in of_names}
    if not table.looks_alike(shown, sizes, names, readable):
        return sizes, False
    needed = table.needed(shown, names)
    whole = _whole(table, shown, needed, width)
    fits = _line_width(whole) <= width and not (width < MIN_TABLE and _leaves_out(table, shown, whole))
    if fits or not cuts_names:
        return whole, False
    return {index: table.natural[index] for index in table.wanted(shown, needed)}, True


def _lines_of_rows(table: _Table, sizes: Mapping[int, int], below: Sequence[int], width: int | None) -> list[str]:
    """Return the heading, a rule, and a line per row; the columns of :func:`lay_out`'s prose are below their row."""
    shown, numeric, columns = [*sizes], table.numeric, table.columns
    lines = [_line([columns[index] for index in shown], shown, sizes, numeric, columns), "-" * _line_width(sizes)]
    for row in table.rows:
        lines.append(_line([row[index] for index in shown], shown, sizes, numeric, columns))
        lines += [line for index in below for line in _wrapped(row[index], width or 0)]
    return lines


def _lines_of_blocks(table: _Table, natural: Mapping[int, int], below: Sequence[int], width: int) -> list[str]:
    """Return the heading of the first column, a rule, and a block of lines per row, names first."""
    columns, numeric = table.columns, table.numeric
    shown = sorted(natural, key=lambda index: columns[index] in numeric or columns[index] not in table.most)
    sizes = {index: min(size, width) for index, size in natural.items()}
    lines = [_line([columns[shown[0]]], shown[:1], sizes, numeric, columns), "-" * width]
    for row in table.rows:
        lines += _block([(columns[index], row[index]) for index in shown], width)
        lines += [line for index in below for line in _wrapped(row[index], width)]
    return lines


@dataclass(frozen=True)
class _Table:
    """A table of one-line cells with the meaning of its columns; see :func:`lay_out`."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    natural: Mapping[int, int]
    """The width of each column at which nothing of it is cut."""
    numeric: Collection[str]
    least: Sequence[str]
    most: Collection[str]
    key: Collection[str]

    def shortest(self, index: int, shortest: int) -> int:
        """Return the least width of a column whose texts may be cut to ``shortest``; numbers are not cut."""
        full = self.natural[index]
        name = self.columns[index]
        return full if name in self.numeric else min(full, max(shortest, text_width(name)))

    def in_order(self, shown: Sequence[int]) -> list[int]:
        """Return the columns of ``least``, in its order."""
        found = (self.columns.index(name) for name in self.least if name in self.columns)
        return [index for index in found if index in shown]

    def repeated(self, shown: Sequence[int]) -> list[int]:
        """Return the columns that one line can state because each row has the same cell."""
        excused = (*self.least, *self.most)
        return [
            index
            for index in reversed(shown)
            if self.columns[index] not in excused and _is_repeated([row[index] for row in self.rows])
        ]

    def kinds(self, of: Iterable[int], sizes: Mapping[int, int] | None = None) -> int:
        """Return how many rows differ in these columns, as they are or cut to their sizes."""
        chosen = [*of]
        if sizes is None:
            return len({tuple(row[index] for index in chosen) for row in self.rows})
        return len({tuple(cut(row[index], sizes[index]) for index in chosen) for row in self.rows})

    def telling(self, shown: Sequence[int], names: Collection[int]) -> list[int]:
        """Return the columns of text that identify a row: names and the key."""
        return [
            index
            for index in shown
            if self.columns[index] not in self.numeric and (index in names or self.columns[index] in self.key)
        ]

    def looks_alike(
        self, shown: Sequence[int], sizes: Mapping[int, int], names: Collection[int], readable: Mapping[int, int]
    ) -> bool:
        """Return True if a name is missing, hardly left or cut to the text of another, or rows of different keys look equal."""
        telling = self.telling(shown, names)
        left = [index for index in telling if index in sizes]
        return (
            any(index not in sizes for index in names)
            or any(sizes[index] < min(self.natural[index], readable.get(index, 0)) for index in left)
            or any(self.kinds([index], sizes) < self.kinds([index]) for index in left)
            or (bool(self.key) and self.kinds(left, sizes) < self.kinds(telling))
        )

    def needed(self, shown: Sequence[int], names: Sequence[int]) -> list[int]:
        """Return the names, and the columns of the key without which rows look alike."""
        telling = self.telling(shown, names)
        needed = [index for index in telling if index in names]
        while (more := _telling_apart(needed, telling, self.rows)) is not None:
            needed.append(more)
        return sorted({*needed, *names})

    def wanted(self, shown: Sequence[int], needed: Sequence[int]) -> list[int]:
        """Return the columns that a block of one row states: what is needed and what is not among the least important."""
        same = [index for index in self.repeated(shown) if len(self.rows) > 1]
        wanted = [i for i in shown if i in needed or (self.columns[i] not in self.least and i not in same)]
        return [index for index in wanted if index not in same] or wanted


def _line_width(sizes: Mapping[int, int]) -> int:
    return sum(sizes.values()) + GAP * (len(sizes) - 1)


def _fitting(table: _Table, shown: Sequence[int], width: int, uncut: Sequence[int]) -> dict[int, int]:
    """Return the columns that fit and their widths. Texts are cut, except those of ``uncut``."""
    natural = table.natural
    readable, narrow = (
        {index: min(natural[index], width) if index in uncut else table.shortest(index, shortest) for index in shown}
        for shortest in (READABLE_TEXT, MIN_TEXT)
    )
    order = table.in_order(shown)
    others = [index for index in reversed(shown) if index not in order]
    same = table.repeated(shown)
    others.sort(key=lambda index: table.columns[index] in table.most)
    fitting = _kept(_kept(shown, readable, width, order), narrow, width, [*order, *same, *others])
    telling = _telling_apart(fitting, [index for index in shown if table.columns[index] in table.key], table.rows)
    if telling is not None:
        order = [index for index in order if index != telling]
        others = [index for index in others if index != telling] + [telling]
        fitting = _kept(_kept(shown, readable, width, [*same, *order]), narrow, width, [*same, *order, *others])
    return _shared({index: natural[index] for index in fitting}, narrow, width)


def _whole(table: _Table, shown: Sequence[int], needed: Sequence[int], width: int) -> dict[int, int]:
    """Return the widths of a table whose needed columns are whole, at any width, and of others as far as they fit."""
    natural = table.natural
    readable, narrow = (
        {index: natural[index] if index in needed else table.shortest(index, shortest) for index in shown}
        for shortest in (READABLE_TEXT, MIN_TEXT)
    )
    least, same = table.in_order(shown), table.repeated(shown)
    others = sorted(reversed(shown), key=lambda index: table.columns[index] in table.most)
    first, then = (
        [index for index in order if index in same or index not in needed]
        for order in (least, [*least, *same, *others])
    )
    kept = _kept(_kept(shown, readable, width, first), narrow, width, then)
    return _shared({index: natural[index] for index in kept}, narrow, width)


def _leaves_out(table: _Table, shown: Sequence[int], kept: Collection[int]) -> bool:
    """Return True if a column is missing that is neither the same in every row nor among the least important."""
    excused = (*table.in_order(shown), *table.repeated(shown))
    return any(index not in kept and index not in excused for index in shown)


def _block(fields: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Return the lines of one row: its first cell, and below it names and cells as many as fit on each line."""
    (_, first), *others = fields
    lines, line = _folded(first, width) or [""], ""
    for part in (f"{name} {cell}".strip() for name, cell in others if cell):
        if line and text_width(line) + GAP + text_width(part) <= width - INDENT:
            line += " " * GAP + part
            continue
        lines += [" " * INDENT + piece for piece in _folded(line, width - INDENT)]
        line = part
    return lines + [" " * INDENT + piece for piece in _folded(line, width - INDENT)]


def _folded(text: str, width: int) -> list[str]:
    """Split a text into pieces of at most ``width`` terminal columns, after a separator if there is one in the second half."""
    pieces = []
    while text_width(text) > width:
        head = _head(text, width) or text[:1]
        after = max((head.rfind(mark) + 1 for mark in " ,_-/"), default=0)
        head = head[:after] if after > len(head) // 2 else head
        pieces.append(head.rstrip())
        text = text[len(head) :]
    return [*pieces, text] if text else pieces


def _telling_apart(kept: Sequence[int], key: Sequence[int], rows: Sequence[Sequence[str]]) -> int | None:
    """Return the left-out column of a key that makes most rows differ; None if no column makes more of them differ than now."""

    def kinds(of: Sequence[int]) -> int:
        return len({tuple(row[index] for index in of) for row in rows})

    stays = [index for index in key if index in kept]
    left_out = {index: kinds([*stays, index]) for index in key if index not in kept}
    most = max(left_out, key=lambda index: left_out[index], default=None)
    return most if most is not None and left_out[most] > kinds(stays) else None


def _is_repeated(cells: Sequence[str]) -> bool:
    return len(cells) > 1 and cells[0] != "" and len(set(cells)) == 1


def _kept(shown: Sequence[int], sizes: Mapping[int, int], width: int, order: Sequence[int]) -> list[int]:
    """Return the columns that fit in these sizes after dropping others in ``order``. At least one stays."""
    kept = list(shown)
    for index in order:
        if len(kept) <= 1 or sum(sizes[i] for i in kept) + GAP * (len(kept) - 1) <= width:
            break
        if index in kept:
            kept.remove(index)
    return kept


def _shared(natural: dict[int, int], narrow: dict[int, int], width: int) -> dict[int, int]:
    """Return the column widths: the widest columns shrink first, down to their minimum."""
    sizes = dict(natural)
    excess = sum(sizes.values()) + GAP * (len(sizes) - 1) - width
    while excess > 0:
        wide = [index for index in sizes if sizes[index] > narrow[index]]
        if not wide:
            (only, *_) = sizes  # a single column wider than the line is cut
            sizes[only] = max(1, sizes[only] - excess) if len(sizes) == 1 else sizes[only]
            break
        widest = max(wide, key=lambda index: sizes[index])
        sizes[widest] -= 1
        excess -= 1
    return sizes


def _line(
    cells: Sequence[str],
    shown: Sequence[int],
    sizes: Mapping[int, int],
    numeric: Collection[str],
    columns: Sequence[str],
) -> str:
    parts = []
    for cell, index in zip(cells, shown, strict=True):
        size = sizes[index]
        text = cut(cell, size)
        if not text.isascii():
            size -= text_width(text) - len(text)
        parts.append(text.rjust(size) if columns[index] in numeric else text.ljust(size))
    return (" " * GAP).join(parts).rstrip()


def _wrapped(text: str, width: int) -> list[str]:
    if not text:
        return []
    space = max(8, width - INDENT)
    if text_width(text) > len(text):
        space //= 2  # textwrap counts characters, but some take two columns
    return [" " * INDENT + line for line in textwrap.wrap(text, space, break_on_hyphens=False)]


def cut(text: str, width: int) -> str:
    """Cut the middle out of a text that is wider than ``width`` terminal columns."""
    if text_width(text) <= width:
        return text
    space = width - len(CUT)
    if space < 2:
        return _head(text, width)
    tail = _head(text[::-1], space // 2)[::-1]
    return _head(text, space - text_width(tail)) + CUT + tail


def _head(text: str, width: int) -> str:
    taken = 0
    for index, character in enumerate(text):
        taken += text_width(character)
        if taken > width:
            return text[:index]
    return text


def text_width(text: str) -> int:
    """Return the terminal columns of a text: two for a wide character, none for a combining one."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


# ---- Spark lines ----------------------------------------------------------------------------------------
# Latency by size, with one character per size from smallest to largest on a logarithmic scale.

Spark = Annotated[
    bool | None,
    typer.Option("--spark/--no-spark", help="Latency by size as a line of blocks; by default on a terminal only."),
]

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-~=+*#"
"""Characters for terminals that cannot print blocks."""
WIDTH = 10
MIN_SIZES = 3
"""Minimum number of sizes for a line."""


def spark_wanted(asked: bool | None) -> bool:
    """Return the option's value; by default True on a terminal."""
    return sys.stdout.isatty() if asked is None else asked


def spark_line(values: Sequence[float], low: float, high: float, *, width: int = WIDTH, ramp: str | None = None) -> str:
    """Return one character per value. Beyond ``width`` values, evenly spaced ones are shown, including the first and last.

    Args:
        values: positive, in the order of their sizes.
        ramp: the characters, lowest first; by default those that the output can print.
    """
    ramp = ramp or (BLOCKS if _prints_blocks() else ASCII)
    if len(values) > width:
        values = [values[round(at * (len(values) - 1) / (width - 1))] for at in range(width)]
    span = math.log(high / low) if high > low else 0.0
    steps = [math.log(value / low) / span if span else 0.0 for value in values]
    return "".join(ramp[min(int(step * len(ramp)), len(ramp) - 1)] for step in steps)


def by_size(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], str]:
    """Return the spark line of each (definition, GPU, solution). Solutions of one operator and GPU share a scale."""
    limits: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        limits.setdefault((row["definition"], row["gpu"]), []).extend(row["latencies_us"])
    lines = {}
    for row in rows:
        group = limits[row["definition"], row["gpu"]]
        if len(row["latencies_us"]) >= MIN_SIZES:
            line = spark_line(row["latencies_us"], min(group), max(group))
            lines[row["definition"], row["gpu"], row["solution"]] = line
    return lines


def print_by_size(rows: Sequence[Mapping[str, Any]], label: str, counted: str = "at {} sizes") -> None:
    """Print a line for each row with enough sizes: its label, its spark line, and the first and last time.

    On a terminal so narrow that little of a label would be left, each label has a line to itself.
    """
    drawn = []
    for row in rows:
        values = row["latencies_us"]
        if len(values) >= MIN_SIZES:
            ends = f"{values[0]:.4g} to {values[-1]:.4g} us {counted.format(len(values))}"
            free = table_width() - len(ends) - len(":  ")
            named = label.format(**row)
            drawn.append((named, cut(named, max(free - WIDTH, WIDTH)), values, free, ends))
    apart = any(short != named and text_width(short) < 2 * WIDTH for named, short, *_ in drawn)
    for named, short, values, free, ends in drawn:
        what = cut(named, table_width() - 1) + ":\n" if apart else f"{short}: "
        width = max(WIDTH, min(3 * WIDTH, free if apart else free - text_width(short)))
        typer.echo(f"{what}{spark_line(values, min(values), max(values), width=width)} {ends}")


def _prints_blocks() -> bool:
    if os.environ.get("TERM") == "dumb":
        return False
    try:
        BLOCKS.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
