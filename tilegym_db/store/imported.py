"""Data sets of other projects, kept beside the catalog and apart from it: exact bytes by content, and what they hold.

``<home>/imported/objects/<ab>/<sha256>`` holds every file once; ``<home>/imported/<dialect>/<name>/manifest.json`` names
the files of one data set and the file of its parsed records. The manifest is written last and in one step, so that a
data set is there whole or not at all. Nothing here is part of the catalog: no ranking, table or model reads it.
"""

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
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tilegym_db.errors import NotFoundError, StoreError, UsageError, did_you_mean
from tilegym_db.files import write_atomically
from tilegym_db.store.lock import writer_lock

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = [
    "DataSet",
    "Kind",
    "Refusal",
    "StoredFile",
    "StoredRecord",
    "add_data_set",
    "data_set",
    "data_sets",
    "forget_data_set",
    "import_lock",
    "imported_manifests",
    "object_path",
    "sync_imported",
    "views_text",
]

_log = logging.getLogger(__name__)

MANIFEST_VERSION = 1
LOCK_TIMEOUT_S = 10.0
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_CHUNK = 1 << 20

Kind = Literal["definition", "solution", "workload", "trace"]


@dataclass(frozen=True)
class StoredFile:
    """One file of a data set: its path there, and the sha256 of its bytes."""

    path: str
    sha256: str
    size: int
    role: str = "other"
    """``records``, ``blob``, ``pointer`` (a Git LFS pointer whose content is elsewhere) or ``other`` (carried unread)."""


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


def imported_folder(home: Path) -> Path:
    """``<home>/imported``."""
    return home / "imported"


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


def imported_manifests(home: Path) -> list[Path]:
    """The manifests of all data sets, by path."""
    return sorted(imported_folder(home).glob("*/*/manifest.json"))


def data_sets(home: Path) -> list[DataSet]:
    """Every imported data set, by origin."""
    return [_read_data_set(path, home) for path in imported_manifests(home)]


def data_set(home: Path, origin: str) -> DataSet:
    """One data set by its origin, or by its name alone where no other has it.

    Raises:
        NotFoundError: there is none; suggests the nearest.
        UsageError: several dialects have one of that name.
    """
    paths = {f"{path.parent.parent.name}:{path.parent.name}": path for path in imported_manifests(home)}
    fitting = [known for known in paths if origin in (known, known.partition(":")[2])]
    if len(fitting) > 1:
        raise UsageError(f"'{origin}' may be {' or '.join(fitting)}; give the whole origin.")
    if not fitting:
        names = ", ".join(paths) or "none"
        raise NotFoundError(
            f"no imported data set '{origin}'.{did_you_mean(origin, paths)} Imported: {names}. Try: tilegym-db import PATH"
        )
    return _read_data_set(paths[fitting[0]], home)


def _read_data_set(path: Path, home: Path) -> DataSet:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["version"] != MANIFEST_VERSION:
            raise StoreError(f"{path} was written by another version of tilegym-db. Import the data set again.")
        lines = (path.parent / manifest["records_file"]).read_text(encoding="utf-8").splitlines()
        return DataSet(
            dialect=manifest["dialect"],
            name=manifest["name"],
            files=tuple(StoredFile(**file) for file in manifest["files"]),
            records=tuple(_record(json.loads(line)) for line in lines),
            refused=tuple(Refusal(**refusal) for refusal in manifest["refused"]),
            home=home,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path}: this imported data set cannot be read ({error}). Import it again.") from None


def _record(fields: dict[str, Any]) -> StoredRecord:
    lists = {name: tuple(fields[name]) for name in ("unset", "findings")}
    return StoredRecord(**{key: fields[key] for key in fields if key != "origin"} | lists)


