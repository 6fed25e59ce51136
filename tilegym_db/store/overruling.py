"""Overrules failed traces: a person says, with a reason, that a failure does not count."""

from __future__ import annotations

import getpass
import socket
from datetime import UTC, datetime

from tilegym_db.errors import NotFoundError, UsageError
from tilegym_db.records.trace import Trace, new_run_id, new_trace_id
from tilegym_db.store import queries
from tilegym_db.store.connection import ingest
from tilegym_db.store.database import Store
from tilegym_db.store.journal import Journal

_OF_THE_FAILURE = ("attempt", "log", "correctness", "failure")
"""Fields of a failed trace that its overruling does not repeat."""


def overrule(store: Store, trace_id: str, reason: str) -> Trace:
    """Journal that a failed trace does not count, and return the new trace, which names the person and the time.

    The passes that the failure took back count again, unless another failure takes them back. The failure itself stays, and
    both are published, so that other stores do the same.

    Args:
        store: opened for writing.
        trace_id: the failed trace, by a prefix of its id.
        reason: the cause of the failure, if not the Solution; a person reads it.

    Raises:
        NotFoundError: the store has no such trace.
        UsageError: several traces have this prefix, the trace is no failure, or there is no reason.
    """
    if not reason.strip():
        raise UsageError("a failure is overruled for a reason only: --because 'TEXT'.", code="reason_missing")
    found = queries.find_traces(store, trace_id.lower(), most=2)
    if not trace_id or not found:
        raise NotFoundError(f"no trace '{trace_id}'. Try: tilegym-db sql \"FROM revocations\"", code="trace_unknown")
    if len(found) > 1:
        raise UsageError(
            f"several traces have an id that starts with '{trace_id}'. Give more characters.", code="trace_ambiguous"
        )
    (failed,) = queries.read_traces(store, [found[0]["trace_id"]]).values()
    if failed.status in ("PASSED", "UNSUPPORTED", "OVERRULED"):
        raise UsageError(
            f"trace {failed.trace_id} is {failed.status}, which takes nothing back. Give the failure: "
            f"tilegym-db show {failed.solution}",
            code="trace_not_failed",
        )
    run_id = new_run_id(failed.gpu)
    kept = {name: value for name, value in failed.to_dict().items() if name not in _OF_THE_FAILURE}
    overruling = Trace.from_dict(
        kept
        | {
            "trace_id": new_trace_id(run_id, "untimed", 0, failed.solution_digest, failed.config, failed.workload_uuid),
            "run_id": run_id,
            "timestamp": datetime.now(UTC),
            "host": socket.gethostname(),
            "tier": "untimed",
            "status": "OVERRULED",
            "reason": reason.strip(),
            "overrules": {"trace_id": failed.trace_id, "by": getpass.getuser()},
        }
    )
    with Journal(run_id, store.home) as journal:
        journal.append(overruling)
    ingest(store, [journal.path])
    return overruling
