"""What a report shows, as plain values: rows of SQL, what a call must do, and the sources of the catalog."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition
from tilegym_db.store.queries import report_rows as queries

if TYPE_CHECKING:
    from tilegym_db.catalog import Catalog
    from tilegym_db.store.database import Store

__all__ = ["ReportData", "read_report", "reproduce_command"]


@dataclass(frozen=True)
class ReportData:
    """Every part of a report; each is a list of rows, and an empty one means that the store has nothing of it.

    ``newest`` is when the newest trace was measured (UTC); ``sources`` maps a digest to the text of a file, and
    ``files_of`` a solution to its (path, digest) pairs.
    """

    newest: datetime | None
    evidence: list[dict[str, Any]]
    coverage: list[dict[str, Any]]
    open: list[dict[str, Any]]
    changes: list[dict[str, Any]]
    definitions: list[dict[str, Any]]
    solutions: list[dict[str, Any]]
    peaks: list[dict[str, Any]]
    models: list[dict[str, Any]]
    sources: dict[str, str]
    files_of: dict[str, list[tuple[str, str]]]


def read_report(store: Store, catalog: Catalog, since: datetime | None = None) -> ReportData:
    """Everything that a report shows; changes since then (UTC), or all of them."""
    definitions = queries.definition_rows(store)
    sources, files_of = _sources(catalog)
    return ReportData(
        newest=queries.newest_trace_time(store),
        evidence=_with_work(queries.evidence_rows(store), definitions),
        coverage=queries.coverage_rows(store),
        open=queries.open_rows(store),
        changes=queries.change_rows(store, since),
        definitions=[{key: value for key, value in row.items() if key != "record"} for row in definitions],
        solutions=queries.solution_rows(store),
        peaks=queries.peak_rows(store),
        models=queries.model_rows(store),
        sources=sources,
        files_of=files_of,
    )


def reproduce_command(row: Mapping[str, Any]) -> str:
    """The command that verifies the case of a trace again, for a shell; empty values are left out.

    Of what was measured on a file: the command that measures it again.
    """
    if row["blobs_key"]:
        return shlex.join(["tilegym-db", "bench", row["solution"], "--workload", row["workload_uuid"], "--again"])
    options = (
        ("--axes", "axes_key"),
        ("--dtype", "dtypes_key"),
        ("--scalar", "scalars_key"),
        ("--layout", "layouts_key"),
    )
    parts = ["tilegym-db", "reproduce", row["solution"]]
    for option, key in options:
        parts += [option, row[key]] if row[key] else []
    for name, value in row["config"].items():
        parts += ["--config", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(parts)


def _with_work(rows: Sequence[dict[str, Any]], definitions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with ``flops`` and ``bytes`` of a call, by the Definition's cost; None where it states none."""
    records = {row["name"]: Definition.from_json(row["record"], f"definition {row['name']}") for row in definitions}
    known: dict[tuple[str, str, str], tuple[float, float] | None] = {}
    for row in rows:
        key = (row["definition"], row["axes_key"], row["dtypes_key"])
        if key not in known:
            known[key] = _work(records[row["definition"]], row["axes"], row["dtypes"])
    with_work = []
    for row in rows:
        work = known[row["definition"], row["axes_key"], row["dtypes_key"]]
        told = {"flops": work and work[0], "bytes": work and work[1], "command": reproduce_command(row)}
        # What tells two cases of one shape apart on the page: numbers, and the files that hold inputs.
        files = ",".join(f"{name}={sha256[:12]}" for name, sha256 in row["blobs"].items())
        told["scalars_key"] = ",".join(part for part in (row["scalars_key"], files) if part)
        with_work.append({**row, **told})
    return with_work


def _work(definition: Definition, axes: Mapping[str, int], dtypes: Mapping[str, str]) -> tuple[float, float] | None:
    try:
        work = definition.cost_of(definition.bind_axes(axes), definition.bind_dtypes(dtypes))
    except RecordError:  # a shape that this version of the operator no longer takes: shown, without its work
        return None
    return work if max(work) > 0 else None


def _sources(catalog: Catalog) -> tuple[dict[str, str], dict[str, list[tuple[str, str]]]]:
    """Texts by digest, each once although a family shares it, and which of them each solution has."""
    texts: dict[str, str] = {}
    files_of: dict[str, list[tuple[str, str]]] = {}
    for name, solution in catalog.solutions.items():
        files_of[name] = []
        for path, content in solution.sources.items():
            digest = hashlib.sha256(content).hexdigest()[:16]
            texts[digest] = content.decode("utf-8", errors="replace")
            files_of[name].append((path, digest))
    return texts, files_of
