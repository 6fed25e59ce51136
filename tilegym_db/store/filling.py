"""Fills the database: creates it, rebuilds it, brings in journals, and reloads changed sources.

:mod:`tilegym_db.store.opening` opens a database. A command that only reads loads this module if the database must change.
"""

from __future__ import annotations

import gc
import getpass
import logging
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json, to_json

from tilegym_db.catalog import Catalog
from tilegym_db.catalog.record_files import definition_at, keeping_parsed_sources, visible
from tilegym_db.errors import NotFoundError, RecordError, StoreError, UsageError
from tilegym_db.published.input_files import imported_manifests, published_folders
from tilegym_db.published.snapshot import Checked, RejectedLine
from tilegym_db.records import axes_key
from tilegym_db.records.text import binding_key
from tilegym_db.records.trace import Trace, new_run_id, new_trace_id
from tilegym_db.store import statements
from tilegym_db.store.connection import (
    LOCK_TIMEOUT_S,
    Store,
    attach,
    can_be_noted,
    connect,
    database_path,
    is_damage,
    lock_patience_s,
    remove_database,
    require_regular,
    settle,
    write_ahead_log,
    writer_lock,
)
from tilegym_db.store.imported import whole_records_file
from tilegym_db.store.journal import (
    IngestReport,
    Journal,
    combined,
    journal_files,
    judge_passes,
    load_journals,
    load_snapshots,
    load_traces,
    mark_newest,
)
from tilegym_db.store.queries import measured
from tilegym_db.store.side_files import (
    load_model_runs,
    load_tuning,
    peaks_rows,
    published_model_rows,
    published_tuning_rows,
    sync_loop,
)
from tilegym_db.store.statements import fingerprints, views_fingerprint

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


# ---- creation -------------------------------------------------------------------------------------
# Creates a database, rebuilds an older one, and ingests the files of a home folder.

_log = logging.getLogger(__name__)


def upgrade(path: Path, catalog: Catalog, version: str) -> None:
    """Rebuild a database with older tables. The old one stays until the new one is complete."""
    _log.warning(
        "%s has the tables of an older tilegym-db (schema %s, now %d): making it anew, once.",
        path,
        version,
        statements.SCHEMA_VERSION,
    )
    create_database(path, catalog, path, keep_traces=True)


def create_database(
    path: Path, catalog: Catalog, history: Path | None = None, *, keep_traces: bool = False
) -> IngestReport:
    """Create a complete database and move it to ``path`` in one step, so that no process opens a partial one.

    The caller holds the writers' lock.
    """
    staging = path.with_name(f".{path.name}.new")
    try:
        remove_database(staging)  # left by a killed process
        wanted = fingerprints(catalog, path.parent)  # before the files are read, so that a later change is seen
        with _uncollected(), ThreadPoolExecutor(1) as ahead:
            # At the same time DuckDB plans the views, which needs no Python.
            read = ahead.submit(_read_catalog, catalog, path.parent)
            with new_store(staging) as store:
                report = _fill(store, path, catalog, history, keep_traces, wanted, read)
        write_ahead_log(path).unlink(missing_ok=True)  # it must not be replayed into the new file
        staging.replace(path)
    except OSError as error:
        raise StoreError(f"cannot create {path}: {error.strerror or error}.", code="write_failed") from None
    finally:
        remove_database(staging)
    return report


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the search for cycles: rows are many and have none, and going through them is a tenth of the time of a new home."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def new_store(path: Path) -> Store:
    """Create a database with all tables and views and no rows, and return it open for writing."""
    store = Store(path, connect(path, read_only=False, timeout_s=0.0), read_only=False)
    try:
        with store.transaction("create") as connection:
            connection.execute(statements.schema_sql())
            version = {"key": "schema_version", "value": str(statements.SCHEMA_VERSION)}
            connection.execute(statements.REMEMBER_META, version)
            connection.execute(statements.tables_and_views_sql())
            connection.execute(statements.REMEMBER_META, {"key": "views", "value": views_fingerprint()})
        return store
    except BaseException:
        store.close()
        raise


def _fill(
    store: Store,
    path: Path,
    catalog: Catalog,
    history: Path | None,
    keep_traces: bool,
    wanted: dict[str, str],
    read: Future[_CatalogRows],
) -> IngestReport:
    shipped = refresh(store, catalog, wanted, wanted.keys() - {"views"}, read.result())
    journaled = load_home(store)
    for note in journaled.notes:
        _log.warning("%s", note)
    adopted = IngestReport()
    if history is not None:
        adopted = _adopt(store, history, keep_traces)
    with store.translated("create"):  # the moved file must be complete; closing would hide a full disk
        store.connection.execute("CHECKPOINT")
    return combined(shipped, journaled, adopted)


