"""What tables of a team add to the published one, Definition by Definition: points, and candidates at points that both have.

The published table comes first: where it has a source and config at a point, another's time of that counts for nothing. A failure
takes earlier passes of its source back, whichever of the tables either is in, as it does in the database.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from tilegym_db.errors import RecordError
from tilegym_db.records.solution import config_id
from tilegym_db.records.trace_set import TraceSet, is_trace_set
from tilegym_db.resolver.entries import Candidate, DtypesKey, Entry, MeasuredEntries, entries_of
from tilegym_db.store.snapshot import Snapshot

__all__ = ["SetFile", "merged_entries", "taken_back"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SetFile:
    """The trace set of a Definition in a folder that was published or came from a team."""

    snapshot: Snapshot
    path: Path

    def content(self) -> bytes:
        """Its bytes.

        Raises:
            RecordError: it is not what the lock says.
        """
        return self.snapshot.read(self.path, "trace set")

    def entries(self) -> MeasuredEntries:
        """Its entries, with the origin of the folder; raises as :meth:`content`, and where it is no trace set."""
        return entries_of(self.content(), self.path, self.snapshot.origin)


def merged_entries(
    published: Callable[[], MeasuredEntries] | None, own: SetFile | None, shared: Sequence[SetFile]
) -> MeasuredEntries:
    """The entries of one Definition from the published table and those of a team.

    A file of a team that is not what its lock says is left out with a warning; one of the published table is an error, as ever.

    Args:
        published: what the published table has, if it has the Definition.
        own: the file that this comes from; None for a table of the old layout.
        shared: of tables that may serve, the newest first.
    """
    first = [published()] if published is not None else []
    sets = [TraceSet.parse(own.content(), own.path)] if own is not None and is_trace_set(own.content()) else []
    added = []
    for file in shared:
        try:
            measured, parsed = file.entries(), TraceSet.parse(file.content(), file.path)
        except RecordError as error:
            _log.warning("a table of a team is passed over: %s", error)
            continue
        added.append(measured)
        sets.append(parsed)
    lost = taken_back(sets)
    groups = first + added
    keys = dict.fromkeys(key for measured in groups for key in measured.by_dtypes)
    by_dtypes = {key: partial(_joined, groups, key, lost) for key in keys}
    return MeasuredEntries(by_dtypes, groups[0].scalars if groups else {})


def taken_back(sets: Iterable[TraceSet]) -> frozenset[str]:
    """Ids of the passes that a later failure of the same source takes back, by the rule of the view ``revocations``."""
    sets = list(sets)
    if not any(_revokes(facts) for one in sets for facts in one.header.facts):
        return frozenset()
    traces = [trace for one in sets for trace in one.traces()]
    failures = [trace for trace in traces if _revokes(trace)]
    return frozenset(
        trace["trace_id"]
        for trace in traces
        if trace["status"] == "PASSED" and any(_takes_back(failure, trace) for failure in failures)
    )


def _revokes(said: dict[str, Any]) -> bool:
    return said.get("status") not in ("PASSED", "UNSUPPORTED") and said.get("tier") != "interpreter"


def _takes_back(failure: dict[str, Any], passed: dict[str, Any]) -> bool:
    source = ("definition_digest", "solution_digest", "gpu")
    if any(failure[name] != passed[name] for name in source) or _time(failure) < _time(passed):
        return False
    if failure["status"] == "COMPILE_ERROR" and failure["workload_uuid"] != passed["workload_uuid"]:
        return False
    is_cheat = failure["status"] == "REJECTED"
    return is_cheat or config_id(failure.get("config", {})) == config_id(passed.get("config", {}))


def _time(trace: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(trace["timestamp"])


def _joined(groups: Sequence[MeasuredEntries], key: DtypesKey, lost: frozenset[str]) -> tuple[Entry, ...]:
    points: dict[str, Entry] = {}
    for measured in groups:
        load = measured.by_dtypes.get(key)
        for entry in load() if load is not None else ():
            candidates = [_ranged(one, measured) for one in entry.candidates if one.trace_id not in lost]
            where = _point(entry)
            known = points.get(where)
            if known is not None:
                has = {_source(one) for one in known.candidates}
                candidates = [*known.candidates, *(one for one in candidates if _source(one) not in has)]
                candidates.sort(key=lambda one: (one.latency_us or 0.0, one.trace_id or ""))
            points[where] = replace(known or entry, candidates=tuple(candidates))
    return tuple(entry for entry in points.values() if entry.candidates)


def _ranged(candidate: Candidate, measured: MeasuredEntries) -> Candidate:
    """Of before ranges were recorded (decision 0024): verified with the numbers of its own table, not of others."""
    return candidate if candidate.scalar_ranges is not None else replace(candidate, scalar_ranges=measured.scalars)


def _source(candidate: Candidate) -> tuple[str, str, str]:
    return candidate.solution, candidate.solution_digest, config_id(candidate.config)


def _point(entry: Entry) -> str:
    parts = entry.axes, entry.scalars, entry.layouts
    return json.dumps([entry.definition_digest, *(sorted(part.items()) for part in parts)], default=str)
