"""Traces from JSONL files into the database, in bulk.

DuckDB reads whole files at once. Only where a batch holds a line that is no trace is it read again line by line in
Python, which takes longer, keeps what is good, and says of each other line where it is and what is wrong with it.
"""

from __future__ import annotations

import glob
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilegym_db.errors import StoreError
from tilegym_db.store import statements
from tilegym_db.store.journal import RejectedLine, read_journal

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from tilegym_db.store.database import Store

__all__ = ["IngestReport", "combined", "grown_files", "load_journals", "load_traces", "remember_files"]


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
    pending = grown_files(store, journals)
    if not pending:
        return IngestReport()
    report = load_traces(store, list(pending))
    with store.transaction("ingest traces into") as connection:
        remember_files(connection, pending)
    return report


def grown_files(store: Store, files: Sequence[Path]) -> dict[Path, int]:
    """Those that are not empty and have another size than when they were last brought in, with that size.

    Ask before reading them: what is appended from then on comes next time.
    """
    known = {row["path"]: row["size"] for row in store.rows(statements.INGESTED_FILES)}
    sizes = {path: _size(path) for path in files}
    return {path: size for path, size in sizes.items() if size and known.get(str(path)) != size}


def remember_files(connection: DuckDBPyConnection, sizes: Mapping[Path, int]) -> None:
    """What was brought in, at which size."""
    paths = [str(path) for path in sizes]
    connection.execute(statements.FORGET_FILES, {"paths": paths})
    connection.execute(statements.REMEMBER_FILES, {"paths": paths, "sizes": list(sizes.values())})


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0  # a run that measured nothing takes its empty journal away


def load_traces(store: Store, files: Sequence[Path]) -> IngestReport:
    """Insert every trace of ``files`` that the database does not have yet: all of them, or none where that fails.

    Keys that this version does not know are left out, not refused: a journal may come from a newer one.

    Raises:
        StoreError: a file cannot be read, or the disk is full.
    """
    if not files:
        return IngestReport()
    lines = sum(_count_lines(path) for path in files)
    added = _insert(store, files)
    if added is not None:
        return IngestReport(len(files), added, lines - added)
    with tempfile.TemporaryDirectory(prefix="tilegym-db-") as folder:
        cleaned = Path(folder) / "traces.jsonl"
        lines, rejected = _clean(files, cleaned)
        added = _insert(store, [cleaned])
    if added is None:
        names = ", ".join(str(path) for path in files)
        raise StoreError(f"the traces of {names} hold a value that the database cannot. Nothing was ingested.")
    return IngestReport(len(files), added, lines - added, rejected)


def _count_lines(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return sum(not line.isspace() for line in file)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}. Nothing was ingested.") from None


def _insert(store: Store, files: Sequence[Path]) -> int | None:
    """How many traces were new, or None, with nothing changed, where not every line is a trace."""
    import duckdb

    # read_json takes patterns, so a bracket in a folder's name must not act as one
    parameters = {"files": [glob.escape(str(path.absolute())) for path in files]}
    try:
        with store.transaction("ingest traces into") as connection:
            last = {"last": connection.execute(statements.LAST_ROW).fetchall()[0][0]}
            added = connection.execute(statements.INSERT_TRACES, parameters).fetchall()[0][0]
            repeated = connection.execute(statements.COUNT_REPEATED, last).fetchall()[0][0]
            if repeated:
                connection.execute(statements.DELETE_REPEATED, last)
            return int(added - repeated)
    except StoreError as error:
        if isinstance(
            error.__cause__, duckdb.InvalidInputException | duckdb.ConversionException | duckdb.ConstraintException
        ):
            return None
        raise


def _clean(files: Sequence[Path], target: Path) -> tuple[int, tuple[RejectedLine, ...]]:
    """Write what is a trace in ``files`` to ``target``; how many there are, and the lines that are none."""
    rejected: list[RejectedLine] = []
    count = 0
    try:
        with target.open("w", encoding="utf-8") as out:
            for path in files:
                content = read_journal(path)
                rejected += content.rejected
                count += len(content.traces)
                out.writelines(trace.to_json() + "\n" for trace in content.traces)
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error.strerror or error}. Nothing was ingested.") from None
    return count, tuple(rejected)
