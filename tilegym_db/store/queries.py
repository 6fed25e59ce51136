"""The questions that the package asks of the store: one named text and one function each, with bound parameters.

What they ask about are the views of ``views.sql``; the SQL that makes and fills the tables is in ``statements``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC
from typing import TYPE_CHECKING, Any, NamedTuple

from tilegym_db.records import Config, Trace
from tilegym_db.records.hardware import GPU_SLUGS, gpus_meant
from tilegym_db.records.peaks import GpuPeaks
from tilegym_db.records.solution import config_id
from tilegym_db.store.statements import PUBLISHED_SANDBOX_LEVEL
from tilegym_db.store.tuning import TuningStep

if TYPE_CHECKING:
    from tilegym_db.store.database import Store

__all__ = [
    "Promotable",
    "best_rows",
    "count_traces",
    "count_unverified",
    "definition_by_digest",
    "done_keys",
    "failed_screen",
    "find_traces",
    "kept_back",
    "leaderboard_rows",
    "likely_fastest_of",
    "measured_gpus",
    "promotable",
    "provided",
    "publishable_rows",
    "publishable_steps",
    "read_peaks",
    "read_traces",
    "revoking_rows",
    "solutions_of_run",
    "traced_gpus",
    "traces_of",
    "tuned_configs",
    "verified_rows",
]

ALL_ROWS = (1 << 62) - 1

LIKELY_FASTEST_US, LIKELY_FASTEST_MARGIN = 2.0, 0.02
"""How far from the fastest a verified Solution may be the fastest on another host (``docs/decisions/0021-current-best.md``)."""

DONE = """
    SELECT solution_digest, definition_digest, workload_uuid, any_value(config) AS config FROM trace_records
    WHERE gpu = $gpu AND ($tier IS NULL OR tier = $tier) AND is_counted(origin, trusted)
    GROUP BY solution_digest, definition_digest, workload_uuid, config_key
"""

_POINT = """definition, definition_version, definition_digest, op_type, dtypes, dtypes_key, axes, axes_key,
        scalars, scalars_key, layouts, layouts_key, solution, solution_digest, language, role, config, sm,
        latency_us, ci_low_us, ci_high_us, host_us, speedup, speedup_ci_low, tier, sandbox_level, trace_id, run_id, origin,
        coalesce(envelope_cases, 0) AS envelope_cases,
        (SELECT s.provides FROM solutions s WHERE s.name = solution) AS provides"""
_BY_POINT = "ORDER BY definition, dtypes_key, axes_key, scalars_key, layouts_key, latency_us, trace_id"

VERIFIED = f"SELECT {_POINT} FROM best_per_solution WHERE gpu = $gpu {_BY_POINT}"

PUBLISHABLE = f"""
    SELECT {_POINT} FROM traces WHERE gpu = $gpu AND trace_id IN (
        SELECT arg_min(trace_id, row(latency_us, trace_id)) FROM verified
        WHERE gpu = $gpu AND tier = 'promotion' AND sandbox_level >= {PUBLISHED_SANDBOX_LEVEL}
        GROUP BY definition, dtypes_key, axes_key, scalars_key, layouts_key, solution)
    {_BY_POINT}
"""

# Of the solutions, configs and shapes that were promoted on a GPU with today's sources: how many a later failure took
# back, and how many are verified, but by a worker that could have reached what judges it.
KEPT_BACK = f"""
    SELECT count(*) FILTER (NOT verified) AS revoked, count(*) FILTER (verified AND NOT confined) AS unconfined
    FROM (
        SELECT
            bool_or(v.trace_id IS NOT NULL) AS verified,
            bool_or(v.trace_id IS NOT NULL AND t.sandbox_level >= {PUBLISHED_SANDBOX_LEVEL}) AS confined
        FROM trace_records t
        JOIN definition_records d ON d.is_current AND d.name = t.definition AND d.digest = t.definition_digest
        JOIN solution_records s ON s.is_current AND s.name = t.solution AND s.digest = t.solution_digest
        LEFT JOIN verified v ON v.trace_id = t.trace_id
        WHERE t.gpu = $gpu AND t.tier = 'promotion' AND t.status = 'PASSED' AND is_counted(t.origin, t.trusted)
        GROUP BY t.solution, t.config_key, t.axes_key, t.dtypes_key, t.scalars_key, t.layouts_key)
