"""Queries for reports: kernels per shape with their evidence, coverage, open work, and changes."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from tilegym_db.records.loop import ModelRun, claims_of

if TYPE_CHECKING:
    from tilegym_db.store.connection import Store


_SHAPE = "definition, gpu, dtypes_key, axes_key, scalars_key, layouts_key, blobs_key"

# `is_fastest` marks the row of the view `best`: both break ties by trace_id.
EVIDENCE = f"""
    SELECT definition, op_type, gpu, axes_key, dtypes_key, scalars_key, layouts_key, blobs_key,
        solution, language, role, config, config_key, latency_us, ci_low_us, ci_high_us, samples, speedup, speedup_ci_low,
        sol_us, sol_ratio, strongest_baseline, strongest_ratio, profiled_us, trace_id, timestamp, origin, gpu_name, driver,
        array_to_string(list_transform(map_entries(libs), lambda e: e.key || ' ' || e.value), ', ') AS libs,
        tier, sandbox_level, cases, envelope_cases,
        envelope_digest, workload_uuid, rel_fro, max_abs, timer, clock_mhz, solution_digest,
        row_number() OVER (PARTITION BY {_SHAPE} ORDER BY latency_us, trace_id) = 1 AS is_fastest,
        row_number() OVER (PARTITION BY {_SHAPE}, language ORDER BY latency_us, trace_id) = 1 AS is_fastest_in_language
    FROM best_per_solution
    ORDER BY {_SHAPE}, latency_us, trace_id
"""

# Passes of what was timed more than once. A pass that was never repeated has no history.
HISTORY = f"""
    SELECT solution, gpu, axes_key, dtypes_key, scalars_key, layouts_key, blobs_key, config_key, tier, number, timestamp,
        latency_us, ci_low_us, ci_high_us, ratio, change, is_current, driver, trace_id
    FROM history
    QUALIFY count(*) OVER (PARTITION BY solution, {_SHAPE}, config_key, tier) > 1
    ORDER BY solution, {_SHAPE}, timestamp, trace_id
"""

# Every operator, language and GPU with any data. `workloads` is the number to verify.
COVERAGE = """
    WITH places AS (SELECT DISTINCT gpu FROM trace_records WHERE is_counted(origin, trusted)),
        languages AS (SELECT unnest(['triton', 'tilelang', 'cutile', 'python']) AS language),
        kernels AS (SELECT definition, language, count(*) AS solutions FROM solutions GROUP BY ALL),
        shapes AS (SELECT definition, count(*) AS workloads FROM workloads GROUP BY ALL),
        proofs AS (
            SELECT definition, language, gpu, count(DISTINCT workload_uuid) AS verified
            FROM best_per_solution SEMI JOIN workloads w ON w.uuid = workload_uuid GROUP BY ALL)
    SELECT d.name AS definition, d.op_type, p.gpu, l.language,
        coalesce(k.solutions, 0) AS solutions, coalesce(s.workloads, 0) AS workloads, coalesce(v.verified, 0) AS verified
    FROM definitions d CROSS JOIN places p CROSS JOIN languages l
    LEFT JOIN kernels k ON k.definition = d.name AND k.language = l.language
    LEFT JOIN shapes s ON s.definition = d.name
    LEFT JOIN proofs v ON v.definition = d.name AND v.language = l.language AND v.gpu = p.gpu
    ORDER BY d.op_type, d.name, p.gpu, l.language
"""

# Open work: operators declared open, kernels without a verified trace, and screens that wait for `verify`.
OPEN = """
    SELECT 'operator is open' AS kind, name AS definition, '' AS solution, '' AS gpu, 0 AS cases FROM definitions WHERE is_open
    UNION ALL
    SELECT 'solution not verified on any GPU', definition, name, '', 0 FROM solutions
    WHERE name NOT IN (SELECT solution FROM verified)
    UNION ALL
    SELECT 'passed a screen, waits for verify', definition, solution, gpu, count(*) FROM promotable GROUP BY ALL
    ORDER BY kind, definition, solution, gpu
