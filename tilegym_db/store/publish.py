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

import itertools
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilegym_db.errors import HardwareError, NotFoundError, RecordError, StoreError
from tilegym_db.files import write_atomically, writing
from tilegym_db.paths import home, shipped_root
from tilegym_db.published.checked import shipped_keys
from tilegym_db.published.entries import Audience, Refusal
from tilegym_db.published.input_files import (
    LOCK_NAME,
    PEAKS_NAME,
    SUFFIX,
    TUNING_FOLDER,
    json_lines,
    model_files,
    packed,
    trace_files,
    trace_lines,
    tuning_files,
    unpacked,
)
from tilegym_db.published.snapshot import lock_text, open_snapshot, read_published, sha256
from tilegym_db.records.hardware import gpus_meant
from tilegym_db.records.model_run import ModelRun
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.records.trace import PUBLISHED_SANDBOX_LEVEL
from tilegym_db.store import queries
from tilegym_db.store.database import Store
from tilegym_db.store.model_runs import model_texts
from tilegym_db.store.peaks_files import peaks_text
from tilegym_db.store.queries.publishing import SHAPE

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
    gpu = _one_gpu(gpu, queries.traced_gpus(store))
    users = home() / "published" / gpu
    folder = users if own else published_folder(gpu, root)
    audience: Audience = "this user" if folder == users else "others"
    shipped = _shipped_unconfined(store, gpu) if folder == users else frozenset()
    promoted, refused = queries.promoted_rows(store, gpu, shipped, audience=audience)
    rows = [row for row in promoted if row["solution_digest"] not in without]
    failures = queries.revoking_rows(store, gpu)
    left_out = _left_out(store, gpu, refused)
    if not rows and not failures:
        raise _nothing_to_publish(store, gpu, left_out)
    lines = trace_contents(store, [*rows, *failures]) | _tuning_contents(store, gpu)
    contents = {folder / name: _packed_as_is(folder / name, content) for name, content in lines.items()}
    peaks = queries.read_peaks(store, gpu, own=True)
    if peaks is not None and _may_replace(peaks, _published_peaks(folder, store.home)):
        contents[folder / PEAKS_NAME] = peaks_text(peaks).encode()
    runs: list[ModelRun] = []
    if folder != users:
        runs = queries.publishable_model_runs(store, gpu)
        left_out |= _runs_left_out(store, gpu)
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
        tuple(queries.disagreements(store, gpu)),
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


def publish_all(store: Store, gpu: str, root: Path | None = None) -> list[PublishReport]:
    """Run :func:`publish` for every GPU with traces in a slug or family: ``h100`` covers ``h100-sxm`` and
    ``h100-pcie``.

    Raises:
        NotFoundError, StoreError: as for :func:`publish`.
    """
    return [publish(store, slug, root) for slug in gpus_meant(gpu, queries.traced_gpus(store)) or [gpu]]


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
    """Return True if a lock that this installation wrote, or may write, already states the same."""
    if not (folder / LOCK_NAME).is_file():
        return False
    try:
        found = open_snapshot(folder, home)
    except RecordError:
        return False  # damaged: write it
    return found.origin != "foreign" and dict(found.files) == dict(files)


def _shipped_unconfined(store: Store, gpu: str) -> frozenset[str]:
    """Return the shipped sources of Definitions verified here by unconfined workers. Usually there are none."""
    return shipped_keys(queries.unconfined_definitions(store, gpu))


def _left_out(store: Store, gpu: str, refused: Mapping[str, int]) -> dict[str, int]:
    counts = {**queries.not_verified(store, gpu), **refused, "screened": queries.count_unverified(store, gpu=gpu)}
    return {_LEFT_OUT[code]: counts[code] for code in _LEFT_OUT if counts.get(code)}


def _runs_left_out(store: Store, gpu: str) -> dict[str, int]:
    return {RUNS_KEPT_BACK[reason]: count for reason, count in queries.kept_back_runs(store, gpu).items()}


def _nothing_to_publish(store: Store, gpu: str, left_out: Mapping[str, int]) -> NotFoundError:
    if left_out:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in left_out.items())
        return NotFoundError(f"nothing on '{gpu}' can be published. Left out: {reasons}.", code="nothing_to_publish")
    measured = ", ".join(queries.measured_gpus(store)) or "none"
    return NotFoundError(
        f"no verified trace on '{gpu}' (GPUs with one: {measured}). "
        "Measure first, on that GPU: tilegym-db bench --verify",
        code="traces_missing",
    )


def trace_contents(store: Store, rows: list[dict[str, Any]]) -> dict[str, bytes]:
    """Return path in the GPU's folder -> lines of that trace file, from ``publishable_rows`` and ``revoking_rows``."""
    traces = queries.read_traces(store, [row["trace_id"] for row in rows])
    ordered = sorted(rows, key=lambda row: (*(row[key] for key in SHAPE), row["solution"], row["trace_id"]))
    foreign = {row["run_id"] for row in rows if row["origin"] == "foreign"}
    provides = queries.provided(store)
    contents: dict[str, bytes] = {}
    for (op_type, definition), group in itertools.groupby(ordered, key=lambda row: (row["op_type"], row["definition"])):
        records = [traces[row["trace_id"]].to_dict() for row in group]
        contents[f"{op_type}/{definition}{SUFFIX}"] = trace_lines(records, provides, foreign)
    return contents


def _tuning_contents(store: Store, gpu: str) -> dict[str, bytes]:
    steps = queries.publishable_steps(store, gpu)  # by Definition; steps of older sources are dropped
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
