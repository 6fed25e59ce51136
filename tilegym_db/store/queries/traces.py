"""Single traces, and what they were measured against."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC
from typing import TYPE_CHECKING, Any

from tilegym_db.records import Trace
from tilegym_db.store.queries.json_columns import parsed

if TYPE_CHECKING:
    from tilegym_db.store.database import Store

__all__ = ["count_traces", "definition_by_digest", "find_traces", "read_traces", "traces_of"]

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

TRACES_BY_ID = "FROM trace_records WHERE trace_id IN (SELECT unnest($trace_ids::VARCHAR[]))"

DEFINITION_BY_DIGEST = "SELECT record FROM definition_records WHERE digest = $digest"

_KEYS = (
    "config_key", "axes_key", "dtypes_key", "scalars_key", "layouts_key", "blobs_key", "origin", "trusted", "doubt",
    "is_newest",
)  # fmt: skip
"""Columns of the store's own, which are no part of a trace."""


def traces_of(store: Store, solution: str) -> list[dict[str, Any]]:
    """Every trace of a Solution by name, newest first, whatever its digest was then; columns as in the view."""
    return parsed(store.rows(TRACES_OF, {"solution": solution}))


def find_traces(store: Store, prefix: str, most: int = 10) -> list[dict[str, Any]]:
    """The traces whose id starts so, at most ``most`` of them.

    Columns as in the view, and ``is_verified``, ``is_current`` (measured with the catalog's definition and source of
    today) and ``revoked_by`` (the id of the later failure that takes a pass back, or None).
    """
    return parsed(store.rows(FIND_TRACES, {"prefix": prefix, "most": most}))


def count_traces(store: Store) -> int:
    """How many traces the store holds."""
    return int(store.rows(COUNT_TRACES)[0]["traces"])


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
