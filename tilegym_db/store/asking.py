"""Run one statement of a user on an open store. It must be a single SELECT, and it can be interrupted.

The connection prevents access to anything outside the database: :mod:`tilegym_db.store.connection`.
"""

from __future__ import annotations

import functools
import math
import re
import signal
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tilegym_db.errors import QueryError, QueryTimeoutError, StoreError, did_you_mean

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

# ---- views ----------------------------------------------------------------------------------------
# The names of the views for users, read from ``views.sql``, ``imported.sql`` and ``loop.sql``.

INTERNAL_VIEWS = frozenset({"marked_traces", "standing", "newest_passes", "newest_steps", "best_per_solution"})
"""Intermediate views, which can be queried but may change."""

_NAME = re.compile(r"^CREATE OR REPLACE VIEW (\w+)", re.MULTILINE)


@functools.cache
def public_views() -> tuple[str, ...]:
    """Return every view for user queries, in the order of creation."""
    text = "".join(
        files(__package__).joinpath(name).read_text(encoding="utf-8")
        for name in ("views.sql", "imported.sql", "loop.sql")
    )
    return tuple(name for name in _NAME.findall(text) if name not in INTERNAL_VIEWS)


VIEWS = public_views()
"""The views for user queries, for help texts."""

MAX_STATEMENT = 1 << 16
"""Maximum number of characters in a statement. Planning time grows faster than the text: 50,000 UNIONs would take
hours.
"""

MAX_ROWS = 1_000_000
"""Maximum number of rows as Python values, at a kilobyte per row. An Arrow table may have more."""

_CHUNK = 10_000
_WAKE_S = 0.2
_STOP_S = 3.0

_Answer = TypeVar("_Answer")


class Asked(Protocol):
    """The part of an open store that a query needs."""

    path: Path
    connection: DuckDBPyConnection
    stale: str | None


@dataclass(frozen=True)
class QueryResult:
    """Column names, their DuckDB types (``MAP(VARCHAR, BIGINT)``), and rows of Python values."""

    columns: tuple[str, ...]
    types: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    warning: str | None = None
    """Reason why the answer may be older than the catalog on disk, else None."""
    table: Any = None
    """The answer as a ``pyarrow.Table`` instead of rows, if requested."""


def ask(
    store: Asked,
    text: str,
    params: Sequence[Any] | Mapping[str, Any] = (),
    *,
    as_arrow: bool = False,
    timeout_s: float | None = None,
) -> QueryResult:
    """Answer one SQL statement. An interrupt (SIGINT) in the main thread ends it at once.

    Args:
        text: one SELECT (also ``FROM ...``, ``DESCRIBE``, ``SUMMARIZE``, ``SHOW TABLES``, ``PIVOT ... IN``). ``DESCRIBE`` of a
            view and ``SHOW TABLES`` say what columns and views mean.
        params: values for ``?`` or ``$name``.
        as_arrow: return a ``pyarrow.Table``, which keeps DuckDB's types, instead of rows.

    Raises:
        QueryTimeoutError: the query took longer than ``timeout_s``.
        QueryError: not a single SELECT, too long, too many rows, or DuckDB refused it; carries DuckDB's message.
        StoreError: the store was closed.
        ModuleNotFoundError: ``as_arrow`` without pyarrow.
    """
    check_text(text)
    if as_arrow:
        import pyarrow  # noqa: F401  # DuckDB would report its absence as an error of the query
    connection, warning = store.connection, store.stale

    def answer() -> QueryResult:
        check_open(store)
        check_single_read(connection, text)
        asked = with_comments(text, connection)
        if as_arrow:
            table = connection.sql(asked, params=params or None).to_arrow_table()
            return QueryResult(tuple(table.column_names), tuple(map(str, table.schema.types)), [], warning, table)
        cursor = connection.execute(asked, params) if params else connection.execute(asked)
        columns = tuple(column[0] for column in cursor.description or ())
        types = tuple(str(column[1]) for column in cursor.description or ())
        check_fetchable(columns, types)
        return QueryResult(columns, types, _fetched(cursor), warning)

    return interruptible(answer, connection, timeout_s)


