"""Marks the passes in the database whose figures cannot be true (:mod:`tilegym_db.records.plausible`)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tilegym_db.errors import RecordError
from tilegym_db.records.definition import Definition
from tilegym_db.records.peaks import GpuPeaks
from tilegym_db.records.plausible import bounds_of
from tilegym_db.store import trace_statements

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["judge_passes"]


def judge_passes(connection: DuckDBPyConnection, last: int = -1, plausible: frozenset[str] = frozenset()) -> bool:
    """Set the column ``doubt`` of the passes behind row ``last``, by the definitions and peaks that the database holds.

    Work grows with the number of different points, not of traces. ``plausible`` are the Definitions whose passes need not be
    looked at.
    Returns whether any of them is doubted, or was.
    """
    changed: int = connection.execute(trace_statements.FORGET_DOUBTS, {"last": last}).fetchall()[0][0]
    cursor = connection.execute(trace_statements.POINTS_OF_PASSES, {"last": last, "plausible": sorted(plausible)})
    names = [column[0] for column in cursor.description or ()]
    points = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    if not points:
        return changed > 0
    definitions = _definitions(connection, {point["definition_digest"] for point in points})
    peaks = _peaks(connection)
    bounds = [
        found
        for point in points
        if (definition := definitions.get(point["definition_digest"])) is not None
        and (found := _bounds(definition, point, peaks.get(point["gpu"]))) is not None
    ]
    if bounds:
        changed += connection.execute(trace_statements.DOUBT, {"last": last, "bounds": json.dumps(bounds)}).fetchall()[
            0
        ][0]
    return changed > 0


def _definitions(connection: DuckDBPyConnection, digests: set[str]) -> dict[str, Definition]:
    rows = connection.execute(trace_statements.DEFINITIONS_BY_DIGEST, {"digests": sorted(digests)}).fetchall()
    found = {}
    for digest, record in rows:
        try:
            found[digest] = Definition.from_json(record, f"definition {digest[:12]}")
        except RecordError:
            continue  # of an older version; nothing of it counts as verified
    return found


def _peaks(connection: DuckDBPyConnection) -> dict[str, GpuPeaks]:
    """By GPU, what was published before what was measured here: the floor is the driver's, and the package's is locked."""
    rows = connection.execute(trace_statements.PEAKS_BY_GPU).fetchall()
    return {gpu: GpuPeaks.from_json(record, f"peaks of {gpu}") for gpu, record in rows}


def _bounds(definition: Definition, point: dict[str, Any], peaks: GpuPeaks | None) -> dict[str, Any] | None:
    try:
        found = bounds_of(
            definition, point["axes"], point["dtypes"], peaks, cold_l2=point["cold_l2"], timer=point["timer"]
        )
    except (LookupError, ValueError, ArithmeticError):
        return None  # axes or dtypes that this Definition does not have: no workload of it, so nothing can ask for it
    keys = ("definition_digest", "gpu", "axes_key", "dtypes_key", "cold_l2", "timer")
    return {**{key: point[key] for key in keys}, **vars(found)}
