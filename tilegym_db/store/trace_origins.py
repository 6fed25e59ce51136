"""Sorts files of traces by who vouches for them, before they go into the database in bulk."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic_core import to_json

from tilegym_db.errors import RecordError, StoreError
from tilegym_db.records.trace_set import TraceSet, is_trace_set
from tilegym_db.store.input_files import trace_files
from tilegym_db.store.installation import Origin, RejectedLine, is_signed, split_line
from tilegym_db.store.snapshot import Snapshot, open_snapshot

__all__ = ["Batch", "Sorted", "sorted_files", "sorted_snapshots"]


@dataclass(frozen=True)
class Batch:
    """Files of whole traces, one a line, that all have one origin."""

    origin: Origin
    trusted: bool
    files: tuple[Path, ...]
    lines: int
    sources: Mapping[Path, Path] = field(default_factory=dict)
    """Where the lines of a file that was made for this came from; the line's number is the same."""


@dataclass(frozen=True)
class Sorted:
    """Batches, and what was no trace or is not used, and why."""

    batches: tuple[Batch, ...] = ()
    rejected: tuple[RejectedLine, ...] = ()
    refused: tuple[str, ...] = ()


class _Sorter:
    """Collects batches; lines that have to be moved go to files of ``scratch``."""

    def __init__(self, home: Path, scratch: Path, trust: bool) -> None:
        self.home, self.scratch, self.trust = home, scratch, trust
        self._files: dict[tuple[Origin, bool], list[Path]] = {}
        self._lines: dict[tuple[Origin, bool], int] = {}
        self._numbers = itertools.count()
        self._sources: dict[Path, Path] = {}

    def add(self, path: Path, origin: Origin, lines: int, *, trusted: bool | None = None) -> None:
        key: tuple[Origin, bool] = (origin, origin == "foreign" and (self.trust if trusted is None else trusted))
        self._files.setdefault(key, []).append(path)
        self._lines[key] = self._lines.get(key, 0) + lines

    def write(self, lines: Iterable[bytes], origin: Origin, source: Path, *, trusted: bool | None = None) -> None:
        content = b"".join(lines)
        count = sum(not line.isspace() for line in content.splitlines())
        if count:
            path = self.scratch / f"{next(self._numbers)}.jsonl"
            try:
                path.write_bytes(content)
            except OSError as error:
                raise StoreError(f"cannot write {path}: {error.strerror or error}. Nothing was ingested.") from None
            self._sources[path] = source
            self.add(path, origin, count, trusted=trusted)

    def batches(self) -> tuple[Batch, ...]:
        # Who is believed first: what follows then finds its ids taken.
        order = sorted(self._files, key=lambda key: (("shipped", "local", "foreign").index(key[0]), not key[1]))
        return tuple(Batch(*key, tuple(self._files[key]), self._lines[key], self._sources) for key in order)


def sorted_files(files: Sequence[Path], home: Path, scratch: Path, *, trust: bool) -> Sorted:
    """Journals and other files that the user names, by the signature of every line.

    A trace set that this installation or the package published is what its lock says; any other is foreign.

    Raises:
        StoreError: a file cannot be read.
    """
    sorter = _Sorter(home, scratch, trust)
    rejected: list[RejectedLine] = []
    for path in files:
        if path.exists() and not path.is_file():  # a FIFO would be waited for
            raise StoreError(f"cannot read {path}: it is no regular file. Nothing was ingested.")
        try:
            with path.open("rb") as file:
                if is_trace_set(file.read(64)):
                    problems = _add_sets(sorter, [path], path.parent.parent)
                    rejected += [RejectedLine(path, 1, text.removeprefix(f"{path}: ")) for text in problems]
                    continue
                file.seek(0)
                signed = [_is_own(line, home) for line in file if not line.isspace()]
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}. Nothing was ingested.") from None
        if all(signed) or not any(signed):
            sorter.add(path, "local" if signed and all(signed) else "foreign", len(signed))
        else:
            own = (line if _is_own(line, home) else b"\n" for line in _whole_lines(path))
            others = (b"\n" if _is_own(line, home) else line for line in _whole_lines(path))
            sorter.write(own, "local", path)
            sorter.write(others, "foreign", path)
    return Sorted(sorter.batches(), rejected=tuple(rejected))


def sorted_snapshots(folders: Iterable[Path], home: Path, scratch: Path, *, trust: bool) -> Sorted:
    """The traces of published folders (``traces/<gpu>``), by who vouches for each folder.

    A folder that is not valid, or a file that is not what the lock says, is left out with the reason.
    """
    sorter = _Sorter(home, scratch, trust)
    refused: list[str] = []
    for folder in folders:
        refused += _add_sets(sorter, trace_files(folder), folder)
    return Sorted(sorter.batches(), refused=tuple(refused))


def _add_sets(sorter: _Sorter, paths: Sequence[Path], folder: Path) -> list[str]:
    """Take files of a published folder in; returns why not, where they cannot be."""
    if not paths:
        return []
    try:
        snapshot = open_snapshot(folder, sorter.home)
    except RecordError as error:
        return [str(error)]
    if sorter.trust and snapshot.origin == "foreign":
        snapshot = Snapshot(folder, snapshot.gpu, snapshot.sm, snapshot.published, "foreign")
    return [problem for path in paths for problem in _add_set(sorter, path, snapshot)]


def _add_set(sorter: _Sorter, path: Path, snapshot: Snapshot) -> list[str]:
    try:
        content = snapshot.read(path, "trace set")
        if not is_trace_set(content):
            sorter.add(path, snapshot.origin, sum(not line.isspace() for line in content.splitlines()))
            return []
        parsed = TraceSet.parse(content, path)
        traces = list(parsed.traces())
    except RecordError as error:
        return [str(error)]
    # What this installation published without having measured it, it had been told to trust.
    borrowed = parsed.foreign_runs if snapshot.origin == "local" else frozenset()
    sorter.write((_line(trace) for trace in traces if trace["run_id"] not in borrowed), snapshot.origin, path)
    sorter.write((_line(trace) for trace in traces if trace["run_id"] in borrowed), "foreign", path, trusted=True)
    return []


def _line(trace: dict[str, object]) -> bytes:
    return to_json(trace) + b"\n"


def _is_own(line: bytes, home: Path) -> bool:
    content, claimed = split_line(line)
    return claimed is not None and is_signed(home, "trace", content, claimed)


def _whole_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for line in file:
            yield line if line.endswith(b"\n") else line + b"\n"
