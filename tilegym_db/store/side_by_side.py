"""Which of two solutions is faster at a size, by what was measured of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tilegym_db.store.queries.measured import LIKELY_FASTEST_MARGIN, LIKELY_FASTEST_US

__all__ = ["Winner", "winner"]

Winner = Literal["a", "b", "neither"]


def winner(row: Mapping[str, Any]) -> tuple[Winner, str]:
    """Which of two is faster, and why that is known or is not.

    Args:
        row: as :func:`tilegym_db.store.queries.solution_pairs.rows_of_both` returns it.
    """
    faster: Literal["a", "b"] = "a" if row["a_us"] <= row["b_us"] else "b"
    slower = "b" if faster == "a" else "a"
    fast, slow = row[f"{faster}_us"], row[f"{slower}_us"]
    high, low = row[f"{faster}_high_us"], row[f"{slower}_low_us"]
    if high is None or low is None:
        return "neither", "a trace without an interval"
    if high >= low:
        return "neither", "their intervals overlap"
    if row["same_run"]:
        return faster, "timed in turns, intervals apart"
    if slow <= max(fast + LIKELY_FASTEST_US, fast * (1 + LIKELY_FASTEST_MARGIN)):
        return "neither", "of two runs, which may differ by as much"
    return faster, "of two runs, further apart than runs are"