def load_home(store: Store, *, trust: bool = False) -> IngestReport:
    """Bring in new files beside the database: journals, model runs, and search logs.

    With ``trust``, unsigned journals and model runs (those of older versions) count as well.
    """
    load_tuning(store, store.home)
    journals = journal_files(store.home)
    odd = [path for path in journals if not can_be_noted(path)]
    journaled = load_journals(store, [path for path in journals if path not in odd], trust=trust)
    reason = "its name is not UTF-8, so the database cannot note that it was read. Rename it."
    left_out = IngestReport(rejected=tuple(RejectedLine(path, 0, reason) for path in odd))
    return combined(journaled, left_out, load_model_runs(store, store.home, trust=trust))


def _adopt(store: Store, old: Path, keep_traces: bool) -> IngestReport:
    """Copy what only the old database has. Without ``keep_traces``, traces of this installation come from its journals alone."""
    notes = []
    with store.translated("take over the history of"):
        attach(store.connection, old, "old", "READ_ONLY")
    with store.transaction("create") as connection:
        for statement in statements.ADOPT_HISTORY:
            connection.execute(statement)
        trust = {"trace_records": statements.ADOPT_TRUST, "model_run_records": statements.ADOPT_MODEL_RUN_TRUST}
        for table, statement in trust.items():
            if connection.execute(statements.HAS_OLD_TRUST, {"table": table}).fetchall()[0][0]:
                connection.execute(statement)
                if table == "trace_records" and not keep_traces:
                    notes += _adopt_foreign(connection)
        if keep_traces:
            connection.execute(statements.ADOPT_TRACES)
        mark_newest(connection)
    with store.translated("create"):
        store.connection.execute("DETACH old")
    return IngestReport(notes=tuple(notes))


def _adopt_foreign(connection: DuckDBPyConnection) -> list[str]:
    """Copy foreign traces; return sentences on what was copied and what was left out."""
    (copied,) = connection.execute(statements.ADOPT_FOREIGN).fetchall()[0]
    (left_out,) = connection.execute(statements.COUNT_LEFT_OUT).fetchall()[0]
    notes = []
    if copied:
        notes.append(f"{copied} traces of other files or data sets were copied from the old database.")
    if left_out:
        notes.append(f"{left_out} traces measured here are in no journal any more, so they were left out.")
    return notes


# ---- ingest ---------------------------------------------------------------------------------------
# Brings journals into the database: new ones (:func:`ingest`), or everything from scratch (:func:`rebuild`).


def ingest(store: Store, files: Sequence[Path] | None = None, *, trust: bool = False) -> IngestReport:
    """Bring new traces, model runs and searches into the database.

    Args:
        files: JSONL files of traces. By default: the journals and search logs beside the database that grew since the
            last time, and the model runs beside it.
        trust: count traces that this installation did not sign as if they were measured here. The column ``origin``
            still calls them foreign.

    Returns:
        Counts, and each line that is not a trace. Such a line does not stop the ingest: a killed process leaves one
            behind.
    """
    if files:
        return load_traces(store, files, trust=trust)
    return load_home(store, trust=trust)


def rebuild(
    path: Path | None = None, *, catalog: Catalog | None = None, lock_timeout_s: float = LOCK_TIMEOUT_S
) -> IngestReport:
    """Rebuild the database from the catalog, its shipped traces and the journals, and replace the old one at the end.

    If the old database can be read, older definitions and solutions are copied, and so are the traces that were ingested from
    other files or synced. The notes of the report say how many, and what was left out.
    """
    path = database_path(path)
    require_regular(path)
    with writer_lock(path, lock_patience_s(path, lock_timeout_s)):
        history, notes = _history(path, lock_timeout_s)
        catalog = catalog or Catalog.default()
        try:
            report = create_database(path, catalog, history)
        except StoreError as error:  # damage beyond the part that opening reads
            if history is None or not is_damage(error):
                raise
            report, notes = create_database(path, catalog), (_forgotten(path),)
    return replace(report, notes=(*report.notes, *notes))


def _history(path: Path, lock_timeout_s: float) -> tuple[Path | None, tuple[str, ...]]:
    """Return the old database with its write-ahead log merged, or None with the reason why it cannot be read."""
    if not path.exists():
        return None, ()
    try:
        settle(path, lock_timeout_s)
    except StoreError as error:
        if not is_damage(error):
            raise
        return None, (_forgotten(path),)
    return path, ()


