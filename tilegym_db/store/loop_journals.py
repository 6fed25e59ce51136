"""The journals of the loop, ``<home>/loop/<kind>s.jsonl``, and the database's copy of them.

A line is written whole and synced while the folder's lock is held; a process that is killed leaves at most a torn last line,
which readers name and pass over, and the next writer ends. What numbers records (attempts, promotions) reads and appends under
one lock.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tilegym_db.errors import RecordError, StoreError
from tilegym_db.files import read_bytes
from tilegym_db.folder_locks import writing
from tilegym_db.records.base import Record
from tilegym_db.records.loop import Attempt, Experiment, Promotion, Task
from tilegym_db.store import statements
from tilegym_db.store.input_files import loop_folder
from tilegym_db.store.installation import RejectedLine
from tilegym_db.store.journal import CUT_OFF, RunFile, is_cut_off, numbered_lines
from tilegym_db.store.pattern_pages import read_patterns

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from tilegym_db.catalog import Catalog

__all__ = ["append", "journaled", "latest", "loop_journals", "loop_lock", "rejected_lines", "sync_loop"]

_log = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)

JOURNALED: tuple[type[Record], ...] = (Task, Attempt, Promotion, Experiment)

_INSERT = """INSERT INTO loop_records
    SELECT unnest(from_json($records::JSON, '[{"kind":"VARCHAR","line":"BIGINT","record":"JSON"}]'), recursive := true)"""


@contextmanager
def loop_lock(home: Path | None = None) -> Iterator[None]:
    """Hold the lock of the journals, so that what is read stays true until a record that builds on it is appended.

    Raises:
        StoreError: another process holds it for a minute, or the folder cannot be written.
    """
    with writing(loop_folder(home)):
        yield


def append(record: Record, home: Path | None = None) -> None:
    """Write one record at the end of its journal and wait until it is on disk. The caller holds :func:`loop_lock`.

    Raises:
        StoreError: the disk is full or gone; the journal then ends with its last whole line.
    """
    with RunFile("loop", _stem(type(record)), home) as journal:
        journal.append_line(record.to_json().encode() + b"\n")


def journaled(kind: type[R], home: Path | None = None) -> list[R]:
    """Every record of a kind, in the order in which they were written. A line that is none is passed over.

    Raises:
        StoreError: the journal cannot be read.
    """
    return [record for _, record in _numbered(kind, _path(kind, home))]


def _numbered(kind: type[R], path: Path) -> Iterator[tuple[int, R]]:
    for number, found in _lines(kind, path):
        if not isinstance(found, RejectedLine):
            yield number, found
        elif not found.reason.startswith(CUT_OFF):
            _warn_once(str(found))
        elif found.reason != CUT_OFF:  # else a later writer ended it, and it was told then
            _warn_once(f"{found}, and what follows is written after it.")


def _lines(kind: type[R], path: Path) -> Iterator[tuple[int, R | RejectedLine]]:
    """Number and record of each line, or why it is none."""
    if not os.path.lexists(path):
        return
    try:
        content = read_bytes(path, "journal", limit=None)
    except RecordError as error:
        raise StoreError(str(error)) from None
    for number, line, finished in numbered_lines(content):
        try:
            yield number, kind.from_json(line, f"{path}:{number}")
        except RecordError as error:
            reason = str(error).removeprefix(f"{path}:{number}: ")
            if not finished:
                reason = f"{CUT_OFF}: this record is lost"
            elif is_cut_off(line, finished=finished):
                reason = CUT_OFF
            yield number, RejectedLine(path, number, reason)


def loop_journals(home: Path) -> dict[Path, type[Record]]:
    """The journals that there are, each with what its lines are."""
    paths = {_path(kind, home): kind for kind in JOURNALED}
    return {path: kind for path, kind in paths.items() if os.path.lexists(path)}


def rejected_lines(kind: type[Record], path: Path) -> list[RejectedLine]:
    """The lines of a journal that are no record, and why.

    Raises:
        StoreError: it cannot be read.
    """
    return [found for _, found in _lines(kind, path) if isinstance(found, RejectedLine)]


@cache
def _warn_once(text: str) -> None:
    """A journal is read several times by one command, and every other second by one that waits."""
    _log.warning("%s", text)


def _stem(kind: type[Record]) -> str:
    return f"{kind.kind}s"


def _path(kind: type[Record], home: Path | None) -> Path:
    return loop_folder(home) / f"{_stem(kind)}.jsonl"


# -- the database's copy ----------------------------------------------------------------------------------------------


def sync_loop(connection: DuckDBPyConnection, home: Path, catalog: Catalog) -> None:
    """Bring every record of the loop into ``loop_records``, in place of what was there."""
    connection.execute(statements.loop_sql())
    connection.execute("DELETE FROM loop_records")
    rows: list[dict[str, Any]] = []
    for kind in JOURNALED:
        try:
            found = [*_numbered(kind, _path(kind, home))]
        except StoreError as error:  # stops what is about the loop, and nothing else
            _warn_once(f"left out: {error}")
            continue
        rows += [{"kind": kind.kind, "line": number, "record": _plain(record)} for number, record in found]
    patterns, refused = read_patterns(catalog)
    for reason in refused:
        _log.warning("%s", reason)
    rows += [{"kind": "pattern", "line": 0, "record": _plain(pattern)} for pattern in patterns]
    connection.execute(_INSERT, {"records": json.dumps(rows, ensure_ascii=False)})


def _plain(record: Record) -> dict[str, Any]:
    return record.model_dump(mode="json")


def latest(attempts: Sequence[Attempt]) -> dict[tuple[str, int], Attempt]:
    """(task, number) -> the newest line of that attempt, in the order in which they were received."""
    return {(attempt.task, attempt.number): attempt for attempt in attempts}
