"""A picture of latency by size: the fastest solution of each language over the bytes that a call must move."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any
from xml.sax.saxutils import escape

from tilegym_db.store.answer import log_ticks

__all__ = ["LANGUAGES", "latency_picture", "series_of"]

LANGUAGES = ("triton", "tilelang", "cutile", "python")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 340, 64, 132, 44, 46
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #16202b } .title { font-size: 14px; font-weight: 600 }
.page { fill: #ffffff } .grid { stroke: #cfd6dd } .line { fill: none; stroke-width: 1.5 }
.triton { stroke: #0072b2; fill: #0072b2 } .tilelang { stroke: #b35900; fill: #b35900 }
.cutile { stroke: #005640; fill: #005640 } .python { stroke: #9c4f7c; fill: #9c4f7c } .line { fill: none }
@media (prefers-color-scheme: dark) { text { fill: #e8edf2 } .page { fill: #12181f } .grid { stroke: #3a4754 }
.triton { stroke: #56b4e9; fill: #56b4e9 } .tilelang { stroke: #f0a30a; fill: #f0a30a }
.cutile { stroke: #a2efd2; fill: #a2efd2 } .python { stroke: #e08fbd; fill: #e08fbd } .line { fill: none } }
"""

Point = tuple[float, float]
Series = Mapping[str, Sequence[Point]]


def series_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """Return language -> (bytes, us) of its fastest solution per size, smallest first; shapes of one size give their mean.

    Only rows of the most measured dtypes count, because two dtypes of one size make no line.
    """
    usable = [row for row in rows if row["bytes"] and row["is_fastest_in_language"] and not row["layouts_key"]]
    if not usable:
        return {}
    counts: dict[str, int] = {}
    for row in usable:
        counts[row["dtypes_key"]] = counts.get(row["dtypes_key"], 0) + 1
    dtypes = max(sorted(counts), key=lambda key: counts[key])
    sizes: dict[str, dict[float, list[float]]] = {}
    for row in usable:
        if row["dtypes_key"] == dtypes:
            sizes.setdefault(row["language"], {}).setdefault(row["bytes"], []).append(row["latency_us"])
    return {
        language: [(size, geometric_mean(sizes[language][size])) for size in sorted(sizes[language])]
        for language in LANGUAGES
        if language in sizes
    }


def latency_picture(title: str, series: Series) -> str:
    """Return an SVG with logarithmic axes, a line and marks for each language, and a label at the end of each line."""
    points = [point for line in series.values() for point in line]
    x_of, x_ticks = _log_axis([x for x, _ in points], LEFT, WIDTH - RIGHT)
    y_of, y_ticks = _log_axis([y for _, y in points], HEIGHT - BOTTOM, TOP)
    named = ", ".join(series)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{escape(title)}: {named}">',
        f'<style>{STYLE}</style><rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="title" x="12" y="22">{escape(title)}</text>',
    ]
    for tick in x_ticks:
        x = x_of(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{_bytes(tick)}</text>')
    for tick in y_ticks:
        y = y_of(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g} us</text>')
    label_ys = _apart([y_of(line[-1][1]) for line in series.values()])
    for (language, line), label_y in zip(series.items(), label_ys, strict=True):
        parts += _line(language, [(x_of(x), y_of(y)) for x, y in line], label_y)
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">bytes that a call must move</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _line(language: str, points: Sequence[Point], label_y: float) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    marks = [_MARKS[language](x, y) for x, y in points]
    label = f'<text x="{WIDTH - RIGHT + 22}" y="{label_y + 4:.1f}">{language}</text>'
    key = _MARKS[language](WIDTH - RIGHT + 12, label_y)
    shapes = "".join([*marks, key])
    return [f'<polyline class="line {language}" points="{path}"/>', f'<g class="{language}">{shapes}</g>', label]


# Shapes as well as colours, so that all readers can distinguish the lines, in print too.
_MARKS: dict[str, Callable[[float, float], str]] = {
    "triton": lambda x, y: f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>',
    "tilelang": lambda x, y: f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6"/>',
    "cutile": lambda x, y: f'<path d="M{x:.1f} {y - 4:.1f}l4 7h-8z"/>',
    "python": lambda x, y: f'<path d="M{x:.1f} {y - 4:.1f}l4 4l-4 4l-4 -4z"/>',
}


def _log_axis(values: Sequence[float], start: float, end: float) -> tuple[Callable[[float], float], list[float]]:
    """Return value -> position between ``start`` and ``end``, and the powers of ten inside.

    The axis spans a factor of four or more.
    """
    low, high = math.log10(min(values)), math.log10(max(values))
    if high - low < math.log10(4):
        middle = (low + high) / 2
        low, high = middle - math.log10(2), middle + math.log10(2)

    def position(value: float) -> float:
        return start + (math.log10(value) - low) / (high - low) * (end - start)

    return position, log_ticks(low, high)


def _apart(positions: Sequence[float], least: float = 16) -> list[float]:
    """Return the positions, moved down if two labels would lie on each other."""
    placed: dict[int, float] = {}
    below = -math.inf
    for index in sorted(range(len(positions)), key=lambda index: positions[index]):
        below = max(positions[index], below + least)
        placed[index] = below
    return [placed[index] for index in range(len(positions))]


def _bytes(size: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size:g} B"
