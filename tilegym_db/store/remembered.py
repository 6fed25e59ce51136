"""What this installation remembers of data sets that a team shares, so that no file is read twice: ``<home>/shared``.

A file of a data set never changes, since its name is the digest of its rows. Everything here may be removed at any time; then the
files are read once more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tilegym_db.errors import RecordError
from tilegym_db.files import read_bytes, write_atomically
from tilegym_db.folder_locks import writing
from tilegym_db.store import statements
from tilegym_db.store.data_set import DataFile
from tilegym_db.store.input_files import FOLDER

__all__ = ["read_own_traces", "remember_own_traces", "store_folder"]

LARGEST = 1 << 30

OwnTraces = Mapping[tuple[str, int], Sequence[str]]
"""Name and size of a file -> the traces of this installation that are in it."""


def store_folder(home: Path, uri: str, *, trust: bool) -> Path:
    """The folder of a store with the traces of one data set, for questions about it; apart for traces that were trusted."""
    return home / FOLDER / f"{_digest(uri)}-v{statements.SCHEMA_VERSION}{'-trusted' if trust else ''}"


def read_own_traces(home: Path, uri: str) -> dict[tuple[str, int], list[str]]:
    """What :func:`remember_own_traces` wrote; nothing where that is missing or damaged."""
    path = _path(home, uri)
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_bytes(path, "memory of a data set", LARGEST))
        return {(str(name), int(size)): [str(one) for one in ids] for name, size, ids in content["files"]}
    except (RecordError, ValueError, KeyError, TypeError):
        return {}


def remember_own_traces(home: Path, uri: str, found: OwnTraces, files: Iterable[DataFile]) -> None:
    """Write what was found in those files that the data set still has.

    Raises:
        StoreError: it cannot be written.
    """
    present = {(file.name, file.size) for file in files}
    lines = [[name, size, sorted(ids)] for (name, size), ids in sorted(found.items()) if (name, size) in present]
    with writing(home / FOLDER):
        write_atomically(_path(home, uri), json.dumps({"uri": uri.partition("?")[0], "files": lines}).encode())


def _path(home: Path, uri: str) -> Path:
    return home / FOLDER / f"{_digest(uri)}.json"


def _digest(uri: str) -> str:
    return hashlib.sha256(uri.encode()).hexdigest()[:16]