"""

REVOKING = """
    SELECT definition, op_type, dtypes_key, axes_key, scalars_key, layouts_key, solution, sm, trace_id, run_id, origin
    FROM trace_records WHERE trace_id IN (
        SELECT r.trace_id FROM revocations r
        JOIN definition_records d ON d.is_current AND d.digest = r.definition_digest
        JOIN solution_records s ON s.is_current AND s.digest = r.solution_digest
        SEMI JOIN trace_records p ON p.status = 'PASSED' AND p.tier = 'promotion' AND is_counted(p.origin, p.trusted)
            AND p.definition_digest = r.definition_digest AND p.solution_digest = r.solution_digest
            AND p.gpu = r.gpu AND p.timestamp <= r.revoked_at
            AND p.config_key = coalesce(r.config_key, p.config_key)
            AND p.workload_uuid = coalesce(r.workload_uuid, p.workload_uuid)
        WHERE r.gpu = $gpu)
    ORDER BY definition, dtypes_key, axes_key, scalars_key, layouts_key, solution, trace_id
"""

BEST = """
    FROM best
    WHERE ($definition IS NULL OR definition = $definition) AND ($op_type IS NULL OR op_type = $op_type)
        AND ($gpus::VARCHAR[] IS NULL OR list_contains($gpus::VARCHAR[], gpu))
        AND list_bool_and(list_transform(
            map_entries($axes::MAP(VARCHAR, BIGINT)), lambda a: axes[a.key] IS NOT DISTINCT FROM a.value)) IS NOT FALSE
    ORDER BY definition, gpu, dtypes_key, axes_key, scalars_key, layouts_key
    LIMIT $most
"""

BEST_IN_A_LANGUAGE = BEST.replace(
    "FROM best\n",
    """FROM (
        FROM best_per_solution WHERE language = $language
        QUALIFY row_number() OVER (PARTITION BY definition, gpu, dtypes_key, axes_key, scalars_key, layouts_key
            ORDER BY latency_us, trace_id) = 1)\n""",
)

FAILED_SCREEN = """
    SELECT
        solution_digest, definition_digest, workload_uuid, any_value(config) AS config,
        arg_max(status, timestamp) AS status
    FROM trace_records WHERE gpu = $gpu AND tier = 'screen' AND is_counted(origin, trusted)
    GROUP BY solution_digest, definition_digest, workload_uuid, config_key HAVING arg_max(status, timestamp) <> 'PASSED'
"""

LEADERBOARD = """
    FROM leaderboard
    WHERE ($definition IS NULL OR definition = $definition) AND ($op_type IS NULL OR op_type = $op_type)
        AND ($gpus::VARCHAR[] IS NULL OR list_contains($gpus::VARCHAR[], gpu))
    ORDER BY definition, gpu, wins DESC, geomean_speedup DESC NULLS LAST, solution
"""

PROMOTABLE = """
    SELECT solution, solution_digest, definition_digest, workload_uuid, config FROM promotable WHERE gpu = $gpu
    ORDER BY definition, solution, workload_uuid, config_key
"""

UNVERIFIED = """
    SELECT count(*) AS pairs FROM promotable p
    WHERE ($definition IS NULL OR p.definition = $definition) AND ($op_type IS NULL OR p.op_type = $op_type)
        AND ($gpus::VARCHAR[] IS NULL OR list_contains($gpus::VARCHAR[], p.gpu))
