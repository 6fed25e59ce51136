"""The published files of one GPU, ``traces/<gpu>/``, and their lock; and the list of files that were valid at release.

The lock of the package's own traces is part of the package. Any other lock counts only with the signature of this
installation. A folder from elsewhere is foreign and is used only if the user trusts it. A file that differs from its
lock is never used.

The key of an installation signs measured and published data. It lies in ``<home>/installation.key``, readable by its owner
only, and is made when first needed. A signature states that a tilegym-db with access to this key wrote a line. It does not
identify a person: any process that can read the key can sign.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import os
import re
import secrets
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field
from pydantic_core import from_json

from tilegym_db.catalog import Catalog
from tilegym_db.catalog.record_files import (
    CHECKED_RECORDS,
    content_of_family,
    family_content,
    file_of,
    of_family_file,
    read_sources,
)
from tilegym_db.errors import RecordError, StoreError
from tilegym_db.files import read_bytes
from tilegym_db.paths import shipped_root
from tilegym_db.published.input_files import (
    LOCK_NAME,
    PEAKS_NAME,
    definition_of,
    is_packed,
    published_folders,
    trace_files,
    unpacked,
)
from tilegym_db.records.base import Record
from tilegym_db.records.definition import (
    CODES_EQUAL,
    MIN_ELEMENTS_FOR_NORMS,
    TAU_CAP,
    WORST_ROW_FACTOR,
    Definition,
    limits_for,
)
from tilegym_db.records.roofline import GpuPeaks, least_us, speed_of_light
from tilegym_db.records.solution import digest_of, source_names, without_defaults
from tilegym_db.records.text import NAME_PATTERN, canonical_json, length_prefixed_digest

# ---- Signatures of an installation -----------------------------------------------------------------------

KEY_NAME = "installation.key"
KEY_BYTES = 32
MAX_KEY_BYTES = 1 << 20
"""Maximum number of bytes read from the key file, so that an error can state its length."""

Origin = Literal["shipped", "local", "foreign"]
"""Origin of a trace: the package, a measurement by this installation, or an unknown source."""

Purpose = Literal["trace", "lock", "model run", "trusted table", "writer"]

_SIGNATURE = re.compile(rb', "signature": "([0-9a-f]{64})"\}\s*$')


def signature(home: Path, purpose: Purpose, content: bytes) -> str:
    """Return the signature of some content by the key of a home folder, which is made if it is missing."""
    key = _read_key(home) or _make_key(home)
    return _hmac(key, purpose, content)


def is_signed(home: Path, purpose: Purpose, content: bytes, claimed: str) -> bool:
    """Return True if ``claimed`` is the result of :func:`signature` for this content."""
    key = _read_key(home)
    return key is not None and hmac.compare_digest(_hmac(key, purpose, content), claimed)


def signed_line(home: Path, text: str) -> bytes:
    """Return a line of a journal: one JSON object with its signature as the last key."""
    content = text.encode()
    return content[:-1] + f', "signature": "{signature(home, "trace", content)}"}}\n'.encode()


def split_line(line: bytes) -> tuple[bytes, str | None]:
    """Return the object of a line as it was before signing, and its signature or None."""
    found = _SIGNATURE.search(line)
    return (line, None) if found is None else (line[: found.start()] + b"}", found[1].decode())


def _hmac(key: bytes, purpose: Purpose, content: bytes) -> str:
    return hmac.digest(key, purpose.encode() + b"\0" + content, "sha256").hex()


def _read_key(home: Path) -> bytes | None:
    path = home / KEY_NAME
    try:
        stat = path.stat()
        return _cached_key(path, stat.st_mtime_ns, stat.st_ino)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(
            f"cannot read the key of this installation, {path}: {error.strerror or error}.", code="file_unreadable"
        ) from None


@lru_cache(maxsize=8)
def _cached_key(path: Path, _mtime_ns: int, _inode: int) -> bytes:
    try:
        key = read_bytes(path, "key of this installation", MAX_KEY_BYTES)
    except RecordError as error:
        raise StoreError(str(error), code=error.code) from None
    if len(key) != KEY_BYTES:
        raise StoreError(
            f"{path} is damaged: it has {len(key)} bytes and not {KEY_BYTES}. Restore it, or delete it: then what was "
            "measured here before counts as foreign (tilegym-db data ingest --trust).",
            code="key_damaged",
        )
    return key


def _make_key(home: Path) -> bytes:
    """Return a new key, or the key that another process made at the same moment."""
    path = home / KEY_NAME
    try:
        home.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=home, prefix=f".{KEY_NAME}.")  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):  # the other process was first: use its key
                os.link(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"cannot write the key of this installation, {path}: {error.strerror or error}. "
            "Make its folder writable, or set TILEGYM_DB_HOME to one that is.",
            code="write_failed",
        ) from None
    key = _read_key(home)
    if key is None:
        raise StoreError(
            f"the key of this installation, {path}, went away while it was made. Run the command again.",
            code="key_gone",
        )
    return key


@dataclass(frozen=True)
class RejectedLine:
    """A journal line that is not a trace. ``line`` counts from 1."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


