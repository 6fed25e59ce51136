"""Shares traces through a team's data set, and loads its traces into this store."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError, StoreError
from tilegym_db.files import read_bytes, write_atomically, writing
from tilegym_db.paths import home, remove_tree
from tilegym_db.published.input_files import FOLDER
from tilegym_db.published.shared_tables import SharedPlace, hidden
from tilegym_db.published.snapshot import KEY_NAME, signature
from tilegym_db.records.text import length_prefixed_digest
from tilegym_db.records.trace import Trace
from tilegym_db.records.verdicts import PUBLISHED_SANDBOX_LEVEL, UNTIMED_TIERS, VERIFIED_TIERS
from tilegym_db.store import statements
from tilegym_db.store.asking import QueryResult
from tilegym_db.store.connection import Store
from tilegym_db.store.journal import IngestReport, load_traces, remember_files
from tilegym_db.store.opening import open_store, run_user_query
from tilegym_db.store.queries.measured import read_traces, slugs
from tilegym_db.store.statements import listed


@dataclass
class SharedReport:
    """The result of sharing: traces written, traces already there, files, and invalid files."""

    traces: int = 0
    known: int = 0
    written: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def share_traces(store: Store, data_set: SharedDataSet, gpu: str | None = None) -> SharedReport:
    """Add new traces measured here to the data set, of one GPU slug or family or of all.

    Shipped traces and traces of other installations are not shared. Each GPU's traces become one file.
    """
    traces = own_traces(store, gpu)
    known, problems = _own_traces_in(store, data_set)
    report = SharedReport(len(traces), problems=problems)
    by_gpu: dict[str, list[Row]] = {}
    for trace in traces:
        if trace.trace_id in known:
            report.known += 1
            continue
        record = trace.to_json()
        by_gpu.setdefault(trace.gpu, []).append(Row(record, signature(store.home, "trace", record.encode())))
    for slug, rows in by_gpu.items():
        name = data_set.add(rows, slug)
        report.written += [name] if name else []
    return report


def _own_traces_in(store: Store, data_set: SharedDataSet) -> tuple[set[str], list[str]]:
    """Return the local traces that a data set has, and its invalid files. Only new files are read."""
    files = data_set.files()
    remembered = read_own_traces(store.home, data_set.uri)
    new = [file for file in files if (file.name, file.size) not in remembered]
    own = {trace.trace_id for trace in own_traces(store)} if new else set()
    found: dict[tuple[str, int], list[str]] = dict(remembered)
    problems = []
    for file in new:
        ids, wrong = data_set.trace_ids([file])
        problems += wrong
        if not wrong:
            found[file.name, file.size] = sorted(ids & own)
    if new or len(files) < len(remembered):
        remember_own_traces(store.home, data_set.uri, found, files)
    present = {(file.name, file.size) for file in files}
    return {one for key, ids in found.items() if key in present for one in ids}, problems


def sync_traces(
    store: Store, data_set: SharedDataSet, *, trust: bool = False, again: bool | None = None
) -> tuple[IngestReport, list[str]]:
    """Load every new trace of a data set into the store. Files that were read before are skipped.

    Return the report and the reason for each invalid file, which stops nothing.

    Traces signed by this installation are local. All others are foreign: they are shown, but count only with ``trust``.
    With ``again`` (by default equal to ``trust``) all files are read again, since they may have been read without
    trust.
    """
    files = data_set.files()
    if not files:
        raise StoreError(
            f"there are no traces at {data_set.uri}. The first to share some writes them: "
            f"tilegym-db publish --gpu auto --to {shlex.quote(data_set.uri)}",
            code="data_set_empty",
        )
    names = {Path(f"{data_set.uri}/{file.name}"): file for file in files}
    known = {row["path"] for row in store.rows(statements.INGESTED_FILES)}
    again = trust if again is None else again
    pending = {path: file for path, file in names.items() if again or str(path) not in known}
    with tempfile.TemporaryDirectory(prefix="tilegym-db-") as folder:
        written: list[Path] = []
        problems = []
        for number, (path, file) in enumerate(list(pending.items())):
            rows, problem = data_set.rows(file)
            if problem:
                problems.append(problem)
                del pending[path]
                continue
            written.append(Path(folder) / f"{number}.jsonl")
            _write(written[-1], rows)
        report = load_traces(store, written, trust=trust)
    with store.transaction("sync traces into") as connection:
        remember_files(connection, {path: file.size for path, file in pending.items()})
    return replace(report, files=len(pending)), problems


def brought_in(data_set: SharedDataSet, *, trust: bool = False) -> tuple[IngestReport, list[str]]:
    """Run :func:`sync_traces` on the user's store; return the report and the reason for every omission."""
    with open_store() as store:
        report, problems = sync_traces(store, data_set, trust=trust)
    return report, [*problems, *map(str, report.rejected)]


