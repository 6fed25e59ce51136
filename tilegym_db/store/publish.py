"""Publishes the snapshot of a GPU: the resolver's input, which also ships with the package.

``traces/<gpu>/<op_type>/<definition>.jsonl`` is a trace set with the best verified trace per solution and shape.
``<definition>.tuning.jsonl`` beside it has the search steps that found its configs, or found no better ones.
``traces/<gpu>/peaks.json`` has the calibrated peaks behind the speed-of-light ratios.
``traces/<gpu>/<model>.models.jsonl`` has the newest runs of a model.

A trace set also has the failures that revoked passes, since a store with an older snapshot would still count those
passes. ``traces/<gpu>/traces.lock.json`` has the digest of every file. All content is prepared before the first file is
written, and the lock is written last, so that it never names a missing file.
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
from tilegym_db.published.input_files import (
    LOCK_NAME,
    OLD_TABLE_NAME,
    OLD_TUNING_NAME,
    PEAKS_NAME,
    TUNING_SUFFIX,
    model_files,
)
from tilegym_db.published.snapshot import lock_text, open_snapshot, read_published, sha256
from tilegym_db.published.trace_set_writer import encode_traces
from tilegym_db.published.tuning_set import encode_steps
from tilegym_db.records.hardware import gpus_meant
from tilegym_db.records.model_run import ModelRun
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.records.trace import PUBLISHED_SANDBOX_LEVEL
from tilegym_db.store import queries
from tilegym_db.store.database import Store
from tilegym_db.store.model_runs import model_texts
from tilegym_db.store.peaks_files import peaks_text

DOUBTED = "tilegym-db sql 'SELECT solution, gpu, axes, doubt FROM traces WHERE doubt IS NOT NULL'"
"""Command that shows the traces with impossible figures, and the reasons."""

RUNS_KEPT_BACK = {
    "foreign": "runs of models that this installation did not sign (--trust)",
    "discarded": "runs of models with a change that the loop discarded",
    "throttled": "runs of models on a GPU that was throttled during the run",
    "claimless": "runs of models without an interval (no kernel ran, or too few rounds)",
}

_SHAPE = ("definition", "dtypes_key", "axes_key", "scalars_key", "layouts_key")


@dataclass(frozen=True)
class PublishReport:
    """The result of publishing. ``written`` leaves out unchanged files."""

    folder: Path
    entries: int
    traces: int
    revocations: int
    """Number of published failures that revoked earlier passes."""
    model_runs: int
    """Number of published model runs; 0 for the user's own folder, whose home has them."""
    left_out: dict[str, int]
    """Reason -> number of solutions with a config and shape, or of model runs, that were left out; without zeros."""
    written: tuple[Path, ...]
    leftover: tuple[Path, ...]
    """Trace files of this GPU without verified traces, which the user may delete."""
    unconfined: int = 0
    """Number of traces from unconfined workers with shipped sources; only in the user's own folder."""


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
    shipped = _shipped_unconfined(store, gpu) if folder == users else frozenset()
    publishable = queries.publishable_rows(store, gpu, shipped)
    rows = [row for row in publishable if row["solution_digest"] not in without]
    failures = queries.revoking_rows(store, gpu)
    left_out = _left_out(store, gpu, shipped)
    if not rows and not failures:
        raise _nothing_to_publish(store, gpu, left_out)
    contents = {folder / name: text for name, text in trace_set_texts(store, [*rows, *failures]).items()}
    peaks = queries.read_peaks(store, gpu, own=True)
    if peaks is not None and _may_replace(peaks, _published_peaks(folder, store.home)):
        contents[folder / PEAKS_NAME] = peaks_text(peaks)
    contents |= _tuning_files(store, gpu, folder)
    runs: list[ModelRun] = []
    if folder != users:
        runs = queries.publishable_model_runs(store, gpu)
        left_out |= _runs_left_out(store, gpu)
    contents |= {folder / name: text for name, text in model_texts(runs).items()}
    sm = [*rows, *failures][0]["sm"]
    with writing(folder.parents[1]):
        changed = _write(store, gpu, sm, folder, contents)
    leftover = {path for path in (*folder.glob("*/*.jsonl"), *_top_files(folder)) if path not in contents}
    shapes = len({tuple(row[key] for key in _SHAPE) for row in rows})
    unconfined = sum(row["sandbox_level"] < PUBLISHED_SANDBOX_LEVEL for row in rows)
    return PublishReport(
        folder, shapes, len(rows), len(failures), len(runs), left_out, changed, tuple(sorted(leftover)), unconfined
    )


