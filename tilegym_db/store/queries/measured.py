"""Queries measurements for planning a run: verdicts, configs, the likely fastest, peaks, and single traces."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from datetime import UTC
from typing import TYPE_CHECKING, Any, NamedTuple

from tilegym_db.records import Config, Trace
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.records.solution import config_id
from tilegym_db.store.database import parsed

if TYPE_CHECKING:
    from tilegym_db.store.database import Store


LIKELY_FASTEST_US, LIKELY_FASTEST_MARGIN = 2.0, 0.02
"""Maximum distance from the fastest at which a Solution may be fastest on another host (``docs/decisions/timing.md``,
0021).
"""

DONE = """
    SELECT solution_digest, definition_digest, workload_uuid, any_value(config) AS config FROM trace_records
    WHERE gpu = $gpu AND ($tier IS NULL OR tier = $tier) AND is_counted(origin, trusted)
    GROUP BY solution_digest, definition_digest, workload_uuid, config_key
"""

FAILED_SCREEN = """
    SELECT
        solution_digest, definition_digest, workload_uuid, any_value(config) AS config,
        arg_max(status, timestamp) AS status
    FROM trace_records WHERE gpu = $gpu AND tier = 'screen' AND is_counted(origin, trusted)
    GROUP BY solution_digest, definition_digest, workload_uuid, config_key HAVING arg_max(status, timestamp) <> 'PASSED'
"""

PROMOTABLE = """
    SELECT solution, solution_digest, definition_digest, workload_uuid, config FROM promotable WHERE gpu = $gpu
    ORDER BY definition, solution, workload_uuid, config_key
"""

# The config measured beside the default one: the one found last among those whose newest verdict is an unrevoked pass.
# A search writes no trace for a config that it did not choose. A verdict that repeats an earlier one, such as of a
# likely fastest, finds no config.
TUNED = """
    SELECT solution_digest, definition_digest, workload_uuid, arg_max(config, row(found_at, config_key)) AS config
    FROM (
        SELECT
            solution_digest, definition_digest, gpu, workload_uuid, config_key, any_value(config) AS config,
            min(timestamp) AS found_at, max(timestamp) AS timestamp
        FROM trace_records WHERE gpu = $gpu AND tier IN ('screen', 'promotion') AND json(config) <> '{}'
            AND is_counted(origin, trusted)
        GROUP BY solution_digest, definition_digest, gpu, workload_uuid, config_key
        HAVING arg_max(status, row(timestamp, trace_id)) = 'PASSED') t
    ANTI JOIN revocations r ON takes_back(r, t)
    GROUP BY solution_digest, definition_digest, workload_uuid
"""

LIKELY_FASTEST = """
    SELECT b.definition_digest, b.workload_uuid, p.solution, p.config
    FROM best b
    JOIN best_per_solution p ON p.definition = b.definition AND p.gpu = b.gpu AND p.dtypes_key = b.dtypes_key
        AND p.axes_key = b.axes_key AND p.scalars_key = b.scalars_key AND p.layouts_key = b.layouts_key
        AND p.blobs_key = b.blobs_key
        AND (p.latency_us <= greatest(b.latency_us + $margin_us, b.latency_us * (1 + $margin))
            OR list_contains($whole::VARCHAR[], b.definition))
    WHERE b.gpu = $gpu AND p.gpu = $gpu
    ORDER BY b.definition_digest, b.workload_uuid, p.latency_us, p.trace_id
