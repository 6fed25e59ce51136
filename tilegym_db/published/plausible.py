"""Compares the figures of a pass with the gates' bounds and the physics floor.

It refuses figures that no run can produce, with the widest bound of any gate. It cannot prove the rest: a trace within
the bounds may still be invented. Only running the code gives a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tilegym_db.records.definition import Definition
from tilegym_db.records.roofline import GpuPeaks, least_us, speed_of_light
from tilegym_db.records.tolerance import (
    CODES_EQUAL,
    MIN_ELEMENTS_FOR_NORMS,
    TAU_CAP,
    WORST_ROW_FACTOR,
    limits_for,
)

SLACK = 1.001
"""Allowance for rounding: published figures keep at least three digits."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of the figures of a pass at one point; None if a bound is unknown. Times are microseconds."""

    least_us: float | None = None
    rel_fro: float | None = None
    worst_row_rel: float | None = None
    matched_ratio: float = 1.0


def bounds_of(
    definition: Definition,
    axes: Mapping[str, int],
    dtypes: Mapping[str, str],
    peaks: GpuPeaks | None,
    *,
    cold_l2: bool,
    timer: str,
) -> Bounds:
    """Return the bounds at one point.

    Args:
        definition: the operator; states tolerances and the compulsory work.
        axes: every axis, const ones included.
        dtypes: every dtype variable.
        peaks: of the GPU; None for a CPU, or if they are unknown.
        cold_l2: the L2 was flushed before every call.
        timer: the timer that measured.
    """
    rel_fro, worst_row, matched = _error_bounds(definition, axes, dtypes)
    light = speed_of_light(definition, axes, dtypes, peaks) if peaks is not None else None
    least = least_us(light, peaks, cold_l2=cold_l2, timer=timer) if light is not None and peaks is not None else None
    return Bounds(least, rel_fro, worst_row, matched)


def _error_bounds(
    definition: Definition, axes: Mapping[str, int], dtypes: Mapping[str, str]
) -> tuple[float | None, float | None, float]:
    """Return the widest bounds over all outputs, since a trace states the worst error but not its output."""
    rel_fro, worst_row, matched = 0.0, 0.0, 1.0
    for name in definition.outputs:
        limits = limits_for(definition, definition.dtype_of(name, dtypes), "tf32")
        if limits is None or limits.codes or name in definition.gathers:
            rel_fro = worst_row = math.inf
            matched = min(matched, CODES_EQUAL)
        elif math.prod(definition.shape_of(name, axes)) < MIN_ELEMENTS_FOR_NORMS:
            rel_fro = worst_row = math.inf  # norms would be noise, so no gate checks them
        else:
            rel_fro = max(rel_fro, TAU_CAP * limits.tau)
            worst_row = max(worst_row, WORST_ROW_FACTOR * TAU_CAP * max(limits.tau, limits.row_tau))
        if limits is not None:
            matched = min(matched, limits.share)
    return _finite(rel_fro), _finite(worst_row), matched


def _finite(bound: float) -> float | None:
    return None if math.isinf(bound) else bound * SLACK


def why_implausible(
    bounds: Bounds,
    *,
    latency_us: float | None,
    ci_low_us: float | None,
    ci_high_us: float | None,
    rel_fro: float | None,
    worst_row_rel: float | None,
    matched_ratio: float | None,
) -> str | None:
    """Return the reason why the figures of a pass cannot be true, or None if they can."""
    if latency_us is not None and ci_low_us is not None and ci_high_us is not None:
        if bounds.least_us is not None and latency_us < bounds.least_us:
            return f"{latency_us:.4g} us is below the physics floor of {bounds.least_us:.4g} us"
        if not ci_low_us * (1 / SLACK) <= latency_us <= ci_high_us * SLACK:
            return f"{latency_us:.4g} us lies outside its own interval, {ci_low_us:.4g} to {ci_high_us:.4g} us"
    for name, value, bound in (
        ("rel_fro", rel_fro, bounds.rel_fro),
        ("worst row", worst_row_rel, bounds.worst_row_rel),
    ):
        if value is not None and bound is not None and value > bound:
            return f"{name} {value:.3g} exceeds {bound:.3g}, which no gate lets pass"
    if matched_ratio is not None and matched_ratio < bounds.matched_ratio:
        return f"only {matched_ratio:.4g} of the elements match; a pass needs {bounds.matched_ratio:g}"
    return None
