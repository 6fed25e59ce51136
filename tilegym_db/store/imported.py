"""Adds data sets and removes them, one process at a time."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tilegym_db.errors import NotFoundError, StoreError, UsageError, did_you_mean
from tilegym_db.files import write_atomically
from tilegym_db.published.input_files import imported_folder, imported_manifests
from tilegym_db.store import statements
from tilegym_db.store.database import writer_lock

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


LOCK_TIMEOUT_S = 10.0

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")

_CHUNK = 1 << 20
_UNFINISHED = ".new-"


def import_lock(home: Path, timeout_s: float = LOCK_TIMEOUT_S) -> AbstractContextManager[None]:
    """Return one process at a time adds or removes data sets.

    Raises:
        StoreError: another holds it for longer than ``timeout_s`` seconds, or the folder cannot be written.
    """
    return writer_lock(imported_folder(home) / "manifests", timeout_s)


def check_name(name: str) -> None:
    """Raise :class:`UsageError` for what cannot name a data set."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"'{name}' cannot name a data set: lower-case letters, digits, '.', '_' and '-' can.", code="name_invalid"
        )


def check_addable(found: DataSet, home: Path, *, replace: bool = False) -> None:
    """Raise what :func:`add_data_set` would for a name; writes nothing."""
    check_name(found.name)
    manifest_path = _manifest_path(found, home)
    if manifest_path.exists() and not replace:
        _refuse_other(found, manifest_path.read_bytes(), _contents(found)[1])


def _manifest_path(found: DataSet, home: Path) -> Path:
    return imported_folder(home) / found.dialect / found.name / "manifest.json"


def _contents(found: DataSet) -> tuple[bytes, bytes]:
    """Return the file of records of a data set, and its manifest."""
    records_text = "".join(_line(found.origin, record) for record in found.records).encode()
    return records_text, _manifest_text(found, records_name(records_text))


def _refuse_other(found: DataSet, earlier: bytes, text: bytes) -> None:
    if earlier != text:
        raise UsageError(
            f"{found.origin} was imported before with other content. Add --replace to put this in its place, "
            "or --name to keep both.",
            code="data_set_exists",
        )


