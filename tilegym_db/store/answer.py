"""The answer to a SELECT for notebooks: rows, Arrow, pandas, polars, and tables and plots that display themselves."""

from __future__ import annotations

import html
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, Self

from tilegym_db.errors import MissingPackageError, UsageError, missing_package
from tilegym_db.store.asking import Asked, QueryResult, ask

if TYPE_CHECKING:
    import pyarrow


SHOWN_NAMES = 6
"""Maximum number of columns that the text of an answer names."""


@dataclass(frozen=True, repr=False)
class Answer:
    """Columns and rows, usable as a sequence of rows. Arrow, pandas and polars query the open store again and keep its
    types.
    """

    columns: tuple[str, ...]
    types: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    _store: Asked = field(repr=False, compare=False)
    _question: tuple[str, Sequence[Any] | Mapping[str, Any]] = field(repr=False, compare=False)

    @classmethod
    def of(cls, store: Asked, text: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> Self:
        """Return the answer to a query; raises as :func:`tilegym_db.store.asking.ask` does."""
        found: QueryResult = ask(store, text, parameters)
        return cls(found.columns, found.types, found.rows, store, (text, parameters))

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Yield the rows as tuples in the order of ``columns``."""
        return iter(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Return one row."""
        return self.rows[index]

    def arrow(self) -> pyarrow.Table:
        """Return the answer as a ``pyarrow.Table``.

        Raises:
            MissingPackageError: pyarrow is not installed.
            StoreError: the store was closed.
        """
        required("pyarrow")
        return ask(self._store, *self._question, as_arrow=True).table

    def pandas(self) -> Any:
        """Return the answer as a ``pandas.DataFrame``; raises as :meth:`arrow` does."""
        required("pandas")
        return self.arrow().to_pandas()

    def polars(self) -> Any:
        """Return the answer as a ``polars.DataFrame``; raises as :meth:`arrow` does."""
        return required("polars").from_arrow(self.arrow())

    def plot(self, x: str, y: str, line: str | None = None) -> LinePlot:
        """Return a plot of column ``y`` over column ``x``, with one line per value of column ``line``.

        Raises:
            UsageError: no such column, no numbers in it, or too many lines.
        """
        return line_plot(self.columns, self.rows, x, y, line)

    def __repr__(self) -> str:
        """Return the size and the first columns; the rows are in ``rows``."""
        names = ", ".join(self.columns[:SHOWN_NAMES]) + (", ..." if len(self.columns) > SHOWN_NAMES else "")
        return f"<Answer: {len(self.rows)} rows of {names}>"

    def _repr_html_(self) -> str:
        return html_table(self.columns, self.rows)


def required(module: str) -> Any:
    """Return a module of an optional package; raise :class:`MissingPackageError` if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        error = missing_package(module) or MissingPackageError(
            f"{module} is not installed. Try: pip install '{module}'", code="package_missing"
        )
        raise error from None


# ---- line plot ------------------------------------------------------------------------------------
# Draws a plot as an SVG of lines and points, without any package.

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 84, 210, 16, 46
MAX_LINES = 12
# Distinct for colour-blind readers (after Okabe and Ito) and dark enough for a white page. Dashes double the number.
COLOURS = ("#0072b2", "#b35900", "#005640", "#9c4f7c", "#5c4a00", "#3d3d3d")
DASHES = ("", "6 3")

Point = tuple[float, float]


@dataclass(frozen=True)
class LinePlot:
    """Named lines over two axes, displayed in a notebook. An axis is logarithmic if all its values are above zero."""

    x: str
    y: str
    lines: dict[str, list[Point]]

    def svg(self) -> str:
        """Return the SVG; each point shows its numbers under the pointer."""
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
    """Return one line per value of the column ``line``, without rows that lack a number."""
    for name in filter(None, (x, y, line)):
        if name not in columns:
            raise UsageError(f"no column '{name}'; the answer has {', '.join(columns)}.", code="column_unknown")
    at = {name: columns.index(name) for name in filter(None, (x, y, line))}
    lines: dict[str, list[Point]] = {}
    for row in rows:
        pair = (_number(row[at[x]]), _number(row[at[y]]))
        if pair[0] is not None and pair[1] is not None:
            lines.setdefault(y if line is None else str(row[at[line]]), []).append((pair[0], pair[1]))
    if not lines:
        raise UsageError(f"no row has a number in both '{x}' and '{y}'.", code="plot_empty")
    if len(lines) > MAX_LINES:
        raise UsageError(
            f"{len(lines)} lines, but a plot shows at most {MAX_LINES}. Narrow the query.", code="plot_lines_too_many"
        )
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
    """Return the map from value to position between ``start`` and ``end``, and the ticks between them."""
    is_log = min(values) > 0
    scaled = [math.log10(value) for value in values] if is_log else list(values)
    low, high = min(scaled), max(scaled)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5

    def position(value: float) -> float:
        return start + ((math.log10(value) if is_log else value) - low) / (high - low) * (end - start)

    return position, log_ticks(low, high) if is_log else _steps(low, high)


def log_ticks(low: float, high: float) -> list[float]:
    """Return the powers of ten between two exponents. Add 2 and 5 times them if there are fewer than three."""
    every = [10.0**power * factor for power in range(math.floor(low), math.ceil(high) + 1) for factor in (1, 2, 5)]
    inside = [value for value in every if low - 1e-9 <= math.log10(value) <= high + 1e-9]
    decades = [value for value in inside if math.isclose(math.log10(value) % 1, 0, abs_tol=1e-9)]
    return decades[:: 1 + len(decades) // 8] if len(decades) >= 3 else inside


def _steps(low: float, high: float) -> list[float]:
    power = 10.0 ** math.floor(math.log10((high - low) / 2))
    step = max(power * factor for factor in (1, 2, 5) if power * factor <= (high - low) / 2)
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


# ---- html table -----------------------------------------------------------------------------------

SHOWN_ROWS = 20
"""Maximum number of rows in a displayed table, which states how many more there are."""


def html_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "", most: int = SHOWN_ROWS) -> str:
    """Return an unstyled HTML table with escaped text and the first ``most`` rows."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    lines = "".join(
        f"<tr>{''.join(f'<td>{html.escape(_shown(value))}</td>' for value in row)}</tr>" for row in rows[:most]
    )
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    left = len(rows) - most
    more = f"<p>{left} more rows</p>" if left > 0 else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>{more}"


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
