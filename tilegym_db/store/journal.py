"""The journal: one fsynced JSON line per trace, written as soon as the trace exists.

The database is derived from journals. A killed process loses at most the line it was writing. The next writer ends that
torn line, and readers report it and continue.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tilegym_db.errors import RecordError, StoreError, UsageError
from tilegym_db.files import read_bytes, regular_files, sync_folder
from tilegym_db.paths import home as default_home
from tilegym_db.published.input_files import is_packed, read_traces
from tilegym_db.published.snapshot import RejectedLine, signed_line, split_line
from tilegym_db.records import Trace

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
        """Write one trace as one signed line, and wait until it is on disk.

        Raises:
            RecordError: the trace holds NaN or infinity, which JSON cannot represent.
            StoreError: the disk is full or gone; the journal then ends with its last whole line.
        """
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

    Signatures are not checked here: :mod:`tilegym_db.store.loading` does that.

    Raises:
        StoreError: the file cannot be read.
    """
    try:
        content = read_bytes(path, "journal", limit=None)
    except RecordError as error:
        raise StoreError(str(error), code=error.code) from None
    if is_packed(content):
        return JournalContent(tuple(read_traces(content, path)))
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
