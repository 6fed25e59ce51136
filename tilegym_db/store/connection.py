"""Opening the store: making it where it does not exist, refusing one that is newer, and keeping it in step.

Writers take turns under a file lock and wait for it; a reader that finds an older catalog in it brings that up to date
first if it can, and otherwise reads on and says so (:attr:`Store.stale`). One with older tables is made anew by whoever
opens it first: from the journals, and from the old file for what they do not hold.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from tilegym_db.catalog import Catalog
from tilegym_db.errors import StoreError
from tilegym_db.paths import home
from tilegym_db.store import statements
from tilegym_db.store.database import Store, attach, connect, remove_database, write_ahead_log
from tilegym_db.store.journal import journal_files
from tilegym_db.store.loading import IngestReport, combined, load_journals
from tilegym_db.store.lock import writer_lock
from tilegym_db.store.model_runs import load_model_runs
from tilegym_db.store.refresh import fingerprints, outdated, refresh
from tilegym_db.store.tuning import load_tuning

__all__ = [
    "DATABASE_NAME",
    "LOCK_TIMEOUT_S",
    "Store",
    "create_database",
    "database_path",
    "load_home",
    "open_store",
    "settle",
]

_log = logging.getLogger(__name__)

DATABASE_NAME = "tilegym.duckdb"
LOCK_TIMEOUT_S = 10.0


def database_path(place: Path | None = None) -> Path:
    """The database file of a folder; a path that names one already (``*.duckdb``) stays."""
    folder = place or home()
    return folder if folder.suffix == ".duckdb" else folder / DATABASE_NAME


def open_store(
    path: Path | None = None,
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
        lock_timeout_s: how long to wait for another process to be done with it.

    Raises:
        StoreError: locked by another process, not writable, on a full disk, damaged, or written by a newer version.
        RecordError: the catalog changed and one of its records is not valid.
    """
    path = database_path(path)
    catalog = catalog or Catalog.default()
    if not read_only:
        return _open_writer(path, catalog, lock_timeout_s)
    if not path.exists():
        _open_writer(path, catalog, lock_timeout_s).close()
    store, meta = _connect(path, True, lock_timeout_s, catalog.trust_foreign)
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


def _open_writer(path: Path, catalog: Catalog, lock_timeout_s: float) -> Store:
    with ExitStack() as resources:
        resources.enter_context(writer_lock(path, lock_timeout_s))
        if not path.exists():
            create_database(path, catalog)
        store, meta = _connect(path, False, lock_timeout_s, catalog.trust_foreign)
        if _is_older(meta):
            store.close()
            _upgrade(path, catalog, meta["schema_version"])
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


def _upgrade(path: Path, catalog: Catalog, version: str) -> None:
    """Make a database with older tables anew. It stays as it was until the new one, with all that it held, is whole."""
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
    """Make a whole database and move it to ``path`` in one step, so that nobody ever opens half of one.

    The caller holds the writers' lock.

    Args:
        path: where it goes; the journals are those beside it.
        catalog: its records and its shipped traces go in.
        history: a database whose older definitions and solutions are taken over.
        keep_traces: take over the traces of ``history`` too that neither the journals nor the shipped files hold.
    """
    staging = path.with_name(f".{path.name}.new")
    try:
        remove_database(staging)  # of a process that was killed here
        with Store(staging, connect(staging, read_only=False, timeout_s=0.0), read_only=False) as store:
            report = _fill(store, path, catalog, history, keep_traces)
        write_ahead_log(path).unlink(missing_ok=True)  # it must not be replayed into the new file
        staging.replace(path)
    except OSError as error:
        raise StoreError(f"cannot create {path}: {error.strerror or error}.") from None
    finally:
        remove_database(staging)
    return report


def _fill(store: Store, path: Path, catalog: Catalog, history: Path | None, keep_traces: bool) -> IngestReport:
    wanted = fingerprints(catalog, path.parent)
    with store.transaction("create") as connection:
        connection.execute(statements.schema_sql())
        connection.execute(statements.REMEMBER_META, {"key": "schema_version", "value": str(statements.SCHEMA_VERSION)})
    shipped = refresh(store, catalog, wanted, wanted.keys())
    journaled = load_home(store)
    for note in journaled.notes:
        _log.warning("%s", note)
    if history is not None:
        _adopt(store, history, (*statements.ADOPT_HISTORY, *([statements.ADOPT_TRACES] if keep_traces else [])))
    with store.translated("create"):  # all of it into the one file that is moved; closing would hide a full disk
        store.connection.execute("CHECKPOINT")
    return combined(shipped, journaled)


def load_home(store: Store, *, trust: bool = False) -> IngestReport:
    """Bring in what is new beside the database: journals, runs of models, and logs of searches.

    With ``trust``, journals that nothing signed (those of older versions) count as well.

    Raises:
        StoreError: a file cannot be read, or the disk is full.
    """
    load_tuning(store, store.home)
    return combined(load_journals(store, journal_files(store.home), trust=trust), load_model_runs(store, store.home))


def _adopt(store: Store, old: Path, adoptions: Iterable[str]) -> None:
    with store.translated("take over the history of"):
        attach(store.connection, old, "old", "READ_ONLY")
    with store.transaction("create") as connection:
        for statement in adoptions:
            connection.execute(statement)
        if connection.execute(statements.HAS_OLD_TRUST).fetchall()[0][0]:
            connection.execute(statements.ADOPT_TRUST)
    with store.translated("create"):
        store.connection.execute("DETACH old")