def query_data_set(
    uri: str, text: str, *, trust: bool = False, as_arrow: bool = False, timeout_s: float | None = None
) -> QueryResult:
    """Answer one SQL statement over the traces of a data set and the shipped ones, in a separate cached store.

    Each file is read once. If the data set lost a file that was read, the store is rebuilt.
    """
    data_set = SharedDataSet(uri)
    catalog = Catalog.default(trust_foreign=trust)
    folder = store_folder(home(), uri, trust=trust)
    with writing(folder.parent):
        problems = _renewed(folder, data_set, catalog, trust=trust)
    if problems:
        raise StoreError(
            f"{problems[0]} Remove it from the data set, or sync what is valid: tilegym-db data sync {shlex.quote(uri)}",
            code="data_set_damaged",
        )
    return run_user_query(text, path=folder, catalog=catalog, as_arrow=as_arrow, timeout_s=timeout_s)


def _renewed(folder: Path, data_set: SharedDataSet, catalog: Catalog, *, trust: bool) -> list[str]:
    """Update the store of a data set; return the invalid files of the data set."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = {str(Path(f"{data_set.uri}/{file.name}")) for file in data_set.files()}
    key = folder / KEY_NAME
    if not key.is_symlink():
        key.symlink_to(home() / KEY_NAME)  # so that local traces are local there as well
    with open_store(folder, catalog=catalog) as store:
        read = {row["path"] for row in store.rows(statements.INGESTED_FILES)}
        lost = {path for path in read if path.startswith(str(Path(data_set.uri)))} - listed
        if not lost:
            return sync_traces(store, data_set, trust=trust, again=False)[1]
    remove_tree(folder)
    return _renewed(folder, data_set, catalog, trust=trust)


def _write(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows as lines of a journal, so that loading checks their signatures."""
    lines = (
        f'{row.record[:-1]}, "signature": "{row.signature}"}}\n' if row.signature else f"{row.record}\n" for row in rows
    )
    try:
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror or error}. Nothing was ingested.", code="write_failed"
        ) from None


# ---- data set -------------------------------------------------------------------------------------
# A Parquet data set of traces in a folder or an object store. It is append-only and safe for concurrent writers.
# A file is written once, complete, under the digest of its rows (``gpu=h200/<digest>.parquet``). Writing the same
# traces twice, or from two machines at once, makes the same file. Readers count a trace once even if several files have
# it. A row has the whole trace as JSON (``record``) and the signature of the measuring installation.
# Credentials come from the environment, as for any S3 tool. They are not taken from an address, not stored, and not
# part of a message.

SCHEMA_VERSION = 1
"""Version of the files. A newer version may add columns; a changed meaning of a column raises it."""
VERSION_KEY = b"tilegym_db.schema_version"
COLUMNS = ("trace_id", "definition", "solution", "workload_uuid", "tier", "status", "record", "signature")
SUFFIX = ".parquet"
MAX_OTHERS = 10_000
"""Maximum number of folders and non-Parquet files in a data set's folder. A killed writer leaves one hidden file."""