def _write(store: Store, gpu: str, sm: str, folder: Path, contents: dict[Path, str]) -> tuple[Path, ...]:
    """Write the changed files and then the lock of all digests; return the written files."""
    kept = _kept(folder, store.home, contents)
    files = {path.relative_to(folder).as_posix(): sha256(text.encode()) for path, text in contents.items()} | kept
    changed = {path: text for path, text in contents.items() if not _same(path, text)}
    if changed or not _is_locked(folder, store.home, files):
        date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        changed[folder / LOCK_NAME] = lock_text(folder, gpu, sm, date, files, store.home)
    for path, text in changed.items():
        write_atomically(path, text.encode())
    for path in folder.glob(f"*/*{TUNING_SUFFIX}"):
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


def _kept(folder: Path, home: Path, contents: Mapping[Path, str]) -> dict[str, str]:
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


def _top_files(folder: Path) -> list[Path]:
    old = [path for name in (OLD_TABLE_NAME, OLD_TUNING_NAME) if (path := folder / name).is_file()]
    return [*old, *model_files(folder)]


def _shipped_unconfined(store: Store, gpu: str) -> frozenset[str]:
    """Return the shipped sources of Definitions verified here by unconfined workers. Usually there are none."""
    return shipped_keys(queries.unconfined_definitions(store, gpu))


def _left_out(store: Store, gpu: str, shipped: Collection[str]) -> dict[str, int]:
    kept = queries.kept_back(store, gpu, shipped)
    counts = {
        "a later failure took the pass back": kept["revoked"],
        f"the figures cannot be true ({DOUBTED})": kept["doubted"],
        f"the worker was not confined (sandbox level below {PUBLISHED_SANDBOX_LEVEL})": kept["unconfined"],
        "measured on contents of files, which say nothing of a call on others": kept["of_files"],
        "it omits an output, so its times are compared with nothing": kept["omitting"],
        "passed a screen only (tilegym-db verify)": queries.count_unverified(store, gpu=gpu),
    }
    return {reason: count for reason, count in counts.items() if count}


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


def trace_set_texts(store: Store, rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return path in the GPU's folder -> trace set, from ``publishable_rows`` and ``revoking_rows``."""
    traces = queries.read_traces(store, [row["trace_id"] for row in rows])
    ordered = sorted(rows, key=lambda row: (*(row[key] for key in _SHAPE), row["solution"], row["trace_id"]))
    foreign = {row["run_id"] for row in rows if row["origin"] == "foreign"}
    provides = queries.provided(store)
    contents: dict[str, str] = {}
    for (op_type, definition), group in itertools.groupby(ordered, key=lambda row: (row["op_type"], row["definition"])):
        records = [traces[row["trace_id"]].to_dict() for row in group]
        contents[f"{op_type}/{definition}.jsonl"] = encode_traces(records, provides, foreign)
    return contents


def _tuning_files(store: Store, gpu: str, folder: Path) -> dict[Path, str]:
    steps = queries.publishable_steps(store, gpu)  # by Definition; steps of older sources are dropped
    contents = {}
    for (op_type, definition), group in itertools.groupby(steps, key=lambda item: item[:2]):
        records = [step.to_dict() for _, _, step in group]
        contents[folder / op_type / f"{definition}{TUNING_SUFFIX}"] = encode_steps(definition, records)
    return contents


def _same(path: Path, text: str) -> bool:
    try:
        return path.read_bytes() == text.encode()
    except OSError:
        return False