def add_data_set(found: DataSet, sources: Mapping[str, Path], home: Path, *, replace: bool = False) -> bool:
    """Keep a data set; False if exactly this one is there already. The caller holds :func:`import_lock`.

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
    """Return the digests that data sets name. Where one of them cannot be read nobody knows, and all bytes stay."""
    manifests = [path.read_bytes() for path in imported_manifests(home)]
    if any(not _named(manifest) for manifest in manifests):
        return _kept(home)
    return {sha256 for manifest in manifests for sha256 in _named(manifest)}


def _kept(home: Path) -> set[str]:
    """Return the digests of all bytes that are there."""
    return {path.name for path in (imported_folder(home) / "objects").glob("*/*")}


def _named(manifest: bytes) -> set[str]:
    """Return the digests that a manifest names; none where it cannot be read."""
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
            raise StoreError(
                f"{source} changed while it was imported. Nothing was added; run the command again.",
                code="source_changed",
            )
        os.chmod(temporary, 0o444)
        os.replace(temporary, target)
    except OSError as error:
        raise StoreError(
            f"cannot keep {source}: {error.strerror or error}. Nothing was added.", code="write_failed"
        ) from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


# ---- objects --------------------------------------------------------------------------------------
# What a data set holds: its files, kept by the digest of their bytes, its records, and what was refused.

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
    """From 1 in a file of lines; None if the record is the file."""
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
        """Return the records of one kind, in the order of their files and lines."""
        return [record for record in self.records if record.kind == kind]

    @cached_property
    def files_by_path(self) -> dict[str, StoredFile]:
        """Path in the data set -> file."""
        return {file.path: file for file in self.files}

    def content(self, path: str) -> bytes:
        """Return the exact bytes of one of its files.

        Raises:
            StoreError: the bytes are gone, or are not those that were imported.
        """
        return read_object(self.home, self.files_by_path[path])

    def line(self, record: StoredRecord) -> bytes:
        """Return the exact bytes of one record."""
        return self.content(record.path)[record.offset : record.offset + record.length]


def object_path(home: Path, sha256: str) -> Path:
    """Where the bytes of that digest lie."""
    return imported_folder(home) / "objects" / sha256[:2] / sha256


def read_object(home: Path, file: StoredFile) -> bytes:
    """Return the bytes of a stored file; :class:`StoreError` where they are gone or changed."""
    path = object_path(home, file.sha256)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StoreError(
            f"{path} ({file.path}) cannot be read: {error.strerror}. Import the data set again.", code="file_unreadable"
        ) from None
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise StoreError(
            f"{path} ({file.path}) is not what was imported. Remove it and import the data set again.",
            code="object_changed",
        )
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


# ---- manifests ------------------------------------------------------------------------------------
# Finds data sets by their manifests, and reads them.

_log = logging.getLogger(__name__)

MANIFEST_VERSION = 1


def data_sets(home: Path) -> list[DataSet]:
    """Return every imported data set that can be read, by origin; the others are warned of, and stop nothing."""
    found = []
    for path in imported_manifests(home):
        try:
            found.append(_read_data_set(path, home))
        except StoreError as error:
            _log.warning("%s left out: %s", _origin(path), error)
    return found


def data_set(home: Path, origin: str) -> DataSet:
    """Return one data set by its origin, or by its name alone where no other has it.

    Raises:
        NotFoundError: there is none; suggests the nearest.
        UsageError: several dialects have one of that name.
        StoreError: it cannot be read.
    """
    return _read_data_set(manifest_of(home, origin), home)


def manifest_of(home: Path, origin: str) -> Path:
    """Return the manifest of one data set, unread.

    Raises:
        NotFoundError: there is none; suggests the nearest.
        UsageError: several dialects have one of that name.
    """
    paths = {_origin(path): path for path in imported_manifests(home)}
    fitting = [known for known in paths if origin in (known, known.partition(":")[2])]
    if len(fitting) > 1:
        raise UsageError(f"'{origin}' may be {' or '.join(fitting)}; give the whole origin.", code="data_set_ambiguous")
    if not fitting:
        names = ", ".join(paths) or "none"
        raise NotFoundError(
            f"no imported data set '{origin}'.{did_you_mean(origin, paths)} Imported: {names}. Try: tilegym-db import PATH",
            code="data_set_unknown",
        )
    return paths[fitting[0]]


def _origin(manifest: Path) -> str:
    return f"{manifest.parent.parent.name}:{manifest.parent.name}"


def _read_data_set(path: Path, home: Path) -> DataSet:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["version"] != MANIFEST_VERSION:
            raise StoreError(
                f"{path} was written by another version of tilegym-db. Import the data set again.", code="version_other"
            )
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
            f"{path}: this imported data set cannot be read ({error}). Import it again with --replace.",
            code="manifest_damaged",
        ) from None


def _record(fields: dict[str, Any]) -> StoredRecord:
    lists = {name: tuple(fields[name]) for name in ("unset", "findings")}
    return StoredRecord(**{key: fields[key] for key in fields if key != "origin"} | lists)


def whole_records_file(manifest: Path) -> Path | None:
    """Return the file of records that a manifest names, where it is as it was written; a damaged data set stops nothing
    else.
    """
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


# ---- synced ---------------------------------------------------------------------------------------
# The database's view of imported records.


def sync_imported(connection: DuckDBPyConnection, home: Path) -> None:
    """Bring every imported record into ``imported_records``, in place of what was there."""
    connection.execute(statements.imported_sql())
    connection.execute("DELETE FROM imported_records")
    paths = [path for manifest in imported_manifests(home) if (path := whole_records_file(manifest)) is not None]
    if paths:
        connection.execute(_INSERT, {"files": [str(path) for path in paths]})


_INSERT = """INSERT INTO imported_records
    SELECT origin, kind, name, definition, path, line, digest, coalesce(unset, []), coalesce(findings, []), record
    FROM read_json($files, format = 'newline_delimited', maximum_object_size = 67108864, columns = {
        origin: 'VARCHAR', kind: 'VARCHAR', name: 'VARCHAR', definition: 'VARCHAR', path: 'VARCHAR', line: 'BIGINT',
        digest: 'VARCHAR', unset: 'VARCHAR[]', findings: 'VARCHAR[]', record: 'JSON'})"""
