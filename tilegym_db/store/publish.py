"""Publishes the snapshot of a GPU: the resolver's input, which also ships with the package.

``traces/<gpu>/<op_type>/<definition>.jsonl.gz`` has the best verified trace per solution and shape, one per line.
``<op_type>/tuning/<definition>.jsonl.gz`` has the search steps that found its configs, or found no better ones.
``traces/<gpu>/peaks.json`` has the calibrated peaks behind the speed-of-light ratios.
``traces/<gpu>/<model>.models.jsonl`` has the newest runs of a model.

A trace file also has the failures that revoked passes, and what a person overruled: a store with an older snapshot would
still judge otherwise. ``traces/<gpu>/traces.lock.json`` has the digest of every file. All content is prepared before the
first file is written, and the lock is written last, so that it never names a missing file.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic_core import from_json

from tilegym_db.errors import HardwareError, NotFoundError, RecordError, StoreError
from tilegym_db.files import RECORD_BYTES, read_bytes, write_atomically, write_folder, writing
from tilegym_db.paths import home, remove_tree, shipped_root
from tilegym_db.published.entries import Audience, Refusal
from tilegym_db.published.input_files import (
    LOCK_NAME,
    PEAKS_NAME,
    SUFFIX,
    TUNING_FOLDER,
    json_lines,
    model_files,
    packed,
    read_traces,
    trace_files,
    trace_lines,
    tuning_files,
    unpacked,
)
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
from tilegym_db.published.snapshot import (
    TraceLock,
    is_signed,
    lock_text,
    open_snapshot,
    read_published,
    sha256,
    shipped_keys,
    signature,
    signed_lock,
)
from tilegym_db.records.hardware import gpus_meant
from tilegym_db.records.loop import ModelRun
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.records.verdicts import PUBLISHED_SANDBOX_LEVEL
from tilegym_db.store.connection import Store
from tilegym_db.store.queries import measured, publishing
from tilegym_db.store.queries.publishing import SHAPE
from tilegym_db.store.side_files import model_texts, peaks_text

DOUBTED = "tilegym-db sql 'SELECT solution, gpu, axes, doubt FROM traces WHERE doubt IS NOT NULL'"
"""Command that shows the traces with impossible figures, and the reasons."""

_LEFT_OUT = {
    "revoked": "a failure took the pass back",
    "doubted": f"the figures cannot be true ({DOUBTED})",
    "unconfined": f"the worker was not confined (sandbox level below {PUBLISHED_SANDBOX_LEVEL})",
    "of_files": "measured on contents of files, which say nothing of a call on others",
    "output_omitted": "it omits an output, so its times are compared with nothing",
    "screened": "passed a screen only (tilegym-db verify)",
}
"""Code -> why a result is not published."""

RUNS_KEPT_BACK = {
    "foreign": "runs of models that this installation did not sign (--trust)",
    "discarded": "runs of models with a change that the loop discarded",
    "throttled": "runs of models on a GPU that was throttled during the run",
    "claimless": "runs of models without an interval (no kernel ran, or too few rounds)",
}


@dataclass(frozen=True)
class PublishReport:
    """The result of publishing. ``written`` leaves out unchanged files."""

    folder: Path
    entries: int
    traces: int
    revocations: int
    """Number of published failures that revoke passes, and of overrulings."""
    model_runs: int
    """Number of published model runs; 0 for the user's own folder, whose home has them."""
    left_out: dict[str, int]
    """Reason -> number of solutions with a config and shape, or of model runs, that were left out; without zeros."""
    written: tuple[Path, ...]
    leftover: tuple[Path, ...]
    """Trace files of this GPU without verified traces, which the user may delete."""
    unconfined: int = 0
    """Number of traces from unconfined workers with shipped sources; only in the user's own folder."""
    disagreements: tuple[Refusal, ...] = ()
    """Sources and configs that are not published because one trace passed and another found a wrong number."""


def published_folder(gpu: str, root: Path | None = None) -> Path:
    """Return ``<root>/traces/<gpu>``. Without a root, return that of a writable checkout, else
    ``<home>/published/<gpu>``.
    """
    shipped = shipped_root()
    if root is None and (shipped / "pyproject.toml").is_file() and os.access(shipped, os.W_OK):
        root = shipped
    return root / "traces" / gpu if root is not None else home() / "published" / gpu


