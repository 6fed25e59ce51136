"""What two runs found, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilegym_db.store.database import Store

__all__ = ["rows_of_two_runs", "run_facts", "run_ids"]

# Of each pair that a run measured more than once, the highest tier's newest.
_OF_RUN = """
    SELECT * FROM traces WHERE run_id = {run} AND is_counted(origin, trusted)
    QUALIFY row_number() OVER (
        PARTITION BY definition, solution, config_key, dtypes_key, axes_key, scalars_key, layouts_key, blobs_key
        ORDER BY tier = 'promotion' DESC, timestamp DESC, trace_id) = 1
"""
PAIRS = f"""
    WITH one AS ({_OF_RUN.format(run="$a")}), two AS ({_OF_RUN.format(run="$b")})
    SELECT definition, solution, config_key, dtypes_key, axes_key, scalars_key, layouts_key, blobs_key,
        coalesce(one.language, two.language) AS language, one.solution_digest = two.solution_digest AS same_source,
        one.status AS a_status, two.status AS b_status, one.reason AS a_reason, two.reason AS b_reason,
        one.tier AS a_tier, two.tier AS b_tier, one.trace_id AS a_trace, two.trace_id AS b_trace,
        one.latency_us AS a_us, one.ci_low_us AS a_low_us, one.ci_high_us AS a_high_us,
        two.latency_us AS b_us, two.ci_low_us AS b_low_us, two.ci_high_us AS b_high_us
    FROM one FULL JOIN two USING (definition, solution, config_key, dtypes_key, axes_key, scalars_key, layouts_key, blobs_key)
    ORDER BY definition, solution, config_key, dtypes_key, axes_key, scalars_key, layouts_key, blobs_key
"""
FACTS = """
    SELECT run_id, min(timestamp) AS began, max(timestamp) AS ended, count(*) AS traces,
        count(*) FILTER (status = 'PASSED') AS passed, any_value(gpu) AS gpu, any_value(gpu_name) AS gpu_name,
        any_value(driver) AS driver, any_value(cuda) AS cuda, any_value(libs) AS libs, any_value(host) AS host
    FROM traces WHERE run_id = $run AND is_counted(origin, trusted) GROUP BY run_id
"""
RUNS = """
    SELECT run_id FROM traces WHERE is_counted(origin, trusted) GROUP BY run_id ORDER BY max(timestamp) DESC, run_id
"""


def rows_of_two_runs(store: Store, a: str, b: str) -> list[dict[str, Any]]:
    """One row for each solution, config and shape of either run; columns ``a_...`` or ``b_...`` are None where it lacks it."""
    return store.rows(PAIRS, {"a": a, "b": b})


def run_facts(store: Store, run: str) -> dict[str, Any]:
    """When and where a run was, and how many of its traces passed."""
    (row,) = store.rows(FACTS, {"run": run})
    return row


def run_ids(store: Store) -> list[str]:
    """Every run that the store has traces of, newest first."""
    return [row["run_id"] for row in store.rows(RUNS)]
