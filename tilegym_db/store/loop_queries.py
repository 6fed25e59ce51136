"""The questions that the loop asks of the store: one named text and one function each, with bound parameters."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilegym_db.store.database import Store

__all__ = [
    "cited_cases",
    "cited_searches",
    "cited_traces",
    "model_run_rows",
    "promotion_rows",
    "task_rows",
    "traced_digests",
    "traces_of_source",
    "verified_baselines",
    "verified_on",
]

VERIFIED_ON = """
    SELECT workload_uuid, solution, role, trace_id, latency_us, sol_us FROM best_per_solution
    WHERE gpu = $gpu AND definition = $definition AND list_contains($uuids::VARCHAR[], workload_uuid)
    ORDER BY workload_uuid, latency_us, trace_id
"""
VERIFIED_BASELINES = """
    SELECT definition_digest, workload_uuid, gpu, solution, latency_us FROM best_per_solution
    WHERE role = 'baseline' AND list_contains($digests::VARCHAR[], definition_digest)
"""
PROMOTIONS = """
    FROM promotions
    WHERE ($definition IS NULL OR definition = $definition)
        AND ($gpus::VARCHAR[] IS NULL OR list_contains($gpus::VARCHAR[], gpu))
    ORDER BY id
"""
TASKS = "FROM tasks WHERE $prefix IS NULL OR starts_with(id, $prefix) ORDER BY created, id"
TRACES_OF_SOURCE = """
    SELECT trace_id FROM traces
    WHERE solution_digest = $digest AND definition_digest = $definition_digest AND gpu = $gpu
        AND list_contains($uuids::VARCHAR[], workload_uuid) AND list_contains($tiers::VARCHAR[], tier)
        AND is_counted(origin, trusted)
    ORDER BY timestamp, trace_id
"""
CITED_TRACES = """
    SELECT
        c.trace_id, t.trace_id IS NOT NULL AS is_here, t.status,
        EXISTS (FROM revocations r WHERE r.definition_digest = t.definition_digest
            AND r.solution_digest = t.solution_digest AND r.gpu = t.gpu AND r.revoked_at >= t.timestamp
            AND coalesce(r.config_key, t.config_key) = t.config_key
            AND coalesce(r.workload_uuid, t.workload_uuid) = t.workload_uuid) AS is_revoked
    FROM (SELECT unnest($trace_ids::VARCHAR[]) AS trace_id) c LEFT JOIN traces t ON t.trace_id = c.trace_id
"""
MODEL_RUNS = """
    SELECT run_id, origin, gpu, dtype, batch, prompt_tokens, new_tokens, speedup, speedup_ci_low, speedup_ci_high, evidence_level
    FROM model_runs WHERE model = $model AND list_contains($gpus::VARCHAR[], gpu) AND is_counted(origin, trusted)
    ORDER BY timestamp DESC
"""
TRACED_DIGESTS = "SELECT DISTINCT definition, definition_digest FROM trace_records WHERE is_counted(origin, trusted)"
CITED_CASES = """
    SELECT gpu || '/' || solution || '/' || axes_key AS case_name,
        bool_or(trace_id IN (SELECT trace_id FROM verified)) AS is_verified
    FROM traces WHERE status = 'PASSED' AND tier = 'promotion'
        AND list_contains($cases::VARCHAR[], gpu || '/' || solution || '/' || axes_key)
    GROUP BY ALL
"""
CITED_SEARCHES = "SELECT DISTINCT gpu || '/' || solution AS search FROM searches"


def verified_on(store: Store, definition: str, gpu: str, uuids: list[str]) -> list[dict[str, Any]]:
    """The fastest verified trace of each Solution on each of some Workloads, by Workload, the fastest first."""
    return store.rows(VERIFIED_ON, {"definition": definition, "gpu": gpu, "uuids": uuids})


def verified_baselines(
    store: Store, definition_digests: Collection[str]
) -> dict[tuple[str, str, str], dict[str, float]]:
    """Of some Definitions: digest, Workload and GPU -> baseline -> its verified latency in microseconds there."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in store.rows(VERIFIED_BASELINES, {"digests": [*definition_digests]}):
        case = row["definition_digest"], row["workload_uuid"], row["gpu"]
        found.setdefault(case, {})[row["solution"]] = row["latency_us"]
    return found


def promotion_rows(store: Store, definition: str | None = None, gpus: list[str] | None = None) -> list[dict[str, Any]]:
    """Every promotion with what may be said of it now, by id."""
    return store.rows(PROMOTIONS, {"definition": definition, "gpus": gpus})


def task_rows(store: Store, prefix: str | None = None) -> list[dict[str, Any]]:
    """The tasks, or those whose id begins so, in the order in which they were made."""
    return store.rows(TASKS, {"prefix": prefix})


def traces_of_source(
    store: Store, digest: str, definition_digest: str, gpu: str, uuids: list[str], tiers: Collection[str]
) -> list[str]:
    """The ids of what was measured of one source on some Workloads in some tiers, under whatever name, oldest first."""
    rows = store.rows(
        TRACES_OF_SOURCE,
        {"digest": digest, "definition_digest": definition_digest, "gpu": gpu, "uuids": uuids, "tiers": [*tiers]},
    )
    return [row["trace_id"] for row in rows]


def model_run_rows(store: Store, model: str, gpus: list[str]) -> list[dict[str, Any]]:
    """What was measured of a model itself, newest first."""
    return store.rows(MODEL_RUNS, {"model": model, "gpus": gpus})


def traced_digests(store: Store) -> dict[str, set[str]]:
    """Definition -> the digests of it that traces which count are about."""
    found: dict[str, set[str]] = {}
    for row in store.rows(TRACED_DIGESTS):
        found.setdefault(row["definition"], set()).add(row["definition_digest"])
    return found


def cited_traces(store: Store, trace_ids: list[str]) -> list[dict[str, Any]]:
    """For each id: whether the trace is here, its status, and whether a later failure took it back."""
    return store.rows(CITED_TRACES, {"trace_ids": trace_ids})


def cited_cases(store: Store, cases: list[str]) -> dict[str, bool]:
    """``GPU/SOLUTION/AXES`` -> whether today's source is verified there, of those that ever passed a promotion."""
    return {row["case_name"]: row["is_verified"] for row in store.rows(CITED_CASES, {"cases": cases})}


def cited_searches(store: Store) -> set[str]:
    """``GPU/SOLUTION`` of every search over configs that is recorded with today's sources."""
    return {row["search"] for row in store.rows(CITED_SEARCHES)}