def publish(
    store: Store, gpu: str, root: Path | None = None, *, own: bool = False, without: Collection[str] = ()
) -> PublishReport:
    """Write the snapshot of one GPU, given as a slug such as ``h200`` or as a family of which one GPU has traces.

    Model runs are included, unless the target is the user's home, which has them. Peaks measured on this machine are
    included if an empty kernel took no longer than in the published peaks; otherwise the published ones stay. New
    search steps join the published ones of today's sources.

    Publishing the same traces again changes no byte, including the date. With ``own`` the target is the user's home,
    even if a checkout is writable. Solutions with a digest in ``without`` are left out. Traces by unconfined workers go
    only to the user's home, and only those of shipped sources.

    Raises:
        NotFoundError: the GPU has neither publishable traces nor revoking failures; says what was left out.
        HardwareError: several GPUs of that family have traces.
        StoreError: the folder cannot be written, or ``store`` is behind the catalog.
    """
    if store.stale is not None:
        raise StoreError(f"cannot publish: {store.stale}", code="store_stale")
    gpu = _one_gpu(gpu, measured.traced_gpus(store))
    users = home() / "published" / gpu
    folder = users if own else published_folder(gpu, root)
    audience: Audience = "this user" if folder == users else "others"
    shipped = shipped_keys(publishing.unconfined_definitions(store, gpu)) if folder == users else frozenset()
    promoted, refused = publishing.promoted_rows(store, gpu, shipped, audience=audience)
    rows = [row for row in promoted if row["solution_digest"] not in without]
    failures = publishing.revoking_rows(store, gpu)
    left_out = _left_out(store, gpu, refused)
    if not rows and not failures:
        raise _nothing_to_publish(store, gpu, left_out)
    lines = trace_contents(store, [*rows, *failures]) | _tuning_contents(store, gpu)
    contents = {folder / name: _packed_as_is(folder / name, content) for name, content in lines.items()}
    peaks = measured.read_peaks(store, gpu, own=True)
    if peaks is not None and _may_replace(peaks, _published_peaks(folder, store.home)):
        contents[folder / PEAKS_NAME] = peaks_text(peaks).encode()
    runs: list[ModelRun] = []
    if folder != users:
        runs = publishing.publishable_model_runs(store, gpu)
        kept_back = publishing.kept_back_runs(store, gpu)
        left_out |= {RUNS_KEPT_BACK[reason]: count for reason, count in kept_back.items()}
    contents |= {folder / name: text.encode() for name, text in model_texts(runs).items()}
    sm = [*rows, *failures][0]["sm"]
    with writing(folder.parents[1]):
        changed = _write(store, gpu, sm, folder, contents)
    leftover = {path for path in (*trace_files(folder), *model_files(folder)) if path not in contents}
    shapes = len({tuple(row[key] for key in SHAPE) for row in rows})
    unconfined = sum(row["sandbox_level"] < PUBLISHED_SANDBOX_LEVEL for row in rows)
    return PublishReport(
        folder,
        shapes,
        len(rows),
        len(failures),
        len(runs),
        left_out,
        changed,
        tuple(sorted(leftover)),
        unconfined,
        tuple(publishing.disagreements(store, gpu)),
    )


def _write(store: Store, gpu: str, sm: str, folder: Path, contents: dict[Path, bytes]) -> tuple[Path, ...]:
    """Write the changed files and then the lock of all digests; return the written files."""
    kept = _kept(folder, store.home, contents)
    files = {path.relative_to(folder).as_posix(): sha256(content) for path, content in contents.items()} | kept
    changed = {path: content for path, content in contents.items() if _content_of(path) != content}
    if changed or not _is_locked(folder, store.home, files):
        date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        changed[folder / LOCK_NAME] = lock_text(folder, gpu, sm, date, files, store.home).encode()
    for path, content in changed.items():
        write_atomically(path, content)
    for path in tuning_files(folder):
        if path not in contents:
            path.unlink(missing_ok=True)  # only steps of older sources
    return tuple(changed)


def _one_gpu(asked: str, traced: list[str]) -> str:
    slugs = gpus_meant(asked, traced)
    if len(slugs) > 1:
        raise HardwareError(
            f"'{asked}' means {' and '.join(slugs)} here; publish them one by one, or with publish_all.",
            code="gpu_ambiguous",
        )
    return slugs[0] if slugs else asked


def publish_all(store: Store, gpu: str) -> list[PublishReport]:
    """Run :func:`publish` for every GPU with traces in a slug or family: ``h100`` covers ``h100-sxm`` and ``h100-pcie``."""
    return [publish(store, slug) for slug in gpus_meant(gpu, measured.traced_gpus(store)) or [gpu]]


def _may_replace(peaks: GpuPeaks, published: GpuPeaks | None) -> bool:
    """Return True if this host's peaks may bound all published traces: the host with the shortest launch decides.

    A timer's addition to a launch differs between hosts of one GPU kind (1.3 and 2.9 us on two H200s). With the longer
    launch as bound, correct times of the other host would lie below the physics floor.
    """
    return published is None or published.timer != peaks.timer or peaks.launch_us.value <= published.launch_us.value


def _published_peaks(folder: Path, home: Path) -> GpuPeaks | None:
    path = folder / PEAKS_NAME
    content = read_published(path, folder, home, []) if path.is_file() else None
    try:
        return None if content is None else GpuPeaks.from_json(content, path)
    except RecordError:
        return None  # of an older version, or damaged: write it again


def _kept(folder: Path, home: Path, contents: Mapping[Path, bytes]) -> dict[str, str]:
    """Return the digests of published files that stay: the peaks, if local ones do not replace them."""
    path = folder / PEAKS_NAME
    if path in contents or not path.is_file():
        return {}
    content = read_published(path, folder, home, [])
    return {} if content is None else {PEAKS_NAME: sha256(content)}


