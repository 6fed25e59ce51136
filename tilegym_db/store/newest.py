"""Marks the passes in the database that no newer one supersedes, so that the views read those and not every trace.

A later measurement of the same source, config, workload and GPU supersedes an earlier one. That is settled when a trace comes in:
whatever takes the newer one back takes the older one back as well, since a failure takes back all that was measured before it.
What may change later (which source is current, what a connection trusts, which tiers and sandbox levels count) is the same for a
whole group, or part of its key, and left to the views. More rows than the newest may be marked, but never fewer: a trace comes in
marked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["mark_newest"]

_PASSED = "status = 'PASSED' AND performance.latency_us IS NOT NULL AND doubt IS NULL"
_KEY = """definition, definition_digest, solution, solution_digest, gpu, tier, sandbox_level, config_key, workload_uuid,
        dtypes_key, axes_key, scalars_key, layouts_key, blobs_key, origin <> 'foreign' OR trusted"""

# New rows, and those marked before that one of them may supersede.
_FIND = f"""
    CREATE OR REPLACE TEMP TABLE found_newest AS
    SELECT arg_max(rowid, row(timestamp, trace_id)) AS id, solution_digest FROM (
        SELECT rowid, * FROM trace_records WHERE rowid > $last AND {_PASSED}
        UNION ALL
        SELECT rowid, * FROM trace_records WHERE rowid <= $last AND is_newest AND {_PASSED}
            AND solution_digest IN (SELECT solution_digest FROM trace_records WHERE rowid > $last AND {_PASSED}))
    GROUP BY {_KEY}
"""
_UNMARK = """
    UPDATE trace_records SET is_newest = false
    WHERE is_newest AND rowid NOT IN (SELECT id FROM found_newest)
        AND solution_digest IN (SELECT solution_digest FROM found_newest)
"""
_MARK = "UPDATE trace_records SET is_newest = true WHERE NOT is_newest AND rowid IN (SELECT id FROM found_newest)"
_FORGET = "DROP TABLE found_newest"


def mark_newest(connection: DuckDBPyConnection, last: int = -1) -> None:
    """Set the column ``is_newest`` as the rows behind row ``last`` ask for; without it, of all."""
    connection.execute(_FIND, {"last": last})
    for statement in (_UNMARK, _MARK, _FORGET):
        connection.execute(statement)
