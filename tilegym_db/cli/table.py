"""Lays a table out in a given width: what does not fit is cut in the middle, dropped, or told below its row.

Pure: cells in, lines out. Names are cut in the middle because both their ends tell them apart.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

__all__ = ["Layout", "cut", "lay_out", "text_width"]

GAP = 2
READABLE_TEXT = 24
"""A less important column goes before any text is cut shorter than this."""
SHORTEST_TEXT = 12
"""Where all of those are gone, text is cut down to this before another column goes."""
CUT = ".."
INDENT = 4


@dataclass(frozen=True)
class Layout:
    """The lines of a table, and the columns that did not fit."""

    lines: list[str] = field(default_factory=list)
    dropped: tuple[str, ...] = ()


def lay_out(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int | None,
    numeric: Collection[str] = (),
    least: Sequence[str] = (),
    prose: Collection[str] = (),
) -> Layout:
    """Lay out cells of one line each.

    Args:
        columns: headings.
        rows: as many cells each.
        width: characters of a line; None: as many as it takes.
        numeric: columns that are right-aligned, and dropped rather than cut.
        least: columns to drop first, the least important one first; then those on the right.
        prose: columns of sentences: below their row, and wrapped there, where the table has a width.
    """
    below = [index for index, name in enumerate(columns) if name in prose and width is not None]
    shown = [index for index in range(len(columns)) if index not in below]
    natural = {
        index: max([text_width(columns[index]), *(text_width(row[index]) for row in rows)], default=0)
        for index in shown
    }
    readable, narrow = (
        {
            index: full if columns[index] in numeric else min(full, max(shortest, text_width(columns[index])))
            for index, full in natural.items()
        }
        for shortest in (READABLE_TEXT, SHORTEST_TEXT)
    )
    if width is not None:
        order = [columns.index(name) for name in least if name in columns]
        shown = _kept(shown, readable, width, order)
        shown = _kept(shown, narrow, width, [*order, *reversed(shown)])
        sizes = _shared({index: natural[index] for index in shown}, narrow, width)
    else:
        sizes = natural
    lines = [_line([columns[index] for index in shown], shown, sizes, numeric, columns)]
    lines.append(" ".join(["-" * (sum(sizes[index] for index in shown) + GAP * (len(shown) - 1))]))
    for row in rows:
        lines.append(_line([row[index] for index in shown], shown, sizes, numeric, columns))
        for index in below:
            lines += _wrapped(row[index], width or 0)
    dropped = tuple(name for index, name in enumerate(columns) if index not in shown and index not in below)
    return Layout(lines, dropped)


def _kept(shown: list[int], sizes: dict[int, int], width: int, order: Sequence[int]) -> list[int]:
    """The columns that fit in these sizes, after dropping others in ``order``; at least one stays."""
    kept = list(shown)
    for index in order:
        if len(kept) <= 1 or sum(sizes[i] for i in kept) + GAP * (len(kept) - 1) <= width:
            break
        if index in kept:
            kept.remove(index)
    return kept


def _shared(natural: dict[int, int], narrow: dict[int, int], width: int) -> dict[int, int]:
    """The widths: the widest columns give way first, down to their narrowest."""
    sizes = dict(natural)
    excess = sum(sizes.values()) + GAP * (len(sizes) - 1) - width
    while excess > 0:
        wide = [index for index in sizes if sizes[index] > narrow[index]]
        if not wide:
            (only, *_) = sizes  # one column that is wider than the line: it is cut, whatever it holds
            sizes[only] = max(1, sizes[only] - excess) if len(sizes) == 1 else sizes[only]
            break
        widest = max(wide, key=lambda index: sizes[index])
        sizes[widest] -= 1
        excess -= 1
    return sizes


def _line(
    cells: Sequence[str],
    shown: Sequence[int],
    sizes: dict[int, int],
    numeric: Collection[str],
    columns: Sequence[str],
) -> str:
    parts = []
    for cell, index in zip(cells, shown, strict=True):
        text = cut(cell, sizes[index])
        padding = " " * (sizes[index] - text_width(text))
        parts.append(padding + text if columns[index] in numeric else text + padding)
    return (" " * GAP).join(parts).rstrip()


def _wrapped(text: str, width: int) -> list[str]:
    if not text:
        return []
    space = max(8, width - INDENT)
    if text_width(text) > len(text):
        space //= 2  # textwrap counts characters, and some here take two columns
    return [" " * INDENT + line for line in textwrap.wrap(text, space, break_on_hyphens=False)]


def cut(text: str, width: int) -> str:
    """``text`` in at most ``width`` columns of a terminal, without its middle where it is longer."""
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
    """Columns of a terminal that a text takes: two for a wide character, none for one that combines."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )
