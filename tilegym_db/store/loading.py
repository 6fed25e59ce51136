"""Traces from JSONL files into the database, in bulk.

DuckDB reads whole files at once. Only where a batch holds a line that is no trace is it read again line by line in
Python, which takes longer, keeps what is good, and says of each other line where it is and what is wrong with it.
"""

from __future__ import annotations

import glob
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tilegym_db.errors import StoreError
from tilegym_db.store import statements, trace_statements
from tilegym_db.store.doubts import judge_passes
from tilegym_db.store.installation import RejectedLine
from tilegym_db.store.journal import read_journal
from tilegym_db.store.newest import mark_newest
from tilegym_db.store.trace_origins import Batch, Sorted, sorted_files, sorted_snapshots

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from tilegym_db.store.database import Store

__all__ = [
    "IngestReport",
    "combined",
    "grown_files",
    "load_journals",
    "load_snapshots",
    "load_traces",
    "remember_files",
]

SMALL = 1 << 20
"""Bytes of a file up to which copying it takes less than having DuckDB open it."""


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


def load_journals(store: Store, journals: Sequence[Path], *, trust: bool = False) -> IngestReport:
    """As :func:`load_traces`, for those journals that grew since they were last read; with ``trust``, for all."""
    pending = {path: size for path in journals if (size := _size(path))} if trust else grown_files(store, journals)
    if not pending:
        return IngestReport()
    report = load_traces(store, list(pending), trust=trust)
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


def load_traces(store: Store, files: Sequence[Path], *, trust: bool = False) -> IngestReport:
    """Insert every trace of ``files`` that the database does not have yet: all of them, or none where that fails.

    Keys that this version does not know are left out, not refused: a journal may come from a newer one. Traces that this
    installation did not sign are foreign: they are shown, and count only with ``trust``.

    Raises:
        StoreError: a file cannot be read, or the disk is full.
    """
    if not files:
        return IngestReport()
    with tempfile.TemporaryDirectory(prefix="tilegym-db-") as folder:
        found = sorted_files(files, store.home, Path(folder), trust=trust)
        return replace(_load(store, found, Path(folder)), files=len(files))


def load_snapshots(
    store: Store, folders: Sequence[Path], *, trust: bool = False, plausible: frozenset[str] = frozenset()
) -> IngestReport:
    """As :func:`load_traces`, for published folders (``traces/<gpu>``). What is not used is in the notes.

    ``plausible`` are the Definitions of whose shipped traces none can be doubted.
    """
    with tempfile.TemporaryDirectory(prefix="tilegym-db-") as scratch:
        return _load(store, sorted_snapshots(folders, store.home, Path(scratch), trust=trust), Path(scratch), plausible)


def _load(store: Store, found: Sorted, scratch: Path, plausible: frozenset[str] = frozenset()) -> IngestReport:
    reports, foreign = [IngestReport(rejected=found.rejected, notes=found.refused)], 0
    for number, batch in enumerate(found.batches):
        report = _load_batch(store, batch, scratch / f"whole-{number}.jsonl", plausible)
        reports.append(report)
        if batch.origin == "foreign" and not batch.trusted:
            foreign += report.added + report.known
    if foreign:
        reports.append(IngestReport(notes=(_foreign_note(foreign),)))
    return combined(*reports)


def _load_batch(store: Store, batch: Batch, whole: Path, plausible: frozenset[str]) -> IngestReport:
    added = _insert(store, batch, _joined(batch.files, whole), plausible)
    if added is not None:
        return IngestReport(len(batch.files), added, batch.lines - added)
    lines, rejected = _clean(batch.files, whole)
    added = _insert(store, batch, [whole], plausible)
    if added is None:
        names = ", ".join(str(path) for path in batch.files)
        raise StoreError(f"the traces of {names} hold a value that the database cannot. Nothing was ingested.")
    named = tuple(replace(line, path=batch.sources.get(line.path, line.path)) for line in rejected)
    return IngestReport(len(batch.files), added, lines - added, named)


def _joined(files: Sequence[Path], target: Path) -> Sequence[Path]:
    """The same lines in fewer files: small ones as one, ``target``. DuckDB takes 2 ms to open one, and a tenth to read it."""
    try:
        small = [path for path in files if path.suffix == ".jsonl" and path.stat().st_size <= SMALL]
        with target.open("wb") as out:
            for path in small:
                content = path.read_bytes()
                out.write(content if content.endswith(b"\n") else content + b"\n")
    except OSError:
        return files  # reading them as they are says what is wrong
    return [target, *(path for path in files if path not in small)]


def _foreign_note(count: int) -> str:
    traces = "1 trace was" if count == 1 else f"{count} traces were"
    return (
        f"{traces} not signed by this installation: shown with origin 'foreign', and used for nothing. Journals of older "
        "versions have no signature. To use what you trust: tilegym-db ingest --trust [FILES]"
    )


def _insert(store: Store, batch: Batch, files: Sequence[Path], plausible: frozenset[str]) -> int | None:
    """How many traces were new, or None, with nothing changed, where not every line is a trace."""
    import duckdb

    # read_json takes patterns, so a bracket in a folder's name must not act as one
    names = {"files": [glob.escape(str(path.absolute())) for path in files]}
    parameters = {**names, "origin": batch.origin, "trusted": batch.trusted}
    try:
        with store.transaction("ingest traces into") as connection:
            displaced = False
            if batch.origin != "foreign" or batch.trusted:
                rank = {"over_trusted": batch.origin != "foreign"}
                if connection.execute(trace_statements.HAS_DISPLACED, rank).fetchall()[0][0]:
                    connection.execute(trace_statements.DISPLACE_TRACES, {**names, **rank})
                    displaced = True
            last = {"last": connection.execute(trace_statements.LAST_ROW).fetchall()[0][0]}
            added = connection.execute(trace_statements.INSERT_TRACES, parameters).fetchall()[0][0]
            repeated = connection.execute(trace_statements.COUNT_REPEATED, last).fetchall()[0][0]
            if repeated:
                connection.execute(trace_statements.DELETE_REPEATED, last)
            judge_passes(connection, last["last"], plausible if batch.origin == "shipped" else frozenset())
            if displaced:  # what a foreign trace had superseded may be the newest again
                mark_newest(connection)
    except StoreError as error:
        if isinstance(
            error.__cause__, duckdb.InvalidInputException | duckdb.ConversionException | duckdb.ConstraintException
        ):
            return None
        raise
    if added > repeated and not displaced:
        # On its own: rows that change before they are committed are written twice. Until then every new pass is marked, which
        # costs a reader time and nothing else.
        with store.transaction("ingest traces into") as connection:
            mark_newest(connection, last["last"])
    return int(added - repeated)


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
