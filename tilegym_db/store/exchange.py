"""Which traces can be told to others: those that stand verified, and failures of sources that the catalog still holds."""

from __future__ import annotations

from tilegym_db.records.trace import PUBLISHED_SANDBOX_LEVEL, UNTIMED_TIERS, Trace
from tilegym_db.store.database import Store
from tilegym_db.store.queries import read_traces
from tilegym_db.store.queries.fastest import slugs
from tilegym_db.store.statements import VERIFIED_TIERS, listed

__all__ = ["own_traces", "told_traces", "unverified_counts"]

_TOLD = f"""
    SELECT trace_id FROM verified
    WHERE ($gpus::VARCHAR[] IS NULL OR list_contains($gpus::VARCHAR[], gpu))
        AND ($op_type::VARCHAR IS NULL OR op_type = $op_type)
    UNION
    SELECT t.trace_id FROM traces t
    JOIN definition_records d ON d.is_current AND d.name = t.definition AND d.digest = t.definition_digest
    JOIN solution_records s ON s.is_current AND s.name = t.solution AND s.digest = t.solution_digest
    WHERE t.tier NOT IN ({listed(UNTIMED_TIERS)}) AND t.status <> 'PASSED'
        AND ($gpus::VARCHAR[] IS NULL OR list_contains($gpus::VARCHAR[], t.gpu))
        AND ($op_type::VARCHAR IS NULL OR t.op_type = $op_type)
"""
_OWN = f"""
    SELECT trace_id FROM traces
    WHERE origin = 'local' AND tier NOT IN ({listed(UNTIMED_TIERS)})
        AND NOT (status = 'PASSED' AND tier IN ({listed(VERIFIED_TIERS)}) AND sandbox_level < {PUBLISHED_SANDBOX_LEVEL})
        AND ($gpus::VARCHAR[] IS NULL OR list_contains($gpus::VARCHAR[], gpu))
"""
_UNVERIFIED = """
    SELECT tier, count(*) AS traces FROM traces
    WHERE status = 'PASSED' AND trace_id NOT IN (SELECT trace_id FROM verified)
        AND ($gpus::VARCHAR[] IS NULL OR list_contains($gpus::VARCHAR[], gpu))
        AND ($op_type::VARCHAR IS NULL OR op_type = $op_type)
    GROUP BY tier ORDER BY tier
"""


def told_traces(store: Store, gpu: str | None = None, op_type: str | None = None) -> list[Trace]:
    """The traces of one GPU slug and family, or of all, oldest first."""
    ids = [row["trace_id"] for row in store.rows(_TOLD, {"gpus": slugs(gpu), "op_type": op_type})]
    return sorted(read_traces(store, ids).values(), key=lambda trace: (trace.timestamp, trace.trace_id))


def own_traces(store: Store, gpu: str | None = None) -> list[Trace]:
    """Those that were measured here, of one GPU slug and family, or of all, oldest first.

    Promotions by workers that were not confined are nobody else's to believe, and not among them.
    """
    ids = [row["trace_id"] for row in store.rows(_OWN, {"gpus": slugs(gpu)})]
    return sorted(read_traces(store, ids).values(), key=lambda trace: (trace.timestamp, trace.trace_id))


def unverified_counts(store: Store, gpu: str | None = None, op_type: str | None = None) -> dict[str, int]:
    """Tier -> how many passes do not stand verified: superseded, taken back, or of a screen only."""
    return {row["tier"]: row["traces"] for row in store.rows(_UNVERIFIED, {"gpus": slugs(gpu), "op_type": op_type})}