@dataclass(frozen=True)
class Row:
    """A trace as JSON, and the signature of the measuring installation ('' if unsigned)."""

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

    def __init__(self, uri: str, *, max_others: int = MAX_OTHERS) -> None:
        """Open the data set without accessing the address.

        Args:
            max_others: a folder with more files of other kinds is no data set.

        Raises:
            UsageError: no address, one with credentials or without a bucket, or of a kind that pyarrow does not know.
            StoreError: the region of the bucket cannot be asked for.
            ModuleNotFoundError: pyarrow is not installed.
        """
        self.uri, self.max_others = uri, max_others
        self.place = SharedPlace(uri)

    def files(self) -> list[DataFile]:
        """Return every file, by name; an empty list before the first write."""
        from pyarrow import fs

        found = []
        if self.place.is_local:
            return self._local_files()
        try:
            self.place.refuse_silence("list")
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
        """Return :meth:`files` of a folder. A folder that is clearly no data set, such as ``/tmp``, is refused early."""
        found, others = [], 0
        if not os.path.isdir(self.place.root):
            if os.path.lexists(self.place.root):
                raise self.place.refused("list", NotADirectoryError("it is no folder"))
            return []
        for place, folders, names in os.walk(self.place.root, onerror=self._refuse_listing, followlinks=True):
            folders[:] = [name for name in folders if not name.startswith((".", "_"))]
            files = [name for name in names if name.endswith(SUFFIX) and not name.startswith((".", "_"))]
            others += len(folders) + len(names) - len(files)
            if others > self.max_others:
                raise StoreError(
                    f"{self.place.shown} is no data set: it holds more than {self.max_others:,} folders and files that are not "
                    "Parquet. Give the folder that 'publish --to' wrote.",
                    code="data_set_not_one",
                )
            for path in (os.path.join(place, name) for name in files):
                if os.path.isfile(path):
                    found.append(DataFile(os.path.relpath(path, self.place.root), path, os.path.getsize(path)))
        return sorted(found, key=lambda file: file.name)

    def _refuse_listing(self, error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # a folder removed since holds nothing
            raise self.place.refused("list", error) from None

    def trace_ids(self, files: Sequence[DataFile]) -> tuple[set[str], list[str]]:
        """Return the trace ids in the files, and the reason for each invalid file."""
        known: set[str] = set()
        problems = []
        for file in files:
            table, problem = self._read(file, ["trace_id"])
            known.update(table.column("trace_id").to_pylist() if table is not None else ())
            problems += [problem] if problem else []
        return known, problems

    def rows(self, file: DataFile) -> tuple[list[Row], str]:
        """Return the rows of a file; no rows and the reason if it is cut off or does not match its name."""
        table, problem = self._read(file, ["record", "signature"])
        if table is None:
            return [], problem
        columns = table.to_pydict()
        rows = [Row(*pair) for pair in zip(columns["record"], columns["signature"], strict=True)]
        if digest_of(rows) not in file.name:
            return [], f"{file.name} does not hold what its name says: it was changed after it was written."
        return rows, ""

    def add(self, rows: Sequence[Row], gpu: str) -> str | None:
        """Write rows of one GPU slug as one complete file; return its name, or None if it exists."""
        import pyarrow.parquet as parquet

        rows = sorted(rows, key=lambda row: row.record)
        name = f"gpu={gpu}/{digest_of(rows)}{SUFFIX}"
        table = _table(rows)
        new = self.place.add(name, lambda file: parquet.write_table(table, file, compression="zstd"))
        return name if new else None

    def _read(self, file: DataFile, columns: list[str]) -> tuple[Any, str]:
        """Return the columns of a file as a table, or None and the reason why it is not valid."""
        import pyarrow
        from pyarrow import dataset

        try:
            source = dataset.dataset(file.path, filesystem=self.place.files, format="parquet")
            version = int((source.schema.metadata or {}).get(VERSION_KEY, b"0"))
            if version > SCHEMA_VERSION:
                raise StoreError(
                    f"{file.name} of {self.place.shown} was written by a newer tilegym-db (version {version} of the data set; "
                    f"this one knows {SCHEMA_VERSION}). Nothing was read. Try: pip install --upgrade tilegym-db",
                    code="version_newer",
                )
            missing = sorted(set(columns) - set(source.schema.names))
            if missing:
                return None, f"{file.name} has no column {missing[0]}: it is no file of traces."
            return source.to_table(columns=columns), ""
        except (pyarrow.ArrowInvalid, ValueError) as error:
            return None, f"{file.name} is no whole Parquet file: {hidden(str(error).splitlines()[0])}"
        except OSError as error:
            # Arrow also reports a page that cannot be decoded as an input/output error.
            if self.place.is_local or "Couldn't deserialize" in str(error) or "Unexpected end of stream" in str(error):
                return None, f"{file.name} cannot be read: {hidden(str(error).splitlines()[0])}"
            raise self.place.refused("read", error) from None


def digest_of(rows: Sequence[Row]) -> str:
    """Return the digest that names a file. It does not depend on the order of rows or the writer."""
    ordered = sorted(rows, key=lambda row: row.record)
    return length_prefixed_digest(part.encode() for row in ordered for part in (row.record, row.signature))


def _table(rows: Sequence[Row]) -> Any:
    import pyarrow

    schema = pyarrow.schema(
        [(name, pyarrow.string()) for name in COLUMNS], metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()}
    )
    traces = [(row, json.loads(row.record)) for row in rows]
    records = [{**{name: trace.get(name) for name in COLUMNS}, **vars(row)} for row, trace in traces]
    return pyarrow.Table.from_pylist(records, schema=schema)


# ---- exchange -------------------------------------------------------------------------------------
# Selects shareable traces: verified ones, and failures of sources in the catalog.

