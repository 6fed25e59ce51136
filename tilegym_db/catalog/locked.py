"""``definitions.lock.json``: name -> version -> digest, so that no meaning changes under an old version."""

from __future__ import annotations

import json
from pathlib import Path

from tilegym_db.catalog.reader import CatalogReader
from tilegym_db.errors import RecordError
from tilegym_db.files import read_bytes, write_atomically
from tilegym_db.folder_locks import writing
from tilegym_db.records.parsing import parse_object

__all__ = ["findings", "read_lock", "update", "write_lock"]

LOCK_FILE = "definitions.lock.json"

Locked = dict[str, dict[str, str]]


def _path(root: Path) -> Path:
    """The lock of one root."""
    return root / "definitions" / LOCK_FILE


def read_lock(root: Path) -> Locked:
    """name -> version -> digest of one root; empty where it has no lock.

    Raises:
        RecordError: the file is damaged; it is then never written over.
    """
    path = _path(root)
    if not path.exists():
        return {}
    try:
        content = parse_object(read_bytes(path, "lock"), "lock", path)
    except RecordError as error:
        raise RecordError(
            f"{path}: the lock cannot be read: {str(error).removeprefix(f'{path}: ')}", code="lock_damaged"
        ) from None
    if not isinstance(content, dict):
        raise RecordError(f"{path}: the lock cannot be read: it is no JSON object of names.", code="lock_damaged")
    for name, versions in content.items():
        if not isinstance(versions, dict) or not all(isinstance(digest, str) for digest in versions.values()):
            raise RecordError(
                f"{path}: the lock cannot be read: {name!r} must map versions to digests.", code="lock_damaged"
            )
    return content


def findings(catalog: CatalogReader) -> list[str]:
    """What disagrees between the valid Definitions of a catalog and the locks of its roots."""
    found = []
    for root in catalog.roots:
        try:
            locked = read_lock(root)
        except RecordError as error:
            found.append(str(error))
            continue
        for name, record in catalog.definitions.items():
            path = catalog.definition_paths[name]
            if not path.is_relative_to(root):
                continue
            known = locked.get(name, {})
            if record.version not in known:
                found.append(
                    f"{path}: version {record.version} is not in {LOCK_FILE}. Try: tilegym-db check --update-lock"
                )
            elif known[record.version] != record.digest:
                found.append(
                    f"{path}: its meaning changed but its version is still {record.version}. "
                    "Raise 'version' (a semantic change needs a new one), or restore the content."
                )
    return found


def update(catalog: CatalogReader, root: Path) -> list[str]:
    """Add the versions that the lock of a root does not know yet, and return them as ``name version``."""
    with writing(root):
        locked = read_lock(root)
        added = []
        for name, record in catalog.definitions.items():
            if catalog.definition_paths[name].is_relative_to(root) and record.version not in locked.get(name, {}):
                locked.setdefault(name, {})[record.version] = record.digest
                added.append(f"{name} {record.version}")
        if added:
            write_lock(root, locked)
    return added


def write_lock(root: Path, locked: Locked) -> None:
    """Replace the lock of a root, whose folder lock the caller holds."""
    write_atomically(_path(root), (json.dumps(locked, indent=2, sort_keys=True) + "\n").encode())