"""

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


def done_keys(store: Store, gpu: str, tier: str | None = None) -> set[tuple[str, str, str, str]]:
    """Return all (solution digest, definition digest, workload uuid, config id) measured on a GPU, with any verdict.

    ``tier`` None means any tier.
    """
    return {(*_pair(row), _config_id(row)) for row in store.rows(DONE, {"gpu": gpu, "tier": tier})}


def failed_screen(store: Store, gpu: str) -> dict[tuple[str, str, str, str], str]:
    """Return what failed the newest screen on a GPU, keyed as :func:`done_keys` -> status."""
    return {(*_pair(row), _config_id(row)): row["status"] for row in store.rows(FAILED_SCREEN, {"gpu": gpu})}


def tuned_configs(store: Store, gpu: str) -> dict[tuple[str, str, str], Config]:
    """Return valid results of ``tune`` on a GPU: (solution digest, definition digest, workload uuid) -> config.

    A pair without one runs only with its source's own defaults.
    """
    return {_pair(row): json.loads(row["config"]) for row in store.rows(TUNED, {"gpu": gpu})}


def likely_fastest_of(
    store: Store, gpu: str, whole: Collection[str] = ()
) -> dict[tuple[str, str], list[tuple[str, Config]]]:
    """Return (definition digest, workload uuid) -> verified Solutions and configs that may be fastest on a GPU, fastest
    first.

    Times of different runs may differ as much as two hosts of one kind do (``LIKELY_FASTEST_US`` and
    ``LIKELY_FASTEST_MARGIN``). For Definitions in ``whole`` every verified Solution at a shape is included, since their
    timing inputs changed (``docs/decisions/inputs.md``, 0035).
    """
    found: dict[tuple[str, str], list[tuple[str, Config]]] = {}
    margins = {"margin_us": LIKELY_FASTEST_US, "margin": LIKELY_FASTEST_MARGIN}
    for row in store.rows(LIKELY_FASTEST, {"gpu": gpu, "whole": sorted(whole), **margins}):
        pair = row["solution"], json.loads(row["config"])
        found.setdefault((row["definition_digest"], row["workload_uuid"]), []).append(pair)
    return found


def _pair(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["solution_digest"], row["definition_digest"], row["workload_uuid"]


def _config_id(row: dict[str, Any]) -> str:
    return config_id(json.loads(row["config"]))


class Promotable(NamedTuple):
    """A pair whose newest screen passed, under the config it passed with."""

    solution: str
    solution_digest: str
    definition_digest: str
    workload_uuid: str
    config: Config


def promotable(store: Store, gpu: str) -> list[Promotable]:
    """Return candidates for verification: pairs that passed their newest screen, have no verdict of the promotion tier since, and
    are not verified already.
    """
    rows = store.rows(PROMOTABLE, {"gpu": gpu})
    return [Promotable(**{**row, "config": json.loads(row["config"])}) for row in rows]


def read_peaks(
    store: Store, gpu: str, *, gpu_name: str | None = None, driver: str | None = None, own: bool = False
) -> GpuPeaks | None:
    """Return the newest peaks of a GPU slug measured on this machine, else the published ones, or None.

    ``gpu_name`` and ``driver`` select a device by its driver's name and driver version. ``own`` leaves out published
    peaks.
    """
    rows = store.rows(PEAKS, {"gpu": gpu, "gpu_name": gpu_name, "driver": driver, "own": own})
    return GpuPeaks.from_json(rows[0]["record"], f"{store.path}: peaks of {gpu}") if rows else None


def solutions_of_run(store: Store, run_id: str) -> dict[str, str]:
    """Return solution -> digest for all that a run tried on its device; empty if the store has no such run."""
    return {row["solution"]: row["solution_digest"] for row in store.rows(SOLUTIONS_OF_RUN, {"run_id": run_id})}


# ---- traces ---------------------------------------------------------------------------------------
# Queries single traces, and the Definitions they were measured against.

TRACES_OF = "FROM traces WHERE solution = $solution ORDER BY timestamp DESC, trace_id"

FIND_TRACES = """
    SELECT
        t.*, v.trace_id IS NOT NULL AS is_verified,
        EXISTS (FROM definition_records d WHERE d.is_current AND d.digest = t.definition_digest)
            AND EXISTS (FROM solution_records s WHERE s.is_current AND s.digest = t.solution_digest) AS is_current,
        (SELECT arg_max(r.trace_id, row(r.is_final, r.revoked_at)) FROM revocations r WHERE takes_back(r, t)) AS revoked_by,
        (SELECT arg_max({"by": o.overrules."by", timestamp: o.timestamp, reason: o.reason}, o.timestamp) FROM trace_records o
            WHERE o.overrules.trace_id = t.trace_id AND is_counted(o.origin, o.trusted)) AS overruled
    FROM traces t LEFT JOIN verified v ON v.trace_id = t.trace_id
    WHERE starts_with(t.trace_id, $prefix) ORDER BY t.trace_id LIMIT $most