def interruptible(
    work: Callable[[], _Answer], connection: DuckDBPyConnection, timeout_s: float | None = None
) -> _Answer:
    """Run ``work`` in a thread while this thread waits, so that signals are handled while DuckDB computes."""
    import duckdb

    done = threading.Event()
    answers: list[_Answer] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(work())
        except BaseException as error:  # passed to the waiting thread
            errors.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=run, name="tilegym-db-query", daemon=True)
    thread.start()
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    try:
        while not done.wait(min(_WAKE_S, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise QueryTimeoutError(
                    f"the query was stopped after {timeout_s:g} s. Give it more time, or ask for less: WHERE, LIMIT.",
                    code="query_timeout",
                )
    except BaseException:
        _stop(connection, done)
        raise
    for error in errors:
        if isinstance(error, duckdb.InterruptException):
            raise KeyboardInterrupt from None
        if isinstance(error, duckdb.Error):
            raise _refusal(error) from None
        raise error
    return answers[0]


def _stop(connection: DuckDBPyConnection, done: threading.Event) -> None:
    """Interrupt the query repeatedly, since it may not have started at the first interrupt."""
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main else None
    try:
        deadline = time.monotonic() + _STOP_S
        while not done.wait(0.01) and time.monotonic() < deadline:
            connection.interrupt()
    finally:
        if in_main:
            signal.signal(signal.SIGINT, before)


def check_open(store: Asked) -> None:
    """Raise :class:`StoreError` for a store that was closed."""
    import duckdb

    try:
        store.connection.cursor().close()
    except duckdb.ConnectionException:
        raise StoreError(f"{store.path} was closed. Open it anew to ask again.", code="store_closed") from None


def check_text(text: str) -> None:
    """Raise :class:`QueryError` for a statement that is too long, or that no encoding can hold."""
    if not isinstance(text, str):
        raise QueryError(f"a statement is a text, not {type(text).__name__}.", code="statement_type")
    if len(text) > MAX_STATEMENT:
        raise QueryError(
            f"this statement has {len(text):,} characters; sql takes {MAX_STATEMENT:,} at most.",
            code="statement_too_long",
        )
    if "\0" in text:
        raise QueryError("this statement holds a NUL character. Is it in another encoding than UTF-8?", code="text_nul")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise QueryError("this statement is not valid UTF-8. Save it in that encoding.", code="text_encoding") from None


def _fetched(cursor: Any) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    while chunk := cursor.fetchmany(_CHUNK):
        rows += chunk
        if len(rows) > MAX_ROWS:
            raise QueryError(
                f"the answer has more than {MAX_ROWS:,} rows. Add LIMIT, or aggregate.", code="answer_too_long"
            )
    return rows


def check_single_read(connection: DuckDBPyConnection, text: str) -> None:
    """Raise :class:`QueryError` unless ``text`` is one statement and a SELECT. Runs nothing."""
    import duckdb

    try:
        statements = connection.extract_statements(text)
    except duckdb.Error as error:
        raise _refusal(error) from None
    if len(statements) != 1:
        count = "no statement" if not statements else f"{len(statements)} statements"
        raise QueryError(f"sql takes one SELECT statement, and this is {count}.", code="statement_count")
    kind = statements[0].type
    if kind == duckdb.StatementType.MULTI:
        raise QueryError(
            "PIVOT needs its values spelled out here: PIVOT ... ON column IN (value, ...) USING ...",
            code="pivot_without_values",
        )
    if kind != duckdb.StatementType.SELECT:
        raise QueryError(
            f"sql only reads: one SELECT statement, not {kind.name}. Views: {', '.join(VIEWS)}.",
            code="statement_not_select",
        )


def check_fetchable(columns: Sequence[str], types: Sequence[str]) -> None:
    """Raise :class:`QueryError` for a column type that DuckDB converts only with a package outside our dependencies."""
    for name, kind in zip(columns, types, strict=True):
        if "TIME ZONE" in kind:
            raise QueryError(
                f"column '{name}' is a {kind}; write CAST(... AS TIMESTAMP), in UTC.", code="column_unfetchable"
            )


def _refusal(error: Exception) -> QueryError:
    text = str(error).strip()
    if "disabled by configuration" in text:
        return QueryError(
            f"sql reads the database and no files. Views: {', '.join(VIEWS)}. DuckDB said: {text}", code="files_refused"
        )
    if text.startswith("Catalog Error: Table"):
        return QueryError(f"{text}\nViews: {', '.join(VIEWS)}.", code="view_unknown")
    return QueryError(text, code="query_refused")


# ---- columns --------------------------------------------------------------------------------------
# Says what each view and column of the database means, for ``DESCRIBE``, ``SHOW TABLES`` and ``sql --schema``.
#
# The texts are in ``columns.toml`` beside this file. The types are DuckDB's own, of the open connection.

_ASKED = re.compile(
    r"""\s*(?:(?P<tables>(?:SHOW|DESCRIBE|DESC)(?:(?:\s+ALL)?\s+(?:TABLES|VIEWS))?)
    |(?:DESCRIBE|DESC|SHOW)\s+(?:TABLE\s+)?(?:main\.)?"?(?P<view>\w+)"?)\s*;?\s*""",
    re.IGNORECASE | re.VERBOSE,
)
_TYPES = """
    SELECT column_name, data_type FROM duckdb_columns()
    WHERE NOT internal AND schema_name = 'main' AND table_name = $view ORDER BY column_index
"""
_VIEWS = "SELECT view_name FROM duckdb_views() WHERE NOT internal"


def comment_on(view: str, column: str = "") -> str:
    """Return what a view, or a column of it, means; an empty text if nothing is stated."""
    stated = _stated()
    if not column:
        return str(stated["views"].get(view, ""))
    own = stated["of"].get(view, {})
    return str(own.get(column) or stated["columns"].get(column, ""))


def with_comments(text: str, connection: DuckDBPyConnection) -> str:
    """Return a statement; one that asks for the views or for the columns of a view gives them with comments.

    Views beside :data:`VIEWS`, and the tables behind them, are left out of ``SHOW TABLES``.
    """
    found = _ASKED.fullmatch(text)
    if found is None:
        return text
    there = [name for (name,) in connection.execute(_VIEWS).fetchall() if name in VIEWS]
    if found["tables"]:
        rows = [(name, comment_on(name)) for name in VIEWS if name in there]
        return _values(("view", "comment"), rows) if rows else text
    view = found["view"].lower()
    return _values(("column_name", "column_type", "comment"), _columns(view, connection)) if view in there else text


def schema_statement(view: str | None, connection: DuckDBPyConnection) -> str:
    """Return the statement that gives every column of a view, or of all views, with its type and meaning."""
    if view is not None and view not in VIEWS:
        raise QueryError(
            f"no view '{view}'.{did_you_mean(view, VIEWS)} Views: {', '.join(VIEWS)}.", code="view_unknown"
        )
    chosen = VIEWS if view is None else [view]
    rows = [(name, *row) for name in chosen for row in _columns(name, connection)]
    return _values(("view", "column_name", "column_type", "comment"), rows)


def _columns(view: str, connection: DuckDBPyConnection) -> list[tuple[str, ...]]:
    found = connection.execute(_TYPES, {"view": view}).fetchall()
    return [(name, kind, comment_on(view, name)) for name, kind in found]


def _values(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a SELECT of constant texts."""
    lines = ", ".join(f"({', '.join(_quoted(value) for value in row)})" for row in rows)
    return f"SELECT * FROM (VALUES {lines}) AS described({', '.join(columns)})"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


@functools.cache
def _stated() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("columns.toml").read_text(encoding="utf-8"))