# ---- Snapshots ---------------------------------------------------------------------------------------

_SHA256 = r"^[0-9a-f]{64}$"


class TraceLock(Record):
    """The files of one GPU's published traces with their digests."""

    kind: ClassVar[str] = "trace lock"

    schema_version: Literal[1] = 1
    gpu: str = Field(pattern=NAME_PATTERN)
    sm: str = ""
    published: str
    """Time of the last change to one of the files, in UTC."""
    files: dict[str, str]
    """Path below the GPU's folder -> sha256 of the content."""
    signature: str | None = Field(default=None, pattern=_SHA256)
    """Signature over the other fields by the installation that published; None in the package's own lock."""

    @property
    def signed_content(self) -> bytes:
        """Return the bytes that the signature covers."""
        content = self.to_dict()
        content.pop("signature", None)
        return canonical_json(content).encode()


@dataclass(frozen=True)
class Snapshot:
    """The published files of one GPU. ``files`` is empty if the folder has no lock that counts."""

    folder: Path
    gpu: str
    sm: str
    published: str
    origin: Origin
    files: Mapping[str, str] = field(default_factory=dict)

    def read(self, path: Path, what: str = "published file") -> bytes:
        """Return the content of a file of the folder, which must be as its lock states it."""
        content = read_bytes(path, what)
        name = path.relative_to(self.folder).as_posix()
        if not self.files and self.origin == "foreign":
            return content
        if name not in self.files:
            raise RecordError(
                f"{path} is not used: {self.folder / LOCK_NAME} does not list it, so tilegym-db did not publish it. "
                "Delete it, or bring it in as a foreign file: tilegym-db data ingest --trust FILE",
                code="file_unlisted",
            )
        if sha256(content) != self.files[name]:
            raise RecordError(
                f"{path} is not used: it was changed after it was published (its sha256 is not the one in "
                f"{self.folder / LOCK_NAME}). Restore it, or publish again.",
                code="file_changed",
            )
        return content

    @property
    def how_to_trust(self) -> str:
        """Return the reason why a foreign folder is not used, and the next step."""
        why = "its lock is not signed by this installation" if self.files else f"it has no {LOCK_NAME}"
        return (
            f"{self.folder} is foreign: {why}. If you trust where it came from, bring it in with: "
            f"tilegym-db data ingest --trust {shlex.quote(str(self.folder))}/*/*.jsonl.gz, and publish again"
        )


def open_snapshot(folder: Path, home: Path) -> Snapshot:
    """Open the published files of ``traces/<gpu>`` with the key of a home folder."""
    path = folder / LOCK_NAME
    if not path.is_file():
        return Snapshot(folder, folder.name, "", "", "foreign")
    lock = TraceLock.from_json(read_bytes(path, "trace lock"), path)
    return Snapshot(folder, lock.gpu, lock.sm, lock.published, _origin(folder, lock, home), lock.files)


