"""The questions that the package asks of the store: one named text and one function each, with bound parameters.

What they ask about are the views of ``views.sql``; the SQL that makes and fills the tables is in ``statements``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC
from typing import TYPE_CHECKING, Any

from tilegym_db.records import Trace
from tilegym_db.records.hardware import GPU_SLUGS, same_gpu

if TYPE_CHECKING:
    from tilegym_db.store.database import Store

__all__ = [
    "best_rows",
    "count_traces",
    "definition_by_digest",
    "done_keys",
    "leaderboard_rows",
    "measured_gpus",
    "read_traces",
    "traces_of",
    "verified_rows",
]

DONE = """
    SELECT DISTINCT solution_digest, definition_digest, workload_uuid FROM traces
    WHERE gpu = $gpu AND ($tier IS NULL OR tier = $tier)
"""

VERIFIED = """
    SELECT definition, definition_version, definition_digest, op_type, dtypes, dtypes_key, axes, axes_key,
        scalars, scalars_key, layouts, layouts_key, solution, solution_digest, language, role, config, sm,
        latency_us, ci_low_us, ci_high_us, speedup, speedup_ci_low, tier, trace_id,
        coalesce(envelope_cases, 0) AS envelope_cases
    FROM best_per_solution WHERE gpu = $gpu
    ORDER BY definition, dtypes_key, axes_key, scalars_key, layouts_key, latency_us, trace_id
"""

BEST = """
    FROM best
    WHERE ($definition IS NULL OR definition = $definition) AND ($op_type IS NULL OR op_type = $op_type)
        AND ($gpus::VARCHAR[] IS NULL OR list_contains($gpus::VARCHAR[], gpu))
    ORDER BY definition, gpu, dtypes_key, axes_key, scalars_key, layouts_key
"""

LEADERBOARD = """
    FROM leaderboard
    WHERE ($definition IS NULL OR definition = $definition) AND ($op_type IS NULL OR op_type = $op_type)
        AND ($gpus::VARCHAR[] IS NULL OR list_contains($gpus::VARCHAR[], gpu))
    ORDER BY definition, gpu, geomean_speedup DESC NULLS LAST, wins DESC, solution
"""

TRACES_OF = "FROM traces WHERE solution = $solution ORDER BY timestamp DESC, trace_id"
COUNT_TRACES = "SELECT count(*) AS traces FROM trace_records"
LEADERBOARD = """
    FROM leaderboard
    WHERE ($definition IS NULL OR definition = $definition) AND ($op_type IS NULL OR op_type = $op_type)
        AND ($gpus::VARCHAR[] IS NULL OR list_contains($gpus::VARCHAR[], gpu))
    ORDER BY definition, gpu, wins DESC, geomean_speedup DESC NULLS LAST, solution
"""

TRACES_OF = "FROM traces WHERE solution = $solution ORDER BY timestamp DESC, trace_id"
COUNT_TRACES = "SELECT count(*) AS traces FROM traces"
MEASURED_GPUS = "SELECT DISTINCT gpu FROM verified ORDER BY gpu"
TRACES_BY_ID = "FROM trace_records WHERE trace_id IN (SELECT unnest($trace_ids::VARCHAR[]))"
DEFINITION_BY_DIGEST = "SELECT record FROM definition_records WHERE digest = $digest"

_KEYS = ("config_key", "axes_key", "dtypes_key", "scalars_key", "layouts_key")


def done_keys(store: Store, gpu: str, tier: str | None = None) -> set[tuple[str, str, str]]:
    """What was measured on a GPU, whatever the verdict: (solution digest, definition digest, workload uuid).

    ``tier`` None means any tier.
    """
    rows = store.rows(DONE, {"gpu": gpu, "tier": tier})
    return {(row["solution_digest"], row["definition_digest"], row["workload_uuid"]) for row in rows}


def verified_rows(store: Store, gpu: str) -> list[dict[str, Any]]:
    """The fastest verified trace of every solution per shape on one GPU slug, ordered by shape, then latency.

    ``config`` and ``scalars`` are dicts; times are microseconds; ``speedup`` is against stock code, or None.
    """
    return _parsed(store.rows(VERIFIED, {"gpu": gpu}))


def best_rows(
    store: Store, definition: str | None = None, op_type: str | None = None, gpu: str | None = None
) -> list[dict[str, Any]]:
    """The fastest verified trace per definition, GPU and shape; columns as in the view ``traces``.

    ``gpu`` is a slug or a family: ``h100`` covers ``h100-sxm`` and ``h100-pcie``.
    """
    return _parsed(store.rows(BEST, {"definition": definition, "op_type": op_type, "gpus": _slugs(gpu)}))


def leaderboard_rows(
    store: Store, definition: str | None = None, op_type: str | None = None, gpu: str | None = None
) -> list[dict[str, Any]]:
    """The view ``leaderboard``, most wins first within a definition and GPU; arguments as for :func:`best_rows`."""
    return store.rows(LEADERBOARD, {"definition": definition, "op_type": op_type, "gpus": _slugs(gpu)})


def traces_of(store: Store, solution: str) -> list[dict[str, Any]]:
    """Every trace of a Solution by name, newest first, whatever its digest was then; columns as in the view."""
    return _parsed(store.rows(TRACES_OF, {"solution": solution}))


def count_traces(store: Store) -> int:
    """How many traces the store holds."""
    return int(store.rows(COUNT_TRACES)[0]["traces"])


def measured_gpus(store: Store) -> list[str]:
    """The GPU slugs that have a verified trace."""
    return [row["gpu"] for row in store.rows(MEASURED_GPUS)]


def definition_by_digest(store: Store, digest: str) -> dict[str, Any] | None:
    """The text of the Definition that a trace was measured against, as parsed JSON; None if it was never seen.

    Old texts are kept as they were written: today's ``Definition`` need not accept them.
    """
    rows = store.rows(DEFINITION_BY_DIGEST, {"digest": digest})
    return dict(json.loads(rows[0]["record"])) if rows else None


def read_traces(store: Store, trace_ids: Iterable[str]) -> dict[str, Trace]:
    """trace_id -> the Trace record, as it was journaled."""
    rows = store.rows(TRACES_BY_ID, {"trace_ids": list(trace_ids)})
    return {row["trace_id"]: _trace_of(row, f"{store.path}: trace {row['trace_id']}") for row in rows}


def _slugs(gpu: str | None) -> list[str] | None:
    return None if gpu is None else sorted({gpu, *(slug for slug in GPU_SLUGS if same_gpu(gpu, slug))})


def _parsed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``config`` and ``scalars`` come as JSON text."""
    for row in rows:
        row["config"], row["scalars"] = json.loads(row["config"]), json.loads(row["scalars"])
    return rows


def _trace_of(row: dict[str, Any], where: str) -> Trace:
    content = _without_nulls({key: value for key, value in row.items() if key not in _KEYS})
    content["config"], content["scalars"] = json.loads(row["config"]), json.loads(row["scalars"])
    content["timestamp"] = row["timestamp"].replace(tzinfo=UTC)
    return Trace.from_dict(content, where)


def _without_nulls(value: Any) -> Any:
    """DuckDB gives an absent key of a struct as null; the record's own default is what was meant."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
