"""From journals to the database: what is new (:func:`ingest`), or everything from scratch (:func:`rebuild`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tilegym_db.catalog import Catalog
from tilegym_db.errors import StoreError
from tilegym_db.store.connection import LOCK_TIMEOUT_S, database_path, require_regular, settle
from tilegym_db.store.creation import create_database, load_home
from tilegym_db.store.database import Store, is_damage
from tilegym_db.store.loading import IngestReport, load_traces
from tilegym_db.store.lock import writer_lock

__all__ = ["IngestReport", "ingest", "ingest_journals", "rebuild"]


def ingest(store: Store, files: Sequence[Path] | None = None, *, trust: bool = False) -> IngestReport:
    """Bring traces, runs of models and searches into the database; those it has already are left alone.

    Args:
        store: opened for writing; being that, it holds the writers' lock.
        files: JSONL files of traces; without any, the journals and the logs of searches beside the database that grew since
            the last time, and the runs of models beside it.
        trust: traces that this installation did not sign count from now on, as if they had been measured here; the column
            ``origin`` goes on calling them foreign.

    Returns:
        Counts, and each line that is no trace. Such lines stop nothing: a killed process leaves one behind.

    Raises:
        StoreError: a file cannot be read, or the disk is full; then nothing at all was ingested.
    """
    if files:
        return load_traces(store, files, trust=trust)
    return load_home(store, trust=trust)


def ingest_journals(store: Store) -> IngestReport:
    """:func:`ingest` of the journals beside the database."""
    return ingest(store)


def rebuild(
    path: Path | None = None, *, catalog: Catalog | None = None, lock_timeout_s: float = LOCK_TIMEOUT_S
) -> IngestReport:
    """Make the database anew from the catalog, its shipped traces and the journals; the old one is replaced at the end.

    Older definitions and solutions are taken over where the old database can still be read. Traces that were ingested
    from files other than journals are not.

    Raises:
        StoreError: another process has the database open, it is newer than this version, or the disk is full; the old
            database is then left as it was.
    """
    path = database_path(path)
    require_regular(path)
    with writer_lock(path, lock_timeout_s):
        history, notes = _history(path, lock_timeout_s)
        catalog = catalog or Catalog.default()
        try:
            report = create_database(path, catalog, history)
        except StoreError as error:  # damage further back than what opening reads
            if history is None or not is_damage(error):
                raise
            report, notes = create_database(path, catalog), (_forgotten(path),)
    return replace(report, notes=notes)


def _history(path: Path, lock_timeout_s: float) -> tuple[Path | None, tuple[str, ...]]:
    """The old database, settled (its write-ahead log folded in), or None with why it cannot be read."""
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
    return f"{path} was damaged, so definitions and solutions that left the catalog are forgotten."