def _origin(folder: Path, lock: TraceLock, home: Path) -> Origin:
    if folder.parent.resolve() == (shipped_root() / "traces").resolve():
        return "shipped"
    is_own = lock.signature is not None and is_signed(home, "lock", lock.signed_content, lock.signature)
    return "local" if is_own else "foreign"


def lock_text(folder: Path, gpu: str, sm: str, published: str, files: Mapping[str, str], home: Path) -> str:
    """Return the text of a lock, signed unless the folder is the package's own."""
    lock = TraceLock(gpu=gpu, sm=sm, published=published, files=dict(sorted(files.items())))
    if folder.parent.resolve() != (shipped_root() / "traces").resolve():
        lock = signed_lock(lock, home)
    return lock.to_json(indent=1) + "\n"


def signed_lock(lock: TraceLock, home: Path) -> TraceLock:
    """Return the lock with the signature of this installation."""
    return lock.model_copy(update={"signature": signature(home, "lock", lock.signed_content)})


def sha256(content: bytes) -> str:
    """Return the digest used in locks."""
    return hashlib.sha256(content).hexdigest()


def read_published(path: Path, folder: Path, home: Path, refused: list[str], *, trust: bool = False) -> bytes | None:
    """Return the content of a trusted file of ``traces/<gpu>``; else None, with the reason added to ``refused``."""
    try:
        snapshot = open_snapshot(folder, home)
        if snapshot.origin == "foreign" and not trust:
            raise RecordError(f"{path} is not used: {snapshot.how_to_trust}.", code="snapshot_foreign")
        return snapshot.read(path)
    except RecordError as error:
        refused.append(str(error))
        return None


# ---- trace origins --------------------------------------------------------------------------------
# Sorts trace files by origin before they are loaded into the database in bulk.


@dataclass(frozen=True)
class Batch:
    """Traces of one origin, one per line, in files or in memory."""

    origin: Origin
    trusted: bool
    lines: int
    files: tuple[Path, ...] = ()
    texts: tuple[tuple[Path, bytes], ...] = ()
    """Each file that is not read as it is, with its unpacked lines. Lines left out are blank, so that numbers stay equal."""


@dataclass(frozen=True)
class Sorted:
    """Batches by origin, and the lines and files left out with their reasons."""

    batches: tuple[Batch, ...] = ()
    rejected: tuple[RejectedLine, ...] = ()
    refused: tuple[str, ...] = ()


class _Sorter:
    """A collector of batches."""

    def __init__(self, home: Path, trust: bool) -> None:
        self.home, self.trust = home, trust
        self._files: dict[tuple[Origin, bool], list[Path]] = {}
        self._texts: dict[tuple[Origin, bool], list[tuple[Path, bytes]]] = {}
        self._lines: dict[tuple[Origin, bool], int] = {}

    def _key(self, origin: Origin, trusted: bool | None, lines: int) -> tuple[Origin, bool]:
        key: tuple[Origin, bool] = (origin, origin == "foreign" and (self.trust if trusted is None else trusted))
        self._lines[key] = self._lines.get(key, 0) + lines
        return key

    def add(self, path: Path, origin: Origin, lines: int) -> None:
        """Add a file that is read as it is."""
        self._files.setdefault(self._key(origin, None, lines), []).append(path)

    def add_lines(self, lines: Sequence[bytes], origin: Origin, source: Path, *, trusted: bool | None = None) -> None:
        """Add the lines of a source."""
        count = sum(not line.isspace() for line in lines)
        if count:
            self._texts.setdefault(self._key(origin, trusted, count), []).append((source, b"".join(lines)))

    def add_apart(
        self,
        lines: Sequence[bytes],
        is_foreign: Sequence[bool],
        origin: Origin,
        source: Path,
        *,
        trusted: bool | None = None,
    ) -> None:
        """Add the foreign lines apart from the others, with blank lines in their places to keep the line numbers."""
        if not any(is_foreign):
            self.add_lines(lines, origin, source)
            return
        marked = list(zip(lines, is_foreign, strict=True))
        self.add_lines([b"\n" if foreign else line for line, foreign in marked], origin, source)
        self.add_lines([line if foreign else b"\n" for line, foreign in marked], "foreign", source, trusted=trusted)

    def batches(self) -> tuple[Batch, ...]:
        # Trusted origins come first: later batches find their ids taken.
        order = sorted(self._lines, key=lambda key: (("shipped", "local", "foreign").index(key[0]), not key[1]))
        return tuple(
            Batch(*key, self._lines[key], tuple(self._files.get(key, ())), tuple(self._texts.get(key, ())))
            for key in order
        )