_TOLD = f"""
    SELECT trace_id FROM verified
    WHERE ($gpus::VARCHAR[] IS NULL OR list_contains($gpus::VARCHAR[], gpu))
        AND ($op_type::VARCHAR IS NULL OR op_type = $op_type)
    UNION
    SELECT t.trace_id FROM traces t
    JOIN definition_records d ON d.is_current AND d.name = t.definition AND d.digest = t.definition_digest
    JOIN solution_records s ON s.is_current AND s.name = t.solution AND s.digest = t.solution_digest
    WHERE t.tier NOT IN ({listed(UNTIMED_TIERS)}) AND t.status <> 'PASSED'
        AND ($gpus::VARCHAR[] IS NULL OR list_contains($gpus::VARCHAR[], t.gpu))
        AND ($op_type::VARCHAR IS NULL OR t.op_type = $op_type)
"""
_OWN = f"""
    SELECT trace_id FROM traces
    WHERE origin = 'local' AND (tier NOT IN ({listed(UNTIMED_TIERS)}) OR status = 'OVERRULED')
        AND NOT (status = 'PASSED' AND tier IN ({listed(VERIFIED_TIERS)}) AND sandbox_level < {PUBLISHED_SANDBOX_LEVEL})
        AND ($gpus::VARCHAR[] IS NULL OR list_contains($gpus::VARCHAR[], gpu))
"""
_UNVERIFIED = """
    SELECT tier, count(*) AS traces FROM traces
    WHERE status = 'PASSED' AND trace_id NOT IN (SELECT trace_id FROM verified)
        AND ($gpus::VARCHAR[] IS NULL OR list_contains($gpus::VARCHAR[], gpu))
        AND ($op_type::VARCHAR IS NULL OR op_type = $op_type)
    GROUP BY tier ORDER BY tier
"""


def shareable_traces(store: Store, gpu: str | None, op_type: str | None = None) -> list[Trace]:
    """Return the shareable traces of one GPU slug and family, or of all, oldest first."""
    ids = [row["trace_id"] for row in store.rows(_TOLD, {"gpus": slugs(gpu), "op_type": op_type})]
    return sorted(read_traces(store, ids).values(), key=lambda trace: (trace.timestamp, trace.trace_id))


def own_traces(store: Store, gpu: str | None = None) -> list[Trace]:
    """Return the shareable traces measured here, of one GPU slug and family, or of all, oldest first.

    Passes in unconfined workers are excluded: other installations must not trust them.
    """
    ids = [row["trace_id"] for row in store.rows(_OWN, {"gpus": slugs(gpu)})]
    return sorted(read_traces(store, ids).values(), key=lambda trace: (trace.timestamp, trace.trace_id))


def unverified_counts(store: Store, gpu: str | None = None, op_type: str | None = None) -> dict[str, int]:
    """Return tier -> number of passes that are not verified: superseded, revoked, or only screened."""
    return {row["tier"]: row["traces"] for row in store.rows(_UNVERIFIED, {"gpus": slugs(gpu), "op_type": op_type})}


# ---- remembered -----------------------------------------------------------------------------------
# Caches what this installation read of shared data sets in ``<home>/shared``, so that no file is read twice.
# A file of a data set never changes, since its name is the digest of its rows. Removing the cache is safe; the files
# are then read again.

MAX_CACHE_BYTES = 1 << 30

OwnTraces = Mapping[tuple[str, int], Sequence[str]]
"""Name and size of a file -> its traces from this installation."""


def store_folder(home: Path, uri: str, *, trust: bool) -> Path:
    """Return the folder of a store for queries of one data set; trusted traces have a separate one."""
    return home / FOLDER / f"{_digest(uri)}-v{statements.SCHEMA_VERSION}{'-trusted' if trust else ''}"


def read_own_traces(home: Path, uri: str) -> dict[tuple[str, int], list[str]]:
    """Return the mapping that :func:`remember_own_traces` wrote; empty if its file is missing or damaged."""
    path = _path(home, uri)
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_bytes(path, "memory of a data set", MAX_CACHE_BYTES))
        return {(str(name), int(size)): [str(one) for one in ids] for name, size, ids in content["files"]}
    except (RecordError, ValueError, KeyError, TypeError):
        return {}


def remember_own_traces(home: Path, uri: str, found: OwnTraces, files: Iterable[DataFile]) -> None:
    """Write which traces of each file are our own, for the files that the data set still has."""
    present = {(file.name, file.size) for file in files}
    lines = [[name, size, sorted(ids)] for (name, size), ids in sorted(found.items()) if (name, size) in present]
    with writing(home / FOLDER):
        write_atomically(_path(home, uri), json.dumps({"uri": uri.partition("?")[0], "files": lines}).encode())


def _path(home: Path, uri: str) -> Path:
    return home / FOLDER / f"{_digest(uri)}.json"


def _digest(uri: str) -> str:
    return hashlib.sha256(uri.encode()).hexdigest()[:16]