"""

# The config beside the default one that is measured from now on: of those whose newest verdict is a pass which no later
# failure took back, the one that was found last. A search writes no trace for a config that it did not choose; a verdict
# that only repeats an earlier one, of one of the likely fastest, say, finds nothing.
TUNED = """
    SELECT solution_digest, definition_digest, workload_uuid, arg_max(config, row(found_at, config_key)) AS config
    FROM (
        SELECT
            solution_digest, definition_digest, gpu, workload_uuid, config_key, any_value(config) AS config,
            min(timestamp) AS found_at, max(timestamp) AS judged_at
        FROM trace_records WHERE gpu = $gpu AND tier IN ('screen', 'promotion') AND json(config) <> '{}'
            AND is_counted(origin, trusted)
        GROUP BY solution_digest, definition_digest, gpu, workload_uuid, config_key
        HAVING arg_max(status, row(timestamp, trace_id)) = 'PASSED') t
    ANTI JOIN revocations r ON r.definition_digest = t.definition_digest AND r.solution_digest = t.solution_digest
        AND r.gpu = t.gpu AND r.revoked_at >= t.judged_at
        AND coalesce(r.config_key, t.config_key) = t.config_key
        AND coalesce(r.workload_uuid, t.workload_uuid) = t.workload_uuid
    GROUP BY solution_digest, definition_digest, workload_uuid
"""

PUBLISHABLE_STEPS = """
    SELECT op_type, definition, record FROM newest_steps WHERE gpu = $gpu
    ORDER BY definition, solution, workload_uuid, stepped_at, config_key
"""

LIKELY_FASTEST = """
    SELECT b.definition_digest, b.workload_uuid, p.solution, p.config
    FROM best b
    JOIN best_per_solution p ON p.definition = b.definition AND p.gpu = b.gpu AND p.dtypes_key = b.dtypes_key
        AND p.axes_key = b.axes_key AND p.scalars_key = b.scalars_key AND p.layouts_key = b.layouts_key
        AND p.latency_us <= greatest(b.latency_us + $margin_us, b.latency_us * (1 + $margin))
    WHERE b.gpu = $gpu AND p.gpu = $gpu
    ORDER BY b.definition_digest, b.workload_uuid, p.latency_us, p.trace_id
"""

TRACES_OF = "FROM traces WHERE solution = $solution ORDER BY timestamp DESC, trace_id"
FIND_TRACES = """
    SELECT
        t.*, v.trace_id IS NOT NULL AS is_verified,
        EXISTS (FROM definition_records d WHERE d.is_current AND d.digest = t.definition_digest)
            AND EXISTS (FROM solution_records s WHERE s.is_current AND s.digest = t.solution_digest) AS is_current,
        (SELECT arg_max(r.trace_id, r.revoked_at) FROM revocations r
            WHERE r.definition_digest = t.definition_digest AND r.solution_digest = t.solution_digest
                AND r.gpu = t.gpu AND r.revoked_at >= t.timestamp
                AND coalesce(r.config_key, t.config_key) = t.config_key
                AND coalesce(r.workload_uuid, t.workload_uuid) = t.workload_uuid) AS revoked_by
    FROM traces t LEFT JOIN verified v ON v.trace_id = t.trace_id
    WHERE starts_with(t.trace_id, $prefix) ORDER BY t.trace_id LIMIT $most
"""
COUNT_TRACES = "SELECT count(*) AS traces FROM trace_records"
TRACED_GPUS = "SELECT DISTINCT gpu FROM trace_records WHERE is_counted(origin, trusted) ORDER BY gpu"
PROVIDED = "SELECT name, provides FROM solutions"
MEASURED_GPUS = "SELECT DISTINCT gpu FROM verified ORDER BY gpu"
TRACES_BY_ID = "FROM trace_records WHERE trace_id IN (SELECT unnest($trace_ids::VARCHAR[]))"
DEFINITION_BY_DIGEST = "SELECT record FROM definition_records WHERE digest = $digest"

PEAKS = """
    SELECT record FROM peak_records
    WHERE gpu = $gpu AND ($gpu_name IS NULL OR gpu_name = $gpu_name) AND ($driver IS NULL OR driver = $driver)
        AND (is_own OR NOT $own)
    ORDER BY is_own DESC, timestamp DESC, record::VARCHAR LIMIT 1
"""

SOLUTIONS_OF_RUN = """
    SELECT DISTINCT solution, solution_digest FROM traces WHERE run_id = $run_id AND tier <> 'interpreter'
    ORDER BY solution, solution_digest
"""

_KEYS = (
    "config_key", "axes_key", "dtypes_key", "scalars_key", "layouts_key", "origin", "trusted", "doubt",
)  # fmt: skip
"""Columns of the store's own, which are no part of a trace."""


