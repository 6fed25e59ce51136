"""Making a database: a new one, one that takes the place of an older one, and what a home folder brings into it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from tilegym_db.catalog import Catalog
from tilegym_db.errors import StoreError
from tilegym_db.store import statements
from tilegym_db.store.database import Store, attach, connect, remove_database, write_ahead_log
from tilegym_db.store.fingerprints import fingerprints
from tilegym_db.store.installation import RejectedLine
from tilegym_db.store.journal import journal_files
from tilegym_db.store.loading import IngestReport, combined, load_journals
from tilegym_db.store.model_runs import load_model_runs
from tilegym_db.store.newest import mark_newest
from tilegym_db.store.refresh import refresh
from tilegym_db.store.tuning import load_tuning

__all__ = ["create_database", "load_home", "upgrade"]

_log = logging.getLogger(__name__)


def upgrade(path: Path, catalog: Catalog, version: str) -> None:
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

    With ``trust``, journals and runs of models that nothing signed (those of older versions) count as well.

    Raises:
        StoreError: a file cannot be read, or the disk is full.
    """
    load_tuning(store, store.home)
    journals = journal_files(store.home)
    odd = [path for path in journals if not _can_be_kept(path)]
    journaled = load_journals(store, [path for path in journals if path not in odd], trust=trust)
    reason = "its name is not UTF-8, so the database cannot note that it was read. Rename it."
    left_out = IngestReport(rejected=tuple(RejectedLine(path, 0, reason) for path in odd))
    return combined(journaled, left_out, load_model_runs(store, store.home, trust=trust))


def _can_be_kept(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _adopt(store: Store, old: Path, adoptions: Iterable[str]) -> None:
    with store.translated("take over the history of"):
        attach(store.connection, old, "old", "READ_ONLY")
    with store.transaction("create") as connection:
        for statement in adoptions:
            connection.execute(statement)
        trust = {"trace_records": statements.ADOPT_TRUST, "model_run_records": statements.ADOPT_MODEL_RUN_TRUST}
        for table, statement in trust.items():
            if connection.execute(statements.HAS_OLD_TRUST, {"table": table}).fetchall()[0][0]:
                connection.execute(statement)
        mark_newest(connection)
    with store.translated("create"):
        store.connection.execute("DETACH old")
