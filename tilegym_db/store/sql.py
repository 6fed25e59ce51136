"""Runs the user's SQL: one SELECT on a restricted connection.

Two checks confine it. The statement must parse as exactly one SELECT (:mod:`tilegym_db.store.asking`). The connection
is read-only, with file access, extensions and settings locked (:mod:`tilegym_db.store.database`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilegym_db.store.asking import VIEWS, QueryResult, ask, schema_statement

if TYPE_CHECKING:
    from tilegym_db.catalog import Catalog

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
    from tilegym_db.store.connection import open_store

    with open_store(path, read_only=True, catalog=catalog, lock_timeout_s=lock_timeout_s) as store:
        return ask(store, text, params, as_arrow=as_arrow, timeout_s=timeout_s)


def run_schema_query(
    view: str | None = None, *, path: Path | None = None, catalog: Catalog | None = None, as_arrow: bool = False
) -> QueryResult:
    """Return every column of a view, or of all views: its type and its meaning.

    Arguments and errors are those of :func:`run_user_query`; an unknown view is a :class:`QueryError`.
    """
    from tilegym_db.store.connection import open_store

    with open_store(path, read_only=True, catalog=catalog, lock_timeout_s=_LOCK_TIMEOUT_S) as store:
        return ask(store, schema_statement(view, store.connection, VIEWS), as_arrow=as_arrow)
