"""Says what each view and column of the database means, for ``DESCRIBE``, ``SHOW TABLES`` and ``sql --schema``.

The texts are in ``columns.toml`` beside this file. The types are DuckDB's own, of the open connection.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from tilegym_db.errors import QueryError, did_you_mean

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_ASKED = re.compile(r"\s*(?:(?P<tables>SHOW\s+TABLES)|(?:DESCRIBE|DESC|SHOW)\s+(?P<view>\w+))\s*;?\s*", re.IGNORECASE)
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


def with_comments(text: str, connection: DuckDBPyConnection, views: Sequence[str]) -> str:
    """Return a statement; one that asks for the views or for the columns of a view gives them with comments.

    Args:
        text: a statement of a user.
        connection: an open database.
        views: the names that users may rely on. Other views and the tables behind them are left out of ``SHOW TABLES``.
    """
    found = _ASKED.fullmatch(text)
    if found is None:
        return text
    there = [name for (name,) in connection.execute(_VIEWS).fetchall() if name in views]
    if found["tables"]:
        rows = [(name, comment_on(name)) for name in views if name in there]
        return _values(("view", "comment"), rows) if rows else text
    view = found["view"].lower()
    return _values(("column_name", "column_type", "comment"), _columns(view, connection)) if view in there else text


def schema_statement(view: str | None, connection: DuckDBPyConnection, views: Sequence[str]) -> str:
    """Return the statement that gives every column of a view, or of all views, with its type and meaning.

    Raises:
        QueryError: there is no such view.
    """
    if view is not None and view not in views:
        raise QueryError(
            f"no view '{view}'.{did_you_mean(view, views)} Views: {', '.join(views)}.", code="view_unknown"
        )
    chosen = views if view is None else [view]
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