def sorted_files(files: Sequence[Path], home: Path, *, trust: bool) -> Sorted:
    """Sort journals and other files given by the user, by the signature of every line.

    The lock of a published file decides its origin. A published file without a lock that counts is foreign.
    """
    sorter = _Sorter(home, trust)
    rejected: list[RejectedLine] = []
    for path in files:
        if path.exists() and not path.is_file():  # reading a FIFO would block
            raise StoreError(f"cannot read {path}: it is no regular file. Nothing was ingested.", code="file_irregular")
        try:
            with path.open("rb") as file:
                if is_packed(file.read(2)):
                    problems = _add_published(sorter, [path], path.parent.parent)
                    rejected += [RejectedLine(path, 1, text.removeprefix(f"{path}: ")) for text in problems]
                    continue
                file.seek(0)
                signed = [_is_own(line, home) for line in file if not line.isspace()]
        except OSError as error:
            raise StoreError(
                f"cannot read {path}: {error.strerror or error}. Nothing was ingested.", code="file_unreadable"
            ) from None
        if all(signed) or not any(signed):
            sorter.add(path, "local" if signed and all(signed) else "foreign", len(signed))
        else:
            lines = list(_whole_lines(path))
            sorter.add_apart(lines, [not _is_own(line, home) for line in lines], "local", path)
    return Sorted(sorter.batches(), rejected=tuple(rejected))


def sorted_snapshots(folders: Iterable[Path], home: Path) -> Sorted:
    """Sort the traces of published folders (``traces/<gpu>``) by the origin of each folder.

    An invalid folder, or a file that differs from its lock, is left out with the reason.
    """
    sorter = _Sorter(home, trust=False)
    refused: list[str] = []
    for folder in folders:
        refused += _add_published(sorter, trace_files(folder), folder)
    return Sorted(sorter.batches(), refused=tuple(refused))


def _add_published(sorter: _Sorter, paths: Sequence[Path], folder: Path) -> list[str]:
    """Add files of a published folder; return the reasons for those left out."""
    if not paths:
        return []
    try:
        snapshot = open_snapshot(folder, sorter.home)
    except RecordError as error:
        return [str(error)]
    if sorter.trust and snapshot.origin == "foreign":
        snapshot = Snapshot(folder, snapshot.gpu, snapshot.sm, snapshot.published, "foreign")
    return [problem for path in paths for problem in _add_file(sorter, path, snapshot)]


def _add_file(sorter: _Sorter, path: Path, snapshot: Snapshot) -> list[str]:
    try:
        lines = unpacked(snapshot.read(path, "trace file"), path).splitlines(keepends=True)
    except RecordError as error:
        return [str(error)]
    # This installation published these without measuring them, because the user had trusted them.
    borrowed = [_is_foreign(line) for line in lines] if snapshot.origin == "local" else [False] * len(lines)
    sorter.add_apart(lines, borrowed, snapshot.origin, path, trusted=True)
    return []


def _is_foreign(line: bytes) -> bool:
    if b'"foreign"' not in line:
        return False
    try:
        record = from_json(line)
    except ValueError:
        return True  # reported as a line that is no trace
    return isinstance(record, dict) and record.get("origin") == "foreign"


def _is_own(line: bytes, home: Path) -> bool:
    content, claimed = split_line(line)
    return claimed is not None and is_signed(home, "trace", content, claimed)