"""

# A pass of the promotion tier has an award if it beat the best baseline by the required ratio; stock code never
# counts. A regression is a newest pass whose whole interval lies above that of the pass before it, with the same source
# and shape or not.
CHANGES = """
    WITH passes AS (
        SELECT definition, solution, gpu, role, timestamp, trace_id, latency_us, ci_low_us,
            lag(ci_high_us) OVER earlier AS ci_high_before, lag(latency_us) OVER earlier AS latency_before
        FROM traces WHERE status = 'PASSED' AND tier = 'promotion' AND is_counted(origin, trusted) AND doubt IS NULL
        WINDOW earlier AS (
            PARTITION BY definition, solution, config_key, gpu, dtypes_key, axes_key, scalars_key, layouts_key, blobs_key
            ORDER BY timestamp, trace_id))
    SELECT if(trace_id IN (SELECT trace_id FROM promotions), 'award', 'verified') AS kind,
        timestamp::DATE::VARCHAR AS day, definition, solution, gpu, count(*) AS cases,
        max(timestamp) AS newest, NULL::DOUBLE AS ratio, arg_max(trace_id, row(timestamp, trace_id)) AS trace_id
    FROM passes WHERE role = 'kernel' AND ($since::TIMESTAMP IS NULL OR timestamp >= $since::TIMESTAMP)
    GROUP BY ALL
    UNION ALL
    SELECT 'regression', timestamp::DATE::VARCHAR, definition, solution, gpu, count(*), max(timestamp),
        max(latency_us / latency_before), arg_max(trace_id, row(timestamp, trace_id))
    FROM passes
    WHERE ci_low_us > ci_high_before AND ($since::TIMESTAMP IS NULL OR timestamp >= $since::TIMESTAMP)
    GROUP BY ALL
    UNION ALL
    SELECT 'revocation', r.revoked_at::DATE::VARCHAR, t.definition, t.solution, r.gpu, count(*), max(r.revoked_at), NULL,
        arg_max(r.trace_id, row(r.revoked_at, r.trace_id))
    FROM revocations r JOIN trace_records t ON t.trace_id = r.trace_id
    WHERE ($since::TIMESTAMP IS NULL OR r.revoked_at >= $since::TIMESTAMP)
        AND EXISTS (
            FROM trace_records p WHERE p.status = 'PASSED' AND p.tier = 'promotion' AND is_counted(p.origin, p.trusted)
                AND takes_back(r, p))
    GROUP BY ALL
    ORDER BY newest DESC, kind, definition, solution, gpu
"""

# Kernels newly verified since then, and those with an award; one row per operator or family, and GPU.
_FRESH = """
    WITH fresh AS (
        SELECT v.definition, v.op_type, v.gpu, v.language, v.workload_uuid, v.solution, p.ratio
        FROM verified v LEFT JOIN promotions p ON p.trace_id = v.trace_id AND p.status = 'standing'
        WHERE v.role = 'kernel' AND v.timestamp >= $since::TIMESTAMP
            AND (p.id IS NOT NULL OR NOT EXISTS (
                FROM traces e WHERE e.solution_digest = v.solution_digest AND e.gpu = v.gpu AND e.tier = 'promotion'
                    AND e.definition_digest = v.definition_digest AND e.workload_uuid = v.workload_uuid
                    AND e.status = 'PASSED' AND e.timestamp < $since::TIMESTAMP)))
"""
_KERNELS = """gpu,
        array_to_string(list_sort(list(DISTINCT language)), ', ') AS languages,
        count(DISTINCT definition) AS operators,
        count(DISTINCT (definition, workload_uuid)) AS shapes,
        count(DISTINCT (definition, workload_uuid)) FILTER (ratio IS NOT NULL) AS awards,
        max(ratio) AS ratio, coalesce(arg_max(solution, row(ratio, solution)) FILTER (ratio IS NOT NULL), '') AS solution
    FROM fresh"""
KERNELS = f"{_FRESH} SELECT definition, {_KERNELS} GROUP BY definition, gpu ORDER BY definition, gpu"
FAMILIES = f"{_FRESH} SELECT op_type, {_KERNELS} GROUP BY op_type, gpu ORDER BY op_type, gpu"

# The state of each GPU: the language of the fastest solution of each shape.
STANDING_OF_GPUS = """
    SELECT gpu, count(DISTINCT definition) AS operators, count(*) AS shapes,
        count(*) FILTER (language = 'triton') AS triton, count(*) FILTER (language = 'tilelang') AS tilelang,
        count(*) FILTER (language = 'cutile') AS cutile, count(*) FILTER (language = 'python') AS python
    FROM best GROUP BY gpu ORDER BY gpu
