"""Traces from JSONL files into the database, in bulk.

DuckDB reads whole files at once. Only where a batch holds a line that is no trace is it read again line by line in
Python, which takes longer, keeps what is good, and says of each other line where it is and what is wrong with it.
"""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilegym_db.errors import StoreError
from tilegym_db.store import statements
from tilegym_db.store.journal import RejectedLine, read_journal

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from tilegym_db.store.database import Store

__all__ = ["IngestReport", "combined", "load_journals", "load_traces"]


@dataclass(frozen=True)
class IngestReport:
    """What an ingest did. ``added + known`` is the number of traces read; ``rejected`` are lines that are no trace."""

    files: int = 0
    added: int = 0
    known: int = 0
    rejected: tuple[RejectedLine, ...] = ()
    notes: tuple[str, ...] = ()
    """Anything else worth a line to the user."""


def combined(*reports: IngestReport) -> IngestReport:
    """The sum of several reports."""
    return IngestReport(
        sum(report.files for report in reports),
        sum(report.added for report in reports),
        sum(report.known for report in reports),
        tuple(line for report in reports for line in report.rejected),
        tuple(note for report in reports for note in report.notes),
    )


def load_journals(store: Store, journals: Sequence[Path]) -> IngestReport:
    """As :func:`load_traces`, for those journals that grew since they were last read."""
    # sizes before reading: what is appended from now on comes next time
    sizes = {str(path): path.stat().st_size for path in journals}
    known = {row["path"]: row["size"] for row in store.rows(statements.INGESTED_FILES)}
    pending = {name: size for name, size in sizes.items() if known.get(name) != size}
    if not pending:
        return IngestReport()
    report = load_traces(store, [Path(name) for name in pending])
    with store.transaction("ingest traces into") as connection:
        connection.execute(statements.FORGET_FILES, {"paths": list(pending)})
        connection.execute(statements.REMEMBER_FILES, {"paths": list(pending), "sizes": list(pending.values())})
    return report


def load_traces(store: Store, files: Sequence[Path]) -> IngestReport:
    """Insert every trace of ``files`` that the database does not have yet: all of them, or none where that fails.

    Raises:
        StoreError: a file cannot be read, or the disk is full.
    """
    if not files:
        return IngestReport()
    for path in files:
        if not os.access(path, os.R_OK):
            raise StoreError(f"cannot read {path}: " + ("permission denied." if path.exists() else "no such file."))
    rejected: tuple[RejectedLine, ...] = ()
    with store.translated("ingest traces into"):
        # staged before the transaction starts, because an unreadable line would abort it
        lines = _stage(store.connection, files)
        if lines is None:
            lines, rejected = _stage_line_by_line(store.connection, files)
    with store.transaction("ingest traces into") as connection:
        added = connection.execute(statements.INSERT_STAGED).fetchall()[0][0]
        connection.execute(statements.DROP_STAGED)
    return IngestReport(len(files), added, lines - added, rejected)


def _stage(connection: DuckDBPyConnection, files: Sequence[Path]) -> int | None:
    """Fill ``staged``; the number of lines, or None where not every line is a trace."""
    import duckdb

    try:
        # read_json takes a pattern, so a bracket in a folder's name must not act as one
        connection.execute(statements.STAGE, {"files": [glob.escape(str(path.absolute())) for path in files]})
    except (duckdb.InvalidInputException, duckdb.ConversionException):
        return None
    lines, traces, invalid = connection.execute(statements.STAGED_COUNTS).fetchall()[0]
    if invalid:
        return None
    if traces < lines:
        connection.execute(statements.DROP_REPEATED)
    return int(lines)


def _stage_line_by_line(connection: DuckDBPyConnection, files: Sequence[Path]) -> tuple[int, tuple[RejectedLine, ...]]:
    rejected: list[RejectedLine] = []
    with tempfile.TemporaryDirectory(prefix="tilegym-db-") as folder:
        cleaned = Path(folder) / "traces.jsonl"
        try:
            with cleaned.open("w", encoding="utf-8") as out:
                for path in files:
                    content = read_journal(path)
                    rejected += content.rejected
                    out.writelines(trace.to_json() + "\n" for trace in content.traces)
        except OSError as error:
            raise StoreError(f"cannot write {cleaned}: {error.strerror or error}. Nothing was ingested.") from None
        lines = _stage(connection, [cleaned])
    if lines is None:
        names = ", ".join(str(path) for path in files)
        raise StoreError(f"the traces of {names} hold a value that the database cannot. Nothing was ingested.")
    return lines, tuple(rejected)
