"""Connects to the store: one DuckDB file, whose writers wait for each other at a file lock.

:mod:`tilegym_db.store.opening` creates a missing store and keeps it in step with its sources.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tilegym_db.errors import StoreError
from tilegym_db.files import POLL_S, hold_lock, lock_holder
from tilegym_db.paths import home
from tilegym_db.store import statements

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from tilegym_db.store.answer import Answer


_log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 10.0
READER_TIMEOUT_S = 600.0
"""Seconds that a reader waits for a command of this package that writes, such as a long ingest."""
SILENT_S = 2.0
IDLE_S = 20.0
IDLE_SHARE = 0.02
"""A writer that computes less than this share of so many seconds is idle, as a notebook that keeps its store open."""
SLOW_POLL_S = 0.2
"""Seconds between the attempts of a reader that waits long. Each attempt opens the file."""

STORAGE_VERSION = "v1.5.0"
"""Format of the files, which DuckDB 1.5's command line and UI can open."""

ROW_GROUP_SIZE = 32768
"""Rows that one thread compresses, writes and scans as one unit. Traces are wide and number tens of thousands. With
DuckDB's default of 122,880 one thread would do all the work, and only at commit.
"""

_Settings = dict[str, str | bool | int | float | list[str]]
_BASE: _Settings = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",  # a SQL name must never resolve to a caller's Python variable
}
WRITER_MEMORY_BYTES = 2 << 30
"""Maximum memory of a writer before it spills to disk, or half the machine's memory if that is less. With DuckDB's
default, ten million traces would take 14 GB.
"""


