"""Adds data sets and removes them, one process at a time."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

from tilegym_db.errors import StoreError, UsageError
from tilegym_db.files import write_atomically
from tilegym_db.store.imported.manifests import MANIFEST_VERSION, manifest_of, records_name, whole_records_file
from tilegym_db.store.imported.objects import DataSet, StoredFile, StoredRecord, object_path
from tilegym_db.store.input_files import imported_folder, imported_manifests
from tilegym_db.store.lock import writer_lock

__all__ = [
    "add_data_set",
    "check_addable",
    "check_name",
    "forget_data_set",
    "import_lock",
]

LOCK_TIMEOUT_S = 10.0

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")

_CHUNK = 1 << 20
_UNFINISHED = ".new-"


def import_lock(home: Path, timeout_s: float = LOCK_TIMEOUT_S) -> AbstractContextManager[None]:
    """One process at a time adds or removes data sets.

    Raises:
        StoreError: another holds it for longer than ``timeout_s`` seconds, or the folder cannot be written.
    """
    return writer_lock(imported_folder(home) / "manifests", timeout_s)


def check_name(name: str) -> None:
    """Raise :class:`UsageError` for what cannot name a data set."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"'{name}' cannot name a data set: lower-case letters, digits, '.', '_' and '-' can.")


def check_addable(found: DataSet, home: Path, *, replace: bool = False) -> None:
    """Raise what :func:`add_data_set` would for a name; writes nothing."""
    check_name(found.name)
    manifest_path = _manifest_path(found, home)
    if manifest_path.exists() and not replace:
        _refuse_other(found, manifest_path.read_bytes(), _contents(found)[1])


def _manifest_path(found: DataSet, home: Path) -> Path:
    return imported_folder(home) / found.dialect / found.name / "manifest.json"


def _contents(found: DataSet) -> tuple[bytes, bytes]:
    """The file of records of a data set, and its manifest."""
    records_text = "".join(_line(found.origin, record) for record in found.records).encode()
    return records_text, _manifest_text(found, records_name(records_text))


def _refuse_other(found: DataSet, earlier: bytes, text: bytes) -> None:
    if earlier != text:
        raise UsageError(
            f"{found.origin} was imported before with other content. Add --replace to put this in its place, "
            "or --name to keep both."
        )


def add_data_set(found: DataSet, sources: Mapping[str, Path], home: Path, *, replace: bool = False) -> bool:
    """Keep a data set; False where exactly this one is there already. The caller holds :func:`import_lock`.

    Args:
        found: what was read; every file's digest is that of the bytes that were checked.
        sources: path in the data set -> the file to copy from.
        home: the store's folder.
        replace: take the place of another data set of the same origin.

    Raises:
        UsageError: the name cannot be one, or a data set of that origin has other content.
        StoreError: a file changed since it was read, the disk is full, or the folder cannot be written.
    """
    check_name(found.name)
    manifest_path = _manifest_path(found, home)
    records_text, text = _contents(found)
    records_path = manifest_path.with_name(records_name(records_text))
    earlier = manifest_path.read_bytes() if manifest_path.exists() else text
    if not replace:
        _refuse_other(found, earlier, text)
    whole = manifest_path.exists() and earlier == text and whole_records_file(manifest_path) == records_path
    if whole and all(object_path(home, file.sha256).exists() for file in found.files):
        return False
    for leftover in (imported_folder(home) / "objects").glob(f"*/{_UNFINISHED}*"):
        leftover.unlink(missing_ok=True)  # of a process that was killed: who holds the lock is the only one who writes
    for file in found.files:
        _keep(sources[file.path], file, home)
    write_atomically(records_path, records_text)
    write_atomically(manifest_path, text)
    for stale in set(manifest_path.parent.glob("records-*.jsonl")) - {records_path}:
        stale.unlink()
    _drop(_named(earlier) - _held(home), home)
    return True


def _manifest_text(found: DataSet, records_file: str) -> bytes:
    manifest = {
        "version": MANIFEST_VERSION,
        "dialect": found.dialect,
        "name": found.name,
        "records_file": records_file,
        "files": [asdict(file) for file in found.files],
        "refused": [asdict(refusal) for refusal in found.refused],
    }
    return (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "surrogateescape")


def forget_data_set(home: Path, origin: str) -> tuple[str, int]:
    """Remove a data set, also one whose records cannot be read, and the bytes that no other one holds.

    Returns its origin and how many files that were. The caller holds :func:`import_lock`.

    Raises:
        NotFoundError: there is none of that origin.
        UsageError: several dialects have one of that name.
    """
    manifest = manifest_of(home, origin)
    folder = manifest.parent
    # A manifest that cannot be read names no bytes; its own are then among those that no other data set holds.
    named = _named(manifest.read_bytes()) or _kept(home)
    manifest.unlink()
    for path in (*folder.glob("records-*.jsonl"), *folder.glob("judgements.jsonl")):
        path.unlink()
    folder.rmdir()
    return f"{folder.parent.name}:{folder.name}", _drop(named - _held(home), home)


def _held(home: Path) -> set[str]:
    """The digests that data sets name. Where one of them cannot be read nobody knows, and all bytes stay."""
    manifests = [path.read_bytes() for path in imported_manifests(home)]
    if any(not _named(manifest) for manifest in manifests):
        return _kept(home)
    return {sha256 for manifest in manifests for sha256 in _named(manifest)}


def _kept(home: Path) -> set[str]:
    """The digests of all bytes that are there."""
    return {path.name for path in (imported_folder(home) / "objects").glob("*/*")}


def _named(manifest: bytes) -> set[str]:
    """The digests that a manifest names; none where it cannot be read."""
    try:
        return {file["sha256"] for file in json.loads(manifest)["files"]}
    except (ValueError, KeyError, TypeError):
        return set()


def _drop(digests: set[str], home: Path) -> int:
    for sha256 in digests:
        object_path(home, sha256).unlink(missing_ok=True)
    return len(digests)


def _line(origin: str, record: StoredRecord) -> str:
    # NaN and Infinity are spelled as text, which is how FlashInfer-Bench writes them: JSON has no word for either.
    return json.dumps({"origin": origin, **asdict(record)}, ensure_ascii=False, allow_nan=False) + "\n"


def _keep(source: Path, file: StoredFile, home: Path) -> None:
    """Copy a file to its place by content, checking on the way that it still is what was read."""
    target = object_path(home, file.sha256)
    if target.exists():
        return
    temporary: str | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=_UNFINISHED)
        digest = hashlib.sha256()
        with os.fdopen(descriptor, "wb") as out, source.open("rb") as content:
            while chunk := content.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != file.sha256:
            raise StoreError(f"{source} changed while it was imported. Nothing was added; run the command again.")
        os.chmod(temporary, 0o444)
        os.replace(temporary, target)
    except OSError as error:
        raise StoreError(f"cannot keep {source}: {error.strerror or error}. Nothing was added.") from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
