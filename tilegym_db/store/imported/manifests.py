"""Finds data sets by their manifests, and reads them."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from tilegym_db.errors import NotFoundError, StoreError, UsageError, did_you_mean
from tilegym_db.store.imported.objects import DataSet, Refusal, StoredFile, StoredRecord
from tilegym_db.store.input_files import imported_manifests

__all__ = [
    "MANIFEST_VERSION",
    "data_set",
    "data_sets",
    "manifest_of",
    "records_name",
    "whole_records_file",
]

_log = logging.getLogger(__name__)

MANIFEST_VERSION = 1


def data_sets(home: Path) -> list[DataSet]:
    """Every imported data set that can be read, by origin; the others are warned of, and stop nothing."""
    found = []
    for path in imported_manifests(home):
        try:
            found.append(_read_data_set(path, home))
        except StoreError as error:
            _log.warning("%s left out: %s", _origin(path), error)
    return found


def data_set(home: Path, origin: str) -> DataSet:
    """One data set by its origin, or by its name alone where no other has it.

    Raises:
        NotFoundError: there is none; suggests the nearest.
        UsageError: several dialects have one of that name.
        StoreError: it cannot be read.
    """
    return _read_data_set(manifest_of(home, origin), home)


def manifest_of(home: Path, origin: str) -> Path:
    """The manifest of one data set, unread.

    Raises:
        NotFoundError: there is none; suggests the nearest.
        UsageError: several dialects have one of that name.
    """
    paths = {_origin(path): path for path in imported_manifests(home)}
    fitting = [known for known in paths if origin in (known, known.partition(":")[2])]
    if len(fitting) > 1:
        raise UsageError(f"'{origin}' may be {' or '.join(fitting)}; give the whole origin.")
    if not fitting:
        names = ", ".join(paths) or "none"
        raise NotFoundError(
            f"no imported data set '{origin}'.{did_you_mean(origin, paths)} Imported: {names}. Try: tilegym-db import PATH"
        )
    return paths[fitting[0]]


def _origin(manifest: Path) -> str:
    return f"{manifest.parent.parent.name}:{manifest.parent.name}"


def _read_data_set(path: Path, home: Path) -> DataSet:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["version"] != MANIFEST_VERSION:
            raise StoreError(f"{path} was written by another version of tilegym-db. Import the data set again.")
        # Not splitlines: it also splits at U+2028, U+2029 and U+0085, which stand unescaped within a record.
        lines = (path.parent / manifest["records_file"]).read_bytes().split(b"\n")
        return DataSet(
            dialect=manifest["dialect"],
            name=manifest["name"],
            files=tuple(StoredFile(**file) for file in manifest["files"]),
            records=tuple(_record(json.loads(line)) for line in lines if line),
            refused=tuple(Refusal(**refusal) for refusal in manifest["refused"]),
            home=home,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path}: this imported data set cannot be read ({error}). Import it again with --replace."
        ) from None


def _record(fields: dict[str, Any]) -> StoredRecord:
    lists = {name: tuple(fields[name]) for name in ("unset", "findings")}
    return StoredRecord(**{key: fields[key] for key in fields if key != "origin"} | lists)


def whole_records_file(manifest: Path) -> Path | None:
    """The file of records that a manifest names, where it is as it was written; a damaged data set stops nothing else."""
    try:
        name: str = json.loads(manifest.read_text(encoding="utf-8"))["records_file"]
        path = manifest.with_name(name)
        if name == records_name(path.read_bytes()):
            return path
        reason = f"{name} is not what was written"
    except (OSError, ValueError, KeyError) as error:
        reason = str(error)
    _log.warning("%s: left out: %s. Import this data set again with --replace.", manifest, reason)
    return None


def records_name(content: bytes) -> str:
    """What the file of these records is called, by its content."""
    return f"records-{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
