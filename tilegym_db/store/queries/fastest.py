"""Queries the fastest verified kernels and compares two solutions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from tilegym_db.records.hardware import GPU_SLUGS, gpus_meant
from tilegym_db.store.database import parsed
from tilegym_db.store.queries.measured import LIKELY_FASTEST_MARGIN, LIKELY_FASTEST_US

if TYPE_CHECKING:
    from tilegym_db.store.database import Store


ALL_ROWS = (1 << 62) - 1

TABLE_COLUMNS = (
    "definition", "gpu", "axes_key", "blobs_key", "dtypes_key", "scalars_key", "layouts_key", "solution", "language",
    "config_key", "latency_us", "profiled_us", "speedup", "strongest_baseline", "strongest_ratio", "sol_ratio", "workload_uuid",
    "origin",
)  # fmt: skip
"""Columns of the view ``best`` that a table shows; a query of these alone is several times quicker."""

BEST = """
    FROM best
    WHERE ($definition IS NULL OR definition = $definition) AND ($op_type IS NULL OR op_type = $op_type)
        AND ($gpus::VARCHAR[] IS NULL OR list_contains($gpus::VARCHAR[], gpu))
        AND list_bool_and(list_transform(
            map_entries($axes::MAP(VARCHAR, BIGINT)), lambda a: axes[a.key] IS NOT DISTINCT FROM a.value)) IS NOT FALSE
    ORDER BY definition, gpu, dtypes_key, axes_key, scalars_key, layouts_key, blobs_key
    LIMIT $most
"""

BEST_IN_A_LANGUAGE = BEST.replace(
    "FROM best\n",
    """FROM (
        FROM best_per_solution WHERE language = $language
        QUALIFY row_number() OVER (PARTITION BY definition, gpu, dtypes_key, axes_key, scalars_key, layouts_key, blobs_key
            ORDER BY latency_us, trace_id) = 1)\n""",
)

LEADERBOARD = """
    FROM leaderboard
    WHERE ($definition IS NULL OR definition = $definition) AND ($op_type IS NULL OR op_type = $op_type)
        AND ($gpus::VARCHAR[] IS NULL OR list_contains($gpus::VARCHAR[], gpu))
    ORDER BY definition, gpu, wins DESC, geomean_speedup DESC NULLS LAST, solution
"""

# Sizes are ordered by the speed of light if it is known, else by the number of elements of all axes.
_SIZE = "coalesce(sol_us, list_product(map_values(axes)))"
SIZES = f"""
    SELECT definition, gpu, solution, dtypes_key,
        list(latency_us ORDER BY {_SIZE}, axes_key, scalars_key, layouts_key, blobs_key, trace_id) AS latencies_us
    FROM best_per_solution
    WHERE ($definition IS NULL OR definition = $definition) AND ($op_type IS NULL OR op_type = $op_type)
        AND ($solution IS NULL OR solution = $solution)
        AND ($gpus::VARCHAR[] IS NULL OR list_contains($gpus::VARCHAR[], gpu))
    GROUP BY definition, gpu, solution, dtypes_key
    QUALIFY $all_dtypes OR row_number() OVER (
        PARTITION BY definition, gpu, solution ORDER BY count(*) DESC, dtypes_key) = 1
    ORDER BY definition, gpu, solution, dtypes_key
"""

SCREENED = "SELECT EXISTS (FROM trace_records WHERE tier = 'screen' AND status = 'PASSED') AS some"

UNVERIFIED = """
    SELECT count(*) AS pairs FROM promotable p
    WHERE ($definition IS NULL OR p.definition = $definition) AND ($op_type IS NULL OR p.op_type = $op_type)
        AND ($gpus::VARCHAR[] IS NULL OR list_contains($gpus::VARCHAR[], p.gpu))
