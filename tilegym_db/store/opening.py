"""Opens the store: creates a missing one, and keeps it in step with its sources.

A reader that finds an older catalog in the store refreshes it if it can. Otherwise it reads on and reports that in
:attr:`Store.stale`. It ingests journals that grew in the same way. Opening a store with older tables rebuilds it from the
journals, and from the old file for the rest.

A reader of a store in step loads no record classes: they take longer than its answer, so :mod:`tilegym_db.store.filling` is
imported on its first use.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from tilegym_db.catalog import Catalog
from tilegym_db.errors import StoreError
from tilegym_db.files import regular_files
from tilegym_db.store import statements
from tilegym_db.store.asking import QueryResult, ask, schema_statement
from tilegym_db.store.connection import (
    LOCK_TIMEOUT_S,
    Store,
    can_be_noted,
    database_path,
    is_older,
    lock_patience_s,
    open_file,
    require_regular,
    writer_lock,
)
from tilegym_db.store.statements import fingerprints, outdated

_log = logging.getLogger(__name__)


def open_store(
    path: Path | str | None = None,
    *,
    read_only: bool = False,
    catalog: Catalog | None = None,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
    waits: bool = False,
) -> Store:
    """Open the database, and create it first if it is missing.

    A new store holds the catalog's records, the shipped traces, and the traces of journals beside it.

    Args:
        path: the database file (``*.duckdb``) or its folder; by default :func:`~tilegym_db.paths.home`.
        read_only: several readers may share the store, but not with a writer. A reader cannot access files.
        catalog: the current definitions and solutions; by default :meth:`Catalog.default`. If it trusts foreign traces,
            they count for this connection.
        lock_timeout_s: seconds to wait for another process; by default longer if that is creating the store.
        waits: a reader waits for a writer in order to see all that is there. By default it reads on, and is :attr:`Store.stale`.

    Raises:
        StoreError: locked by another process, not writable, on a full disk, damaged, or written by a newer version.
        RecordError: the catalog changed and one of its records is not valid.
    """
    path = database_path(path)
    require_regular(path)
    catalog = catalog or Catalog.default()
    if not read_only:
        return _open_writer(path, catalog, lock_timeout_s)
    is_new = not path.exists() and _create_missing(path, catalog, lock_timeout_s)
    store, meta = open_file(path, True, lock_timeout_s, catalog.trust_foreign)
    if is_new:
        return store
    if is_older(meta):
        store.close()
        try:
            _open_writer(path, catalog, lock_timeout_s).close()
        except StoreError as error:
            raise StoreError(
                f"{path} was written by an older tilegym-db and must be made anew, but {error}", code=error.code
            ) from error
        store, meta = open_file(path, True, lock_timeout_s, catalog.trust_foreign)
    if not _behind(store, meta, catalog):
        return store
    store.close()
    reason = ""
    try:
        with _open_writer(path, catalog, lock_timeout_s if waits else 0.0) as writer:
            if _has_grown(writer):  # a run was killed before it ingested what it had journaled, or is still at work
                _ingest_journals(writer)
    except StoreError as error:
        reason = str(error)
    store, meta = open_file(path, True, lock_timeout_s, catalog.trust_foreign)
    # Another process may have brought in the same while this one waited to read. One that still measures adds more.
    behind = _behind(store, meta, catalog) if reason else []
    if behind:
        store.stale = f"the {' and '.join(behind)} changed since this store was last written, and now {reason}"
    return store


def _behind(store: Store, meta: dict[str, str], catalog: Catalog) -> list[str]:
    """Return what changed since the store was last written, by name."""
    parts = outdated(meta, fingerprints(catalog, store.home))
    return [*parts, "journals"] if _has_grown(store) else parts


def _has_grown(store: Store) -> bool:
    """Return True if a journal beside the database has another size than when it was ingested. An empty one has nothing."""
    known = {row["path"]: row["size"] for row in store.rows(statements.INGESTED_FILES)}
    for path in regular_files(store.home / "runs", "*.jsonl"):
        with suppress(OSError):  # a run without measurements removes its empty journal
            size = path.stat().st_size
            if size and known.get(str(path)) != size and can_be_noted(path):
                return True
    return False


def _ingest_journals(store: Store) -> None:
    """Ingest journals, and name what is left out: later commands find nothing new in them.

    A line that is cut off is not named, since its run may still write it. If that was killed, its trace was never acknowledged.
    """
    from tilegym_db.store.filling import ingest
    from tilegym_db.store.journal import CUT_OFF

    report = ingest(store)
    left_out = (str(line) for line in report.rejected if not line.reason.startswith(CUT_OFF))
    for text in (*left_out, *report.notes):
        _log.warning("%s", text)


def _create_missing(path: Path, catalog: Catalog, lock_timeout_s: float) -> bool:
    """Create the database unless another process did so first; return True if this one created it."""
    from tilegym_db.store.filling import create_database

    with writer_lock(path, lock_patience_s(path, lock_timeout_s)):
        if path.exists():
            return False
        create_database(path, catalog)
        return True


def _open_writer(path: Path, catalog: Catalog, lock_timeout_s: float) -> Store:
    from tilegym_db.store.filling import create_database, refresh, upgrade

    with ExitStack() as resources:
        resources.enter_context(writer_lock(path, lock_patience_s(path, lock_timeout_s)))
        is_new = not path.exists()
        if is_new:
            create_database(path, catalog)
        store, meta = open_file(path, False, lock_timeout_s, catalog.trust_foreign)
        if is_older(meta):
            store.close()
            upgrade(path, catalog, meta["schema_version"])
            store, meta = open_file(path, False, lock_timeout_s, catalog.trust_foreign)
        resources.callback(store.connection.close)
        if not is_new:
            wanted = fingerprints(catalog, path.parent)
            outdated_parts = outdated(meta, wanted)
            if outdated_parts:
                refresh(store, catalog, wanted, outdated_parts)
        store.resources = resources.pop_all()
        return store


# ---- the user's SQL -------------------------------------------------------------------------------
# Runs the user's SQL: one SELECT on a restricted connection.
#
# Two checks confine it. The statement must parse as exactly one SELECT (:mod:`tilegym_db.store.asking`). The connection is
# read-only, with file access, extensions and settings locked (:mod:`tilegym_db.store.connection`).


def run_user_query(
    text: str,
    params: Sequence[Any] | Mapping[str, Any] = (),
    *,
    path: Path | None = None,
    catalog: Catalog | None = None,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
    as_arrow: bool = False,
    timeout_s: float | None = None,
) -> QueryResult:
    """Answer one SQL statement of the user. An interrupt (SIGINT) in the main thread ends it at once.

    Arguments and errors are those of :func:`open_store` and of :func:`~tilegym_db.store.asking.ask`.
    """
    with open_store(path, read_only=True, catalog=catalog, lock_timeout_s=lock_timeout_s) as store:
        return ask(store, text, params, as_arrow=as_arrow, timeout_s=timeout_s)


def run_schema_query(view: str | None = None, *, path: Path | None = None, as_arrow: bool = False) -> QueryResult:
    """Return every column of a view, or of all views: its type and its meaning.

    Arguments and errors are those of :func:`run_user_query`; an unknown view is a :class:`QueryError`.
    """
    with open_store(path, read_only=True, lock_timeout_s=LOCK_TIMEOUT_S) as store:
        return ask(store, schema_statement(view, store.connection), as_arrow=as_arrow)