def import_lock(home: Path, timeout_s: float = LOCK_TIMEOUT_S) -> AbstractContextManager[None]:
    """One process at a time adds or removes data sets.

    Raises:
        StoreError: another holds it for longer than ``timeout_s`` seconds, or the folder cannot be written.
    """
    return writer_lock(imported_folder(home) / "manifests", timeout_s)


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
    if not _NAME.fullmatch(found.name):
        raise UsageError(f"'{found.name}' cannot name a data set: lower-case letters, digits, '.', '_' and '-' can.")
    manifest_path = imported_folder(home) / found.dialect / found.name / "manifest.json"
    records_text = "".join(_line(found.origin, record) for record in found.records).encode()
    records_path = manifest_path.with_name(_records_name(records_text))
    text = _manifest_text(found, records_path.name)
    earlier = manifest_path.read_bytes() if manifest_path.exists() else text
    if earlier != text and not replace:
        raise UsageError(
            f"{found.origin} was imported before with other content. Add --replace to put this in its place, "
            "or --name to keep both."
        )
    whole = manifest_path.exists() and earlier == text and _whole_records_file(manifest_path) == records_path
    if whole and all(object_path(home, file.sha256).exists() for file in found.files):
        return False
    for file in found.files:
        _keep(sources[file.path], file, home)
    write_atomically(records_path, records_text)
    write_atomically(manifest_path, text)
    for stale in set(manifest_path.parent.glob("records-*.jsonl")) - {records_path}:
        stale.unlink()
    _drop(_named(earlier) - _held(home), home)
    return True


def _manifest_text(found: DataSet, records_name: str) -> bytes:
    manifest = {
        "version": MANIFEST_VERSION,
        "dialect": found.dialect,
        "name": found.name,
        "records_file": records_name,
        "files": [asdict(file) for file in found.files],
        "refused": [asdict(refusal) for refusal in found.refused],
    }
    return (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "surrogateescape")


def forget_data_set(found: DataSet) -> int:
    """Remove a data set, and the bytes that no other one holds. Returns how many files that were.

    The caller holds :func:`import_lock`.
    """
    folder = imported_folder(found.home) / found.dialect / found.name
    (folder / "manifest.json").unlink()
    for path in (*folder.glob("records-*.jsonl"), *folder.glob("judgements.jsonl")):
        path.unlink()
    folder.rmdir()
    return _drop({file.sha256 for file in found.files} - _held(found.home), found.home)


def _held(home: Path) -> set[str]:
    """The digests that data sets name. Where one of them cannot be read nobody knows, and all bytes stay."""
    manifests = [path.read_bytes() for path in imported_manifests(home)]
    if any(not _named(manifest) for manifest in manifests):
        return {path.name for path in (imported_folder(home) / "objects").glob("*/*")}
    return {sha256 for manifest in manifests for sha256 in _named(manifest)}


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
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".new-")
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


# -- the database's view of it ----------------------------------------------------------------------------------------


def views_text() -> str:
    """The statements that make the table and the views of imported records."""
    return files(__package__).joinpath("imported.sql").read_text(encoding="utf-8")


def sync_imported(connection: DuckDBPyConnection, home: Path) -> None:
    """Bring every imported record into ``imported_records``, in place of what was there."""
    connection.execute(views_text())
    connection.execute("DELETE FROM imported_records")
    paths = [path for manifest in imported_manifests(home) if (path := _whole_records_file(manifest)) is not None]
    if paths:
        connection.execute(_INSERT, {"files": [str(path) for path in paths]})


def _whole_records_file(manifest: Path) -> Path | None:
    """The file of records that a manifest names, where it is as it was written; a damaged data set stops nothing else."""
    try:
        name: str = json.loads(manifest.read_text(encoding="utf-8"))["records_file"]
        path = manifest.with_name(name)
        if name == _records_name(path.read_bytes()):
            return path
        reason = f"{name} is not what was written"
    except (OSError, ValueError, KeyError) as error:
        reason = str(error)
    _log.warning("%s: left out: %s. Import this data set again with --replace.", manifest, reason)
    return None


def _records_name(content: bytes) -> str:
    return f"records-{hashlib.sha256(content).hexdigest()[:16]}.jsonl"


_INSERT = """INSERT INTO imported_records
    SELECT origin, kind, name, definition, path, line, digest, coalesce(unset, []), coalesce(findings, []), record
    FROM read_json($files, format = 'newline_delimited', maximum_object_size = 67108864, columns = {
        origin: 'VARCHAR', kind: 'VARCHAR', name: 'VARCHAR', definition: 'VARCHAR', path: 'VARCHAR', line: 'BIGINT',
        digest: 'VARCHAR', unset: 'VARCHAR[]', findings: 'VARCHAR[]', record: 'JSON'})"""


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
