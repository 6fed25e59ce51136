"""The journal: one fsynced JSON line per trace, written as soon as the trace exists.

The database is derived from journals. A killed process loses at most the line it was writing. The next writer ends that
torn line, and readers report it and continue.

DuckDB reads whole files at once. If a batch holds a line that is not a trace, Python reads it again line by line. This
is slower, but keeps the valid lines and reports the place and fault of each other line.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import itertools
import json
import logging
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tilegym_db.errors import RecordError, StoreError, UsageError
from tilegym_db.files import read_bytes, regular_files, sync_folder
from tilegym_db.paths import home as default_home
from tilegym_db.published.input_files import is_packed, read_traces
from tilegym_db.published.snapshot import (
    Batch,
    RejectedLine,
    Sorted,
    bounds_of,
    signed_line,
    sorted_files,
    sorted_snapshots,
    split_line,
)
from tilegym_db.records import Trace
from tilegym_db.records.definition import Definition
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.store import statements

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from tilegym_db.store.connection import Store


CUT_OFF = "cut off in mid write"
"""Start of the reason for a line whose writer was killed. Its content is lost, but the file is intact."""

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True)
class JournalContent:
    """The content of a journal: its traces in order, and the lines that are not traces."""

    traces: tuple[Trace, ...]
    rejected: tuple[RejectedLine, ...] = ()
    torn: bool = False
    """True if the last line was cut off during writing."""


class RunFile:
    """An append-only file of one run, ``<home>/<folder>/<run_id>.jsonl``. One process may write it at a time.

    Raises:
        UsageError: ``run_id`` cannot name a file.
        StoreError: the folder cannot be written, or another process writes this file.
    """

    def __init__(self, folder: str, run_id: str, home: Path | None = None) -> None:
        if not _RUN_ID.fullmatch(run_id):
            raise UsageError(
                f"run id {run_id!r} must be letters, digits, '_', '.' or '-', and at most 128 of them.",
                code="run_id_invalid",
            )
        self.home = home or default_home()
        self.path = self.home / folder / f"{run_id}.jsonl"
        self._descriptor = _open_for_append(self.path)

    def append_line(self, line: bytes) -> None:
        """Write one line, which ends with its newline, and wait until it is on disk.

        Raises:
            StoreError: the disk is full or gone; the file then ends with its last whole line.
        """
        end = os.fstat(self._descriptor).st_size
        try:
            write_fully(self._descriptor, line)
            os.fsync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):  # the disk is gone: readers skip a torn line
                os.ftruncate(self._descriptor, end)
            raise StoreError(
                f"cannot append to {self.path}: {error.strerror}. This line is lost, earlier ones are safe; "
                "free some space or set TILEGYM_DB_HOME to another disk, and run the command again to resume.",
                code="write_failed",
            ) from None

    def close(self) -> None:
        """Release the file for other processes; an empty file is removed."""
        if self._descriptor < 0:
            return
        if os.fstat(self._descriptor).st_size == 0:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Journal(RunFile):
    """The traces of one run, ``<home>/runs/<run_id>.jsonl``; raises as :class:`RunFile` does."""

    def __init__(self, run_id: str, home: Path | None = None) -> None:
        super().__init__("runs", run_id, home)

    def append(self, trace: Trace) -> None:
        """Write one trace as one signed line, and wait until it is on disk."""
        try:
            line = signed_line(self.home, trace.to_json())
        except ValueError as error:
            raise RecordError(
                f"trace {trace.trace_id} of '{trace.solution}' is not plain JSON: {error}.", code="json_unholdable"
            ) from None
        self.append_line(line)


def _open_for_append(path: Path) -> int:
    descriptor = -1
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _open_locked(path)
        _end_torn_line(descriptor)
        sync_folder(path.parent)
    except BlockingIOError:
        raise StoreError(
            f"{path} is being written by another process. Wait for that run, or start a new one.", code="journal_locked"
        ) from None
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise StoreError(
            f"cannot write the journal {path}: {error.strerror or error}. Make its folder writable, "
            "or set TILEGYM_DB_HOME to one that is.",
            code="write_failed",
        ) from None
    return descriptor


def _open_locked(path: Path) -> int:
    """Open and lock the journal. The lock is on the written file itself, so that it covers every link to the file."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last writer removed the empty file: a new line would be lost


