"""Queries measurements: the fastest verified kernels, and what a plan needs: verdicts, configs, peaks, and single traces."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tilegym_db.records.hardware import GPU_SLUGS, gpus_meant
from tilegym_db.records.verdicts import MACHINE_SLOW
from tilegym_db.store.connection import parsed

if TYPE_CHECKING:
    from tilegym_db.records import Config, Trace
    from tilegym_db.records.roofline import GpuPeaks
    from tilegym_db.store.connection import Store

LIKELY_FASTEST_US, LIKELY_FASTEST_MARGIN = 2.0, 0.02
"""Maximum distance from the fastest at which a Solution may be fastest on another host (``docs/decisions/timing.md``,
0021).
"""

DONE = """
    SELECT solution_digest, definition_digest, workload_uuid, any_value(config) AS config FROM trace_records
    WHERE gpu = $gpu AND ($tier IS NULL OR tier = $tier) AND is_counted(origin, trusted)
        AND NOT (status = 'UNSUPPORTED' AND starts_with(reason, $disturbed))
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

    What other programs disturbed is not measured. ``tier`` None means any tier.
    """
    return {
        (*_pair(row), _config_id(row))
        for row in store.rows(DONE, {"gpu": gpu, "tier": tier, "disturbed": MACHINE_SLOW})
    }


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
    from tilegym_db.records.solution import config_id

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
    from tilegym_db.records.roofline import GpuPeaks

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

HISTORY_OF = """
    FROM history WHERE solution = $name OR definition = $name
    ORDER BY definition, solution, gpu, dtypes_key, axes_key, scalars_key, layouts_key, blobs_key, config_key, tier, number
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


def history_of_passes(store: Store, name: str) -> list[dict[str, Any]]:
    """Return the rows of the view ``history`` for a Solution, or for all Solutions of a Definition.

    Passes of one Solution, call, GPU, config and tier follow each other, oldest first.
    """
    return store.rows(HISTORY_OF, {"name": name})


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
    from tilegym_db.records import Trace

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


# ---- the fastest ----------------------------------------------------------------------------------
# Queries the fastest verified kernels and compares two solutions.

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
        axes: only shapes with these sizes; other axes may have any.
        language: return the fastest in this language, even if another one is faster.
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
    """Return which of two solutions of a row of :func:`rows_of_both` is faster, and why that is known or not."""
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
