"""A plot of an answer as a notebook shows it: an SVG of lines and points, which needs no package."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from tilegym_db.errors import UsageError

__all__ = ["LinePlot", "line_plot", "log_ticks"]

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 84, 210, 16, 46
MOST_LINES = 12
# Distinct to colour-blind readers (after Okabe and Ito) and dark enough for a white page; dashes double them.
COLOURS = ("#0072b2", "#b35900", "#005640", "#9c4f7c", "#5c4a00", "#3d3d3d")
DASHES = ("", "6 3")

Point = tuple[float, float]


@dataclass(frozen=True)
class LinePlot:
    """Named lines over two axes, which are logarithmic where everything on them is above zero. It shows itself in a notebook."""

    x: str
    y: str
    lines: dict[str, list[Point]]

    def svg(self) -> str:
        """The picture; each point says its numbers when the pointer rests on it."""
        points = [point for line in self.lines.values() for point in line]
        x_of, x_ticks = _axis([x for x, _ in points], LEFT, WIDTH - RIGHT)
        y_of, y_ticks = _axis([y for _, y in points], HEIGHT - BOTTOM, TOP)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'role="img" aria-label="{escape(f"{self.y} over {self.x}")}" font-family="system-ui, sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        ]
        for tick in x_ticks:
            x, bottom = f"{x_of(tick):.1f}", HEIGHT - BOTTOM
            parts.append(f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{bottom}" stroke="#cfd6dd"/>')
            parts.append(f'<text x="{x}" y="{bottom + 17}" text-anchor="middle">{tick:g}</text>')
        for tick in y_ticks:
            y = y_of(tick)
            parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#cfd6dd"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
        for number, (name, line) in enumerate(self.lines.items()):
            parts += _drawn(number, name, line, x_of, y_of)
        parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">{escape(self.x)}</text>')
        middle = (TOP + HEIGHT - BOTTOM) / 2
        parts.append(
            f'<text x="14" y="{middle}" transform="rotate(-90 14 {middle})" text-anchor="middle">{escape(self.y)}</text>'
        )
        return "\n".join([*parts, "</svg>"])

    def _repr_svg_(self) -> str:
        return self.svg()


def line_plot(columns: Sequence[str], rows: Sequence[Sequence[Any]], x: str, y: str, line: str | None) -> LinePlot:
    """One line for each value of the column ``line``; rows without a number are left out.

    Raises:
        UsageError: no such column, it holds no numbers, or there are more lines than can be told apart.
    """
    for name in filter(None, (x, y, line)):
        if name not in columns:
            raise UsageError(f"no column '{name}'; the answer has {', '.join(columns)}.")
    at = {name: columns.index(name) for name in filter(None, (x, y, line))}
    lines: dict[str, list[Point]] = {}
    for row in rows:
        pair = (_number(row[at[x]]), _number(row[at[y]]))
        if pair[0] is not None and pair[1] is not None:
            lines.setdefault(y if line is None else str(row[at[line]]), []).append((pair[0], pair[1]))
    if not lines:
        raise UsageError(f"no row has a number in both '{x}' and '{y}'.")
    if len(lines) > MOST_LINES:
        raise UsageError(f"{len(lines)} lines, and {MOST_LINES} can be told apart. Narrow the question.")
    return LinePlot(x, y, {name: sorted(points) for name, points in lines.items()})


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _drawn(
    number: int, name: str, line: Sequence[Point], x_of: Callable[[float], float], y_of: Callable[[float], float]
) -> list[str]:
    colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS)]
    path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line)
    style = f'stroke="{colour}"' + (f' stroke-dasharray="{dash}"' if dash else "")
    label_y = TOP + 10 + 18 * number
    key = WIDTH - RIGHT + 14
    marks = [
        f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3" fill="{colour}">'
        f"<title>{escape(name)}: {x:g}, {y:g}</title></circle>"
        for x, y in line
    ]
    return [
        f'<polyline points="{path}" fill="none" {style}/>',
        *marks,
        f'<line x1="{key}" y1="{label_y}" x2="{key + 18}" y2="{label_y}" {style}/>',
        f'<text x="{key + 24}" y="{label_y + 4}">{escape(name)}</text>',
    ]


def _axis(values: Sequence[float], start: float, end: float) -> tuple[Callable[[float], float], list[float]]:
    """Value -> position between ``start`` and ``end``, and the ticks between them."""
    is_log = min(values) > 0
    scaled = [math.log10(value) for value in values] if is_log else list(values)
    low, high = min(scaled), max(scaled)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5

    def position(value: float) -> float:
        return start + ((math.log10(value) if is_log else value) - low) / (high - low) * (end - start)

    return position, log_ticks(low, high) if is_log else _steps(low, high)


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two exponents of ten; where fewer than three are, 2 and 5 times them too."""
    every = [10.0**power * factor for power in range(math.floor(low), math.ceil(high) + 1) for factor in (1, 2, 5)]
    inside = [value for value in every if low - 1e-9 <= math.log10(value) <= high + 1e-9]
    decades = [value for value in inside if math.isclose(math.log10(value) % 1, 0, abs_tol=1e-9)]
    return decades[:: 1 + len(decades) // 8] if len(decades) >= 3 else inside


def _steps(low: float, high: float) -> list[float]:
    power = 10.0 ** math.floor(math.log10((high - low) / 2))
    step = max(power * factor for factor in (1, 2, 5) if power * factor <= (high - low) / 2)
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
