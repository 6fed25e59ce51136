"""The database's view of imported records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tilegym_db.store import statements
from tilegym_db.store.imported.manifests import whole_records_file
from tilegym_db.store.input_files import imported_manifests

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = [
    "sync_imported",
]


def sync_imported(connection: DuckDBPyConnection, home: Path) -> None:
    """Bring every imported record into ``imported_records``, in place of what was there."""
    connection.execute(statements.imported_sql())
    connection.execute("DELETE FROM imported_records")
    paths = [path for manifest in imported_manifests(home) if (path := whole_records_file(manifest)) is not None]
    if paths:
        connection.execute(_INSERT, {"files": [str(path) for path in paths]})


_INSERT = """INSERT INTO imported_records
    SELECT origin, kind, name, definition, path, line, digest, coalesce(unset, []), coalesce(findings, []), record
    FROM read_json($files, format = 'newline_delimited', maximum_object_size = 67108864, columns = {
        origin: 'VARCHAR', kind: 'VARCHAR', name: 'VARCHAR', definition: 'VARCHAR', path: 'VARCHAR', line: 'BIGINT',
        digest: 'VARCHAR', unset: 'VARCHAR[]', findings: 'VARCHAR[]', record: 'JSON'})"""
