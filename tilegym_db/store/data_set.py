"""A Parquet data set of traces in a folder or an object store: append-only, and safe with any number of writers.

A file is written once, whole, under the digest of its rows (``gpu=h200/<digest>.parquet``), so that writing the same traces
twice, or from two machines at once, makes the same file; readers count a trace once whatever files it is in. A row has the
whole trace as JSON (``record``) and the signature of the installation that measured it. Credentials are those that the
environment gives any S3 tool; they are neither taken from an address nor stored, and never part of a message.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tilegym_db.errors import StoreError
from tilegym_db.records.base import length_prefixed_digest
from tilegym_db.store.shared_place import SharedPlace, hidden

__all__ = ["SCHEMA_VERSION", "DataFile", "Row", "SharedDataSet"]

SCHEMA_VERSION = 1
"""Of the files. A newer version may add columns; one that changes the meaning of a column raises it."""
VERSION_KEY = b"tilegym_db.schema_version"
COLUMNS = ("trace_id", "definition", "solution", "workload_uuid", "tier", "status", "record", "signature")
SUFFIX = ".parquet"
MAX_OTHERS = 10_000
"""Folders, and files that are not Parquet, in a folder that is a data set; a writer that was killed leaves one hidden file."""


@dataclass(frozen=True)
class Row:
    """A trace as JSON, and the signature of who measured it ('' where nobody signed it)."""

    record: str
    signature: str = ""


@dataclass(frozen=True)
class DataFile:
    """A file of the data set: its name below the data set's address, and its size."""

    name: str
    path: str
    size: int


