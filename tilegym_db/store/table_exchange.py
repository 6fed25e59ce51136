"""Shares resolver tables through a data set, and fetches them into the home folder.

Below ``_tables/gpu=<slug>`` of the data set every trace file lies under its digest
(``sets/<op_type>/<definition>/<sha256>.jsonl.gz``). Each writer adds a lock (``by=<writer>/<time>-<sha256>.json``) after
all files that it names. No file is ever replaced, and the same table makes the same files. A writer that stops early
leaves files that no lock names. Older versions skip the folder.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic_core import from_json

from tilegym_db.errors import RecordError, StoreError
from tilegym_db.files import RECORD_BYTES, read_bytes, write_folder, writing
from tilegym_db.paths import remove_tree
from tilegym_db.published.input_files import LOCK_NAME, PEAKS_NAME, SUFFIX, packed, read_traces
from tilegym_db.published.shared_tables import (
    SOURCE_NAME,
    SharedPlace,
    damage_of,
    folder_of,
    remove_superseded,
    serving,
    tables_folder,
    tables_in,
    trust_table,
)
from tilegym_db.published.snapshot import TraceLock, is_signed, sha256, signature, signed_lock
from tilegym_db.records.hardware import gpus_meant
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.store import queries
from tilegym_db.store.database import Store
from tilegym_db.store.peaks_files import peaks_text
from tilegym_db.store.publish import trace_contents

FOLDER = "_tables"
LOCK_VERSION = 1
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_SLUG = "[a-z0-9][a-z0-9_.-]{0,127}"
_LOCK = re.compile(rf"gpu=({_SLUG})/by=([0-9a-f]{{16}})/[0-9]{{8}}T[0-9]{{6}}Z-([0-9a-f]{{64}})\.json")
_TRACES = re.compile(rf"{_SLUG}/{_SLUG}\.jsonl\.gz")


# -- writing ----------------------------------------------------------------------------------------------------------


def share_tables(store: Store, place: SharedPlace, gpu: str) -> list[str]:
    """Add the table of kernels verified here on one GPU slug or family; return the names of the new files.

    Raises:
        StoreError: the data set cannot be reached or written, or ``store`` is behind the catalog.
    """
    if store.stale is not None:
        raise StoreError(f"cannot share a resolver table: {store.stale}", code="store_stale")
    slugs = gpus_meant(gpu, queries.traced_gpus(store))
    return [name for slug in slugs for name in _share_table(store, place, slug)]


def _share_table(store: Store, place: SharedPlace, gpu: str) -> list[str]:
    rows = [
        row
        for row in (*queries.publishable_rows(store, gpu), *queries.revoking_rows(store, gpu))
        if row["origin"] == "local"
    ]
    if not rows:
        return []
    contents = {name: packed(lines) for name, lines in trace_contents(store, rows).items()}
    peaks = queries.read_peaks(store, gpu, own=True)
    if peaks is not None:
        contents[PEAKS_NAME] = peaks_text(peaks).encode()
    files = {name: sha256(content) for name, content in sorted(contents.items())}
    writer = signature(store.home, "writer", b"")[:16]
    folder = f"{FOLDER}/gpu={gpu}"
    newest = _newest_own_lock(place, f"{folder}/by={writer}", store.home)
    if newest is not None and newest.files == files:
        return []
    now = datetime.now(UTC)
    if newest is not None:  # also within a second, and if a clock was set back
        now = max(now, datetime.strptime(newest.published, _TIME).replace(tzinfo=UTC) + timedelta(seconds=1))
    lock = TraceLock(gpu=gpu, sm=rows[0]["sm"], published=now.strftime(_TIME), files=files)
    added = [(_blob(name, files[name]), content) for name, content in contents.items()]
    content = signed_lock(lock, store.home).to_json(indent=1).encode()
    # The lock comes last, after all files that it names.
    added.append((f"by={writer}/{now:%Y%m%dT%H%M%SZ}-{sha256(content)}.json", content))
    return [f"{folder}/{name}" for name, data in added if place.add(f"{folder}/{name}", _saving(data))]


def _newest_own_lock(place: SharedPlace, folder: str, home: Path) -> TraceLock | None:
    """Return the newest lock that this installation wrote."""
    for name in reversed(place.names(folder)):
        with contextlib.suppress(RecordError):
            lock = TraceLock.from_json(_fetched(place, f"{folder}/{name}"), name)
            if is_signed(home, "lock", lock.signed_content, lock.signature or ""):
                return lock
    return None


def _saving(content: bytes) -> Callable[[Any], Any]:
    return lambda file: file.write(content)


def _blob(name: str, digest: str) -> str:
    """Return the name of a table's file in a data set."""
    suffix = SUFFIX if name.endswith(SUFFIX) else PurePosixPath(name).suffix
    return f"sets/{name.removesuffix(suffix)}/{digest}{suffix}"


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass
class FetchedTables:
    """The tables of a data set: their number, the new ones, those that do not serve yet, and the invalid ones."""

    tables: int = 0
    new: int = 0
    waiting: int = 0
    problems: list[str] = field(default_factory=list)

    def notes(self, uri: str) -> list[str]:
        """Return notes on possible next steps of the user."""
        if not self.tables and not self.problems:
            return ["no resolver table is there. After verify, add one: tilegym-db publish --gpu GPU --to URI"]
        if not self.waiting:
            return []
        others = "1 of them was" if self.waiting == 1 else f"{self.waiting} of them were"
        return [
            f"{others} written by another installation: foreign, and served by nothing here. To use what you trust: "
            f"tilegym-db data sync {uri.partition('?')[0]} --tables --trust"
        ]


