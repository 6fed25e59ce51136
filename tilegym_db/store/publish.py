"""The published snapshot: what the resolver reads and what ships with the package.

``traces/<gpu>/<op_type>/<definition>.jsonl`` holds the best promoted trace per solution and shape,
``traces/<gpu>/resolver.json`` the same as a table of candidates per shape, ``traces/<gpu>/peaks.json`` what the GPU
was calibrated to do, which speed-of-light ratios were taken against, and ``traces/<gpu>/tuning.jsonl`` what the searches
tried that found their configs, or nothing better than the defaults. Beside the passes lie the failures that took others
back, since a store that has an older snapshot would go on believing it. Everything is put together before the first file
is written, and the table is written last, so that it never cites a trace that is not there.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilegym_db.catalog import write_atomically
from tilegym_db.errors import NotFoundError, StoreError
from tilegym_db.paths import home, shipped_root
from tilegym_db.store import queries
from tilegym_db.store.database import Store
from tilegym_db.store.peaks import PEAKS_NAME, peaks_text
from tilegym_db.store.statements import PUBLISHED_SANDBOX_LEVEL
from tilegym_db.store.tuning import TUNING_NAME

__all__ = ["PublishReport", "publish", "published_folder", "resolver_table"]

TABLE_NAME = "resolver.json"
TABLE_VERSION = 2

_SHAPE = ("definition", "dtypes_key", "axes_key", "scalars_key", "layouts_key")
_ENTRY = (
    "definition", "definition_version", "definition_digest", "op_type", "dtypes", "axes", "scalars", "layouts",
)  # fmt: skip
_CANDIDATE = (
    "solution", "solution_digest", "language", "role", "provides", "config", "latency_us", "ci_low_us", "ci_high_us",
    "host_us", "speedup", "speedup_ci_low", "tier", "sandbox_level", "trace_id", "envelope_cases",
)  # fmt: skip


@dataclass(frozen=True)
class PublishReport:
    """What was published. ``written`` leaves out files that were the same already."""

    folder: Path
    entries: int
    traces: int
    revocations: int
    """Failures that go along, because they took back what was promoted before."""
    left_out: dict[str, int]
    """Why solutions with a config and a shape were left out, and how many of them; only what there is any of."""
    written: tuple[Path, ...]
    leftover: tuple[Path, ...]
    """Trace files of this GPU that hold nothing verified any more; yours to delete."""


def published_folder(gpu: str, root: Path | None = None) -> Path:
    """``<root>/traces/<gpu>``; without a root, that of a writable checkout, else ``<home>/published/<gpu>``."""
    shipped = shipped_root()
    if root is None and (shipped / "pyproject.toml").is_file() and os.access(shipped, os.W_OK):
        root = shipped
    return root / "traces" / gpu if root is not None else home() / "published" / gpu


def publish(store: Store, gpu: str, root: Path | None = None) -> PublishReport:
    """Write the snapshot of one GPU (a slug, such as ``h200``).

    Peaks go along where they were measured on this machine; those that were published before stay otherwise. Steps of
    searches go along with those that were published before, of today's sources.
    Publishing the same traces again changes no byte, not even the date.

    Raises:
        NotFoundError: nothing of that GPU can be published, and no failure took anything back; says what was left out.
        StoreError: the folder cannot be written, or ``store`` is behind the catalog.
    """
    if store.stale is not None:
        raise StoreError(f"cannot publish: {store.stale}")
    rows, failures = queries.publishable_rows(store, gpu), queries.revoking_rows(store, gpu)
    left_out = _left_out(store, gpu)
    if not rows and not failures:
        raise NotFoundError(_nothing_to_publish(store, gpu, left_out))
    folder = published_folder(gpu, root)
    contents = _trace_files(store, [*rows, *failures], folder)
    peaks = queries.read_peaks(store, gpu, own=True)
    if peaks is not None:
        contents[folder / PEAKS_NAME] = peaks_text(peaks)
    steps = queries.publishable_steps(store, gpu)
    if steps or (folder / TUNING_NAME).is_file():  # those of older sources leave it
        contents[folder / TUNING_NAME] = "".join(step.to_json() + "\n" for step in steps)
    entries = resolver_entries(rows)
    table = folder / TABLE_NAME
    if not _holds(table, entries):
        contents[table] = _table_text(resolver_table(gpu, [*rows, *failures][0]["sm"], entries, datetime.now(UTC)))
    leftover = set(folder.glob("*/*.jsonl")) - set(contents)
    changed = {path: text for path, text in contents.items() if not _same(path, text)}
    for path, text in changed.items():
        write_atomically(path, text.encode())
    return PublishReport(
        folder, len(entries), len(rows), len(failures), left_out, tuple(changed), tuple(sorted(leftover))
    )


def _left_out(store: Store, gpu: str) -> dict[str, int]:
    kept = queries.kept_back(store, gpu)
    counts = {
        "a later failure took the pass back": kept["revoked"],
        f"the worker was not confined (sandbox level below {PUBLISHED_SANDBOX_LEVEL})": kept["unconfined"],
        "passed a screen only (tilegym-db promote)": queries.count_unverified(store, gpu=gpu),
    }
    return {reason: count for reason, count in counts.items() if count}


def _nothing_to_publish(store: Store, gpu: str, left_out: Mapping[str, int]) -> str:
    if left_out:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in left_out.items())
        return f"nothing on '{gpu}' can be published. Left out: {reasons}."
    measured = ", ".join(queries.measured_gpus(store)) or "none"
    return (
        f"no verified trace on '{gpu}' (GPUs with one: {measured}). "
        "Measure first, on that GPU: tilegym-db bench --promote"
    )


def resolver_entries(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per shape, its candidates by latency, from rows ordered as :func:`queries.publishable_rows` gives them."""
    entries = []
    for _, group in itertools.groupby(rows, key=lambda row: [row[key] for key in _SHAPE]):
        candidates = list(group)
        entry = {key: candidates[0][key] for key in _ENTRY}
        entry["candidates"] = [{key: row[key] for key in _CANDIDATE} for row in candidates]
        entries.append(entry)
    return entries


