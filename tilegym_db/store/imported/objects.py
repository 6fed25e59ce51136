"""What a data set holds: its files, kept by the digest of their bytes, its records, and what was refused."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tilegym_db.errors import StoreError
from tilegym_db.store.input_files import imported_folder

__all__ = [
    "DataSet",
    "Kind",
    "Refusal",
    "StoredFile",
    "StoredRecord",
    "counted",
    "object_path",
    "paths_of",
    "read_object",
]

Kind = Literal["definition", "solution", "workload", "trace"]


@dataclass(frozen=True)
class StoredFile:
    """One file of a data set: its path there, and the sha256 of its bytes."""

    path: str
    sha256: str
    size: int
    role: str = "other"
    """``records``, ``blob``, ``pointer`` (a Git LFS pointer whose content is elsewhere), ``changed`` (a blob that an export of
    ours had with other bytes) or ``other`` (carried unread)."""


@dataclass(frozen=True)
class StoredRecord:
    """One record: where it stands, byte for byte, and what it says."""

    kind: Kind
    name: str
    """Of a Definition or Solution; a Workload's uuid; of a Trace, that of its Workload."""
    definition: str
    path: str
    line: int | None
    """From 1 in a file of lines; None where the record is the file."""
    offset: int
    length: int
    digest: str
    """sha256 of the record without its white space: order of keys and the text of numbers are kept apart."""
    record: Mapping[str, Any]
    """As parsed, with the dialect's defaults filled in."""
    unset: tuple[str, ...] = ()
    """Keys that were filled in."""
    findings: tuple[str, ...] = ()
    """What stands in the way of using it here, or does not fit its place."""


@dataclass(frozen=True)
class Refusal:
    """One thing that did not come in: the file, the key within it, and why."""

    path: str
    key: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.key + ': ' if self.key else ''}{self.reason}"


@dataclass(frozen=True)
class DataSet:
    """What one import brought in. ``origin`` is ``<dialect>:<name>``."""

    dialect: str
    name: str
    files: tuple[StoredFile, ...]
    records: tuple[StoredRecord, ...] = field(repr=False)
    refused: tuple[Refusal, ...] = ()
    home: Path = field(default=Path(), repr=False, compare=False)

    @property
    def origin(self) -> str:
        """What ``list --origin`` and the column ``origin`` call it."""
        return f"{self.dialect}:{self.name}"

    def of_kind(self, kind: Kind) -> list[StoredRecord]:
        """The records of one kind, in the order of their files and lines."""
        return [record for record in self.records if record.kind == kind]

    @cached_property
    def files_by_path(self) -> dict[str, StoredFile]:
        """Path in the data set -> file."""
        return {file.path: file for file in self.files}

    def content(self, path: str) -> bytes:
        """The exact bytes of one of its files.

        Raises:
            StoreError: the bytes are gone, or are not those that were imported.
        """
        return read_object(self.home, self.files_by_path[path])

    def line(self, record: StoredRecord) -> bytes:
        """The exact bytes of one record."""
        return self.content(record.path)[record.offset : record.offset + record.length]


def object_path(home: Path, sha256: str) -> Path:
    """Where the bytes of that digest lie."""
    return imported_folder(home) / "objects" / sha256[:2] / sha256


def read_object(home: Path, file: StoredFile) -> bytes:
    """The bytes of a stored file; :class:`StoreError` where they are gone or changed."""
    path = object_path(home, file.sha256)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path} ({file.path}) cannot be read: {error.strerror}. Import the data set again.") from None
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise StoreError(f"{path} ({file.path}) is not what was imported. Remove it and import the data set again.")
    return content


def counted(records: Iterable[StoredRecord]) -> dict[str, int]:
    """Kind -> how many."""
    counts: dict[str, int] = {}
    for record in records:
        counts[record.kind] = counts.get(record.kind, 0) + 1
    return counts


def paths_of(records: Sequence[StoredRecord]) -> dict[str, list[StoredRecord]]:
    """Path -> its records in order."""
    found: dict[str, list[StoredRecord]] = {}
    for record in records:
        found.setdefault(record.path, []).append(record)
    return found