def _end_torn_line(descriptor: int) -> None:
    """End a line that a killed process left unfinished, so that it does not absorb the next one."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        write_fully(descriptor, b"\n")


def write_fully(descriptor: int, content: bytes) -> None:
    """Call ``os.write`` until nothing is left: a nearly full disk takes a part and fails on the rest."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def journal_files(home: Path) -> list[Path]:
    """Return the journals of a home folder, by name."""
    return regular_files(home / "runs", "*.jsonl")


def read_journal(path: Path) -> JournalContent:
    """Read every trace of a journal or of a published file, and each other line with the reason.

    Signatures are not checked here: :func:`load_traces` does that.
    """
    try:
        content = read_bytes(path, "journal", limit=None)
    except RecordError as error:
        raise StoreError(str(error), code=error.code) from None
    if is_packed(content):
        return JournalContent(tuple(read_traces(content, path)))
    return journal_content(content, path)


def journal_content(content: bytes, path: Path) -> JournalContent:
    """Return the traces of the unpacked lines of a file, and each other line with the reason."""
    traces: list[Trace] = []
    rejected: list[RejectedLine] = []
    torn = False
    for number, line, finished in numbered_lines(content):
        try:
            traces.append(Trace.from_json(split_line(line)[0], f"{path}:{number}"))
        except RecordError as error:
            cut_off = is_cut_off(line, finished=finished)
            torn = cut_off and not finished
            reason = str(error).removeprefix(f"{path}:{number}: ")
            is_text = b"\0" not in line and not content.startswith((b"\xff\xfe", b"\xfe\xff"))
            rejected.append(RejectedLine(path, number, f"{CUT_OFF}." if cut_off and is_text else reason))
    return JournalContent(tuple(traces), tuple(rejected), torn)


def is_cut_off(line: bytes, *, finished: bool) -> bool:
    """Return True if a line was cut off by a killed writer, even if a later writer ended it."""
    if finished and not (line.startswith(b"{") and not line.endswith(b"}")):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False  # the line is complete and has another fault


