"""The published files of one GPU, ``traces/<gpu>/``: their places, format and lock (their digests, and a signature).

The lock of the package's own traces is part of the package. Any other lock counts only with the signature of this
installation. A folder from elsewhere is foreign and is used only if the user trusts it. A file that differs from its
lock is never used.

The key of an installation signs measured and published data. It lies in ``<home>/installation.key``, readable by its owner
only, and is made when first needed. A signature states that a tilegym-db with access to this key wrote a line. It does not
identify a person: any process that can read the key can sign.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import hmac
import io
import json
import os
import re
import secrets
import shlex
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field
from pydantic_core import from_json

from tilegym_db.catalog.record_files import library_files, solution_folders
from tilegym_db.errors import RecordError, StoreError
from tilegym_db.files import MiB, read_bytes, regular_files
from tilegym_db.paths import home as default_home
from tilegym_db.paths import shipped_root
from tilegym_db.records.base import Record
from tilegym_db.records.text import NAME_PATTERN, canonical_json

if TYPE_CHECKING:
    from tilegym_db.catalog import Catalog
    from tilegym_db.records import Trace


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
    """Return the signature of some content by the key of a home folder, which is made if it is missing.

    Raises:
        StoreError: the key cannot be read or written.
    """
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
        """Return the content of a file of the folder.

        Raises:
            RecordError: it differs from its lock, or cannot be read.
        """
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
    """Open the published files of ``traces/<gpu>`` with the key of a home folder.

    Raises:
        RecordError: the lock is not valid, or of a newer version.
    """
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

    Raises:
        StoreError: a file cannot be read.
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


# ---- input files ---------------------------------------------------------------------------------
# The files from which the database is derived: their places, and the format of published traces and search steps.
#
# The format is JSON Lines in gzip, one file per Definition and GPU.
#
# ``traces/<gpu>/<op_type>/<definition>.jsonl.gz`` has one trace per line, and ``<op_type>/tuning/<definition>.jsonl.gz``
# one search step per line. Any reader of JSON Lines opens them without this package:
#
#     duckdb -c "SELECT solution, axes, performance.latency_us FROM 'traces/h200/norm/*.jsonl.gz'"
#     pandas.read_json("traces/h200/norm/rms_norm.jsonl.gz", lines=True)
#
# A line has the fields of a Trace (``schema/trace.schema.json``) and up to two more. ``provides`` is the baseline that the
# Solution stands for (``stock``, ``compile``, ...). ``origin`` is ``foreign`` if the publishing installation had not measured
# the trace.


SUFFIX = ".jsonl.gz"
EXTRA_KEYS = ("provides", "origin")
"""Keys of a line that are not fields of a Trace."""

DIGEST_DIGITS = 8
ERRORS = ("rel_fro", "worst_row_rel", "max_abs")
MAX_BYTES = 256 * MiB
"""Maximum number of bytes that a file may unpack to; the largest today has 0.6 MB."""

_GZIP_MAGIC = b"\x1f\x8b"
_TIMES = ("latency_us", "ci_low_us", "ci_high_us", "host_us", "wall_us", "profiled_us")


# ---- packing --------------------------------------------------------------------------------------


def trace_lines(
    traces: Iterable[Mapping[str, Any]], provides: Mapping[str, str | None], foreign: Iterable[str] = ()
) -> bytes:
    """Return the lines of a trace file.

    Args:
        traces: as :meth:`Trace.to_dict` gives them, in the order to keep.
        provides: the baseline that a Solution stands for, by name.
        foreign: ids of runs that were not measured by the installation that publishes them.
    """
    borrowed = frozenset(foreign)
    lines = []
    for trace in traces:
        stands_for = provides.get(trace["solution"])
        more = {} if stands_for is None else {"provides": stands_for}
        lines.append(rounded(trace) | more | ({"origin": "foreign"} if trace["run_id"] in borrowed else {}))
    return json_lines(lines)


def json_lines(records: Iterable[Mapping[str, Any]]) -> bytes:
    """Return one line of JSON per record."""
    return b"".join(
        json.dumps(record, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        for record in records
    )


def packed(lines: bytes) -> bytes:
    """Return the content of a file with these lines. It has no time stamp, so equal lines make an equal file."""
    return gzip.compress(lines, 9, mtime=0)


def rounded(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trace's fields with the digits that are published.

    Times of a microsecond or more are whole nanoseconds. Errors have three significant digits, as every report prints
    them, and the digest of an envelope has its first eight.
    """
    result = dict(trace)
    correctness = result.get("correctness")
    if correctness is not None:
        errors = {name: float(f"{correctness[name]:.2e}") for name in ERRORS if correctness.get(name) is not None}
        result["correctness"] = {**correctness, **errors}
    for name in ("performance", "audit"):
        if result.get(name) is not None:
            result[name] = {**result[name], **_whole_nanoseconds(result[name])}
    if result.get("envelope") is not None:
        result["envelope"] = {**result["envelope"], "digest": result["envelope"]["digest"][:DIGEST_DIGITS]}
    return result


