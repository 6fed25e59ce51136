"""Opens the store: creates a missing one, refuses a newer one, and keeps it in step with its sources.

Writers wait for each other at a file lock. A reader that finds an older catalog in the store refreshes it if it can.
Otherwise it reads on and reports that in :attr:`Store.stale`. Opening a store with older tables rebuilds it from the
journals, and from the old file for the rest.

A reader of a store in step loads no record classes: they take longer than its answer, so :mod:`tilegym_db.store.filling` is
imported on its first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tilegym_db.catalog import Catalog
from tilegym_db.errors import StoreError
from tilegym_db.paths import home
from tilegym_db.store import statements
from tilegym_db.store.asking import VIEWS, QueryResult, ask, schema_statement
from tilegym_db.store.database import LOCK_TIMEOUT_S, Store, connect, writer_lock
from tilegym_db.store.statements import fingerprints, outdated

DATABASE_NAME = "tilegym.duckdb"
CREATION_TIMEOUT_S = 120.0
"""Seconds to wait for another process that is creating the database."""


def database_path(place: Path | str | None = None) -> Path:
    """Return the database file of a folder; a path of a file (``*.duckdb``) is returned unchanged."""
    folder = Path(place) if place else home()
    return folder if folder.suffix == ".duckdb" else folder / DATABASE_NAME


def require_regular(path: Path) -> None:
    """Raise if the database path is not a regular file: opening a FIFO would never end.

    Raises:
        StoreError: it is a FIFO, a folder or a device, or DuckDB would interpret a part of the path.
    """
    if "?" in str(path):
        raise StoreError(
            f"{path}: DuckDB ends the name of a file at a question mark. Choose another folder with TILEGYM_DB_HOME.",
            code="path_unfit",
        )
    if path.exists() and not path.is_file():
        raise StoreError(
            f"{path} is no regular file, and the database belongs there. Move it away, or choose another folder with "
            "TILEGYM_DB_HOME.",
            code="file_irregular",
        )


def open_store(
    path: Path | str | None = None,
    *,
    read_only: bool = False,
    catalog: Catalog | None = None,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
) -> Store:
    """Open the database, and create it first if it is missing.

    A new store holds the catalog's records, the shipped traces, and the traces of journals beside it.

    Args:
        path: the database file (``*.duckdb``) or its folder; by default :func:`~tilegym_db.paths.home`.
        read_only: several readers may share the store, but not with a writer. A reader cannot access files.
        catalog: the current definitions and solutions; by default :meth:`Catalog.default`. If it trusts foreign traces,
            they count for this connection.
        lock_timeout_s: seconds to wait for another process; by default longer if that is creating the store.

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
    store, meta = _connect(path, True, lock_timeout_s, catalog.trust_foreign)
    if is_new:
        return store
    if _is_older(meta):
        store.close()
        try:
            _open_writer(path, catalog, lock_timeout_s).close()
        except StoreError as error:
            raise StoreError(
                f"{path} was written by an older tilegym-db and must be made anew, but {error}", code=error.code
            ) from error
        store, meta = _connect(path, True, lock_timeout_s, catalog.trust_foreign)
    outdated_parts = outdated(meta, fingerprints(catalog, path.parent))
    if not outdated_parts:
        return store
    store.close()
    stale = None
    try:
        _open_writer(path, catalog, 0.0).close()
    except StoreError as error:
        stale = f"the {' and '.join(outdated_parts)} changed since this store was last written, and now {error}"
    store, _ = _connect(path, True, lock_timeout_s, catalog.trust_foreign)
    store.stale = stale
    return store


def _create_missing(path: Path, catalog: Catalog, lock_timeout_s: float) -> bool:
    """Create the database unless another process did so first; return True if this one created it."""
    from tilegym_db.store.filling import create_database

    with writer_lock(path, lock_patience_s(path, lock_timeout_s)):
        if path.exists():
            return False
        create_database(path, catalog)
        return True


def lock_patience_s(path: Path, lock_timeout_s: float) -> float:
    """Return the seconds to wait for the writers' lock, which are more if its holder is creating the database."""
    is_default = lock_timeout_s >= LOCK_TIMEOUT_S
    return CREATION_TIMEOUT_S if is_default and not path.exists() else lock_timeout_s


def _open_writer(path: Path, catalog: Catalog, lock_timeout_s: float) -> Store:
    from tilegym_db.store.filling import create_database, refresh, upgrade

    with ExitStack() as resources:
        resources.enter_context(writer_lock(path, lock_patience_s(path, lock_timeout_s)))
        is_new = not path.exists()
        if is_new:
            create_database(path, catalog)
        store, meta = _connect(path, False, lock_timeout_s, catalog.trust_foreign)
        if _is_older(meta):
            store.close()
            upgrade(path, catalog, meta["schema_version"])
            store, meta = _connect(path, False, lock_timeout_s, catalog.trust_foreign)
        resources.callback(store.connection.close)
        if not is_new:
            wanted = fingerprints(catalog, path.parent)
            outdated_parts = outdated(meta, wanted)
            if outdated_parts:
                refresh(store, catalog, wanted, outdated_parts)
        store.resources = resources.pop_all()
        return store


