"""Two solutions beside each other, at every size where both are verified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilegym_db.store.queries.fastest import slugs

if TYPE_CHECKING:
    from tilegym_db.store.database import Store

__all__ = ["rows_of_both"]

BOTH = """
    SELECT
        a.definition, a.gpu, a.axes_key, a.dtypes_key, a.scalars_key, a.layouts_key, a.blobs_key,
        a.latency_us AS a_us, a.ci_low_us AS a_low_us, a.ci_high_us AS a_high_us,
        b.latency_us AS b_us, b.ci_low_us AS b_low_us, b.ci_high_us AS b_high_us,
        b.latency_us / a.latency_us AS ratio,
        a.run_id = b.run_id AS same_run, a.trace_id AS a_trace, b.trace_id AS b_trace
    FROM best_per_solution a
    JOIN best_per_solution b ON b.definition = a.definition AND b.gpu = a.gpu AND b.dtypes_key = a.dtypes_key
        AND b.axes_key = a.axes_key AND b.scalars_key = a.scalars_key AND b.layouts_key = a.layouts_key
        AND b.blobs_key = a.blobs_key
    WHERE a.solution = $a AND b.solution = $b
        AND ($gpus::VARCHAR[] IS NULL OR list_contains($gpus::VARCHAR[], a.gpu))
    ORDER BY a.gpu, a.dtypes_key, a.axes_key, a.scalars_key, a.layouts_key, a.blobs_key
"""


def rows_of_both(store: Store, a: str, b: str, gpu: str | None = None) -> list[dict[str, Any]]:
    """One row per GPU and size where both have a verified trace; times and the ends of their intervals in microseconds.

    ``ratio`` is the time of ``b`` over that of ``a``; ``same_run`` says whether both were timed in turns, in one run.
    ``gpu`` is a slug or a family.
    """
    return store.rows(BOTH, {"a": a, "b": b, "gpus": slugs(gpu)})