def _whole_nanoseconds(part: Mapping[str, Any]) -> dict[str, float]:
    # Shorter times would lose significant digits.
    return {name: round(part[name], 3) for name in _TIMES if (part.get(name) or 0) >= 1}


# ---- reading --------------------------------------------------------------------------------------


def is_packed(content: bytes) -> bool:
    """Return True if content is a published file, by its first two bytes; a journal is plain text."""
    return content.startswith(_GZIP_MAGIC)


def unpacked(content: bytes, source: str | Path) -> bytes:
    """Return the lines of a published file; errors name ``source``.

    Raises:
        RecordError: the content is not gzip, is cut off, or unpacks to more than :data:`MAX_BYTES`.
    """
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            lines = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(source, error) from None
    if len(lines) > MAX_BYTES:
        raise RecordError(
            f"{source}: this file unpacks to more than {MAX_BYTES // MiB} MiB, which is the most that is read.",
            code="file_too_large",
        )
    return lines


def read_lines(content: bytes, source: str | Path) -> list[dict[str, Any]]:
    """Return the object of every line of a published file.

    Raises:
        RecordError: as :func:`unpacked`, or a line is not a JSON object.
    """
    found = []
    for number, line in enumerate(unpacked(content, source).splitlines(), start=1):
        try:
            record = from_json(line, cache_strings="all")
        except ValueError as error:
            raise damaged(f"{source}:{number}", error) from None
        if not isinstance(record, dict):
            raise damaged(f"{source}:{number}", TypeError("the line is not a JSON object"))
        found.append(record)
    return found


def read_traces(content: bytes, source: str | Path) -> list[Trace]:
    """Return the traces of a published file, validated.

    Raises:
        RecordError: as :func:`read_lines`, or a line is not a valid trace.
    """
    from tilegym_db.records import Trace

    return [
        Trace.from_parsed({name: value for name, value in line.items() if name not in EXTRA_KEYS}, source)
        for line in read_lines(content, source)
    ]


def damaged(source: str | Path, error: Exception) -> RecordError:
    """Return the error for a published file that cannot be read."""
    return RecordError(
        f"{source}: not a valid file of published traces: {type(error).__name__}: {error}. Publish it again.",
        code="trace_file_damaged",
    )


# ---- Names of files --------------------------------------------------------------------------------------

LOCK_NAME = "traces.lock.json"
PEAKS_NAME = "peaks.json"
"""Name of the file of a GPU's published peaks, beside its resolver table."""

MODELS_SUFFIX = ".models.jsonl"
"""Suffix of the published runs of a whole model on a GPU, one run per line: ``<model>.models.jsonl``."""

TUNING_FOLDER = "tuning"
"""Folder of published search steps, in the folder of an op_type: ``<op_type>/tuning/<definition>.jsonl.gz``."""

_RECORD_FILES = ("definitions/*/*.json", "workloads/*/*.jsonl")


# -- of a catalog -----------------------------------------------------------------------------------------------------


