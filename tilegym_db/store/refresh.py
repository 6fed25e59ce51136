"""Keeps the database in step with what it is derived from: the views' text, the catalog, shipped traces and searches, and peaks.

Each has a fingerprint, kept in ``meta``; only what changed is brought in again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilegym_db.catalog import Catalog
from tilegym_db.records import axes_key
from tilegym_db.records.base import length_prefixed_digest
from tilegym_db.store import statements
from tilegym_db.store.batches import trace_files
from tilegym_db.store.doubts import judge_passes
from tilegym_db.store.imported import imported_manifests, sync_imported, views_text
from tilegym_db.store.loading import IngestReport, combined, load_snapshots
from tilegym_db.store.loop_journals import loop_files, loop_views_text, sync_loop
from tilegym_db.store.peaks_files import own_peaks_files, peaks_rows, published_peaks_files
from tilegym_db.store.snapshot import LOCK_NAME, published_folders
from tilegym_db.store.tuning import published_tuning_files, published_tuning_rows

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from tilegym_db.store.database import Store

__all__ = ["fingerprints", "outdated", "refresh", "shipped_traces"]

_log = logging.getLogger(__name__)

_RECORD_FILES = ("definitions/*/*.json", "solutions/*/*/*/**/*", "workloads/*/*.jsonl")


def fingerprints(catalog: Catalog, home: Path) -> dict[str, str]:
    """What a store in step with this package, this catalog and this home folder has in ``meta``.

    Reads names, sizes and times only.
    """
    records = (path for root in catalog.roots for pattern in _RECORD_FILES for path in root.glob(pattern))
    return {
        "views": length_prefixed_digest([statements.views_sql().encode()]),
        "catalog": _fingerprint(path for path in records if "__pycache__" not in path.parts),
        "shipped_traces": _fingerprint([*shipped_traces(catalog), *_locks(catalog)]),
        "peaks": _fingerprint([*own_peaks_files(home), *published_peaks_files(catalog), *_locks(catalog)]),
        "searches": _fingerprint([*published_tuning_files(catalog), *_locks(catalog)]),
        "imported": length_prefixed_digest([views_text().encode(), _fingerprint(imported_manifests(home)).encode()]),
        "loop": length_prefixed_digest([loop_views_text().encode(), _fingerprint(loop_files(home, catalog)).encode()]),
    }


def shipped_traces(catalog: Catalog) -> list[Path]:
    """The published traces that come with a catalog."""
    return [path for folder in published_folders(catalog) for path in trace_files(folder)]


def _locks(catalog: Catalog) -> list[Path]:
    return [folder / LOCK_NAME for folder in published_folders(catalog)]


def outdated(meta: dict[str, str], wanted: dict[str, str]) -> list[str]:
    """Which parts of a store are behind, by their key in ``meta``."""
    return [key for key, value in wanted.items() if meta.get(key) != value]


def refresh(store: Store, catalog: Catalog, wanted: dict[str, str], parts: Collection[str]) -> IngestReport:
    """Bring ``parts`` in again.

    Raises:
        RecordError: a record of the catalog, or a file of peaks, is not valid.
        StoreError: the disk is full.
    """
    refused: list[str] = []
    with store.transaction("bring the catalog into") as connection:
        if "views" in parts:
            connection.execute(statements.views_sql())
        if "catalog" in parts:
            _sync_catalog(connection, catalog)
        if "peaks" in parts:
            _insert(connection, statements.SYNC_PEAKS, peaks_rows(store.home, catalog, refused))
        if "searches" in parts:
            rows = published_tuning_rows(catalog, store.home, refused)
            _insert(connection, statements.SYNC_PUBLISHED_TUNING, rows)
        if "imported" in parts:
            sync_imported(connection, store.home)
        if "loop" in parts:  # after the views, which its own ask
            sync_loop(connection, store.home, catalog)
    report = IngestReport(notes=tuple(refused))
    if "shipped_traces" in parts:  # after the catalog and the peaks, which the figures of passes are held against
        report = combined(report, load_snapshots(store, published_folders(catalog)))
    with store.transaction("bring the catalog into") as connection:
        if not {"catalog", "peaks"}.isdisjoint(parts):
            judge_passes(connection)
        for part in parts:
            connection.execute(statements.FORGET_META, {"key": part})
            connection.execute(statements.REMEMBER_META, {"key": part, "value": wanted[part]})
    for note in report.notes:
        _log.warning("%s", note)
    return report


def _sync_catalog(connection: DuckDBPyConnection, catalog: Catalog) -> None:
    definitions = [
        {"name": d.name, "version": d.version, "digest": d.digest, "op_type": d.op_type, "record": d.to_dict()}
        for d in catalog.definitions.values()
    ]
    solutions = [
        {"name": s.name, "definition": s.record.definition, "digest": s.digest, "record": s.record.to_dict()}
        for s in catalog.solutions.values()
    ]
    workloads = [
        {
            "uuid": w.uuid,
            "definition": w.definition,
            "axes_key": axes_key(w.axes),
            "dtypes_key": ",".join(f"{name}={w.dtypes[name]}" for name in sorted(w.dtypes)),
            "record": w.to_dict(),
        }
        for w in catalog.all_workloads()
    ]
    for statement in statements.RETIRE_RECORDS:
        connection.execute(statement)
    _insert(connection, statements.SYNC_DEFINITIONS, definitions)
    _insert(connection, statements.SYNC_SOLUTIONS, solutions)
    _insert(connection, statements.SYNC_WORKLOADS, workloads)


def _insert(connection: DuckDBPyConnection, statements: Iterable[str], records: list[dict[str, Any]]) -> None:
    # one JSON array as one parameter: row by row, DuckDB takes a millisecond each
    payload = json.dumps(records, ensure_ascii=False)
    for statement in statements:
        connection.execute(statement, {"records": payload} if "$records" in statement else None)


def _fingerprint(paths: Iterable[Path]) -> str:
    parts = []
    for path in sorted(paths):
        if path.is_file():
            status = path.stat()
            parts.append(f"{path}|{status.st_size}|{status.st_mtime_ns}".encode())
    return length_prefixed_digest(parts)