class SharedDataSet:
    """The data set at one address: a folder, or ``s3://bucket/folder`` as ``pyarrow.fs`` reads it."""

    def __init__(self, uri: str) -> None:
        """Open it; nothing is asked of the address yet.

        Raises:
            UsageError: no address, one with credentials or without a bucket, or of a kind that pyarrow does not know.
            StoreError: the region of the bucket cannot be asked for.
            ModuleNotFoundError: pyarrow is not installed.
        """
        self.uri = uri
        self.place = SharedPlace(uri)

    def files(self) -> list[DataFile]:
        """Every file, by name; none where nothing was written yet.

        Raises:
            StoreError: the address cannot be reached or listed to its end.
        """
        from pyarrow import fs

        found = []
        if self.place.is_local:
            return self._local_files()
        try:
            listed = self.place.files.get_file_info(fs.FileSelector(self.place.root, recursive=True))
        except FileNotFoundError:  # the folder; a bucket that does not exist is another error
            return []
        except OSError as error:
            raise self.place.refused("list", error) from None
        for info in listed:
            name = os.path.relpath(info.path, self.place.root)
            hides = any(part.startswith((".", "_")) for part in name.split("/"))
            if info.type == fs.FileType.File and name.endswith(SUFFIX) and not hides:
                found.append(DataFile(name, info.path, info.size))
        return sorted(found, key=lambda file: file.name)

    def _local_files(self) -> list[DataFile]:
        """As :meth:`files`, of a folder; one that is evidently something else, such as ``/tmp``, is refused early."""
        found, others = [], 0
        if not os.path.isdir(self.place.root):
            if os.path.lexists(self.place.root):
                raise self.place.refused("list", NotADirectoryError("it is no folder"))
            return []
        for place, folders, names in os.walk(self.place.root, onerror=self._refuse_listing, followlinks=True):
            folders[:] = [name for name in folders if not name.startswith((".", "_"))]
            files = [name for name in names if name.endswith(SUFFIX) and not name.startswith((".", "_"))]
            others += len(folders) + len(names) - len(files)
            if others > MAX_OTHERS:
                raise StoreError(
                    f"{self.place.shown} is no data set: it holds more than {MAX_OTHERS:,} folders and files that are not "
                    "Parquet. Give the folder that 'publish --to' wrote."
                )
            for path in (os.path.join(place, name) for name in files):
                if os.path.isfile(path):
                    found.append(DataFile(os.path.relpath(path, self.place.root), path, os.path.getsize(path)))
        return sorted(found, key=lambda file: file.name)

    def _refuse_listing(self, error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # a folder that was removed meanwhile holds nothing
            raise self.place.refused("list", error) from None

    def trace_ids(self, files: Sequence[DataFile]) -> tuple[set[str], list[str]]:
        """What the files hold, by trace id; and of each that is no valid file, why.

        Raises:
            StoreError: as :meth:`rows`.
        """
        known: set[str] = set()
        problems = []
        for file in files:
            table, problem = self._read(file, ["trace_id"])
            known.update(table.column("trace_id").to_pylist() if table is not None else ())
            problems += [problem] if problem else []
        return known, problems

    def rows(self, file: DataFile) -> tuple[list[Row], str]:
        """The rows of a file; none and the reason where it is no valid one: cut off, or not what its name says.

        Raises:
            StoreError: it was written by a newer version, or cannot be fetched.
        """
        table, problem = self._read(file, ["record", "signature"])
        if table is None:
            return [], problem
        columns = table.to_pydict()
        rows = [Row(*pair) for pair in zip(columns["record"], columns["signature"], strict=True)]
        if digest_of(rows) not in file.name:
            return [], f"{file.name} does not hold what its name says: it was changed after it was written."
        return rows, ""

    def add(self, rows: Sequence[Row], gpu: str) -> str | None:
        """Write rows of one GPU slug as one file, which is there whole or not at all; its name, or None where it was there.

        Raises:
            StoreError: it cannot be written; nothing of it is there then.
        """
        import pyarrow.parquet as parquet

        rows = sorted(rows, key=lambda row: row.record)
        name = f"gpu={gpu}/{digest_of(rows)}{SUFFIX}"
        table = _table(rows)
        new = self.place.add(name, lambda file: parquet.write_table(table, file, compression="zstd"))
        return name if new else None

    def _read(self, file: DataFile, columns: list[str]) -> tuple[Any, str]:
        """The columns of a file as a table, or None and why it is no valid file."""
        import pyarrow
        from pyarrow import dataset

        try:
            source = dataset.dataset(file.path, filesystem=self.place.files, format="parquet")
            version = int((source.schema.metadata or {}).get(VERSION_KEY, b"0"))
            if version > SCHEMA_VERSION:
                raise StoreError(
                    f"{file.name} of {self.place.shown} was written by a newer tilegym-db (version {version} of the data set; "
                    f"this one knows {SCHEMA_VERSION}). Nothing was read. Try: pip install --upgrade tilegym-db"
                )
            missing = sorted(set(columns) - set(source.schema.names))
            if missing:
                return None, f"{file.name} has no column {missing[0]}: it is no file of traces."
            return source.to_table(columns=columns), ""
        except (pyarrow.ArrowInvalid, ValueError) as error:
            return None, f"{file.name} is no whole Parquet file: {hidden(str(error).splitlines()[0])}"
        except OSError as error:
            # Arrow calls a page that cannot be decoded an error of input and output as well.
            if self.place.is_local or "Couldn't deserialize" in str(error) or "Unexpected end of stream" in str(error):
                return None, f"{file.name} cannot be read: {hidden(str(error).splitlines()[0])}"
            raise self.place.refused("read", error) from None


def digest_of(rows: Sequence[Row]) -> str:
    """What names a file: the same for the same rows, in whatever order and whoever writes them."""
    ordered = sorted(rows, key=lambda row: row.record)
    return length_prefixed_digest(part.encode() for row in ordered for part in (row.record, row.signature))


def _table(rows: Sequence[Row]) -> Any:
    import pyarrow

    schema = pyarrow.schema(
        [(name, pyarrow.string()) for name in COLUMNS], metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()}
    )
    return pyarrow.Table.from_pylist(list(_records(rows)), schema=schema)


def _records(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for row in rows:
        trace = json.loads(row.record)
        columns = {name: trace.get(name) for name in COLUMNS}
        yield {**columns, "record": row.record, "signature": row.signature}
