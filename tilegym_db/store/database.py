"""One open DuckDB file: how it is connected to, and how its errors read.

Everything here knows DuckDB and nothing of traces; :mod:`tilegym_db.store.connection` decides what to open and when.
"""

from __future__ import annotations

import json
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
from tilegym_db.files import POLL_S, hold_lock

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from tilegym_db.store.answer import Answer


STORAGE_VERSION = "v1.5.0"
"""Files are written in this format, so that DuckDB 1.5's command line and UI open them."""

ROW_GROUP_SIZE = 32768
"""Rows that DuckDB compresses, writes and scans as one piece of work, each on one thread. Traces are wide and number tens of
thousands rather than millions: with its own 122,880 one thread would do it all, and only when the transaction commits."""

_Settings = dict[str, str | bool | int | float | list[str]]
_BASE: _Settings = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",  # a SQL name must never resolve to a caller's Python variable
}
WRITER_MEMORY_BYTES = 2 << 30
"""What a writer holds before it writes to disk: with DuckDB's own limit, most of the machine's memory, ten million traces would
take 14 GB. Half the machine's memory where that is less."""


def _writer_memory() -> str:
    """Asked for at each connection: importing this must not depend on the machine."""
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{min(WRITER_MEMORY_BYTES, total_bytes // 2) >> 20}MiB"


_WRITER: _Settings = {**_BASE, "storage_compatibility_version": STORAGE_VERSION}
# What a reader runs may come from a user: it reaches the database and nothing else, not even to spill.
_READER: _Settings = {**_BASE, "enable_external_access": "false", "temp_directory": ""}


@dataclass(frozen=True)
class _Trouble:
    """A cause of DuckDB's errors: the message for it, its code, and marks in DuckDB's own text."""

    message: str
    marks: tuple[str, ...] = ()
    code: str = field(kw_only=True)


_TROUBLES = (  # the first that matches counts
    _Trouble(
        "{path} is locked: {holder} has it open. Close that program or wait for it to finish, and try again.",
        ("Could not set lock",),
        code="store_locked",
    ),
    _Trouble(
        "{path} is locked: this process has it open already. Close that store first.",
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
        "tilegym-db ingest --rebuild",
        ("not a valid DuckDB database", "Corrupt", "corrupt", "checksum", "Could not read enough bytes"),
        code="store_damaged",
    ),
)
_OTHER_TROUBLE = _Trouble("cannot {action} {path}: {cause}", code="store_failed")
_HOLDER = re.compile(r"lock is held in (?P<program>.+?) \(PID (?P<pid>\d+)\)")


@dataclass
class Store:
    """An open database. A context manager; use it in the process and the moment it was opened for, then close it."""

    path: Path
    connection: DuckDBPyConnection = field(repr=False)
    read_only: bool
    stale: str | None = None
    """Why a reader sees an older catalog than the one on disk; None if it does not."""
    resources: ExitStack = field(default_factory=ExitStack, repr=False)
    """What is held as long as the store is open: a writer's lock."""
    _pid: int = field(default_factory=os.getpid, repr=False)

    @property
    def home(self) -> Path:
        """The folder of the database, which also holds the journals (``runs/``)."""
        return self.path.parent

    def rows(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Run one of this package's queries; every row as column -> value."""
        with self.translated("query"):
            cursor = self.connection.execute(sql, parameters) if parameters else self.connection.execute(sql)
            names = [column[0] for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def sql(self, text: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> Answer:
        """Answer one SELECT over the views; the answer turns into Arrow, pandas and polars, and shows itself in a notebook.

        Args:
            text: as for ``tilegym-db sql``.
            parameters: values for ``?`` or ``$name``.

        Raises:
            QueryError: not a single read, or DuckDB refused it.
            StoreError: the store was closed, or opened before a fork.
        """
        from tilegym_db.store.answer import Answer

        with self.translated("query"):
            return Answer.of(self, text, parameters)

    @contextmanager
    def transaction(self, action: str) -> Iterator[DuckDBPyConnection]:
        """All of the block or nothing of it; ``action`` names it in error messages ("ingest traces into")."""
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
        """DuckDB's errors inside the block become :class:`StoreError`."""
        if os.getpid() != self._pid:
            raise StoreError(
                f"{self.path} was opened before a fork; open it anew in this process.", code="store_forked"
            )
        with translated(self.path, action):
            yield

    def close(self) -> None:
        """Write everything out and let other processes in."""
        import duckdb

        try:
            if os.getpid() == self._pid:
                # Reported when it happened, or busy with a query that does not stop; nothing uncommitted is kept.
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
    """Connect to a DuckDB file, waiting up to ``timeout_s`` seconds for another process to let go of it.

    A reader's connection cannot write, reach files, load extensions, or change its own settings.

    Raises:
        StoreError: locked, read-only, not a database, or written by a newer DuckDB.
    """
    import duckdb

    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection = duckdb.connect(path, config=_READER, read_only=True) if read_only else _attached(path)
            break
        except duckdb.IOException as error:
            if "Could not set lock" not in str(error) or time.monotonic() >= deadline:
                raise explained(error, path, "open") from error
        except duckdb.Error as error:
            raise explained(error, path, "open") from error
        time.sleep(POLL_S)
    _settle(connection, read_only)
    return connection


def _attached(path: Path) -> DuckDBPyConnection:
    """Return a writer's connection. The file is attached to a database in memory because only ATTACH takes a size of
    row groups.
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
    """Make a database file one of a connection's databases; its tables are then ``name.table``."""
    literal = str(path).replace("'", "''")  # ATTACH takes no parameters
    connection.execute(f"ATTACH '{literal}' AS {name} ({option})")


def _settle(connection: DuckDBPyConnection, read_only: bool) -> None:
    """What can only be set once connected. Connections of one process to one file share it."""
    locked = connection.execute("SELECT current_setting('lock_configuration')").fetchall()
    if not locked[0][0]:
        connection.execute("SET GLOBAL TimeZone = 'UTC'")
        if read_only:
            connection.execute("SET lock_configuration = true")


@contextmanager
def translated(path: Path, action: str) -> Iterator[None]:
    """DuckDB's errors inside the block become :class:`StoreError` with what to do next."""
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        raise explained(error, path, action) from error


def explained(error: Exception, path: Path, action: str) -> StoreError:
    """Return the :class:`StoreError` that says what a DuckDB error means for the user of the command."""
    text = str(error)
    trouble = next((each for each in _TROUBLES if any(mark in text for mark in each.marks)), _OTHER_TROUBLE)
    message = trouble.message.format(path=path, action=action, cause=_cause(text), holder=_holder(text))
    return StoreError(message, code=trouble.code)


def is_damage(error: StoreError) -> bool:
    """Return True if the file itself is damaged, so that only making it anew helps."""
    return error.code == "store_damaged"


def _cause(text: str) -> str:
    """DuckDB's own first line, without the class of the error in front."""
    return text.partition("\n")[0].partition(": ")[2] or text


def _holder(text: str) -> str:
    match = _HOLDER.search(text)
    return f"{match['program']} (PID {match['pid']})" if match else "another process"


def remove_database(path: Path) -> None:
    """Delete a database file and its write-ahead log, where they exist."""
    for file in (path, write_ahead_log(path)):
        file.unlink(missing_ok=True)


def write_ahead_log(path: Path) -> Path:
    """Where DuckDB keeps what a database file does not have yet; there is none while nobody writes."""
    return path.with_name(path.name + ".wal")


# ---- lock -----------------------------------------------------------------------------------------
# The writers' lock: one process at a time changes the database, and the next one waits its turn.


@contextmanager
def writer_lock(database: Path, timeout_s: float) -> Iterator[None]:
    """Hold ``<database>.lock``. The kernel lets go of it when the process ends, however it ends.

    Raises:
        StoreError: another process (or another store of this one) holds it for longer than ``timeout_s`` seconds, or
            the folder cannot be written.
    """
    path = database.with_name(database.name + ".lock")
    consequence = "Nothing measured meanwhile is lost, it stays in the journals."
    with hold_lock(path, database, max(timeout_s, 0.0), consequence):
        yield


# ---- json columns ---------------------------------------------------------------------------------
# Rows of the database as Python values.


def parsed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``config`` and ``scalars`` come as JSON text."""
    for row in rows:
        row["config"], row["scalars"] = json.loads(row["config"]), json.loads(row["scalars"])
    return rows
