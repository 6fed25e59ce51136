"""Brings in again what changed of what the database is derived from: the views' text, the catalog, peaks, and shipped traces,
searches and runs of models. :mod:`tilegym_db.store.fingerprints` says what changed."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from tilegym_db.catalog import Catalog
from tilegym_db.catalog.parsed_sources import keeping_parsed_sources
from tilegym_db.store import statements
from tilegym_db.store.catalog_rows import definition_rows, solution_rows, workload_rows
from tilegym_db.store.checked import Checked
from tilegym_db.store.doubts import judge_passes
from tilegym_db.store.imported import sync_imported
from tilegym_db.store.input_files import published_folders
from tilegym_db.store.loading import IngestReport, combined, load_snapshots
from tilegym_db.store.loop_journals import sync_loop
from tilegym_db.store.model_runs import published_model_rows
from tilegym_db.store.newest import mark_newest
from tilegym_db.store.peaks_files import peaks_rows
from tilegym_db.store.tuning import published_tuning_rows

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from tilegym_db.store.database import Store

__all__ = ["refresh"]

_log = logging.getLogger(__name__)


def refresh(store: Store, catalog: Catalog, wanted: dict[str, str], parts: Collection[str]) -> IngestReport:
    """Bring ``parts`` in again.

    Raises:
        RecordError: a record of the catalog, or a file of peaks, is not valid.
        StoreError: the disk is full.
    """
    refused: list[str] = []
    checked = Checked(catalog)
    with store.transaction("bring the catalog into") as connection:
        if "views" in parts:
            connection.execute(statements.views_sql())
        if "catalog" in parts:
            with keeping_parsed_sources(store.home):
                _sync_catalog(connection, catalog, checked)
        if "peaks" in parts:
            _insert(connection, statements.SYNC_PEAKS, peaks_rows(store.home, catalog, refused))
        if "searches" in parts:
            rows = published_tuning_rows(catalog, store.home, refused)
            _insert(connection, statements.SYNC_PUBLISHED_TUNING, rows)
        if "model_runs" in parts:
            rows = published_model_rows(catalog, store.home, refused)
            _insert(connection, statements.SYNC_PUBLISHED_MODEL_RUNS, rows)
        if "imported" in parts:
            sync_imported(connection, store.home)
        if "loop" in parts:  # after the views, which its own ask
            sync_loop(connection, store.home, catalog)
        if not {"catalog", "peaks"}.isdisjoint(parts) and judge_passes(connection):
            mark_newest(connection)
    report = IngestReport(notes=tuple(refused))
    if "shipped_traces" in parts:  # after the catalog and the peaks, which each batch's figures are held against
        plausible = frozenset() if store.rows(statements.HAS_RETIRED)[0]["retired"] else checked.plausible()
        report = combined(report, load_snapshots(store, published_folders(catalog), plausible=plausible))
    with store.transaction("bring the catalog into") as connection:
        for part in parts:
            connection.execute(statements.FORGET_META, {"key": part})
            connection.execute(statements.REMEMBER_META, {"key": part, "value": wanted[part]})
    for note in report.notes:
        _log.warning("%s", note)
    return report


def _sync_catalog(connection: DuckDBPyConnection, catalog: Catalog, checked: Checked) -> None:
    definitions, solutions = definition_rows(catalog, checked), solution_rows(catalog, checked)
    workloads = workload_rows(catalog, checked, [row["name"] for row in definitions])
    for statement in statements.RETIRE_RECORDS:
        connection.execute(statement)
    _insert(connection, statements.SYNC_DEFINITIONS, definitions)
    _insert(connection, statements.SYNC_SOLUTIONS, solutions)
    _insert(connection, statements.SYNC_WORKLOADS, workloads)


def _insert(connection: DuckDBPyConnection, statements: Iterable[str], records: list[dict[str, Any]]) -> None:
    # one JSON array as one parameter: row by row, DuckDB takes a millisecond each
    payload = to_json(records).decode()
    for statement in statements:
        connection.execute(statement, {"records": payload} if "$records" in statement else None)