def record_files(catalog: Catalog) -> list[Path]:
    """Return the files of Definitions, of Solutions with their sources and shared code, and of Workloads."""
    found = [path for root in catalog.roots for pattern in _RECORD_FILES for path in root.glob(pattern)]
    for root in catalog.roots:
        for folder in solution_folders(root):
            for place, folders, names in os.walk(folder):  # a folder that cannot be entered counts as empty
                folders[:] = [name for name in folders if name != "__pycache__"]
                found += [Path(place) / name for name in names]
        found += library_files(root)
    return found


def published_folders(catalog: Catalog) -> list[Path]:
    """Return the folders of published traces that come with a catalog, one per GPU."""
    return sorted(path for root in catalog.roots for path in root.glob("traces/*") if path.is_dir())


def is_trace_file(name: str) -> bool:
    """Return True for ``<op_type>/<definition>.jsonl.gz``, the path of a trace file in one GPU's published folder."""
    return name.count("/") == 1 and name.endswith(SUFFIX)


def definition_of(path: Path) -> str:
    """Return the Definition of a trace file, by its name."""
    return path.name.removesuffix(SUFFIX)


def trace_files(folder: Path) -> list[Path]:
    """Return the trace files of one GPU's published folder."""
    return regular_files(folder, f"*/*{SUFFIX}")


def shipped_traces(catalog: Catalog) -> list[Path]:
    """Return the published trace files that come with a catalog."""
    return [path for folder in published_folders(catalog) for path in trace_files(folder)]


def shipped_locks(catalog: Catalog) -> list[Path]:
    """Return the locks of a catalog's published folders."""
    return [folder / LOCK_NAME for folder in published_folders(catalog)]


def published_peaks_files(catalog: Catalog) -> list[Path]:
    """Return the files of peaks that come with a catalog, one per GPU."""
    return sorted(path for root in catalog.roots for path in root.glob(f"traces/*/{PEAKS_NAME}"))


def published_model_files(catalog: Catalog) -> list[Path]:
    """Return the files of model runs that come with a catalog, one per model and GPU."""
    return [path for folder in published_folders(catalog) for path in model_files(folder)]


def model_files(folder: Path) -> list[Path]:
    """Return the files of model runs in one GPU's published folder."""
    return regular_files(folder, f"*{MODELS_SUFFIX}")


def tuning_files(folder: Path) -> list[Path]:
    """Return the files of search steps in one GPU's published folder."""
    return sorted(folder.glob(f"*/{TUNING_FOLDER}/*{SUFFIX}"))


def published_tuning_files(catalog: Catalog) -> list[Path]:
    """Return the files of search steps that come with a catalog, one per Definition and GPU."""
    return [path for folder in published_folders(catalog) for path in tuning_files(folder)]


def pattern_files(catalog: Catalog) -> list[Path]:
    """Return the pages of patterns, one per language and root. A user's pages lie in the overlay."""
    return [path for root in catalog.roots for path in regular_files(root / "docs" / "patterns", "*.md")]


# -- of a home folder -------------------------------------------------------------------------------------------------


def own_peaks_files(home: Path) -> list[Path]:
    """Return every calibration made on this machine, oldest first."""
    return regular_files(home / "peaks", "*.json")


def own_tuning_files(home: Path) -> list[Path]:
    """Return the log of every search on this machine."""
    return regular_files(home / "tuning", "*.jsonl")


def loop_folder(home: Path | None = None) -> Path:
    """Return the folder of the loop's journals and submissions."""
    return (home or default_home()) / "loop"


def loop_files(home: Path, catalog: Catalog) -> list[Path]:
    """Return the journals of the loop and the pages of patterns."""
    return [*regular_files(loop_folder(home), "*.jsonl"), *pattern_files(catalog)]


def imported_folder(home: Path) -> Path:
    """Return the folder of data sets imported from other projects."""
    return home / "imported"


def imported_manifests(home: Path) -> list[Path]:
    """Return the manifests of all imported data sets, by path."""
    return regular_files(imported_folder(home), "*/*/manifest.json")


FOLDER = "shared"