"""

TRACED_GPUS = "SELECT DISTINCT gpu FROM trace_records WHERE is_counted(origin, trusted) ORDER BY gpu"

# `standing` has every verified trace and older ones of the same points.
MEASURED_GPUS = "SELECT DISTINCT gpu FROM standing ORDER BY gpu"


def count_unverified(
    store: Store, definition: str | None = None, op_type: str | None = None, gpu: str | None = None
) -> int:
    """Return the number of pairs that only passed a screen; arguments as for :func:`best_rows`."""
    if not store.rows(SCREENED)[0]["some"]:  # the next query reads every verified trace first
        return 0
    rows = store.rows(UNVERIFIED, {"definition": definition, "op_type": op_type, "gpus": slugs(gpu)})
    return int(rows[0]["pairs"])


def best_rows(
    store: Store,
    definition: str | None = None,
    op_type: str | None = None,
    gpu: str | None = None,
    *,
    axes: Mapping[str, int] | None = None,
    language: str | None = None,
    limit: int | None = None,
    for_table: bool = False,
) -> list[dict[str, Any]]:
    """Return the fastest verified trace per definition, GPU and shape; columns as in the view ``traces``.

    Args:
        gpu: a slug or a family: ``h100`` covers ``h100-sxm`` and ``h100-pcie``.
        axes: only shapes with these sizes; other axes may have any.
        language: return the fastest in this language, even if another one is faster.
        limit: maximum number of rows.
        for_table: return the :data:`TABLE_COLUMNS` only.
    """
    values = {
        "definition": definition,
        "op_type": op_type,
        "gpus": slugs(gpu),
        "axes": dict(axes or {}),
        "most": ALL_ROWS if limit is None else limit,
    }
    query = BEST if language is None else BEST_IN_A_LANGUAGE
    values |= {} if language is None else {"language": language}
    if for_table:
        return store.rows(f"SELECT {', '.join(TABLE_COLUMNS)} {query}", values)
    return parsed(store.rows(query, values))


def leaderboard_rows(
    store: Store, definition: str | None = None, op_type: str | None = None, gpu: str | None = None
) -> list[dict[str, Any]]:
    """Return the view ``leaderboard``, most wins first within a definition and GPU; arguments as for :func:`best_rows`."""
    return store.rows(LEADERBOARD, {"definition": definition, "op_type": op_type, "gpus": slugs(gpu)})


def size_rows(
    store: Store,
    definition: str | None = None,
    op_type: str | None = None,
    gpu: str | None = None,
    *,
    solution: str | None = None,
    all_dtypes: bool = False,
) -> list[dict[str, Any]]:
    """Return ``latencies_us`` of each verified solution and GPU, smallest size first; arguments as for
    :func:`best_rows`.

    Args:
        solution: only this one.
        all_dtypes: a row for each dtype binding; otherwise the one measured at most sizes.
    """
    return store.rows(
        SIZES,
        {
            "definition": definition,
            "op_type": op_type,
            "gpus": slugs(gpu),
            "solution": solution,
            "all_dtypes": all_dtypes,
        },
    )


def measured_gpus(store: Store) -> list[str]:
    """Return the GPU slugs that have a verified trace."""
    return [row["gpu"] for row in store.rows(MEASURED_GPUS)]


def traced_gpus(store: Store) -> list[str]:
    """Return the GPU slugs that have any trace that counts."""
    return [row["gpu"] for row in store.rows(TRACED_GPUS)]


def slugs(gpu: str | None) -> list[str] | None:
    """Return every GPU name that ``gpu`` includes (``h100`` includes ``h100-sxm``), or None for all GPUs."""
    return None if gpu is None else gpus_meant(gpu, GPU_SLUGS) or [gpu]


# ---- solution pairs -------------------------------------------------------------------------------
# Compares two solutions at every size where both are verified.

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
    """Return one row per GPU and size where both have a verified trace; times and interval ends in microseconds.

    ``ratio`` is the time of ``b`` divided by that of ``a``. ``same_run`` is True if both were timed alternately in one
    run. ``gpu`` is a slug or a family.
    """
    return store.rows(BOTH, {"a": a, "b": b, "gpus": slugs(gpu)})


# ---- side by side ---------------------------------------------------------------------------------

Winner = Literal["a", "b", "neither"]


def winner(row: Mapping[str, Any]) -> tuple[Winner, str]:
    """Return which of two solutions is faster, and the reason why that is known or not.

    Args:
        row: as :func:`tilegym_db.store.queries.fastest.rows_of_both` returns it.
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
