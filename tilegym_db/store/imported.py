"""Adds and removes imported data sets, one process at a time, and reads them."""

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
from typing import Any, Literal

from tilegym_db.errors import NotFoundError, StoreError, UsageError, did_you_mean
from tilegym_db.files import hold_lock, write_atomically
from tilegym_db.published.input_files import imported_folder, imported_manifests

LOCK_TIMEOUT_S = 10.0

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")

_CHUNK = 1 << 20
_UNFINISHED = ".new-"


def import_lock(home: Path, timeout_s: float = LOCK_TIMEOUT_S) -> AbstractContextManager[None]:
    """Return the lock under which one process at a time adds or removes data sets."""
    manifests = imported_folder(home) / "manifests"
    return hold_lock(manifests.with_name("manifests.lock"), manifests, max(timeout_s, 0.0), "Nothing was changed.")


def check_name(name: str) -> None:
    """Raise :class:`UsageError` for an invalid name of a data set."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"'{name}' cannot name a data set: lower-case letters, digits, '.', '_' and '-' can.", code="name_invalid"
        )


def check_addable(found: DataSet, home: Path, *, replace: bool = False) -> None:
    """Raise the errors of :func:`add_data_set` that concern a name; writes nothing."""
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
    """Store a data set; return False if exactly this one exists. The caller holds :func:`import_lock`.

    Args:
        sources: path in the data set -> the file to copy from.
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
        leftover.unlink(missing_ok=True)  # left by a killed process: only the lock holder writes
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
    """Remove a data set and the bytes that no other one holds, even if its records cannot be read.

    Return its origin and the number of removed files. The caller holds :func:`import_lock`.
    """
    manifest = manifest_of(home, origin)
    folder = manifest.parent
    # An unreadable manifest names no bytes; its files are then among those that no other data set holds.
    named = _named(manifest.read_bytes()) or _kept(home)
    manifest.unlink()
    for path in (*folder.glob("records-*.jsonl"), *folder.glob("judgements.jsonl")):
        path.unlink()
    folder.rmdir()
    return f"{folder.parent.name}:{folder.name}", _drop(named - _held(home), home)


def _held(home: Path) -> set[str]:
    """Return the digests that data sets name. If a manifest cannot be read, return all digests, so that all bytes stay."""
    manifests = [path.read_bytes() for path in imported_manifests(home)]
    if any(not _named(manifest) for manifest in manifests):
        return _kept(home)
    return {sha256 for manifest in manifests for sha256 in _named(manifest)}


def _kept(home: Path) -> set[str]:
    """Return the digests of all stored bytes."""
    return {path.name for path in (imported_folder(home) / "objects").glob("*/*")}


def _named(manifest: bytes) -> set[str]:
    """Return the digests that a manifest names, or none if it cannot be read."""
    try:
        return {file["sha256"] for file in json.loads(manifest)["files"]}
    except (ValueError, KeyError, TypeError):
        return set()


def _drop(digests: set[str], home: Path) -> int:
    for sha256 in digests:
        object_path(home, sha256).unlink(missing_ok=True)
    return len(digests)


def _line(origin: str, record: StoredRecord) -> str:
    # NaN and Infinity are spelled as text, as in FlashInfer-Bench, since JSON cannot represent them.
    return json.dumps({"origin": origin, **asdict(record)}, ensure_ascii=False, allow_nan=False) + "\n"


def _keep(source: Path, file: StoredFile, home: Path) -> None:
    """Copy a file to its content address, and check that it has not changed since it was read."""
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
# A data set: its files by the digest of their bytes, its records, and its refusals.

Kind = Literal["definition", "solution", "workload", "trace"]


@dataclass(frozen=True)
class StoredFile:
    """One file of a data set: its path there, and the sha256 of its bytes."""

    path: str
    sha256: str
    size: int
    role: str = "other"
    """``records``, ``blob``, ``pointer`` (a Git LFS pointer without its content), ``changed`` (a blob whose bytes
    differ from those in our export) or ``other`` (stored without being read).
    """