def done_keys(store: Store, gpu: str, tier: str | None = None) -> set[tuple[str, str, str, str]]:
    """What was measured on a GPU, whatever the verdict: solution digest, definition digest, workload uuid, config id.

    ``tier`` None means any tier.
    """
    return {(*_pair(row), _config_id(row)) for row in store.rows(DONE, {"gpu": gpu, "tier": tier})}


def failed_screen(store: Store, gpu: str) -> dict[tuple[str, str, str, str], str]:
    """What did not pass the newest screen on a GPU, keyed as :func:`done_keys` -> status."""
    return {(*_pair(row), _config_id(row)): row["status"] for row in store.rows(FAILED_SCREEN, {"gpu": gpu})}


def tuned_configs(store: Store, gpu: str) -> dict[tuple[str, str, str], Config]:
    """What ``tune`` found on a GPU and still stands: (solution digest, definition digest, workload uuid) -> config.

    A pair without one runs under its source's own defaults only.
    """
    return {_pair(row): json.loads(row["config"]) for row in store.rows(TUNED, {"gpu": gpu})}


def likely_fastest_of(store: Store, gpu: str) -> dict[tuple[str, str], list[tuple[str, Config]]]:
    """Who may be the fastest on a GPU: (definition digest, workload uuid) -> verified Solutions and configs, the fastest first.

    Times of different runs may differ by what lies between two hosts of one kind (``LIKELY_FASTEST_US`` and
    ``LIKELY_FASTEST_MARGIN``).
    """
    found: dict[tuple[str, str], list[tuple[str, Config]]] = {}
    margins = {"margin_us": LIKELY_FASTEST_US, "margin": LIKELY_FASTEST_MARGIN}
    for row in store.rows(LIKELY_FASTEST, {"gpu": gpu, **margins}):
        pair = row["solution"], json.loads(row["config"])
        found.setdefault((row["definition_digest"], row["workload_uuid"]), []).append(pair)
    return found


def _pair(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["solution_digest"], row["definition_digest"], row["workload_uuid"]


def _config_id(row: dict[str, Any]) -> str:
    return config_id(json.loads(row["config"]))


def verified_rows(store: Store, gpu: str) -> list[dict[str, Any]]:
    """The fastest verified trace of every solution per shape on one GPU slug, ordered by shape, then latency.

    ``config`` and ``scalars`` are dicts; times are microseconds; ``speedup`` is against stock code, or None.
    """
    return _parsed(store.rows(VERIFIED, {"gpu": gpu}))


def publishable_rows(store: Store, gpu: str) -> list[dict[str, Any]]:
    """As :func:`verified_rows`, of what may leave this machine: promoted, by a confined worker."""
    return _parsed(store.rows(PUBLISHABLE, {"gpu": gpu}))


def publishable_steps(store: Store, gpu: str) -> list[tuple[str, str, TuningStep]]:
    """(op_type, definition, what became of a config) of each that was searched with today's sources.

    By Definition, Solution and Workload, oldest first.
    """
    where = f"{store.path}: tuning steps of {gpu}"
    return [
        (row["op_type"], row["definition"], TuningStep.from_json(row["record"], where))
        for row in store.rows(PUBLISHABLE_STEPS, {"gpu": gpu})
    ]


def provided(store: Store) -> dict[str, str | None]:
    """What each Solution of the catalog provides, by name."""
    return {row["name"]: row["provides"] for row in store.rows(PROVIDED)}


def kept_back(store: Store, gpu: str) -> dict[str, int]:
    """How many solutions, configs and shapes of a GPU were promoted and are not publishable, as reason -> count.

    The reasons are ``revoked`` (a later failure) and ``unconfined`` (below the sandbox level of what is published).
    """
    (counts,) = store.rows(KEPT_BACK, {"gpu": gpu})
    return counts


def revoking_rows(store: Store, gpu: str) -> list[dict[str, Any]]:
    """The newest failures that took promotions of today's sources back on a GPU, by shape: their ids and where they go."""
    return store.rows(REVOKING, {"gpu": gpu})


class Promotable(NamedTuple):
    """A pair whose newest screen passed, under the config it passed with."""

    solution: str
    solution_digest: str
    definition_digest: str
    workload_uuid: str
    config: Config


def promotable(store: Store, gpu: str) -> list[Promotable]:
    """What a promotion may be tried on: pairs that passed their newest screen, have no promotion verdict since, and are not
    verified already."""
    rows = store.rows(PROMOTABLE, {"gpu": gpu})
    return [Promotable(**{**row, "config": json.loads(row["config"])}) for row in rows]


def count_unverified(
    store: Store, definition: str | None = None, op_type: str | None = None, gpu: str | None = None
) -> int:
    """How many pairs passed a screen and only that; arguments as for :func:`best_rows`."""
    rows = store.rows(UNVERIFIED, {"definition": definition, "op_type": op_type, "gpus": _slugs(gpu)})
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
) -> list[dict[str, Any]]:
    """The fastest verified trace per definition, GPU and shape; columns as in the view ``traces``.

    Args:
        gpu: a slug or a family: ``h100`` covers ``h100-sxm`` and ``h100-pcie``.
        axes: only shapes with these sizes; other axes may have any.
        language: the fastest in this language, where another one may be faster.
        limit: so many rows at most.
    """
    values = {
        "definition": definition,
        "op_type": op_type,
        "gpus": _slugs(gpu),
        "axes": dict(axes or {}),
        "most": ALL_ROWS if limit is None else limit,
    }
    if language is None:
        return _parsed(store.rows(BEST, values))
    return _parsed(store.rows(BEST_IN_A_LANGUAGE, {**values, "language": language}))


