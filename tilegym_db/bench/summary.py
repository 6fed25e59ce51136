"""What a run found, one row per Solution. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from tilegym_db.records import Trace
from tilegym_db.records.trace import UNTIMED_TIERS

__all__ = ["SummaryRow", "summarise"]


@dataclass(frozen=True)
class SummaryRow:
    """One Solution in one run.

    ``speedup``: geometric mean of the ratios against stock code. ``over_best``: the same against what was fastest and verified
    before this run, over the workloads where something was. ``note``: the first failure's reason, or why nothing ran.
    ``sol_ratio``: geometric mean of the shares of the speed of light; None where the device has none.
    """

    solution: str
    language: str
    passed: int
    total: int
    speedup: float | None
    note: str
    sol_ratio: float | None = None
    over_best: float | None = None


def summarise(traces: Sequence[Trace]) -> list[SummaryRow]:
    """Rows in the order in which Solutions first appear; workloads that a Solution excludes do not count."""
    grouped: dict[str, list[Trace]] = {}
    for trace in traces:
        grouped.setdefault(trace.solution, []).append(trace)
    return [_row(solution, traces) for solution, traces in grouped.items()]


def _row(solution: str, traces: list[Trace]) -> SummaryRow:
    counted = [trace for trace in traces if trace.status != "UNSUPPORTED"]
    failures = [trace for trace in counted if trace.status != "PASSED"]
    timed = [trace.performance for trace in counted if trace.performance is not None]
    light = [performance.sol_ratio for performance in timed if performance.sol_ratio]
    ratios: dict[str | None, list[float]] = {}
    for performance in timed:
        for comparison in performance.comparisons:
            ratios.setdefault(comparison.provides, []).append(comparison.ratio)
    note = ""
    if not counted:
        note = f"{traces[0].status}: {traces[0].reason}"
    elif failures:
        note = f"{failures[0].status}: {failures[0].reason}"
    elif all(trace.tier == "interpreter" for trace in counted):
        note = "verified in the interpreter, not timed"
    elif all(trace.tier in UNTIMED_TIERS for trace in counted):
        note = "verified, not timed: it omits an output"
    passed = len(counted) - len(failures)
    speedup, over_best = (_mean(ratios.get(provides, ())) for provides in ("stock", "incumbent"))
    return SummaryRow(solution, traces[0].language, passed, len(counted), speedup, note, _mean(light), over_best)


def _mean(ratios: Sequence[float]) -> float | None:
    """Geometric; None of none."""
    return geometric_mean(ratios) if ratios else None