def _forgotten(path: Path) -> str:
    return (
        f"{path} was damaged, so definitions and solutions that left the catalog are forgotten, and so are traces of other files "
        "and data sets. To add them again: tilegym-db data ingest FILES, tilegym-db data sync URI"
    )


# ---- overruling -----------------------------------------------------------------------------------
# A person says, with a reason, that a failure does not count.

_OF_THE_FAILURE = ("attempt", "log", "correctness", "failure")
"""Fields of a failed trace that its overruling does not repeat."""


def overrule(store: Store, trace_id: str, reason: str) -> Trace:
    """Journal that a failed trace does not count, and return the new trace, which names the person and the time.

    The passes that the failure took back count again, unless another failure takes them back. The failure itself stays, and
    both are published, so that other stores do the same.
    """
    if not reason.strip():
        raise UsageError("a failure is overruled for a reason only: --because 'TEXT'.", code="reason_missing")
    found = measured.find_traces(store, trace_id.lower(), most=2)
    if not trace_id or not found:
        raise NotFoundError(f"no trace '{trace_id}'. Try: tilegym-db sql \"FROM revocations\"", code="trace_unknown")
    if len(found) > 1:
        raise UsageError(
            f"several traces have an id that starts with '{trace_id}'. Give more characters.", code="trace_ambiguous"
        )
    (failed,) = measured.read_traces(store, [found[0]["trace_id"]]).values()
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


# ---- refresh --------------------------------------------------------------------------------------
# Reloads changed sources of the database: the views' text, the catalog, peaks, and shipped traces, searches and model
# runs. :mod:`tilegym_db.store.statements` finds the changes.


def refresh(
    store: Store, catalog: Catalog, wanted: dict[str, str], parts: Collection[str], read: _CatalogRows | None = None
) -> IngestReport:
    """Reload ``parts`` from their sources. ``read`` has the catalog's rows if they were read before."""
    refused: list[str] = []
    if read is None and "catalog" in parts:
        read = _read_catalog(catalog, store.home)
    checked = Checked(catalog) if read is None else read.checked
    with store.transaction("bring the catalog into") as connection:
        if "views" in parts:
            connection.execute(statements.tables_and_views_sql())
        if read is not None:
            _sync_catalog(connection, read)
        if "peaks" in parts:
            _insert(connection, statements.SYNC_PEAKS, peaks_rows(store.home, catalog, refused))
        if "searches" in parts:
            rows = published_tuning_rows(catalog, store.home, refused)
            _insert(connection, statements.SYNC_PUBLISHED_TUNING, rows)
        if "model_runs" in parts:
            rows = published_model_rows(catalog, store.home, refused)
            _insert(connection, statements.SYNC_PUBLISHED_MODEL_RUNS, rows)
        if "imported" in parts:
            _sync_imported(connection, store.home)
        if "loop" in parts:
            sync_loop(connection, store.home, catalog)
        if not {"catalog", "peaks"}.isdisjoint(parts) and judge_passes(connection):
            mark_newest(connection)
    report = IngestReport(notes=tuple(refused))
    if "shipped_traces" in parts:  # after the catalog and the peaks, with which figures are compared
        plausible = frozenset() if store.rows(statements.HAS_RETIRED)[0]["retired"] else checked.plausible()
        report = combined(report, load_snapshots(store, published_folders(catalog), plausible=plausible))
    with store.transaction("bring the catalog into") as connection:
        for part in parts:
            connection.execute(statements.FORGET_META, {"key": part})
            connection.execute(statements.REMEMBER_META, {"key": part, "value": wanted[part]})
    for note in report.notes:
        _log.warning("%s", note)
    return report


def _sync_catalog(connection: DuckDBPyConnection, read: _CatalogRows) -> None:
    for statement in statements.RETIRE_RECORDS:
        connection.execute(statement)
    _insert(connection, statements.SYNC_DEFINITIONS, read.definitions)
    _insert(connection, statements.SYNC_SOLUTIONS, read.solutions)
    _insert(connection, statements.SYNC_WORKLOADS, read.workloads)


def _sync_imported(connection: DuckDBPyConnection, home: Path) -> None:
    connection.execute(statements.FORGET_IMPORTED)
    found = (whole_records_file(manifest) for manifest in imported_manifests(home))
    paths = [str(path) for path in found if path is not None]
    if paths:
        connection.execute(statements.INSERT_IMPORTED, {"files": paths})