def resolver_table(gpu: str, sm: str, entries: list[dict[str, Any]], published: datetime) -> dict[str, Any]:
    """The content of ``resolver.json``."""
    date = published.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"schema_version": TABLE_VERSION, "gpu": gpu, "sm": sm, "published": date, "entries": entries}


def _table_text(table: dict[str, Any]) -> str:
    """JSON with one entry a line, so that a diff shows which shapes changed."""
    head = json.dumps({key: value for key, value in table.items() if key != "entries"})
    lines = ",\n".join(json.dumps(entry, sort_keys=False) for entry in table["entries"])
    return f'{head[:-1]}, "entries": [\n{lines}\n]}}\n'


def _trace_files(store: Store, rows: list[dict[str, Any]], folder: Path) -> dict[Path, str]:
    traces = queries.read_traces(store, [row["trace_id"] for row in rows])
    ordered = sorted(rows, key=lambda row: (*(row[key] for key in _SHAPE), row["solution"], row["trace_id"]))
    contents: dict[Path, str] = {}
    for (op_type, definition), group in itertools.groupby(ordered, key=lambda row: (row["op_type"], row["definition"])):
        lines = (traces[row["trace_id"]].to_json() + "\n" for row in group)
        contents[folder / op_type / f"{definition}.jsonl"] = "".join(lines)
    return contents


def _holds(path: Path, entries: list[dict[str, Any]]) -> bool:
    """True where a published table says the same already, whenever it was published."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False  # none, or damaged: write it
    return isinstance(found, dict) and found.get("schema_version") == TABLE_VERSION and found.get("entries") == entries


def _same(path: Path, text: str) -> bool:
    try:
        return path.read_bytes() == text.encode()
    except OSError:
        return False
