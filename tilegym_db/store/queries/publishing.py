"""Queries publishable results, and those left out or revoked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from tilegym_db.published.entries import Audience, Candidate, Refusal, why_not_trusted
from tilegym_db.published.snapshot import source_key
from tilegym_db.records.loop import ModelRun
from tilegym_db.records.verdicts import PUBLISHED_SANDBOX_LEVEL
from tilegym_db.store.connection import parsed
from tilegym_db.store.side_files import TuningStep

if TYPE_CHECKING:
    from tilegym_db.store.connection import Store

_POINT = """definition, definition_version, definition_digest, op_type, dtypes, dtypes_key, axes, axes_key,
        scalars, scalars_key, layouts, layouts_key, solution, solution_digest, language, role, config, sm,
        latency_us, ci_low_us, ci_high_us, host_us, speedup, speedup_ci_low, tier, sandbox_level, trace_id, run_id, origin,
        coalesce(envelope_cases, 0) AS envelope_cases,
        (SELECT s.provides FROM solutions s WHERE s.name = solution) AS provides"""

SHAPE = ("definition", "dtypes_key", "axes_key", "scalars_key", "layouts_key")
_BY_POINT = "ORDER BY definition, dtypes_key, axes_key, scalars_key, layouts_key, latency_us, trace_id"

VERIFIED = f"SELECT {_POINT} FROM best_per_solution WHERE gpu = $gpu {_BY_POINT}"

# The newest verified passes. Which of them may serve is decided by published/entries.py.
PROMOTED = f"""
    SELECT {_POINT}, blobs_key FROM verified WHERE gpu = $gpu AND tier = 'promotion' {_BY_POINT}
"""

# Counts of the solutions, configs and shapes promoted on a GPU with today's sources that have no verified pass left: revoked
# by a failure, or with impossible figures. The last count is passes that omit an output.
NOT_VERIFIED = """
    SELECT
        count(*) FILTER (NOT verified AND NOT doubted) AS revoked,
        count(*) FILTER (NOT verified AND doubted) AS doubted,
        (SELECT count(DISTINCT (o.solution, o.workload_uuid, o.config_key)) FROM trace_records o
            JOIN solution_records s ON s.is_current AND s.name = o.solution AND s.digest = o.solution_digest
            WHERE o.gpu = $gpu AND o.status = 'PASSED' AND NOT gives_all(s.record)) AS output_omitted
    FROM (
        SELECT bool_or(v.trace_id IS NOT NULL) AS verified, bool_or(t.doubt IS NOT NULL) AS doubted
        FROM trace_records t
        JOIN definition_records d ON d.is_current AND d.name = t.definition AND d.digest = t.definition_digest
        JOIN solution_records s ON s.is_current AND s.name = t.solution AND s.digest = t.solution_digest
        LEFT JOIN verified v ON v.trace_id = t.trace_id
        WHERE t.gpu = $gpu AND t.tier = 'promotion' AND t.status = 'PASSED' AND is_counted(t.origin, t.trusted)
            AND gives_all(s.record)
        GROUP BY t.solution, t.config_key, t.axes_key, t.dtypes_key, t.scalars_key, t.layouts_key, t.blobs_key)
"""

UNCONFINED = f"""
    SELECT DISTINCT definition FROM verified
    WHERE gpu = $gpu AND origin = 'local' AND sandbox_level < {PUBLISHED_SANDBOX_LEVEL} ORDER BY definition
"""

REVOKING = """
    SELECT definition, op_type, dtypes_key, axes_key, scalars_key, layouts_key, solution, sm, trace_id, run_id, origin
    FROM trace_records WHERE trace_id IN (
        SELECT r.trace_id FROM revocations r
        JOIN definition_records d ON d.is_current AND d.digest = r.definition_digest
        JOIN solution_records s ON s.is_current AND s.digest = r.solution_digest
        SEMI JOIN trace_records p ON p.status = 'PASSED' AND p.tier = 'promotion' AND is_counted(p.origin, p.trusted)
            AND takes_back(r, p)
        WHERE r.gpu = $gpu
        UNION ALL
        SELECT o.trace_id FROM trace_records o
        JOIN definition_records d ON d.is_current AND d.digest = o.definition_digest
        JOIN solution_records s ON s.is_current AND s.digest = o.solution_digest
        WHERE o.gpu = $gpu AND o.status = 'OVERRULED' AND is_counted(o.origin, o.trusted))
    ORDER BY definition, dtypes_key, axes_key, scalars_key, layouts_key, solution, trace_id
