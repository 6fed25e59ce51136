"""The user's SQL: one statement that reads, over a connection that can do nothing else.

Two fences. The statement must parse as exactly one SELECT; and the connection is read-only with file access, extensions
and settings locked (:mod:`tilegym_db.store.database`), so that a SELECT cannot reach outside either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilegym_db.catalog import Catalog
from tilegym_db.errors import QueryError
from tilegym_db.store.connection import LOCK_TIMEOUT_S, open_store

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["VIEWS", "QueryResult", "run_user_query"]

VIEWS = (
    "definitions", "solutions", "workloads", "traces", "verified", "best", "leaderboard", "promotable", "revocations",
    "searches", "peaks", "model_runs", "model_ways",
)  # fmt: skip
"""What a query may be about, for help texts."""


@dataclass(frozen=True)
class QueryResult:
    """Column names, their DuckDB types (``MAP(VARCHAR, BIGINT)``), and rows of Python values."""

    columns: tuple[str, ...]
    types: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    warning: str | None = None
    """Why the answer may be behind the catalog on disk; None where it is not."""


def run_user_query(
    text: str,
    params: Sequence[Any] | Mapping[str, Any] = (),
    *,
    path: Path | None = None,
    catalog: Catalog | None = None,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
) -> QueryResult:
    """Answer one SQL statement that a user typed.

    Args:
        text: one SELECT (also ``FROM ...``, ``DESCRIBE``, ``SUMMARIZE``, ``SHOW TABLES``, ``PIVOT ... IN``).
        params: values for ``?`` or ``$name``.
        path, catalog, lock_timeout_s: as for :func:`open_store`.

    Raises:
        QueryError: not a single read, or DuckDB refused it; carries DuckDB's message.
        StoreError: the database cannot be opened.
    """
    import duckdb

    with open_store(path, read_only=True, catalog=catalog, lock_timeout_s=lock_timeout_s) as store:
        check_single_read(store.connection, text)
        try:
            cursor = store.connection.execute(text, params) if params else store.connection.execute(text)
            columns = tuple(column[0] for column in cursor.description or ())
            types = tuple(str(column[1]) for column in cursor.description or ())
            check_fetchable(columns, types)
            return QueryResult(columns, types, cursor.fetchall(), store.stale)
        except duckdb.InterruptException:
            raise KeyboardInterrupt from None
        except duckdb.Error as error:
            raise QueryError(_refusal(error)) from None


def check_single_read(connection: DuckDBPyConnection, text: str) -> None:
    """Raise :class:`QueryError` unless ``text`` is one statement, and that one a SELECT. Runs nothing."""
    import duckdb

    try:
        statements = connection.extract_statements(text)
    except duckdb.Error as error:
        raise QueryError(_refusal(error)) from None
    if len(statements) != 1:
        count = "no statement" if not statements else f"{len(statements)} statements"
        raise QueryError(f"sql takes one SELECT statement, and this is {count}.")
    kind = statements[0].type
    if kind == duckdb.StatementType.MULTI:
        raise QueryError("PIVOT needs its values spelled out here: PIVOT ... ON column IN (value, ...) USING ...")
    if kind != duckdb.StatementType.SELECT:
        raise QueryError(f"sql only reads: one SELECT statement, not {kind.name}. Views: {', '.join(VIEWS)}.")


def check_fetchable(columns: Sequence[str], types: Sequence[str]) -> None:
    """Raise :class:`QueryError` for a column that DuckDB hands to Python only with a package we do not depend on."""
    for name, kind in zip(columns, types, strict=True):
        if "TIME ZONE" in kind:
            raise QueryError(f"column '{name}' is a {kind}; write CAST(... AS TIMESTAMP), in UTC.")


def _refusal(error: Exception) -> str:
    text = str(error).strip()
    if "disabled by configuration" in text:
        return f"sql reads the database and no files. Views: {', '.join(VIEWS)}. DuckDB said: {text}"
    if text.startswith("Catalog Error: Table"):
        return f"{text}\nViews: {', '.join(VIEWS)}."
    return text