def _whole_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for line in file:
            yield line if line.endswith(b"\n") else line + b"\n"


# ---- checked records -----------------------------------------------------------------------------
# Reads ``workloads/checked-records.json``, the list of shipped files that were validated at release, and decides
# trust.
#
# The list has each valid file with a digest of everything its validity depends on: its content, its sources, its
# Definition, and the forward of that Definition. A Solution of a ``family.json`` is listed as
# ``family.json#<solution>``, and its content is its entry with the shared keys. A trace file is listed if every figure
# was plausible by its Definition and the published peaks. A file that is not listed, or has another digest, is validated
# again, which costs only time.
#
# ``python tools/write_checked_records.py`` writes the list. Only filling the database uses it: ``check``, and everything
# that runs or serves a kernel, validates every record itself.
#
# The second part compares the figures of a pass with the widest bound of any gate and the physics floor. It refuses
# figures that no run can produce. It cannot prove the rest, because a trace within the bounds may still be invented.


MAX_BYTES = 8 << 20
_NOTHING: Mapping[str, Any] = {"definitions": {}, "files": {}}


def checked_file() -> Path:
    """Return the path of the list that comes with the package."""
    return shipped_root() / CHECKED_RECORDS


class Checked:
    """The list as seen from one catalog's files. It reads each file once."""

    def __init__(self, catalog: Catalog) -> None:
        """Read the list for a catalog whose first root is the shipped one."""
        self._catalog = catalog
        self._root = shipped_root()
        self._contents: dict[Path, bytes] = {}
        self._sources: dict[Path, bytes] = {}
        self._keys: dict[str, str] = {}

    def content(self, path: Path) -> bytes:
        """Return the bytes of a file."""
        if path not in self._contents:
            self._contents[path] = read_bytes(path, "record")
        return self._contents[path]

    def solution_record(self, path: Path) -> tuple[dict[str, Any], str] | None:
        """Return ``to_dict()`` and the digest of the Solution at a place that is known to be valid, else None.

        Its record is not validated: that took a third of the time of a new home.
        """
        if str(path) not in self._files:
            return None
        try:
            record = self.stated_solution(path)
            sources = read_sources(path, source_names(record), self._sources)
            if not self.solution(path, record["definition"], sources):
                return None
            return record, digest_of(record["definition"], record["spec"], sources)
        except (RecordError, ValueError, LookupError, AttributeError, TypeError):
            return None  # the ordinary reader reports the fault

    def stated_solution(self, path: Path) -> dict[str, Any]:
        """Return the content of the Solution's record at a place as ``to_dict()`` would, without validating it."""
        content = self.content(file_of(path))
        stated = content_of_family(content, path) if of_family_file(path) else from_json(content)
        return without_defaults(stated)

    def definition_digest(self, name: str) -> str | None:
        """Return the digest of a Definition that is known to be valid, else None."""
        known = self._listed["definitions"].get(name)
        return known[1] if known and known[0] == self.definition_key(name) else None

    def solution(self, path: Path, definition: str, sources: Mapping[str, bytes]) -> bool:
        """Return True if a Solution of a Definition is known to be valid."""
        return self._is(path, lambda: self.solution_key(path, definition, sources))

    def workloads(self, path: Path, definition: str) -> bool:
        """Return True if every line of a file is known to be a valid Workload of this Definition."""
        return self._is(path, lambda: self.workloads_key(path, definition))

    def plausible(self) -> frozenset[str]:
        """Return the Definitions whose shipped traces are all known to be plausible."""
        keys = self.trace_keys()
        return frozenset(
            name
            for name, of in keys.items()
            if all(self._files.get(str(path)) == key != "" for path, key in of.items())
        )

    # -- dependencies of validity ----------------------------------------------------------------------------------------

    def definition_key(self, name: str) -> str:
        """Return a digest of a Definition's file and its forward's file; '' if a file is missing or cannot be read."""
        if name not in self._keys:
            self._keys[name] = self._definition_key(name)
        return self._keys[name]

    def _definition_key(self, name: str) -> str:
        path = self._catalog.definition_paths.get(name)
        if path is None or not path.is_relative_to(self._root):
            return ""
        try:
            content = self.content(path)
            forward = from_json(content).get("backward_of")
            of_forward = self._catalog.definition_paths.get(forward)
            return _key(path.name, content, self.content(of_forward) if of_forward else b"")
        except (RecordError, ValueError, AttributeError, TypeError):
            return ""

    def solution_key(self, path: Path, definition: str, sources: Mapping[str, bytes]) -> str:
        """Return a digest of a Solution's record, its sources, and its Definition."""
        content = self.content(file_of(path))
        content = family_content(content, path) if of_family_file(path) else content
        parts = (part for name in sorted(sources) for part in (name.encode(), sources[name]))
        return self._of_definition(definition, content, *parts)

    def workloads_key(self, path: Path, definition: str) -> str:
        """Return a digest of a file of Workloads and of their Definition."""
        try:
            return self._of_definition(definition, self.content(path))
        except RecordError:
            return ""

    def trace_keys(self) -> dict[str, dict[Path, str]]:
        """Return Definition -> its shipped trace files, each with a digest of it, all published peaks, and the
        Definition.
        """
        folders = published_folders(self._catalog)
        if not all(folder.is_relative_to(self._root) for folder in folders):
            return {}  # other peaks were published; newer ones count
        try:
            locks = {folder: open_snapshot(folder, self._root).files for folder in folders}
        except RecordError:
            return {}
        peaks = "".join(files.get(PEAKS_NAME, "") for files in locks.values()).encode()
        found: dict[str, dict[Path, str]] = {}
        for folder, files in locks.items():
            for path in trace_files(folder):
                locked = files.get(path.relative_to(folder).as_posix(), "").encode()
                name = definition_of(path)
                found.setdefault(name, {})[path] = self._of_definition(name, locked, peaks)
        return found

    def _of_definition(self, name: str, *parts: bytes) -> str:
        key = self.definition_key(name)
        return _key(key, *parts) if key else ""

    # -- the list ----------------------------------------------------------------------------------------------------

    def _is(self, path: Path, key: Callable[[], str]) -> bool:
        expected = self._files.get(str(path))
        return expected is not None and expected == key()

    @cached_property
    def _files(self) -> Mapping[str, str]:
        return {f"{self._root}/{name}": key for name, key in self._listed["files"].items()}

    @cached_property
    def _listed(self) -> Mapping[str, Any]:
        try:
            content = from_json(read_bytes(checked_file(), "list of checked records", MAX_BYTES))
        except (RecordError, ValueError):
            return _NOTHING
        return content if _is_list(content) else _NOTHING