"""

# Sources and configs with passes that a wrong number outweighs: the newest pass, and the wrong number.
DISAGREEING = """
    SELECT f.definition, f.solution, f.trace_id AS failed, f.status, f.axes_key, count(*) AS passes,
        arg_max(p.trace_id, row(p.timestamp, p.trace_id)) AS passed
    FROM revocations r
    JOIN trace_records f ON f.trace_id = r.trace_id
    JOIN trace_records p ON p.status = 'PASSED' AND p.tier = 'promotion' AND is_counted(p.origin, p.trusted) AND takes_back(r, p)
    JOIN definition_records d ON d.is_current AND d.digest = r.definition_digest
    JOIN solution_records s ON s.is_current AND s.digest = r.solution_digest
    WHERE r.is_final AND r.gpu = $gpu
    GROUP BY ALL ORDER BY ALL
"""

PUBLISHABLE_STEPS = """
    SELECT op_type, definition, record FROM newest_steps WHERE gpu = $gpu
    ORDER BY definition, solution, workload_uuid, stepped_at, config_key
"""

# The reason why a model run on a GPU is not published, or null. A run of a loop change that was discarded did not use
# published kernels.
_JUDGED_RUNS = """
    SELECT *, CASE
        WHEN NOT is_counted(origin, trusted) THEN 'foreign'
        WHEN run_id IN (SELECT unnest(runs) FROM experiments WHERE decision <> 'keep') THEN 'discarded'
        WHEN throttled THEN 'throttled'
        WHEN speedup_ci_low IS NULL THEN 'claimless' END AS kept_back
    FROM model_runs WHERE gpu = $gpu
"""
# The newest of each model and way of calling it, and of each set of other modes that took part or could not.
PUBLISHABLE_MODEL_RUNS = f"""
    SELECT record FROM ({_JUDGED_RUNS}) WHERE kept_back IS NULL
    QUALIFY row_number() OVER (
        PARTITION BY config_digest, dtype, batch, prompt_tokens, new_tokens,
            list_sort(list_concat(coalesce(json_keys(record->'ways'), []), coalesce(json_keys(record->'absent'), [])))
        ORDER BY timestamp DESC, run_id) = 1
    ORDER BY model, config_digest, dtype, batch, prompt_tokens, new_tokens, timestamp, run_id
"""
KEPT_BACK_RUNS = f"""
    SELECT kept_back AS reason, count(*) AS n FROM ({_JUDGED_RUNS}) WHERE kept_back IS NOT NULL GROUP BY ALL ORDER BY ALL
"""

PROVIDED = "SELECT name, provides FROM solutions"


def verified_rows(store: Store, gpu: str) -> list[dict[str, Any]]:
    """Return each solution's fastest verified trace per shape on one GPU slug, ordered by shape, then latency.

    ``config`` and ``scalars`` are dicts. Times are microseconds. ``speedup`` is relative to stock code, or None.
    """
    return parsed(store.rows(VERIFIED, {"gpu": gpu}))


def promoted_rows(
    store: Store, gpu: str, shipped: Collection[str] = (), *, audience: Audience = "others"
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Return the promoted passes of a GPU that may serve an audience, and the number of those that may not, by code.

    Of each solution and shape only the fastest pass is returned, as :func:`verified_rows` does. The codes are those of
    :func:`~tilegym_db.published.entries.why_not_trusted`.

    Args:
        audience: ``others`` for results that leave this machine.
    """
    fastest: dict[tuple[str, ...], dict[str, Any]] = {}
    refused: Counter[str] = Counter()
    for row in store.rows(PROMOTED, {"gpu": gpu}):  # fastest first within a shape
        refusal = why_not_trusted(_candidate(row, shipped), audience=audience)
        if refusal is not None:
            refused[refusal.code] += 1
        else:
            fastest.setdefault(tuple(row[key] for key in (*SHAPE, "solution")), row)
    return parsed(list(fastest.values())), refused


