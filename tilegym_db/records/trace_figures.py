"""A trace's fields as a trace set writes them: whole numbers, rounded figures, compact JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from tilegym_db.records.trace_pieces import ERRORS, NANO, RATIO, Point
from tilegym_db.records.trace_set import DIGEST_DIGITS

__all__ = [
    "Triple",
    "compact",
    "difference",
    "host_of",
    "nanoseconds",
    "point_of",
    "rounded",
    "shortest_number",
    "time_of",
    "triple_of",
]

_TIMES = ("latency_us", "ci_low_us", "ci_high_us", "host_us", "wall_us", "profiled_us")

Triple = tuple[int, int, int]
"""A ratio, and its distances to both ends of its interval, in hundred thousandths."""


def rounded(trace: Mapping[str, Any]) -> dict[str, Any]:
    """A trace's fields (:meth:`Trace.to_dict`) with the digits that a trace set keeps."""
    result = dict(trace)
    correctness = result.get("correctness")
    if correctness is not None:
        errors = {name: float(f"{correctness[name]:.2e}") for name in ERRORS if correctness.get(name) is not None}
        result["correctness"] = {**correctness, **errors}
    if result.get("performance") is not None:
        result["performance"] = {**result["performance"], **_whole_nanoseconds(result["performance"], _TIMES)}
    if result.get("audit") is not None:
        result["audit"] = {**result["audit"], **_whole_nanoseconds(result["audit"], _TIMES)}
    if result.get("envelope") is not None:
        result["envelope"] = {**result["envelope"], "digest": result["envelope"]["digest"][:DIGEST_DIGITS]}
    return result


def _whole_nanoseconds(part: Mapping[str, Any], names: Iterable[str]) -> dict[str, float]:
    """Times of a microsecond or more; a shorter one would lose digits that count."""
    return {name: round(part[name], 3) for name in names if (part.get(name) or 0) >= 1}


def difference(decoded: Mapping[str, Any], trace: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that the columns do not give back, as they are; null for one that is not there."""
    keys = [*trace, *(key for key in decoded if key not in trace)]
    return {key: trace.get(key) for key in keys if decoded.get(key) != trace.get(key)}


def point_of(trace: Mapping[str, Any]) -> Point:
    """Where a trace was measured."""
    dtypes, scalars, layouts = (trace.get(name, {}) for name in ("dtypes", "scalars", "layouts"))
    sol_us = (trace.get("performance") or {}).get("sol_us")
    return Point(trace["workload_uuid"], trace["axes"], dtypes, scalars, layouts, sol_us)


def host_of(trace: Mapping[str, Any]) -> list[Any]:
    """Driver's name of the GPU, compile target, driver, CUDA, and versions of libraries."""
    return [trace["gpu_name"], *(trace.get(key, "") for key in ("sm", "driver", "cuda")), trace.get("libs", {})]


def triple_of(comparison: Mapping[str, Any]) -> Triple:
    """A ratio, and its distances to both ends of its interval, in hundred thousandths."""
    ratio, low, high = (round(comparison[key] * RATIO) for key in ("ratio", "ci_low", "ci_high"))
    return ratio, ratio - low, high - ratio


def nanoseconds(microseconds: float | None) -> int | None:
    """Whole nanoseconds."""
    return None if microseconds is None else round(microseconds * NANO)


def time_of(trace: Mapping[str, Any]) -> datetime:
    """When a trace was taken, in UTC."""
    return datetime.fromisoformat(trace["timestamp"]).astimezone(UTC)


def compact(value: Any) -> str:
    """JSON without white space."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def shortest_number(value: Any) -> str:
    """JSON, a float in the shortest of its spellings: 206e-5 for 0.00206."""
    text = compact(value)
    if not isinstance(value, float) or value == 0:
        return text
    digits, _, exponent = f"{value!r}e0".lower().partition("e")
    whole, _, fraction = digits.partition(".")
    shifted = f"{int(whole + fraction)}e{int(exponent.partition('e')[0]) - len(fraction)}"
    return min(text, shifted, key=len) if float(shifted) == value else text
