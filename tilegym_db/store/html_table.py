"""A table as a notebook shows it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

__all__ = ["SHOWN_ROWS", "html_table"]

SHOWN_ROWS = 20
"""Of a result that shows itself; it says how many more there are."""


def html_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> str:
    """HTML without any style of its own; every text is escaped, and of many rows the first are shown."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    lines = "".join(
        f"<tr>{''.join(f'<td>{html.escape(_shown(value))}</td>' for value in row)}</tr>" for row in rows[:SHOWN_ROWS]
    )
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    left = len(rows) - SHOWN_ROWS
    more = f"<p>{left} more rows</p>" if left > 0 else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>{more}"


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
