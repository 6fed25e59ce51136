"""Lists unreadable files of a home folder. The database leaves each of them out and keeps the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilegym_db.errors import RecordError, StoreError
from tilegym_db.files import read_bytes
from tilegym_db.published.input_files import loop_folder
from tilegym_db.published.snapshot import RejectedLine
from tilegym_db.records.base import Record
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.store.journal import CUT_OFF, read_journal
from tilegym_db.store.side_files import MODEL_RUNS, loop_journals, read_model_run, rejected_lines

BUDGET_S = 1.5
"""Maximum seconds spent on reading one folder, newest files first. The oldest files are skipped."""


@dataclass(frozen=True)
class BrokenFiles:
    """The findings in one folder of the home folder."""

    folder: Path
    what: str
    files: int
    """Number of files."""
    read: int
    """Number of files read in time, the newest first."""
    broken: Sequence[RejectedLine]
    """First fault of each broken file. Line 0 stands for the whole file."""
    cut_off: Sequence[RejectedLine]
    """Lines whose writer was killed. Their content is lost, but the file is intact."""


def broken_files(home: Path) -> Iterator[BrokenFiles]:
    """Yield each folder of measurements with its unreadable files, without changing any file."""
    yield _found(home / "runs", "journals", _named(home / "runs", "*.jsonl"), _of_journal)
    peaks = home / "peaks"
    yield _found(peaks, "calibrations", _named(peaks, "*.json"), _of_record(GpuPeaks, "calibration"))
    models = home / MODEL_RUNS
    yield _found(models, "model runs", _named(models, "*.json"), lambda path: _of_model_run(path, home))
    loop = loop_journals(home)
    yield _found(loop_folder(home), "loop journals", [*loop], lambda path: _of_loop_journal(loop[path], path))


def _named(folder: Path, pattern: str) -> list[Path]:
    """Return all paths with a matching name, including a FIFO, a folder or a broken link."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def _found(
    folder: Path, what: str, files: Sequence[Path], judge: Callable[[Path], Sequence[RejectedLine]]
) -> BrokenFiles:
    broken, cut_off, read, begun = [], [], 0, time.monotonic()
    for path in sorted(files, key=_age):
        if time.monotonic() - begun > BUDGET_S:
            break
        read += 1
        lines = judge(path)
        torn = [line for line in lines if line.reason.startswith(CUT_OFF)]
        broken += [line for line in lines if line not in torn][:1]
        cut_off += torn
    return BrokenFiles(folder, what, len(files), read, broken, cut_off)


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0


def _of_journal(path: Path) -> Sequence[RejectedLine]:
    try:
        return read_journal(path).rejected
    except (StoreError, RecordError) as error:
        return [_as_a_whole(path, error)]


def _of_loop_journal(kind: type[Record], path: Path) -> Sequence[RejectedLine]:
    try:
        return rejected_lines(kind, path)
    except StoreError as error:
        return [_as_a_whole(path, error)]


def _of_model_run(path: Path, home: Path) -> Sequence[RejectedLine]:
    try:
        read_model_run(path, home)
    except RecordError as error:
        return [_as_a_whole(path, error)]
    return ()


def _as_a_whole(path: Path, error: Exception) -> RejectedLine:
    return RejectedLine(path, 0, str(error).removeprefix(f"{path}: "))


def _of_record(kind: type[Record], what: str) -> Callable[[Path], Sequence[RejectedLine]]:
    def judge(path: Path) -> Sequence[RejectedLine]:
        try:
            kind.from_json(read_bytes(path, what), path)
        except RecordError as error:
            return [_as_a_whole(path, error)]
        return ()

    return judge