def _insert(connection: DuckDBPyConnection, statements: Iterable[str], records: list[dict[str, Any]]) -> None:
    # One JSON array as one parameter, since row by row DuckDB takes a millisecond each.
    payload = to_json(records).decode()
    for statement in statements:
        connection.execute(statement, {"records": payload} if "$records" in statement else None)


# ---- catalog rows ---------------------------------------------------------------------------------
# Turns the catalog into database rows without validating shipped records again.
# That validation took most of the time of a new home. :mod:`tilegym_db.published.snapshot` knows the valid files. A
# changed file, or one that depends on a changed file, is validated like a user's.

Row = dict[str, Any]


@dataclass(frozen=True)
class _CatalogRows:
    """The rows of a catalog, and what is known of its files."""

    checked: Checked
    definitions: list[Row]
    solutions: list[Row]
    workloads: list[Row]


def _read_catalog(catalog: Catalog, home: Path) -> _CatalogRows:
    checked = Checked(catalog)
    with keeping_parsed_sources(home):
        definitions, solutions = definition_rows(catalog, checked), solution_rows(catalog, checked)
        workloads = workload_rows(catalog, checked, [row["name"] for row in definitions])
    return _CatalogRows(checked, definitions, solutions, workloads)


def definition_rows(catalog: Catalog, checked: Checked) -> list[Row]:
    """Return every valid Definition, by name. Broken ones are left out, and named as :attr:`Catalog.definitions` does."""
    rows = []
    for name, path in sorted(catalog.definition_paths.items()):
        digest = checked.definition_digest(name)
        if digest is None:
            try:
                definition = catalog.definition(name)
            except RecordError:
                return [_definition_row(one.digest, one.to_dict()) for one in catalog.definitions.values()]
            rows.append(_definition_row(definition.digest, definition.to_dict()))
        else:
            rows.append(_definition_row(digest, from_json(checked.content(path))))
    return rows


def solution_rows(catalog: Catalog, checked: Checked) -> list[Row]:
    """Return every valid Solution, by name. Broken ones are left out, and named as :attr:`Catalog.solutions` does."""
    rows, unknown = {}, set()
    for name, path in catalog.solution_paths.items():
        known = checked.solution_record(path)
        if known is None:
            unknown.add(definition_at(path))
        else:
            rows[name] = _solution_row(*known)
    if unknown <= catalog.definition_paths.keys():
        read = [files for definition in sorted(unknown) for files in catalog.solutions_for(definition)]
    else:
        read = list(catalog.solutions.values())
    rows |= {files.name: _solution_row(files.record.to_dict(), files.digest) for files in read}
    return [rows[name] for name in sorted(rows)]


def workload_rows(catalog: Catalog, checked: Checked, definitions: list[str]) -> list[Row]:
    """Return every valid Workload of these Definitions. Broken ones are left out and named."""
    rows = []
    files: dict[str, list[Path]] = {}
    for path in (path for root in catalog.roots for path in visible(root / "workloads", "*/*.jsonl")):
        files.setdefault(path.stem, []).append(path)
    for name in definitions:
        records = _checked_workloads(files.get(name, ()), name, checked)
        if records is None:
            records = [workload.to_dict() for workload in catalog.workloads_for(name)]
        rows += [_workload_row(record) for record in records]
    return rows


def _checked_workloads(files: Iterable[Path], definition: str, checked: Checked) -> list[Row] | None:
    """Return the Workloads in a Definition's files, or None unless all are known to be valid."""
    found: dict[str, Row] = {}
    for path in files:
        if not checked.workloads(path, definition):
            return None
        for record in map(from_json, checked.content(path).splitlines()):
            found.setdefault(record["uuid"], record)
    return list(found.values())


def _definition_row(digest: str, record: Row) -> Row:
    record.pop("schema_version", None)  # kept records have no defaults
    return {key: record[key] for key in ("name", "version", "op_type")} | {"digest": digest, "record": record}


def _solution_row(record: Row, digest: str) -> Row:
    return {"name": record["name"], "definition": record["definition"], "digest": digest, "record": record}


def _workload_row(record: Row) -> Row:
    dtypes: Mapping[str, str] = record.get("dtypes", {})
    return {
        "uuid": record["uuid"],
        "definition": record["definition"],
        "axes_key": axes_key(record["axes"]),
        "dtypes_key": binding_key(dtypes),
        "record": record,
    }