def _is_list(content: Any) -> bool:
    if not isinstance(content, dict) or not all(isinstance(content.get(key), dict) for key in _NOTHING):
        return False
    pairs = content["definitions"].values()
    return all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)


def _key(name: str, *parts: bytes) -> str:
    return length_prefixed_digest([name.encode(), *parts])[:32]


# ---- shipped sources ------------------------------------------------------------------------------
# Shipped sources are those on the list, by digest. A kernel in a checkout counts as shipped once
# ``tools/write_checked_records.py`` listed it, which is a step of its release.


def shipped_keys(definitions: Iterable[str]) -> frozenset[str]:
    """Return the :func:`source_key` of every shipped Solution of some Definitions, by names."""
    path = checked_file()
    try:
        stamp = path.stat().st_mtime_ns
    except OSError:  # without the list no source counts as shipped
        return frozenset()
    return frozenset().union(*(_keys(path, stamp, name) for name in definitions))


@lru_cache(maxsize=1024)
def _keys(path: Path, _stamp: int, definition: str) -> frozenset[str]:
    catalog = Catalog((path.parents[1],))
    checked = Checked(catalog)
    record = catalog.definitions.get(definition)
    if record is None:
        return frozenset()
    return frozenset(  # a listed Solution covers the file of its Definition
        source_key(record.digest, files.digest)
        for files in catalog.solutions_for(definition)
        if checked.solution(catalog.solution_paths[files.name], definition, files.sources)
    )


