"""The database's view of imported records."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from tilegym_db.store.imported.manifests import imported_manifests, whole_records_file

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = [
    "sync_imported",
    "views_text",
]


def views_text() -> str:
    """The statements that make the table and the views of imported records."""
    return files("tilegym_db.store").joinpath("imported.sql").read_text(encoding="utf-8")


def sync_imported(connection: DuckDBPyConnection, home: Path) -> None:
    """Bring every imported record into ``imported_records``, in place of what was there."""
    connection.execute(views_text())
    connection.execute("DELETE FROM imported_records")
    paths = [path for manifest in imported_manifests(home) if (path := whole_records_file(manifest)) is not None]
    if paths:
        connection.execute(_INSERT, {"files": [str(path) for path in paths]})


_INSERT = """INSERT INTO imported_records
    SELECT origin, kind, name, definition, path, line, digest, coalesce(unset, []), coalesce(findings, []), record
    FROM read_json($files, format = 'newline_delimited', maximum_object_size = 67108864, columns = {
        origin: 'VARCHAR', kind: 'VARCHAR', name: 'VARCHAR', definition: 'VARCHAR', path: 'VARCHAR', line: 'BIGINT',
        digest: 'VARCHAR', unset: 'VARCHAR[]', findings: 'VARCHAR[]', record: 'JSON'})"""