"""

DEFINITIONS = """
    SELECT name, op_type, version, description, is_open, record::VARCHAR AS record FROM definitions ORDER BY op_type, name
"""

SOLUTIONS = """
    SELECT name, definition, op_type, language, role, coalesce(provides, '') AS provides, coalesce(author, '') AS author,
        coalesce(description, '') AS description, digest
    FROM solutions ORDER BY name
"""

PEAKS = """
    SELECT gpu, gpu_name, driver, copy_bytes_per_s, read_bytes_per_s, float8_flops_per_s, bfloat16_flops_per_s,
        float32_flops_per_s, launch_us
    FROM peaks WHERE is_current ORDER BY gpu
"""

MODELS = """
    SELECT r.evidence_level, r.model, r.layers, r.gpu, r.dtype, r.batch, r.prompt_tokens, r.new_tokens, w.way, w.library,
        w.ttft_ms, w.tpot_ms, coalesce(w.tokens_per_s, w.prefill_tokens_per_s) AS tokens_per_s, w.speedup, w.speedup_ci_low,
        w.speedup_ci_high, CASE WHEN w.way = 'patched' THEN r.gpu_share END AS gpu_share, r.proved, w.reason,
        strftime(r.timestamp, '%Y-%m-%d') AS day, r.timestamp, r.origin, r.run_id,
        CASE WHEN w.way = 'patched' THEN r.record END AS record
    FROM model_ways w JOIN model_runs r ON r.run_id = w.run_id
    WHERE is_counted(r.origin, r.trusted)
    ORDER BY r.timestamp DESC, r.run_id, list_position(['stock', 'patched'], w.way) NULLS LAST, w.way
"""

ATTEMPTS = """
    SELECT verdict, gate, count(*) AS attempts, count(DISTINCT task) AS tasks, max(timestamp) AS newest
    FROM attempts WHERE timestamp >= $since::TIMESTAMP
    GROUP BY verdict, gate ORDER BY attempts DESC, verdict, gate
"""

# The shape with the most work characterises a kernel best: small shapes are bound by the launch.
FURTHEST = """
    WITH fastest AS (
        SELECT definition, gpu, solution, axes_key, dtypes_key, latency_us, sol_us, sol_ratio FROM best_per_solution
        WHERE sol_ratio IS NOT NULL
        QUALIFY row_number() OVER (PARTITION BY definition, gpu, dtypes_key, axes_key, scalars_key, layouts_key, blobs_key
            ORDER BY latency_us, trace_id) = 1)
    FROM fastest
    QUALIFY row_number() OVER (PARTITION BY definition, gpu ORDER BY sol_us DESC, axes_key, dtypes_key, latency_us, solution) = 1
    ORDER BY sol_ratio, definition, gpu