def source_key(definition_digest: str, solution_digest: str) -> str:
    """Return the common key of a Definition and a source of it."""
    return f"{definition_digest}/{solution_digest}"


# ---- Plausible figures -----------------------------------------------------------------------------------

SLACK = 1.001
"""Allowance for rounding: published figures keep at least three digits."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of the figures of a pass at one point; None if a bound is unknown. Times are microseconds."""

    least_us: float | None = None
    rel_fro: float | None = None
    worst_row_rel: float | None = None
    matched_ratio: float = 1.0


def bounds_of(
    definition: Definition,
    axes: Mapping[str, int],
    dtypes: Mapping[str, str],
    peaks: GpuPeaks | None,
    *,
    cold_l2: bool,
    timer: str,
) -> Bounds:
    """Return the bounds at one point; ``peaks`` is None for a CPU or if unknown, ``cold_l2`` if each call had a flushed L2."""
    rel_fro, worst_row, matched = _error_bounds(definition, axes, dtypes)
    light = speed_of_light(definition, axes, dtypes, peaks) if peaks is not None else None
    least = least_us(light, peaks, cold_l2=cold_l2, timer=timer) if light is not None and peaks is not None else None
    return Bounds(least, rel_fro, worst_row, matched)


def _error_bounds(
    definition: Definition, axes: Mapping[str, int], dtypes: Mapping[str, str]
) -> tuple[float | None, float | None, float]:
    """Return the widest bounds over all outputs, since a trace states the worst error but not its output."""
    rel_fro, worst_row, matched = 0.0, 0.0, 1.0
    for name in definition.outputs:
        limits = limits_for(definition, definition.dtype_of(name, dtypes), "tf32")
        if limits is None or limits.codes or name in definition.gathers:
            rel_fro = worst_row = math.inf
            matched = min(matched, CODES_EQUAL)
        elif math.prod(definition.shape_of(name, axes)) < MIN_ELEMENTS_FOR_NORMS:
            rel_fro = worst_row = math.inf  # norms would be noise, so no gate checks them
        else:
            rel_fro = max(rel_fro, TAU_CAP * limits.tau)
            worst_row = max(worst_row, WORST_ROW_FACTOR * TAU_CAP * max(limits.tau, limits.row_tau))
        if limits is not None:
            matched = min(matched, limits.share)
    return _finite(rel_fro), _finite(worst_row), matched


def _finite(bound: float) -> float | None:
    return None if math.isinf(bound) else bound * SLACK


def why_implausible(
    bounds: Bounds,
    *,
    latency_us: float | None,
    ci_low_us: float | None,
    ci_high_us: float | None,
    rel_fro: float | None,
    worst_row_rel: float | None,
    matched_ratio: float | None,
) -> str | None:
    """Return the reason why the figures of a pass cannot be true, or None if they can."""
    if latency_us is not None and ci_low_us is not None and ci_high_us is not None:
        if bounds.least_us is not None and latency_us < bounds.least_us:
            return f"{latency_us:.4g} us is below the physics floor of {bounds.least_us:.4g} us"
        if not ci_low_us * (1 / SLACK) <= latency_us <= ci_high_us * SLACK:
            return f"{latency_us:.4g} us lies outside its own interval, {ci_low_us:.4g} to {ci_high_us:.4g} us"
    for name, value, bound in (
        ("rel_fro", rel_fro, bounds.rel_fro),
        ("worst row", worst_row_rel, bounds.worst_row_rel),
    ):
        if value is not None and bound is not None and value > bound:
            return f"{name} {value:.3g} exceeds {bound:.3g}, which no gate lets pass"
    if matched_ratio is not None and matched_ratio < bounds.matched_ratio:
        return f"only {matched_ratio:.4g} of the elements match; a pass needs {bounds.matched_ratio:g}"
    return None