def _writer_memory() -> str:
    """Return the limit at each connection, so that importing does not depend on the machine."""
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{min(WRITER_MEMORY_BYTES, total_bytes // 2) >> 20}MiB"


_WRITER: _Settings = {**_BASE, "storage_compatibility_version": STORAGE_VERSION}
# A reader may run a user's statement. It reaches only the database, and cannot even spill to disk.
_READER: _Settings = {**_BASE, "enable_external_access": "false", "temp_directory": ""}


@dataclass(frozen=True)
class _Trouble:
    """A cause of DuckDB's errors: the message for it, its code, and marks in DuckDB's own text."""

    message: str
    marks: tuple[str, ...] = ()
    code: str = field(kw_only=True)


_TROUBLES = (  # the first that matches counts
    _Trouble(
        "{path} cannot be locked, because its file system has no locks for files: {cause}. Some network file systems have none. "
        "Set TILEGYM_DB_HOME to a folder on a local disk.",
        ("Operation not supported", "No locks available", "Function not implemented"),
        code="locks_missing",
    ),
    _Trouble(
        "{path} is locked: {holder} has it open. Close that program or wait for it to finish, and try again. A notebook "
        "frees the store with store.close(), or shares it if it opens it with open_store(read_only=True).",
        ("Could not set lock",),
        code="store_locked",
    ),
    _Trouble(
        "{path} is locked: this process has it open already. Close that store first, with store.close().",
        ("Unique file handle conflict", "different configuration"),
        code="store_open_here",
    ),
    _Trouble(
        "cannot {action} {path}: the disk is full. Nothing was changed; free some space or set TILEGYM_DB_HOME to "
        "another disk, and run the command again.",
        ("No space left", "File too large", "Disk quota"),
        code="disk_full",
    ),
    _Trouble(
        "cannot {action} {path}: {cause}. Make the file and its folder writable, or set TILEGYM_DB_HOME to a folder "
        "that is.",
        ("Permission denied", "Read-only file system"),
        code="write_failed",
    ),
    _Trouble(
        "{path} was written by a newer DuckDB than the one installed. Try: pip install --upgrade duckdb",
        ("created with a newer version",),
        code="duckdb_newer",
    ),
    _Trouble(
        "{path} is a database of another program. Move it away, or set TILEGYM_DB_HOME elsewhere.",
        ("external extensions", "sqlite_scanner"),  # DuckDB would read a database of SQLite by an extension
        code="store_foreign",
    ),
    _Trouble(
        "cannot {action} {path}: {cause} The journals beside it hold the traces; make it anew with: "
        "tilegym-db data ingest --rebuild",
        ("not a valid DuckDB database", "Corrupt", "corrupt", "checksum", "Could not read enough bytes"),
        code="store_damaged",
    ),
)
_OTHER_TROUBLE = _Trouble("cannot {action} {path}: {cause}", code="store_failed")
_HOLDER = re.compile(r"lock is held in (?P<program>.+?) \(PID (?P<pid>\d+)\)")


@dataclass
class Store:
    """An open database. Use this context manager only in the process that opened it, then close it."""

    path: Path
    connection: DuckDBPyConnection = field(repr=False)
    read_only: bool
    stale: str | None = None
    """Reason why a reader sees an older catalog than the one on disk, else None."""
    resources: ExitStack = field(default_factory=ExitStack, repr=False)
    """Resources held while the store is open: a writer's lock."""
    _pid: int = field(default_factory=os.getpid, repr=False)

    def __repr__(self) -> str:
        """Return the file, and whether it is open for reading only."""
        return f"<Store {self.path}{', read-only' if self.read_only else ''}>"

    @property
    def home(self) -> Path:
        """Return the folder of the database, which also holds the journals (``runs/``)."""
        return self.path.parent

    def rows(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Run one of this package's queries and return each row as column -> value."""
        with self.translated("query"):
            cursor = self.connection.execute(sql, parameters) if parameters else self.connection.execute(sql)
            names = [column[0] for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def sql(self, text: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> Answer:
        """Answer one SELECT over the views. The answer converts to Arrow, pandas and polars, and displays in a
        notebook.

        Raises:
            QueryError: not a single SELECT, or DuckDB refused it.
            StoreError: the store was closed, or opened before a fork.
        """
        from tilegym_db.store.answer import Answer

        with self.translated("query"):
            return Answer.of(self, text, parameters)

    @contextmanager
    def transaction(self, action: str) -> Iterator[DuckDBPyConnection]:
        """Commit all of the block or nothing; ``action`` names it in error messages ("ingest traces into")."""
        import duckdb

        if self.read_only:
            raise StoreError(f"cannot {action} {self.path}: it was opened read-only.", code="store_read_only")
        with self.translated(action):
            self.connection.execute("BEGIN")
            try:
                yield self.connection
                self.connection.execute("COMMIT")
            except BaseException:
                with suppress(duckdb.Error):  # already rolled back, or the connection is beyond use
                    self.connection.execute("ROLLBACK")
                raise

    @contextmanager
    def translated(self, action: str) -> Iterator[None]:
        """Turn DuckDB's errors inside the block into :class:`StoreError`."""
        if os.getpid() != self._pid:
            raise StoreError(
                f"{self.path} was opened before a fork; open it anew in this process.", code="store_forked"
            )
        with translated(self.path, action):
            yield

    def close(self) -> None:
        """Write everything out and release the store for other processes."""
        import duckdb

        try:
            if os.getpid() == self._pid:
                # The error was reported before, or a query does not stop. Uncommitted data is dropped.
                with suppress(duckdb.FatalException, duckdb.ResourceInUseException):
                    self.connection.close()
        finally:
            self.resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(path: Path, *, read_only: bool, timeout_s: float) -> DuckDBPyConnection:
    """Connect to a DuckDB file, waiting up to ``timeout_s`` seconds for another process to release it.

    A reader with the default timeout waits longer, with a message, while a command of this package writes. It does not wait for
    one that is idle.

    A reader's connection cannot write, access files, load extensions, or change its settings.
    """
    import duckdb

    started = time.monotonic()
    said, seen_s, activity = False, -math.inf, _Activity()
    while True:
        try:
            connection = duckdb.connect(path, config=_READER, read_only=True) if read_only else _attached(path)
            break
        except duckdb.IOException as error:
            waited_s = time.monotonic() - started
            reason = explained(error, path, "open")
            if reason.code != "store_locked":
                raise reason from error
            writer = lock_holder(_lock_file(path)) if read_only and timeout_s >= LOCK_TIMEOUT_S else None
            seen_s = waited_s if writer is not None else seen_s
            # A writer that has ended since this attempt gives the file back in a moment.
            if waited_s >= (max(timeout_s, seen_s + SILENT_S) if writer is None else READER_TIMEOUT_S):
                raise reason from error
            if writer is not None and activity.has_ended(writer):
                raise reason from error
            if writer is not None and waited_s >= SILENT_S and not said:
                _log.warning("waiting: another tilegym-db (PID %d) writes %s.", writer, path)
                said = True
        except duckdb.Error as error:
            raise explained(error, path, "open") from error
        time.sleep(SLOW_POLL_S if said else POLL_S)
    _settle(connection, read_only)
    return connection


@dataclass
class _Activity:
    """The processor time of a process that others wait for, since the begin of a window of :data:`IDLE_S` seconds."""

    process: int = 0
    began: float = 0.0
    used_s: float = 0.0

    def has_ended(self, process: int) -> bool:
        """Return True at the end of a window in which the process was idle; False if the system does not tell."""
        used_s, now = processor_seconds(process), time.monotonic()
        if used_s is None:
            return False
        if process == self.process and now < self.began + IDLE_S:
            return False
        is_idle = process == self.process and used_s - self.used_s < IDLE_SHARE * (now - self.began)
        self.process, self.began, self.used_s = process, now, used_s
        return is_idle


def processor_seconds(process: int) -> float | None:
    """Return the processor time of a process and its threads, if the system has ``/proc``."""
    try:
        # The name of the program may have spaces and parentheses.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _attached(path: Path) -> DuckDBPyConnection:
    """Return a writer's connection. The file is attached to an in-memory database, since only ATTACH sets the row group
    size.
    """
    import duckdb

    connection = duckdb.connect(config={**_WRITER, "memory_limit": _writer_memory(), "temp_directory": f"{path}.tmp"})
    try:
        attach(connection, path, "store", f"ROW_GROUP_SIZE {ROW_GROUP_SIZE}")
        connection.execute("USE store")
    except BaseException:
        connection.close()
        raise
    return connection


def attach(connection: DuckDBPyConnection, path: Path, name: str, option: str) -> None:
    """Attach a database file to a connection; its tables are then ``name.table``."""
    literal = str(path).replace("'", "''")  # ATTACH takes no parameters
    connection.execute(f"ATTACH '{literal}' AS {name} ({option})")


def _settle(connection: DuckDBPyConnection, read_only: bool) -> None:
    """Apply settings that need a connection. Connections of one process to one file share them."""
    locked = connection.execute("SELECT current_setting('lock_configuration')").fetchall()
    if not locked[0][0]:
        connection.execute("SET GLOBAL TimeZone = 'UTC'")
        # DuckDB prints a bar to stdout if a query of a prompt, a notebook or `python -c` takes two seconds.
        connection.execute("SET enable_progress_bar = false")
        if read_only:
            connection.execute("SET lock_configuration = true")


@contextmanager
def translated(path: Path, action: str) -> Iterator[None]:
    """Turn DuckDB's errors inside the block into :class:`StoreError` with the next step."""
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        raise explained(error, path, action) from error


def explained(error: Exception, path: Path, action: str) -> StoreError:
    """Return the :class:`StoreError` that explains a DuckDB error to the user of the command."""
    text = str(error)
    trouble = next((each for each in _TROUBLES if any(mark in text for mark in each.marks)), _OTHER_TROUBLE)
    message = trouble.message.format(path=path, action=action, cause=_cause(text), holder=_holder(text))
    return StoreError(message, code=trouble.code)


def is_damage(error: StoreError) -> bool:
    """Return True if the file itself is damaged, so that only making it anew helps."""
    return error.code == "store_damaged"


def _cause(text: str) -> str:
    """Return the first line of DuckDB's message, without the error class."""
    return text.partition("\n")[0].partition(": ")[2] or text


def _holder(text: str) -> str:
    match = _HOLDER.search(text)
    return f"{match['program']} (PID {match['pid']})" if match else "another process"


def remove_database(path: Path) -> None:
    """Delete a database file and its write-ahead log, if they exist."""
    for file in (path, write_ahead_log(path)):
        file.unlink(missing_ok=True)


def write_ahead_log(path: Path) -> Path:
    """Return the path of the write-ahead log: changes missing from the database file. It exists only while a writer is
    active.
    """
    return path.with_name(path.name + ".wal")


# ---- lock -----------------------------------------------------------------------------------------
# The writers' lock: one process at a time changes the database.


def _lock_file(database: Path) -> Path:
    return database.with_name(database.name + ".lock")


@contextmanager
def writer_lock(database: Path, timeout_s: float) -> Iterator[None]:
    """Hold ``<database>.lock``. The kernel releases it when the process ends for any reason."""
    path = _lock_file(database)
    consequence = "Measurements are not lost, they stay in the journals."
    with ExitStack() as held:
        try:
            held.enter_context(hold_lock(path, database, max(timeout_s, 0.0), consequence))
        except StoreError as error:
            if error.code == "store_locked" and lock_holder(path) == os.getpid():  # mostly a cell that runs again
                raise StoreError(
                    f"{database} is locked: this process has it open already, to write. Close that store first, with "
                    "store.close().",
                    code="store_open_here",
                ) from None
            raise
        yield


# ---- json columns ---------------------------------------------------------------------------------


class StoredObject(dict[str, Any]):
    """A JSON object of the database with its text: another writer may spell the same numbers in another way."""

    def __init__(self, text: str) -> None:
        """Parse the text of an object."""
        super().__init__(json.loads(text))
        self.text = text


def parsed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parse ``config`` and ``scalars`` of each row, which DuckDB returns as JSON text."""
    for row in rows:
        row["config"], row["scalars"] = StoredObject(row["config"]), StoredObject(row["scalars"])
    return rows


DATABASE_NAME = "tilegym.duckdb"
CREATION_TIMEOUT_S = 120.0
"""Seconds to wait for another process that is creating the database."""


def database_path(place: Path | str | None = None) -> Path:
    """Return the database file of a folder; a path of a file (``*.duckdb``) is returned unchanged."""
    folder = Path(place) if place else home()
    return folder if folder.suffix == ".duckdb" else folder / DATABASE_NAME


def require_regular(path: Path) -> None:
    """Raise if the database path is not a regular file: opening a FIFO would never end."""
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


def can_be_noted(path: Path) -> bool:
    """Return True if the database can hold the name of a file, which is text for it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def lock_patience_s(path: Path, lock_timeout_s: float) -> float:
    """Return the seconds to wait for the writers' lock, which are more if its holder is creating the database."""
    is_default = lock_timeout_s >= LOCK_TIMEOUT_S
    return CREATION_TIMEOUT_S if is_default and not path.exists() else lock_timeout_s


def open_file(
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
    """Merge a database's write-ahead log into its file, so that the file is complete."""
    store, _ = open_file(path, False, lock_timeout_s)
    store.close()


def is_older(meta: dict[str, str]) -> bool:
    """Return True if an older version of this package made the tables, so that they are made anew."""
    return int(meta["schema_version"]) < statements.SCHEMA_VERSION


def _checked_meta(store: Store) -> dict[str, str]:
    """Return the metadata of the store; refuse one of another package, or of tables that this version does not know."""
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