def fetch_tables(home: Path, place: SharedPlace, *, trust: bool = False) -> FetchedTables:
    """Fetch the newest complete table of each GPU and writer into the home folder; with ``trust`` they may serve.

    A table is fetched completely or not at all. If one of its files differs from its lock, the previous table counts.

    Raises:
        StoreError: the data set cannot be reached, or the home folder cannot be written.
    """
    report = FetchedTables()
    locks: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name in place.names(FOLDER):
        if found := _LOCK.fullmatch(name):
            locks.setdefault((found[1], found[2]), []).append((name, found[3]))
    if not locks and not tables_folder(home).is_dir():
        return report
    with writing(tables_folder(home)):
        for (gpu, writer), versions in sorted(locks.items()):
            _fetch_newest(home, place, gpu, writer, versions, trust, report)
        remove_superseded(home, place.identity, locks)
    newest = serving((table for table in tables_in(home) if table.address == place.identity), trust=True)
    report.waiting = sum(not table.counts for table in newest)
    return report


def _fetch_newest(
    home: Path,
    place: SharedPlace,
    gpu: str,
    writer: str,
    versions: Iterable[tuple[str, str]],
    trust: bool,
    report: FetchedTables,
) -> None:
    for name, digest in sorted(versions, reverse=True):
        folder = folder_of(home, gpu, writer, digest, place.identity)
        try:
            if not _is_whole(home, gpu, folder, digest):
                remove_tree(folder)
                write_folder(folder, _checked_table(home, place, gpu, name, digest))
                report.new += 1
        except RecordError as error:
            report.problems.append(f"{name} of {place.shown}: {error}")
            continue
        if trust:
            trust_table(folder, home)
        report.tables += 1
        return


def _is_whole(home: Path, gpu: str, folder: Path, digest: str) -> bool:
    """Return True if a fetched table is unchanged; a changed one is fetched again."""
    there = [table for table in tables_in(home, gpu) if table.snapshot.folder == folder]
    if not there or damage_of(there[0]):
        return False
    return sha256(read_bytes(folder / LOCK_NAME, "trace lock")) == digest


def _checked_table(home: Path, place: SharedPlace, gpu: str, name: str, digest: str) -> dict[str, bytes]:
    """Return the files of a table, each checked against its lock and for valid traces of that GPU.

    Raises:
        RecordError: the lock, or a file that it names, is not valid, or of a newer version.
    """
    content = _fetched(place, f"{FOLDER}/{name}")
    if sha256(content) != digest:
        raise RecordError(
            "it does not hold what its name says: it was changed after it was written.", code="lock_differs"
        )
    held = _held(home, gpu)
    files = {LOCK_NAME: content, SOURCE_NAME: json.dumps({"address": place.identity}).encode()}
    for path, expected in _files_of(content, gpu).items():
        data = held.get((path, expected)) or _fetched(place, f"{FOLDER}/gpu={gpu}/{_blob(path, expected)}")
        if sha256(data) != expected:
            raise RecordError(
                f"{path} is not what the lock says: it is cut off, or was changed after it was written.",
                code="file_changed",
            )
        _check_content(path, data, gpu)
        files[path] = data
    return files


def _fetched(place: SharedPlace, name: str) -> bytes:
    content = place.read(name, RECORD_BYTES + 1)
    if content is None:
        raise RecordError(f"{name} is not there.", code="file_missing")
    if len(content) > RECORD_BYTES:
        raise RecordError(
            f"{name} is larger than {RECORD_BYTES >> 20} MiB, so it is no part of a resolver table.",
            code="file_too_large",
        )
    return content


def _held(home: Path, gpu: str) -> dict[tuple[str, str], bytes]:
    """Return the files of a GPU's earlier tables, by path and digest."""
    held = {}
    for table in tables_in(home, gpu):
        for path, digest in table.snapshot.files.items():
            with contextlib.suppress(RecordError):
                held[path, digest] = table.snapshot.read(table.snapshot.folder / path)
    return held


def _files_of(content: bytes, gpu: str) -> Mapping[str, str]:
    """Return the files in a lock, if it is the lock of a table of that GPU."""
    try:
        version = from_json(content).get("schema_version")
    except (ValueError, AttributeError) as error:
        raise RecordError(f"not a lock: {error}.", code="lock_damaged") from None
    if isinstance(version, int) and version > LOCK_VERSION:
        raise RecordError(
            f"written by a newer tilegym-db (version {version} of the lock; this one knows {LOCK_VERSION}). "
            "Try: pip install --upgrade tilegym-db",
            code="version_newer",
        )
    lock = TraceLock.from_json(content, "its lock")
    wrong = [path for path in lock.files if path != PEAKS_NAME and _TRACES.fullmatch(path) is None]
    if lock.gpu != gpu or not lock.files or wrong:
        raise RecordError(
            f"its lock is not one of a resolver table of {gpu}{f': it names {wrong[0]!r}' if wrong else ''}.",
            code="lock_of_other_table",
        )
    try:
        datetime.strptime(lock.published, _TIME)
    except ValueError as error:
        raise RecordError(f"its lock does not say when it was written: {error}.", code="lock_time_invalid") from None
    return lock.files


def _check_content(path: str, content: bytes, gpu: str) -> None:
    if path == PEAKS_NAME:
        GpuPeaks.from_json(content, path)
        return
    for trace in read_traces(content, path):
        if (trace.gpu, f"{trace.op_type}/{trace.definition}{SUFFIX}") != (gpu, path):
            raise RecordError(f"{path} holds traces of {trace.definition} on {trace.gpu}.", code="record_misplaced")
