"""Resolver tables of tests: entries in memory, or written to a folder as this installation publishes them.

An entry is a measured point as a dict (definition, axes, dtypes, scalars, layouts, ...) with a list of ``candidates``,
whose keys are the fields of :class:`tilegym_db.published.entries.Candidate`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tilegym_db.files import write_atomically
from tilegym_db.published.entries import Candidate, Entry, MeasuredEntries, dtypes_key, scalar_hull
from tilegym_db.published.input_files import LOCK_NAME, SUFFIX, json_lines, packed
from tilegym_db.published.snapshot import lock_text, sha256
from tilegym_db.published.table import ResolverTable
from tilegym_db.records.call import Call

CALL_KEYS = ("definition", "axes", "dtypes", "layouts", "scalars")


def table_of(gpu: str, entries: Sequence[dict[str, Any]], *, published: str = "2026-11-21") -> ResolverTable:
    """Return a table of entries without a file."""
    by_definition: dict[str, list[Entry]] = {}
    for raw in entries:
        about = {name: value for name, value in raw.items() if name not in (*CALL_KEYS, "candidates")}
        call = Call(**{name: raw[name] for name in CALL_KEYS if name in raw})
        found = tuple(Candidate(**candidate) for candidate in raw["candidates"])
        by_definition.setdefault(raw["definition"], []).append(Entry(call, **about, candidates=found))
    loaders = {name: partial(_measured, found) for name, found in by_definition.items()}
    return ResolverTable(gpu, "sm_90", published, loaders, "a table")


def _measured(entries: list[Entry]) -> MeasuredEntries:
    grouped: dict[Any, list[Entry]] = {}
    for entry in entries:
        grouped.setdefault(dtypes_key(entry.call.dtypes), []).append(entry)
    by_dtypes = {key: partial(tuple, found) for key, found in grouped.items()}
    return MeasuredEntries(by_dtypes, scalar_hull(entry.call.scalars for entry in entries))


def write_table(
    folder: Path,
    entries: Sequence[dict[str, Any]],
    home: Path,
    *,
    sm: str = "sm_90",
    published: str = "2026-11-20T10:00:00Z",
) -> None:
    """Write the trace files of a GPU's folder, ``.../<gpu>``, and their lock, signed with the key of a home folder."""
    write_files(folder, table_files(entries), home, sm=sm, published=published)


def table_files(entries: Sequence[dict[str, Any]]) -> dict[str, bytes]:
    """Return the trace files of entries: content by the path below a GPU's folder."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        name = f"{entry['op_type']}/{entry['definition']}{SUFFIX}"
        lines.setdefault(name, []).extend(_trace(entry, candidate) for candidate in entry["candidates"])
    return {name: packed(json_lines(traces)) for name, traces in lines.items()}


def write_files(
    folder: Path, files: Mapping[str, bytes], home: Path, *, sm: str, published: str = "2026-11-20T10:00:00Z"
) -> None:
    """Write trace files in place of those of a GPU's folder, and their lock, signed with the key of a home folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    lock_folder(folder, home, gpu=folder.name, sm=sm, published=published)


def lock_folder(folder: Path, home: Path, *, gpu: str, sm: str, published: str) -> None:
    """Write a lock over all files of a folder as they are now."""
    files = {
        path.relative_to(folder).as_posix(): sha256(path.read_bytes())
        for path in folder.rglob("*.json*")
        if path.name != LOCK_NAME
    }
    write_atomically(folder / LOCK_NAME, lock_text(folder, gpu, sm, published, files, home).encode())


def _trace(entry: dict[str, Any], candidate: dict[str, Any]) -> dict[str, Any]:
    """Return what the resolver reads of a trace."""
    stock = {"with": "stock", "provides": "stock", "ratio": candidate["speedup"], "ci_low": candidate["speedup_ci_low"]}
    times = {
        name: candidate[name] for name in ("latency_us", "ci_low_us", "ci_high_us", "host_us") if name in candidate
    }
    envelope = {"cases": candidate["envelope_cases"]}
    if candidate.get("scalar_ranges"):
        envelope["scalars"] = candidate["scalar_ranges"]
    envelope |= {name: candidate[name] for name in ("largest", "largest_elements", "batch_slices") if name in candidate}
    about = (
        "solution",
        "solution_digest",
        "language",
        "role",
        "provides",
        "config",
        "tier",
        "sandbox_level",
        "trace_id",
        "libs",
    )
    return {
        **{name: value for name, value in entry.items() if name != "candidates"},
        **{name: candidate[name] for name in about if candidate.get(name) is not None},
        **({"correctness": {"deterministic": True}} if candidate.get("deterministic") else {}),
        "status": "PASSED",
        "run_id": "a-run",
        "performance": {**times, "comparisons": [stock]},
        "envelope": envelope,
    }