def numbered_lines(content: bytes) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (number from 1, line, True if a newline ends it) of every line that is not blank."""
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, line, number < len(lines)


# ---- loading -------------------------------------------------------------------------------------


_log = logging.getLogger(__name__)

LARGE = 64 << 20
"""Minimum number of bytes of journals that take so long that it is said before."""
SMALL = 1 << 20
"""Maximum number of bytes for which copying a file is faster than opening it in DuckDB."""


@dataclass(frozen=True)
class IngestReport:
    """The result of an ingest. ``added + known`` is the number of traces read; ``rejected`` are lines that are not
    traces.
    """

    files: int = 0
    added: int = 0
    known: int = 0
    rejected: tuple[RejectedLine, ...] = ()
    notes: tuple[str, ...] = ()
    """Other notes for the user."""


def combined(*reports: IngestReport) -> IngestReport:
    """Return the sum of several reports."""
    return IngestReport(
        sum(report.files for report in reports),
        sum(report.added for report in reports),
        sum(report.known for report in reports),
        tuple(line for report in reports for line in report.rejected),
        tuple(note for report in reports for note in report.notes),
    )


def load_journals(store: Store, journals: Sequence[Path], *, trust: bool = False) -> IngestReport:
    """Load those journals that grew since they were last read; with ``trust``, all of them."""
    pending = {path: size for path in journals if (size := _size(path))} if trust else grown_files(store, journals)
    if not pending:
        return IngestReport()
    if sum(pending.values()) >= LARGE:
        _log.warning("ingesting %d MB of journals, once.", sum(pending.values()) >> 20)
    report = load_traces(store, list(pending), trust=trust)
    with store.transaction("ingest traces into") as connection:
        remember_files(connection, pending)
    return report


def grown_files(store: Store, files: Sequence[Path]) -> dict[Path, int]:
    """Return the non-empty files whose size changed since they were last loaded, with that size.

    Call this before reading: later additions are then loaded next time.
    """
    known = {row["path"]: row["size"] for row in store.rows(statements.INGESTED_FILES)}
    sizes = {path: _size(path) for path in files}
    return {path: size for path, size in sizes.items() if size and known.get(str(path)) != size}


def remember_files(connection: DuckDBPyConnection, sizes: Mapping[Path, int]) -> None:
    """Store the loaded files with their sizes."""
    paths = [str(path) for path in sizes]
    connection.execute(statements.FORGET_FILES, {"paths": paths})
    connection.execute(statements.REMEMBER_FILES, {"paths": paths, "sizes": list(sizes.values())})


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0  # a run without measurements removes its empty journal


def load_traces(store: Store, files: Sequence[Path], *, trust: bool = False) -> IngestReport:
    """Insert every trace of ``files`` that is new to the database: all of them, or none on failure.

    Keys that this version does not know are ignored, since a newer version may have written a journal. Traces that this
    installation did not sign are foreign: they are shown, but count only with ``trust``.
    """
    if not files:
        return IngestReport()
    with _scratch_folder() as scratch:
        found = sorted_files(files, store.home, trust=trust)
        return replace(_load(store, found, scratch), files=len(files))


def load_snapshots(store: Store, folders: Sequence[Path], *, plausible: frozenset[str] = frozenset()) -> IngestReport:
    """Load published folders (``traces/<gpu>``) as :func:`load_traces` does. The notes name unused parts.

    ``plausible`` names the Definitions whose shipped traces are known to be plausible.
    """
    with _scratch_folder() as scratch:
        return _load(store, sorted_snapshots(folders, store.home), scratch, plausible)


@contextlib.contextmanager
def _scratch_folder() -> Iterator[Path]:
    try:
        folder = tempfile.TemporaryDirectory(prefix="tilegym-db-")
    except OSError as error:
        raise StoreError(
            f"no temporary folder can be made: {error.strerror or error}. Nothing was ingested; free some space, or set "
            "TMPDIR to a folder on another disk.",
            code="write_failed",
        ) from None
    with folder as name:
        yield Path(name)


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
    count = len(batch.files) + len(batch.texts)
    added = _insert(store, batch, joined(batch, whole), plausible)
    if added is not None:
        return IngestReport(count, added, batch.lines - added)
    lines, rejected = _clean(batch, whole)
    added = _insert(store, batch, [whole], plausible)
    if added is None:
        names = ", ".join(str(path) for path in (*batch.files, *(source for source, _ in batch.texts)))
        raise StoreError(
            f"the traces of {names} hold a value that the database cannot. Nothing was ingested.",
            code="value_unstorable",
        )
    return IngestReport(count, added, lines - added, rejected)


def joined(batch: Batch, target: Path, small_bytes: int = SMALL) -> Sequence[Path]:
    """Write the lines in memory and small files into one file, ``target``, and return it with the large ones.

    DuckDB takes 2 ms to open a file, and a tenth of that to read it.
    """
    large: list[Path] = []
    with _writing(target), target.open("wb") as out:
        for _, content in batch.texts:
            out.write(ended(content))
        for path in batch.files:
            try:
                is_small = path.suffix == ".jsonl" and path.stat().st_size <= small_bytes
                content = path.read_bytes() if is_small else b""
            except OSError:
                is_small = False  # reading the original reports the fault
            if is_small:
                out.write(ended(content))
            else:
                large.append(path)
    return [target, *large]


def ended(content: bytes) -> bytes:
    """Return lines of which the last one has its end too."""
    return content if content.endswith(b"\n") else content + b"\n"


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"cannot write {target}: {error.strerror or error}. Nothing was ingested.", code="write_failed"
        ) from None


def _foreign_note(count: int) -> str:
    traces = "1 trace was" if count == 1 else f"{count} traces were"
    return (
        f"{traces} not signed by this installation: shown with origin 'foreign', and used for nothing. Journals of older "
        "versions have no signature. To use what you trust: tilegym-db data ingest --trust [FILES]"
    )


def _insert(store: Store, batch: Batch, files: Sequence[Path], plausible: frozenset[str]) -> int | None:
    """Return the number of new traces. If some line is not a trace, change nothing and return None."""
    import duckdb

    # read_json takes patterns, so escape brackets in a folder's name.
    names = {"files": [glob.escape(str(path.absolute())) for path in files]}
    parameters = {**names, "origin": batch.origin, "trusted": batch.trusted}
    try:
        with store.transaction("ingest traces into") as connection:
            displaced = False
            if batch.origin != "foreign" or batch.trusted:
                rank = {"over_trusted": batch.origin != "foreign"}
                if connection.execute(statements.HAS_DISPLACED, rank).fetchall()[0][0]:
                    connection.execute(statements.DISPLACE_TRACES, {**names, **rank})
                    displaced = True
            last = {"last": connection.execute(statements.LAST_ROW).fetchall()[0][0]}
            added = connection.execute(statements.INSERT_TRACES, parameters).fetchall()[0][0]
            repeated = connection.execute(statements.COUNT_REPEATED, last).fetchall()[0][0]
            if repeated:
                connection.execute(statements.DELETE_REPEATED, last)
            judge_passes(connection, last["last"], plausible if batch.origin == "shipped" else frozenset())
            if displaced:  # a trace superseded by a foreign one may be the newest again
                mark_newest(connection)
    except StoreError as error:
        if isinstance(
            error.__cause__, duckdb.InvalidInputException | duckdb.ConversionException | duckdb.ConstraintException
        ):
            return None
        raise
    if added > repeated and not displaced:
        # In a second transaction, since rows that change before the commit are written twice. Until then every new pass
        # is marked, which costs readers only time.
        with store.transaction("ingest traces into") as connection:
            mark_newest(connection, last["last"])
    return int(added - repeated)


def _clean(batch: Batch, target: Path) -> tuple[int, tuple[RejectedLine, ...]]:
    """Write the traces of a batch to ``target``; return their number, and the lines that are not traces."""
    rejected: list[RejectedLine] = []
    count = 0
    read = itertools.chain(
        map(read_journal, batch.files), (journal_content(content, source) for source, content in batch.texts)
    )
    with _writing(target), target.open("w", encoding="utf-8") as out:
        for content in read:
            rejected += content.rejected
            count += len(content.traces)
            out.writelines(trace.to_json() + "\n" for trace in content.traces)
    return count, tuple(rejected)


# ---- doubts ---------------------------------------------------------------------------------------
# Marks passes whose figures cannot be true (:mod:`tilegym_db.published.snapshot`).


def judge_passes(connection: DuckDBPyConnection, last: int = -1, plausible: frozenset[str] = frozenset()) -> bool:
    """Set the column ``doubt`` of the passes after row ``last``, by the database's definitions and peaks.

    Work grows with the number of distinct points, not of traces. Passes of the Definitions in ``plausible`` are
    skipped. Return True if any pass is doubted, or was.
    """
    changed: int = connection.execute(statements.FORGET_DOUBTS, {"last": last}).fetchall()[0][0]
    cursor = connection.execute(statements.POINTS_OF_PASSES, {"last": last, "plausible": sorted(plausible)})
    names = [column[0] for column in cursor.description or ()]
    points = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    if not points:
        return changed > 0
    definitions = _definitions(connection, {point["definition_digest"] for point in points})
    peaks = _peaks(connection)
    bounds = [
        found
        for point in points
        if (definition := definitions.get(point["definition_digest"])) is not None
        and (found := _bounds(definition, point, peaks.get(point["gpu"]))) is not None
    ]
    if bounds:
        changed += connection.execute(statements.DOUBT, {"last": last, "bounds": json.dumps(bounds)}).fetchall()[0][0]
    return changed > 0


def _definitions(connection: DuckDBPyConnection, digests: set[str]) -> dict[str, Definition]:
    rows = connection.execute(statements.DEFINITIONS_BY_DIGEST, {"digests": sorted(digests)}).fetchall()
    found = {}
    for digest, record in rows:
        try:
            found[digest] = Definition.from_json(record, f"definition {digest[:12]}")
        except RecordError:
            continue  # of an older version, whose passes never count as verified
    return found


def _peaks(connection: DuckDBPyConnection) -> dict[str, GpuPeaks]:
    """Return the peaks by GPU, published before local ones: the floor belongs to the driver, and the package's is
    locked.
    """
    rows = connection.execute(statements.PEAKS_BY_GPU).fetchall()
    return {gpu: GpuPeaks.from_json(record, f"peaks of {gpu}") for gpu, record in rows}


def _bounds(definition: Definition, point: dict[str, Any], peaks: GpuPeaks | None) -> dict[str, Any] | None:
    try:
        found = bounds_of(
            definition, point["axes"], point["dtypes"], peaks, cold_l2=point["cold_l2"], timer=point["timer"]
        )
    except (LookupError, ValueError, ArithmeticError):
        return None  # this Definition lacks these axes or dtypes, so no call can match
    keys = ("definition_digest", "gpu", "axes_key", "dtypes_key", "cold_l2", "timer")
    return {**{key: point[key] for key in keys}, **vars(found)}


# ---- newest ---------------------------------------------------------------------------------------
# Marks the passes that no newer one supersedes, so that views need not read every trace.
# A later measurement of the same source, config, workload and GPU supersedes an earlier one. This is settled at
# loading: a failure that revokes the newer pass revokes the older one as well.
# The current source, the trusted origins, the tiers and the sandbox levels may change later. They are equal for a whole
# group or part of its key, so the views decide them. More rows than the newest may be marked, but never fewer: every
# new trace is marked.

_PASSED = "status = 'PASSED' AND performance.latency_us IS NOT NULL AND doubt IS NULL"
_KEY = """definition, definition_digest, solution, solution_digest, gpu, tier, sandbox_level, config_key, workload_uuid,
        dtypes_key, axes_key, scalars_key, layouts_key, blobs_key, origin <> 'foreign' OR trusted"""

# New rows, and marked older ones that a new row may supersede.
_FIND = f"""
    CREATE OR REPLACE TEMP TABLE found_newest AS
    SELECT arg_max(rowid, row(timestamp, trace_id)) AS id, solution_digest FROM (
        SELECT rowid, * FROM trace_records WHERE rowid > $last AND {_PASSED}
        UNION ALL
        SELECT rowid, * FROM trace_records WHERE rowid <= $last AND is_newest AND {_PASSED}
            AND solution_digest IN (SELECT solution_digest FROM trace_records WHERE rowid > $last AND {_PASSED}))
    GROUP BY {_KEY}
"""
_UNMARK = """
    UPDATE trace_records SET is_newest = false
    WHERE is_newest AND rowid NOT IN (SELECT id FROM found_newest)
        AND solution_digest IN (SELECT solution_digest FROM found_newest)
"""
_MARK = "UPDATE trace_records SET is_newest = true WHERE NOT is_newest AND rowid IN (SELECT id FROM found_newest)"
_FORGET = "DROP TABLE found_newest"


def mark_newest(connection: DuckDBPyConnection, last: int = -1) -> None:
    """Update the column ``is_newest`` for the rows after row ``last``; by default for all rows."""
    connection.execute(_FIND, {"last": last})
    for statement in (_UNMARK, _MARK, _FORGET):
        connection.execute(statement)