def _is_locked(folder: Path, home: Path, files: Mapping[str, str]) -> bool:
    """Return True if the folder's lock states these files already, and is no lock of another installation."""
    if not (folder / LOCK_NAME).is_file():
        return False
    try:
        found = open_snapshot(folder, home)
    except RecordError:
        return False  # damaged: write it
    return found.origin != "foreign" and dict(found.files) == dict(files)


def _left_out(store: Store, gpu: str, refused: Mapping[str, int]) -> dict[str, int]:
    counts = {**publishing.not_verified(store, gpu), **refused, "screened": measured.count_unverified(store, gpu=gpu)}
    return {_LEFT_OUT[code]: counts[code] for code in _LEFT_OUT if counts.get(code)}


def _nothing_to_publish(store: Store, gpu: str, left_out: Mapping[str, int]) -> NotFoundError:
    if left_out:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in left_out.items())
        return NotFoundError(f"nothing on '{gpu}' can be published. Left out: {reasons}.", code="nothing_to_publish")
    found = ", ".join(measured.measured_gpus(store)) or "none"
    return NotFoundError(
        f"no verified trace on '{gpu}' (GPUs with one: {found}). Measure first, on that GPU: tilegym-db bench --verify",
        code="traces_missing",
    )


def trace_contents(store: Store, rows: list[dict[str, Any]]) -> dict[str, bytes]:
    """Return path in the GPU's folder -> lines of that trace file, from ``publishable_rows`` and ``revoking_rows``."""
    traces = measured.read_traces(store, [row["trace_id"] for row in rows])
    ordered = sorted(rows, key=lambda row: (*(row[key] for key in SHAPE), row["solution"], row["trace_id"]))
    foreign = {row["run_id"] for row in rows if row["origin"] == "foreign"}
    provides = publishing.provided(store)
    contents: dict[str, bytes] = {}
    for (op_type, definition), group in itertools.groupby(ordered, key=lambda row: (row["op_type"], row["definition"])):
        records = [traces[row["trace_id"]].to_dict() for row in group]
        contents[f"{op_type}/{definition}{SUFFIX}"] = trace_lines(records, provides, foreign)
    return contents


def _tuning_contents(store: Store, gpu: str) -> dict[str, bytes]:
    steps = publishing.publishable_steps(store, gpu)  # by Definition; steps of older sources are dropped
    return {
        f"{op_type}/{TUNING_FOLDER}/{definition}{SUFFIX}": json_lines(step.to_dict() for _, _, step in group)
        for (op_type, definition), group in itertools.groupby(steps, key=lambda item: item[:2])
    }


def _packed_as_is(path: Path, lines: bytes) -> bytes:
    """Return the content of a file with these lines: the published one if it has them, whichever zlib packed it."""
    published = _content_of(path)
    try:
        if published is not None and unpacked(published, path) == lines:
            return published
    except RecordError:
        pass  # damaged: write it anew
    return packed(lines)


def _content_of(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


# ---- exchange through a data set ------------------------------------------------------------------
# Shares resolver tables through a data set, and fetches them into the home folder.
#
# Below ``_tables/gpu=<slug>`` of the data set every trace file lies under its digest
# (``sets/<op_type>/<definition>/<sha256>.jsonl.gz``). Each writer adds a lock (``by=<writer>/<time>-<sha256>.json``) after all
# files that it names. No file is ever replaced, and the same table makes the same files. A writer that stops early leaves files
# that no lock names. Older versions skip the folder.

FOLDER = "_tables"
LOCK_VERSION = 1
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_SLUG = "[a-z0-9][a-z0-9_.-]{0,127}"
_LOCK = re.compile(rf"gpu=({_SLUG})/by=([0-9a-f]{{16}})/[0-9]{{8}}T[0-9]{{6}}Z-([0-9a-f]{{64}})\.json")
_TRACES = re.compile(rf"{_SLUG}/{_SLUG}\.jsonl\.gz")


# -- writing ----------------------------------------------------------------------------------------------------------


def share_tables(store: Store, place: SharedPlace, gpu: str) -> list[str]:
    """Add the table of kernels verified here on one GPU slug or family; return the names of the new files."""
    if store.stale is not None:
        raise StoreError(f"cannot share a resolver table: {store.stale}", code="store_stale")
    slugs = gpus_meant(gpu, measured.traced_gpus(store))
    return [name for slug in slugs for name in _share_table(store, place, slug)]


def _share_table(store: Store, place: SharedPlace, gpu: str) -> list[str]:
    rows = [
        row
        for row in (*publishing.publishable_rows(store, gpu), *publishing.revoking_rows(store, gpu))
        if row["origin"] == "local"
    ]
    if not rows:
        return []
    contents = {name: packed(lines) for name, lines in trace_contents(store, rows).items()}
    peaks = measured.read_peaks(store, gpu, own=True)
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
    """Return the files of a table, each checked against its lock and for valid traces of that GPU."""
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
            f"its lock belongs to no resolver table of {gpu}{f': it names {wrong[0]!r}' if wrong else ''}.",
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