"""

NEWEST = "SELECT max(timestamp) AS newest FROM trace_records WHERE is_counted(origin, trusted)"


def evidence_rows(store: Store) -> list[dict[str, Any]]:
    """Return each solution's fastest verified trace per shape and GPU, with its evidence.

    Calls are columns of keys, and ``config`` is JSON text: among tens of thousands of rows most maps repeat. Two columns are not
    in the view ``traces``: ``is_fastest`` of its shape, and ``is_fastest_in_language``.
    """
    return store.rows(EVIDENCE)


def history_rows(store: Store) -> list[dict[str, Any]]:
    """Return every pass of each solution, call, GPU, config and tier that was timed more than once, oldest first."""
    return store.rows(HISTORY)


def coverage_rows(store: Store) -> list[dict[str, Any]]:
    """Return per operator, GPU and language: solutions in the catalog, workloads, and how many of those are verified."""
    return store.rows(COVERAGE)


def open_rows(store: Store) -> list[dict[str, Any]]:
    """Return open work: ``kind``, ``definition``, ``solution``, ``gpu`` and ``cases``; a field that does not apply is
    empty.
    """
    return store.rows(OPEN)


def change_rows(store: Store, since: datetime | None = None) -> list[dict[str, Any]]:
    """Return awards, kernels verified without one, revocations and regressions since then (UTC), newest first.

    There is one row per day, solution and GPU. ``cases`` counts shapes and configs. ``ratio`` is the worst time divided
    by the pass before it, for regressions only.
    """
    return store.rows(CHANGES, {"since": since})


def kernel_rows(store: Store, since: datetime) -> list[dict[str, Any]]:
    """Return kernels verified since then (UTC), one row per operator and GPU.

    A row has the languages, the number of shapes, the number of shapes above the required ratio, and the best ratio to
    a best baseline with its solution.
    """
    return store.rows(KERNELS, {"since": since})


def family_rows(store: Store, since: datetime) -> list[dict[str, Any]]:
    """Return :func:`kernel_rows` per family of operators and GPU, with ``op_type`` instead of ``definition``."""
    return store.rows(FAMILIES, {"since": since})


def gpu_rows(store: Store) -> list[dict[str, Any]]:
    """Return per GPU the verified operators and shapes, and the number of shapes at which each language is fastest."""
    return store.rows(STANDING_OF_GPUS)


def definition_rows(store: Store) -> list[dict[str, Any]]:
    """Return the catalog's operators; ``record`` is the text of each."""
    return store.rows(DEFINITIONS)


def solution_rows(store: Store) -> list[dict[str, Any]]:
    """Return the catalog's solutions, by name, without their sources."""
    return store.rows(SOLUTIONS)


def peak_rows(store: Store) -> list[dict[str, Any]]:
    """Return the calibrated peaks of each GPU, per second."""
    return store.rows(PEAKS)


def model_rows(store: Store) -> list[dict[str, Any]]:
    """Return every mode of every measured model, newest run first. This is evidence on models, not on operators.

    ``tokens_per_s`` counts new tokens, or those of the prompt if only the prefill ran. ``claim`` states which speedup
    of the whole call the patched model's rounds support, and ``reason`` why not more.
    """
    rows = store.rows(MODELS)
    for row in rows:
        record = row.pop("record")
        claim = claims_of(ModelRun.from_json(record, f"run {row['run_id']}"))["total"] if record else None
        row["claim"] = claim and claim.verdict
        row["reason"] = row["reason"] or (claim.reason if claim else "")
    return rows


def attempt_rows(store: Store, since: datetime) -> list[dict[str, Any]]:
    """Return attempts of authors since then (UTC) by verdict and by the gate that refused, most first."""
    return store.rows(ATTEMPTS, {"since": since})


def furthest_rows(store: Store) -> list[dict[str, Any]]:
    """Return the operators farthest from the speed of light at their largest shape, farthest first.

    The distance is that of the fastest verified solution, stock included.
    """
    return store.rows(FURTHEST)


def newest_trace_time(store: Store) -> datetime | None:
    """Return when the newest trace that counts was measured (UTC), or None."""
    newest: datetime | None = store.rows(NEWEST)[0]["newest"]
    return newest


# ---- run pairs ------------------------------------------------------------------------------------
# Compares two runs.

# If a run measured a pair more than once, the newest of the highest tier counts.
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
    """Return one row per solution, config and shape of either run; columns ``a_...`` or ``b_...`` are None if that run
    lacks it.
    """
    return store.rows(PAIRS, {"a": a, "b": b})


def run_facts(store: Store, run: str) -> dict[str, Any]:
    """Return when and where a run was, and how many of its traces passed."""
    (row,) = store.rows(FACTS, {"run": run})
    return row


def run_ids(store: Store) -> list[str]:
    """Return every run with traces in the store, newest first."""
    return [row["run_id"] for row in store.rows(RUNS)]
