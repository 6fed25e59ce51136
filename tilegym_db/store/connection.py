"""Opening the store: making it where it does not exist, refusing one that is newer, and keeping it in step.

Writers take turns under a file lock and wait for it; a reader that finds an older catalog in it brings that up to date
first if it can, and otherwise reads on and says so (:attr:`Store.stale`). One with older tables is made anew by whoever
opens it first: from the journals, and from the old file for what they do not hold.

Nearly always there is nothing to bring in. What makes or changes a database is therefore imported where it is needed: it takes
half as long as everything else that a reader loads.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tilegym_db.catalog import Catalog
from tilegym_db.errors import StoreError
from tilegym_db.paths import home
from tilegym_db.store import statements
from tilegym_db.store.database import Store, connect
from tilegym_db.store.fingerprints import fingerprints, outdated
from tilegym_db.store.lock import writer_lock

__all__ = [
    "DATABASE_NAME",
    "LOCK_TIMEOUT_S",
    "Store",
    "database_path",
    "open_store",
    "require_regular",
    "settle",
]

DATABASE_NAME = "tilegym.duckdb"
LOCK_TIMEOUT_S = 10.0
CREATION_TIMEOUT_S = 120.0
"""How long whoever finds no database waits for another process to make it; a slow disk or a busy machine takes its time."""


def database_path(place: Path | str | None = None) -> Path:
    """The database file of a folder; a path that names one already (``*.duckdb``) stays."""
    folder = Path(place) if place else home()
    return folder if folder.suffix == ".duckdb" else folder / DATABASE_NAME


def require_regular(path: Path) -> None:
    """Refuse what lies in the place of the database and is no file: opening a FIFO never ends.

    Raises:
        StoreError: it is a FIFO, a folder or a device, or DuckDB would take a part of the path for something else.
    """
    if "?" in str(path):
        raise StoreError(
            f"{path}: DuckDB ends the name of a file at a question mark. Choose another folder with TILEGYM_DB_HOME."
        )
    if path.exists() and not path.is_file():
        raise StoreError(
            f"{path} is no regular file, and the database belongs there. Move it away, or choose another folder with "
            "TILEGYM_DB_HOME."
        )


def open_store(
    path: Path | str | None = None,
    *,
    read_only: bool = False,
    catalog: Catalog | None = None,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
) -> Store:
    """Open the database, and make it first where there is none.

    A fresh store holds the catalog's records, the traces shipped with it, and those of any journals beside it.

    Args:
        path: the database file (``*.duckdb``) or the folder it is in; by default :func:`~tilegym_db.paths.home`.
        read_only: several readers may be open at once, and no writer beside them. A reader cannot touch files.
        catalog: what definitions and solutions count as current; by default :meth:`Catalog.default`. Where it trusts
            foreign traces, they count for this connection.
        lock_timeout_s: how long to wait for another process to be done with it; by default longer for one that makes it.

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
            raise StoreError(f"{path} was written by an older tilegym-db and must be made anew, but {error}") from error
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
    """Make the database, unless another process has made it by the time its lock is free; whether this one did."""
    from tilegym_db.store.creation import create_database

    # Whoever holds the lock is likely to be making it, which takes far longer than another's use of it.
    with writer_lock(path, lock_timeout_s if lock_timeout_s < LOCK_TIMEOUT_S else CREATION_TIMEOUT_S):
        if path.exists():
            return False
        create_database(path, catalog)
        return True


def _open_writer(path: Path, catalog: Catalog, lock_timeout_s: float) -> Store:
    from tilegym_db.store.creation import create_database, upgrade
    from tilegym_db.store.refresh import refresh

    with ExitStack() as resources:
        resources.enter_context(writer_lock(path, lock_timeout_s))
        if not path.exists():
            create_database(path, catalog)
        store, meta = _connect(path, False, lock_timeout_s, catalog.trust_foreign)
        if _is_older(meta):
            store.close()
            upgrade(path, catalog, meta["schema_version"])
            store, meta = _connect(path, False, lock_timeout_s, catalog.trust_foreign)
        resources.callback(store.connection.close)
        wanted = fingerprints(catalog, path.parent)
        outdated_parts = outdated(meta, wanted)
        if outdated_parts:
            refresh(store, catalog, wanted, outdated_parts)
        store.resources = resources.pop_all()
        return store


def _connect(
    path: Path, read_only: bool, lock_timeout_s: float, trust_foreign: bool = False
) -> tuple[Store, dict[str, str]]:
    """The open database and what it says about itself; :class:`StoreError` where it is none that this version knows."""
    store = Store(path, connect(path, read_only=read_only, timeout_s=lock_timeout_s), read_only)
    try:
        if trust_foreign:
            store.connection.execute(statements.TRUST_FOREIGN)
        return store, _checked_meta(store)
    except BaseException:
        store.close()
        raise


def settle(path: Path, lock_timeout_s: float) -> None:
    """Fold a database's write-ahead log in, so that the file alone is all of it.

    Raises:
        StoreError: as for :func:`open_store`.
    """
    store, _ = _connect(path, False, lock_timeout_s)
    store.close()


def _is_older(meta: dict[str, str]) -> bool:
    return int(meta["schema_version"]) < statements.SCHEMA_VERSION


def _checked_meta(store: Store) -> dict[str, str]:
    """What the store says about itself.

    Raises:
        StoreError: not a database of this package, or one whose tables this version does not know.
    """
    if not any(row["table_name"] == "meta" for row in store.rows(statements.TABLE_NAMES)):
        raise StoreError(f"{store.path} is not a tilegym-db database. Move it away, or set TILEGYM_DB_HOME elsewhere.")
    meta = {row["key"]: row["value"] for row in store.rows(statements.META)}
    version = int(meta["schema_version"])
    if version > statements.SCHEMA_VERSION:
        raise StoreError(
            f"{store.path} was written by a newer version of tilegym-db (schema {version}; this one knows "
            f"{statements.SCHEMA_VERSION}). Try: pip install --upgrade tilegym-db, or set TILEGYM_DB_HOME elsewhere."
        )
    return meta