@dataclass(frozen=True)
class StoredRecord:
    """One record: its place, its exact bytes, and its content."""

    kind: Kind
    name: str
    """Name of a Definition or Solution; uuid of a Workload; for a Trace, the uuid of its Workload."""
    definition: str
    path: str
    line: int | None
    """Line from 1 in a file of lines; None if the file is one record."""
    offset: int
    length: int
    digest: str
    """sha256 of the record without white space. The order of keys and the text of numbers count."""
    record: Mapping[str, Any]
    """The parsed record, with the dialect's defaults filled in."""
    unset: tuple[str, ...] = ()
    """Keys that were filled in."""
    findings: tuple[str, ...] = ()
    """Reasons why it cannot be used here, or does not fit its place."""


@dataclass(frozen=True)
class Refusal:
    """One thing that was not imported: the file, the key in it, and the reason."""

    path: str
    key: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.key + ': ' if self.key else ''}{self.reason}"


@dataclass(frozen=True)
class DataSet:
    """The content of one import. ``origin`` is ``<dialect>:<name>``."""

    dialect: str
    name: str
    files: tuple[StoredFile, ...]
    records: tuple[StoredRecord, ...] = field(repr=False)
    refused: tuple[Refusal, ...] = ()
    home: Path = field(default=Path(), repr=False, compare=False)

    @property
    def origin(self) -> str:
        """Return the origin as in ``list --origin`` and the column ``origin``."""
        return f"{self.dialect}:{self.name}"

    def of_kind(self, kind: Kind) -> list[StoredRecord]:
        """Return the records of one kind, in the order of their files and lines."""
        return [record for record in self.records if record.kind == kind]

    @cached_property
    def files_by_path(self) -> dict[str, StoredFile]:
        """Return path in the data set -> file."""
        return {file.path: file for file in self.files}

    def content(self, path: str) -> bytes:
        """Return the exact bytes of one of its files, checked against those imported."""
        return read_object(self.home, self.files_by_path[path])

    def line(self, record: StoredRecord) -> bytes:
        """Return the exact bytes of one record."""
        return self.content(record.path)[record.offset : record.offset + record.length]


def object_path(home: Path, sha256: str) -> Path:
    """Return the path of the bytes with that digest."""
    return imported_folder(home) / "objects" / sha256[:2] / sha256


def read_object(home: Path, file: StoredFile) -> bytes:
    """Return the bytes of a stored file; raise :class:`StoreError` if they are missing or changed."""
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
    """Return kind -> number of records."""
    counts: dict[str, int] = {}
    for record in records:
        counts[record.kind] = counts.get(record.kind, 0) + 1
    return counts


def paths_of(records: Sequence[StoredRecord]) -> dict[str, list[StoredRecord]]:
    """Return path -> its records in order."""
    found: dict[str, list[StoredRecord]] = {}
    for record in records:
        found.setdefault(record.path, []).append(record)
    return found


# ---- manifests ------------------------------------------------------------------------------------
# Finds data sets by their manifests, and reads them.

_log = logging.getLogger(__name__)

MANIFEST_VERSION = 1


def data_sets(home: Path) -> list[DataSet]:
    """Return every readable imported data set, by origin, and warn of the others."""
    found = []
    for path in imported_manifests(home):
        try:
            found.append(_read_data_set(path, home))
        except StoreError as error:
            _log.warning("%s left out: %s", _origin(path), error)
    return found


def data_set(home: Path, origin: str) -> DataSet:
    """Return one data set by its origin, or by its name alone if that is unique.

    Raises:
        NotFoundError: no data set has that origin; suggests the nearest.
        UsageError: several dialects have one of that name.
        StoreError: it cannot be read.
    """
    return _read_data_set(manifest_of(home, origin), home)


def manifest_of(home: Path, origin: str) -> Path:
    """Return the path of one data set's manifest; without one, suggest the nearest origin."""
    paths = {_origin(path): path for path in imported_manifests(home)}
    fitting = [known for known in paths if origin in (known, known.partition(":")[2])]
    if len(fitting) > 1:
        raise UsageError(f"'{origin}' may be {' or '.join(fitting)}; give the whole origin.", code="data_set_ambiguous")
    if not fitting:
        names = ", ".join(paths) or "none"
        raise NotFoundError(
            f"no imported data set '{origin}'.{did_you_mean(origin, paths)} Imported: {names}. Try: tilegym-db data import PATH",
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
        # Not splitlines: it also splits at U+2028, U+2029 and U+0085, which occur unescaped in a record.
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
    """Return the file of records that a manifest names if it is unchanged, so that a damaged data set stops nothing
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
    """Return the name of a file of records, by its content."""
    return f"records-{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