def leaderboard_rows(
    store: Store, definition: str | None = None, op_type: str | None = None, gpu: str | None = None
) -> list[dict[str, Any]]:
    """The view ``leaderboard``, most wins first within a definition and GPU; arguments as for :func:`best_rows`."""
    return store.rows(LEADERBOARD, {"definition": definition, "op_type": op_type, "gpus": _slugs(gpu)})


def traces_of(store: Store, solution: str) -> list[dict[str, Any]]:
    """Every trace of a Solution by name, newest first, whatever its digest was then; columns as in the view."""
    return _parsed(store.rows(TRACES_OF, {"solution": solution}))


def find_traces(store: Store, prefix: str, most: int = 10) -> list[dict[str, Any]]:
    """The traces whose id starts so, at most ``most`` of them.

    Columns as in the view, and ``is_verified``, ``is_current`` (measured with the catalog's definition and source of
    today) and ``revoked_by`` (the id of the later failure that takes a pass back, or None).
    """
    return _parsed(store.rows(FIND_TRACES, {"prefix": prefix, "most": most}))


def count_traces(store: Store) -> int:
    """How many traces the store holds."""
    return int(store.rows(COUNT_TRACES)[0]["traces"])


def measured_gpus(store: Store) -> list[str]:
    """The GPU slugs that have a verified trace."""
    return [row["gpu"] for row in store.rows(MEASURED_GPUS)]


def traced_gpus(store: Store) -> list[str]:
    """The GPU slugs that have any trace that counts."""
    return [row["gpu"] for row in store.rows(TRACED_GPUS)]


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


def read_peaks(
    store: Store, gpu: str, *, gpu_name: str | None = None, driver: str | None = None, own: bool = False
) -> GpuPeaks | None:
    """The peaks of a GPU slug: the newest that were measured on this machine, else those that were published, or None.

    ``gpu_name`` and ``driver`` ask for a device that the driver calls so, and a version of it; ``own`` leaves out what was
    published.
    """
    rows = store.rows(PEAKS, {"gpu": gpu, "gpu_name": gpu_name, "driver": driver, "own": own})
    return GpuPeaks.from_json(rows[0]["record"], f"{store.path}: peaks of {gpu}") if rows else None


def solutions_of_run(store: Store, run_id: str) -> dict[str, str]:
    """What a run tried on its device: solution -> digest; empty where the store has no such run."""
    return {row["solution"]: row["solution_digest"] for row in store.rows(SOLUTIONS_OF_RUN, {"run_id": run_id})}


def _slugs(gpu: str | None) -> list[str] | None:
    return None if gpu is None else gpus_meant(gpu, GPU_SLUGS) or [gpu]


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