def _connect(
    path: Path, read_only: bool, lock_timeout_s: float, trust_foreign: bool = False
) -> tuple[Store, dict[str, str]]:
    """Return the open database and its metadata; raise :class:`StoreError` if this version does not know it."""
    store = Store(path, connect(path, read_only=read_only, timeout_s=lock_timeout_s), read_only)
    try:
        if trust_foreign:
            store.connection.execute(statements.TRUST_FOREIGN)
        return store, _checked_meta(store)
    except BaseException:
        store.close()
        raise


def settle(path: Path, lock_timeout_s: float) -> None:
    """Merge a database's write-ahead log into its file, so that the file is complete.

    Raises:
        StoreError: as for :func:`open_store`.
    """
    store, _ = _connect(path, False, lock_timeout_s)
    store.close()


def _is_older(meta: dict[str, str]) -> bool:
    return int(meta["schema_version"]) < statements.SCHEMA_VERSION


def _checked_meta(store: Store) -> dict[str, str]:
    """Return the metadata of the store.

    Raises:
        StoreError: not a database of this package, or one whose tables this version does not know.
    """
    if not any(row["table_name"] == "meta" for row in store.rows(statements.TABLE_NAMES)):
        raise StoreError(
            f"{store.path} is not a tilegym-db database. Move it away, or set TILEGYM_DB_HOME elsewhere.",
            code="store_foreign",
        )
    meta = {row["key"]: row["value"] for row in store.rows(statements.META)}
    text = meta.get("schema_version") or ""
    if not (text.isascii() and text.isdigit()):
        raise StoreError(
            f"{store.path} states no version of its tables. Make it anew from the journals: "
            "tilegym-db data ingest --rebuild",
            code="store_damaged",
        )
    version = int(text)
    if version > statements.SCHEMA_VERSION:
        raise StoreError(
            f"{store.path} was written by a newer version of tilegym-db (schema {version}; this one knows "
            f"{statements.SCHEMA_VERSION}). Try: pip install --upgrade tilegym-db, or set TILEGYM_DB_HOME elsewhere.",
            code="version_newer",
        )
    return meta


# ---- the user's SQL -------------------------------------------------------------------------------
# Runs the user's SQL: one SELECT on a restricted connection.
#
# Two checks confine it. The statement must parse as exactly one SELECT (:mod:`tilegym_db.store.asking`). The connection is
# read-only, with file access, extensions and settings locked (:mod:`tilegym_db.store.database`).

_LOCK_TIMEOUT_S = 10.0


def run_user_query(
    text: str,
    params: Sequence[Any] | Mapping[str, Any] = (),
    *,
    path: Path | None = None,
    catalog: Catalog | None = None,
    lock_timeout_s: float = _LOCK_TIMEOUT_S,
    as_arrow: bool = False,
    timeout_s: float | None = None,
) -> QueryResult:
    """Answer one SQL statement of the user. An interrupt (SIGINT) in the main thread ends it at once.

    Args:
        text: one SELECT (also ``FROM ...``, ``DESCRIBE``, ``SUMMARIZE``, ``SHOW TABLES``, ``PIVOT ... IN``).
        params: values for ``?`` or ``$name``.
        path, catalog, lock_timeout_s: as for :func:`open_store`.
        as_arrow: return a ``pyarrow.Table``, which keeps DuckDB's types, instead of rows.
        timeout_s: seconds after which the query is stopped; None for no limit.

    Raises:
        QueryTimeoutError: the query took longer than ``timeout_s``.
        QueryError: not a single SELECT, too long, too many rows, or DuckDB refused it; carries DuckDB's message.
        StoreError: the database cannot be opened.
        ModuleNotFoundError: ``as_arrow`` without pyarrow.
    """
    with open_store(path, read_only=True, catalog=catalog, lock_timeout_s=lock_timeout_s) as store:
        return ask(store, text, params, as_arrow=as_arrow, timeout_s=timeout_s)


def run_schema_query(view: str | None = None, *, path: Path | None = None, as_arrow: bool = False) -> QueryResult:
    """Return every column of a view, or of all views: its type and its meaning.

    Arguments and errors are those of :func:`run_user_query`; an unknown view is a :class:`QueryError`.
    """
    with open_store(path, read_only=True, lock_timeout_s=_LOCK_TIMEOUT_S) as store:
        return ask(store, schema_statement(view, store.connection, VIEWS), as_arrow=as_arrow)
