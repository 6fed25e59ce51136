"""Questions of the loop to the database: awards, tasks, verified kernels, and what patterns cite.

Each query is one named text and one function with bound parameters.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tilegym_db.store.connection import Store

VERIFIED_ON = """
    SELECT workload_uuid, solution, role, trace_id, latency_us, sol_us FROM best_per_solution
    WHERE gpu = $gpu AND definition = $definition AND list_contains($uuids::VARCHAR[], workload_uuid)
    ORDER BY workload_uuid, latency_us, trace_id
"""
VERIFIED_BASELINES = """
    SELECT definition_digest, workload_uuid, gpu, solution, latency_us FROM best_per_solution
    WHERE role = 'baseline' AND list_contains($digests::VARCHAR[], definition_digest)
"""
AWARDS = """
    FROM promotions
    WHERE $gpus::VARCHAR[] IS NULL OR list_contains($gpus::VARCHAR[], gpu)
    ORDER BY id
"""
TASKS = "FROM tasks ORDER BY created, id"
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
        EXISTS (FROM revocations r WHERE takes_back(r, t)) AS is_revoked
    FROM (SELECT unnest($trace_ids::VARCHAR[]) AS trace_id) c LEFT JOIN traces t ON t.trace_id = c.trace_id
"""
RUNS_OF_MODELS = """
    SELECT run_id, origin, gpu, dtype, batch, prompt_tokens, new_tokens, speedup, speedup_ci_low, speedup_ci_high, evidence_level
    FROM model_runs WHERE model = $model AND list_contains($gpus::VARCHAR[], gpu) AND is_counted(origin, trusted)
    ORDER BY timestamp DESC
"""
TIMED_PASSES = """
    SELECT definition, definition_digest, solution, gpu, axes, dtypes, latency_us FROM verified
    WHERE latency_us > 0 ORDER BY definition, gpu, solution, axes_key
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
    """Return each Solution's fastest verified trace on each given Workload, by Workload, fastest first."""
    return store.rows(VERIFIED_ON, {"definition": definition, "gpu": gpu, "uuids": uuids})


def verified_baselines(
    store: Store, definition_digests: Collection[str]
) -> dict[tuple[str, str, str], dict[str, float]]:
    """Return (definition digest, Workload, GPU) -> baseline -> its verified latency in microseconds."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in store.rows(VERIFIED_BASELINES, {"digests": [*definition_digests]}):
        case = row["definition_digest"], row["workload_uuid"], row["gpu"]
        found.setdefault(case, {})[row["solution"]] = row["latency_us"]
    return found


def award_rows(store: Store, gpus: list[str] | None = None) -> list[dict[str, Any]]:
    """Return every award, or those on some GPUs, with its current state, by id."""
    return store.rows(AWARDS, {"gpus": gpus})


def task_rows(store: Store) -> list[dict[str, Any]]:
    """Return all tasks in the order of creation."""
    return store.rows(TASKS)


def traces_of_source(
    store: Store, digest: str, definition_digest: str, gpu: str, uuids: list[str], tiers: Collection[str]
) -> list[str]:
    """Return the ids of the traces of one source on some Workloads in some tiers, under any name, oldest first."""
    rows = store.rows(
        TRACES_OF_SOURCE,
        {"digest": digest, "definition_digest": definition_digest, "gpu": gpu, "uuids": uuids, "tiers": [*tiers]},
    )
    return [row["trace_id"] for row in rows]


def model_run_rows(store: Store, model: str, gpus: list[str]) -> list[dict[str, Any]]:
    """Return the measurements of a whole model, newest first."""
    return store.rows(RUNS_OF_MODELS, {"model": model, "gpus": gpus})


def traced_digests(store: Store) -> dict[str, set[str]]:
    """Return Definition -> its digests in traces that count."""
    found: dict[str, set[str]] = {}
    for row in store.rows(TRACED_DIGESTS):
        found.setdefault(row["definition"], set()).add(row["definition_digest"])
    return found


def timed_passes(store: Store) -> dict[str, list[dict[str, Any]]]:
    """Return digest of a Definition -> its verified passes with a time: solution, GPU, axes, dtypes, latency_us."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in store.rows(TIMED_PASSES):
        found.setdefault(row["definition_digest"], []).append(row)
    return found


def cited_traces(store: Store, trace_ids: list[str]) -> list[dict[str, Any]]:
    """Return for each id: whether the trace exists, its status, and whether a failure revoked it."""
    return store.rows(CITED_TRACES, {"trace_ids": trace_ids})


def cited_cases(store: Store, cases: list[str]) -> dict[str, bool]:
    """Return ``GPU/SOLUTION/AXES`` -> True if today's source is verified there, for cases that were ever verified."""
    return {row["case_name"]: row["is_verified"] for row in store.rows(CITED_CASES, {"cases": cases})}


def cited_searches(store: Store) -> set[str]:
    """Return ``GPU/SOLUTION`` of every recorded config search with today's sources."""
    return {row["search"] for row in store.rows(CITED_SEARCHES)}
