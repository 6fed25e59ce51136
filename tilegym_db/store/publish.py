"""The published snapshot: what the resolver reads and what ships with the package.

``traces/<gpu>/<op_type>/<definition>.jsonl`` holds the best promoted trace per solution and shape, as a trace set, which is
what the resolver reads as well; ``<definition>.tuning.jsonl`` beside it what the searches tried that found its configs, or
nothing better than the defaults; ``traces/<gpu>/peaks.json`` what the GPU was calibrated to do, which speed-of-light ratios
were taken against; ``traces/<gpu>/<model>.models.jsonl`` the newest runs of a model. Beside the passes lie the failures that
took others back, since a store that has an older snapshot would go on believing it. ``traces/<gpu>/traces.lock.json`` states
the digest of every file. Everything is put together before the first file is written, and the lock is written last, so that it
never vouches for what is not there.
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
"""The command that shows which traces have figures that cannot be true, and why."""

RUNS_KEPT_BACK = {
    "foreign": "runs of models that this installation did not sign (--trust)",
    "discarded": "runs of models with a change that the loop discarded",
    "throttled": "runs of models on a GPU that was throttled meanwhile",
    "claimless": "runs of models without an interval (no kernel ran, or too few rounds)",
}

_SHAPE = ("definition", "dtypes_key", "axes_key", "scalars_key", "layouts_key")


@dataclass(frozen=True)
class PublishReport:
    """What was published. ``written`` leaves out files that were the same already."""

    folder: Path
    entries: int
    traces: int
    revocations: int
    """Failures that go along, because they took back what was promoted before."""
    model_runs: int
    """Runs of whole models that go along; none into the user's own folder, whose home has them."""
    left_out: dict[str, int]
    """Why solutions with a config and a shape, or runs of models, were left out, and how many; only what there is any of."""
    written: tuple[Path, ...]
    leftover: tuple[Path, ...]
    """Trace files of this GPU that hold nothing verified any more; yours to delete."""
    unconfined: int = 0
    """Of the traces: those of workers that were not confined, of sources that the package ships; into the user's folder alone."""


def published_folder(gpu: str, root: Path | None = None) -> Path:
    """``<root>/traces/<gpu>``; without a root, that of a writable checkout, else ``<home>/published/<gpu>``."""
    shipped = shipped_root()
    if root is None and (shipped / "pyproject.toml").is_file() and os.access(shipped, os.W_OK):
        root = shipped
    return root / "traces" / gpu if root is not None else home() / "published" / gpu


def publish(
    store: Store, gpu: str, root: Path | None = None, *, own: bool = False, without: Collection[str] = ()
) -> PublishReport:
    """Write the snapshot of one GPU: a slug, such as ``h200``, or a family of which one GPU has traces.

    Runs of whole models go along, unless it goes to the user's home, where they lie. Peaks go along where they were measured on
    this machine and an empty kernel took no longer than in those that were published before, which stay otherwise. Steps of
    searches go along with those that were published before, of today's sources.
    Publishing the same traces again changes no byte, not even the date. With ``own`` it goes to the user's home, also where a
    checkout could be written. Solutions with a digest in ``without`` are left out. What workers promoted that were not confined
    goes to the user's home alone, and only of sources that the package ships.

    Raises:
        NotFoundError: nothing of that GPU can be published, and no failure took anything back; says what was left out.
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
    """Write what is not the same already, the lock of all digests last; returns what was written."""
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
            path.unlink(missing_ok=True)  # steps of older sources alone
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
    """:func:`publish` for every GPU with traces that a slug or family means: ``h100`` covers ``h100-sxm`` and ``h100-pcie``.

    Raises:
        NotFoundError, StoreError: as for :func:`publish`.
    """
    return [publish(store, slug, root) for slug in gpus_meant(gpu, queries.traced_gpus(store)) or [gpu]]


def _may_replace(peaks: GpuPeaks, published: GpuPeaks | None) -> bool:
    """Return True if peaks of this host may bound all published traces: those of the host with the shortest launch do.

    What a timer adds to a launch differs between hosts of one kind of GPU (1.3 and 2.9 us on two H200s). Bounded by the longer
    launch, correct times of the other host would lie below the physics floor.
    """
    return published is None or published.timer != peaks.timer or peaks.launch_us.value <= published.launch_us.value


def _published_peaks(folder: Path, home: Path) -> GpuPeaks | None:
    path = folder / PEAKS_NAME
    content = read_published(path, folder, home, []) if path.is_file() else None
    try:
        return None if content is None else GpuPeaks.from_json(content, path)
    except RecordError:
        return None  # of an older version, or damaged: written anew


def _kept(folder: Path, home: Path, contents: Mapping[Path, str]) -> dict[str, str]:
    """Digests of what stays as it was published before: the peaks, where those measured here do not replace them."""
    path = folder / PEAKS_NAME
    if path in contents or not path.is_file():
        return {}
    content = read_published(path, folder, home, [])
    return {} if content is None else {PEAKS_NAME: sha256(content)}


def _is_locked(folder: Path, home: Path, files: Mapping[str, str]) -> bool:
    """Return True if a lock that this installation wrote, or may write, says the same already."""
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
    """Return the shipped sources of Definitions that workers which were not confined promoted here; mostly there are
    none.
    """
    return shipped_keys(queries.unconfined_definitions(store, gpu))


def _left_out(store: Store, gpu: str, shipped: Collection[str]) -> dict[str, int]:
    kept = queries.kept_back(store, gpu, shipped)
    counts = {
        "a later failure took the pass back": kept["revoked"],
        f"the figures cannot be true ({DOUBTED})": kept["doubted"],
        f"the worker was not confined (sandbox level below {PUBLISHED_SANDBOX_LEVEL})": kept["unconfined"],
        "measured on contents of files, which say nothing of a call on others": kept["of_files"],
        "it omits an output, so its times are compared with nothing": kept["omitting"],
        "passed a screen only (tilegym-db promote)": queries.count_unverified(store, gpu=gpu),
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
        "Measure first, on that GPU: tilegym-db bench --promote",
        code="traces_missing",
    )


def trace_set_texts(store: Store, rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return the trace sets of what ``publishable_rows`` and ``revoking_rows`` give, by their paths in the folder of a
    GPU.
    """
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
    steps = queries.publishable_steps(store, gpu)  # by Definition; those of older sources leave
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