"""

COUNT_TRACES_OF = """
    SELECT gpu, count(*) AS traces FROM trace_records WHERE solution = $name OR definition = $name GROUP BY gpu ORDER BY gpu
"""

COUNT_TRACES = "SELECT count(*) AS traces FROM trace_records"

TRACES_BY_ID = "FROM trace_records WHERE trace_id IN (SELECT unnest($trace_ids::VARCHAR[]))"

DEFINITION_BY_DIGEST = "SELECT record FROM definition_records WHERE digest = $digest"

_KEYS = (
    "config_key", "axes_key", "dtypes_key", "scalars_key", "layouts_key", "blobs_key", "origin", "trusted", "doubt",
    "is_newest",
)  # fmt: skip
"""Columns of the store that are not part of a trace."""


def traces_of(store: Store, solution: str) -> list[dict[str, Any]]:
    """Return every trace of a Solution by name, newest first, with any digest; columns as in the view."""
    return parsed(store.rows(TRACES_OF, {"solution": solution}))


def find_traces(store: Store, prefix: str, most: int = 10) -> list[dict[str, Any]]:
    """Return at most ``most`` traces whose id has the prefix.

    Columns are those of the view, and ``is_verified``, ``is_current`` (measured with the catalog's definition and
    source of today), ``revoked_by`` (the id of the failure that revokes a pass, or None) and ``overruled`` (the person, time
    and reason if a failure was overruled, or None).
    """
    return parsed(store.rows(FIND_TRACES, {"prefix": prefix, "most": most}))


def count_traces(store: Store) -> int:
    """Return the number of traces in the store."""
    return int(store.rows(COUNT_TRACES)[0]["traces"])


def count_traces_of(store: Store, name: str) -> dict[str, int]:
    """Return GPU -> number of the traces of a Solution, or of all Solutions of a Definition."""
    return {row["gpu"]: int(row["traces"]) for row in store.rows(COUNT_TRACES_OF, {"name": name})}


def definition_by_digest(store: Store, digest: str) -> dict[str, Any] | None:
    """Return the parsed JSON of the Definition that a trace was measured against; None if it was never stored.

    Old texts are kept unchanged: today's ``Definition`` need not accept them.
    """
    rows = store.rows(DEFINITION_BY_DIGEST, {"digest": digest})
    return dict(json.loads(rows[0]["record"])) if rows else None


def read_traces(store: Store, trace_ids: Iterable[str]) -> dict[str, Trace]:
    """Return trace_id -> the Trace record, as it was journaled."""
    rows = store.rows(TRACES_BY_ID, {"trace_ids": list(trace_ids)})
    return {row["trace_id"]: _trace_of(row, f"{store.path}: trace {row['trace_id']}") for row in rows}


def _trace_of(row: dict[str, Any], where: str) -> Trace:
    content = _without_nulls({key: value for key, value in row.items() if key not in _KEYS})
    content["config"], content["scalars"] = json.loads(row["config"]), json.loads(row["scalars"])
    content["timestamp"] = row["timestamp"].replace(tzinfo=UTC)
    return Trace.from_dict(content, where)


def _without_nulls(value: Any) -> Any:
    """Drop null keys of a struct, with which DuckDB replaces absent keys, so that the record's defaults apply."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