def _candidate(row: Mapping[str, Any], shipped: Collection[str]) -> Candidate:
    return Candidate(
        **{
            name: row[name]
            for name in ("solution", "solution_digest", "language", "role", "tier", "sandbox_level", "origin")
        },
        of_files=row["blobs_key"] != "",
        shipped_source=source_key(row["definition_digest"], row["solution_digest"]) in shipped,
    )


def publishable_rows(store: Store, gpu: str) -> list[dict[str, Any]]:
    """Return :func:`verified_rows` that may leave this machine: promoted by a confined worker."""
    return promoted_rows(store, gpu)[0]


def publishable_steps(store: Store, gpu: str) -> list[tuple[str, str, TuningStep]]:
    """Return (op_type, definition, step) of each config searched with today's sources.

    Steps are ordered by Definition, Solution and Workload, oldest first.
    """
    where = f"{store.path}: tuning steps of {gpu}"
    return [
        (row["op_type"], row["definition"], TuningStep.from_json(row["record"], where))
        for row in store.rows(PUBLISHABLE_STEPS, {"gpu": gpu})
    ]


def publishable_model_runs(store: Store, gpu: str) -> list[ModelRun]:
    """Return the model runs on a GPU that may leave this machine: the newest of each model and way of calling it."""
    where = f"{store.path}: runs of models on {gpu}"
    rows = store.rows(PUBLISHABLE_MODEL_RUNS, {"gpu": gpu})
    return [ModelRun.from_json(row["record"], where) for row in rows]


def kept_back_runs(store: Store, gpu: str) -> dict[str, int]:
    """Return reason -> number of model runs on a GPU that are not publishable.

    The reasons are ``foreign`` (of unknown origin), ``discarded`` (by the loop, with the change it was made with),
    ``throttled``, and ``claimless`` (without an interval: no kernel ran, or too few rounds).
    """
    return {row["reason"]: row["n"] for row in store.rows(KEPT_BACK_RUNS, {"gpu": gpu})}


def provided(store: Store) -> dict[str, str | None]:
    """Return what each Solution of the catalog provides, by name."""
    return {row["name"]: row["provides"] for row in store.rows(PROVIDED)}


def unconfined_definitions(store: Store, gpu: str) -> list[str]:
    """Return the Definitions that have verified passes on a GPU by unconfined workers of this installation."""
    return [row["definition"] for row in store.rows(UNCONFINED, {"gpu": gpu})]


def not_verified(store: Store, gpu: str) -> dict[str, int]:
    """Return code -> number of promoted solutions, configs and shapes of a GPU that are not verified any more.

    The codes are ``revoked`` (a failure) and ``doubted`` (figures that cannot be true). ``output_omitted`` counts
    passes that omit an output, which are never promoted.
    """
    (counts,) = store.rows(NOT_VERIFIED, {"gpu": gpu})
    return counts


def disagreements(store: Store, gpu: str, solutions: Collection[str] | None = None) -> list[Refusal]:
    """Return a refusal for each source and config of today on a GPU that has passes and a wrong number.

    ``solutions`` names those to look at; None means all.
    """
    return [
        Refusal(
            "attempts_disagree",
            f"{row['solution']} on {gpu}: trace {row['passed']} passed ({row['passes']} in all), but trace {row['failed']} is "
            f"{row['status']} at {row['axes_key']}. Compare: tilegym-db show {row['failed'][:8]}. If its cause is not the "
            f"solution: tilegym-db data overrule {row['failed'][:8]} --because 'TEXT'",
        )
        for row in store.rows(DISAGREEING, {"gpu": gpu})
        if solutions is None or row["solution"] in solutions
    ]


def revoking_rows(store: Store, gpu: str) -> list[dict[str, Any]]:
    """Return the failures that revoke passes of today's sources on a GPU, and what was overruled, by shape: ids and target
    files.
    """
    return store.rows(REVOKING, {"gpu": gpu})
