"""The resolver's table: for each GPU, the latency of each verified solution at each measured point.

``tilegym-db publish`` writes a snapshot as a folder: one file of traces per Definition, and a lock with the digest of each.
Serving reads these files and not the live database: they do not change under a running model and need no database
engine. A Definition's file is read on first use, so loading costs the same for any number of Definitions. A snapshot
that neither the package nor this installation published is not read unless the caller trusts it. Trusted tables from a
shared data set (:mod:`tilegym_db.published.shared_tables`) add to it.

A deployment can lock the kernels that it serves. :meth:`tilegym_db.models.Handle.write_lock` writes the lock. The table
then has the stock code and the locked kernels only, so a newer publication or an edited source never changes what runs.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilegym_db.errors import RecordError
from tilegym_db.files import read_bytes, write_atomically
from tilegym_db.paths import DISABLED, home, is_disabled, shipped_root
from tilegym_db.published.entries import (
    REQUIREMENTS,
    Candidate,
    DtypesKey,
    Entry,
    MeasuredEntries,
    Requirement,
    dtypes_key,
    entries_of,
)
from tilegym_db.published.input_files import (
    LOCK_NAME,
    PEAKS_NAME,
    definition_of,
    is_trace_file,
    read_lines,
    trace_files,
)
from tilegym_db.published.shared_tables import SharedTable, serving, tables_folder, tables_in
from tilegym_db.published.snapshot import Snapshot, bounds_of, open_snapshot, why_implausible
from tilegym_db.records import Definition
from tilegym_db.records.hardware import gpus_meant
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.records.solution import Config, config_id, name_with_config
from tilegym_db.records.text import parse_object
from tilegym_db.records.verdicts import is_wrong

if TYPE_CHECKING:
    from tilegym_db.catalog.reader import Catalog


_log = logging.getLogger(__name__)


class ResolverTable:
    """The entries of one GPU, by Definition and dtypes."""

    def __init__(
        self,
        gpu: str,
        sm: str,
        published: str,
        loaders: Mapping[str, Callable[[], MeasuredEntries]],
        source: str,
        peaks: Callable[[], GpuPeaks | None] = lambda: None,
    ) -> None:
        """Make a table that reads a Definition's entries on first use; error messages name ``source``."""
        self.gpu = gpu
        self.sm = sm
        self.published = published
        self.source = source
        self._loaders = dict(loaders)
        self.load_peaks = peaks
        self._loaded: dict[str, MeasuredEntries] = {}
        self._entries: dict[tuple[str, DtypesKey], tuple[Entry, ...]] = {}
        self.required: frozenset[str] = frozenset()
        """What is required of the bits of kernels (:data:`~tilegym_db.published.entries.REQUIREMENTS`)."""
        self.indexes: dict[Any, Any] = {}
        """Indexes that :mod:`tilegym_db.resolver.resolve` derives from the entries, kept as long as the table."""

    @property
    def size(self) -> int:
        """Return the number of entries, after reading all of them."""
        return sum(1 for _ in self)

    @property
    def definitions(self) -> tuple[str, ...]:
        """Return the Definitions that have a trace file."""
        return tuple(sorted(self._loaders))

    def scalar_hull(self, definition: str) -> Mapping[str, tuple[float, float]]:
        """Return scalar -> the smallest and largest verified number among the points of a Definition."""
        return self._measured(definition).scalars

    def dtypes_of(self, definition: str) -> tuple[Mapping[str, str], ...]:
        """Return the dtype bindings that a Definition was measured with."""
        return tuple(dict(key) for key in self._measured(definition).by_dtypes)

    def entries(self, definition: str, dtypes: Mapping[str, str]) -> tuple[Entry, ...]:
        """Return every measured point of a Definition under one dtype binding."""
        key = definition, dtypes_key(dtypes)
        known = self._entries.get(key)
        if known is None:
            load = self._measured(definition).by_dtypes.get(key[1])
            known = self._entries[key] = () if load is None else load()
        return known

    def believed_entries(self, definition: Definition, dtypes: Mapping[str, str]) -> tuple[Entry, ...]:
        """Return :meth:`entries` without candidates whose figures cannot be true of this Definition."""
        key = definition.digest, dtypes_key(dtypes)
        known = self.indexes.get(key)
        if known is None:
            known = self.indexes[key] = tuple(
                self._believed(entry, definition) for entry in self.entries(definition.name, dtypes)
            )
        found: tuple[Entry, ...] = known
        return found

    def _believed(self, entry: Entry, definition: Definition) -> Entry:
        if entry.definition_digest != definition.digest:
            return entry  # it has another meaning and is never served
        kept = tuple(item for item in entry.candidates if self._doubt(item, entry, definition) is None)
        return entry if len(kept) == len(entry.candidates) else replace(entry, candidates=kept)

    def _doubt(self, candidate: Candidate, entry: Entry, definition: Definition) -> str | None:
        if candidate.latency_us is None:
            return None
        figures = dict(candidate.figures)
        cold, timer = figures.pop("cold_l2", False), figures.pop("timer", "")
        bounds = bounds_of(definition, entry.call.axes, entry.call.dtypes, self._peaks, cold_l2=cold, timer=timer)
        times = {
            "latency_us": candidate.latency_us,
            "ci_low_us": candidate.ci_low_us,
            "ci_high_us": candidate.ci_high_us,
        }
        errors = {name: figures.get(name) for name in ("rel_fro", "worst_row_rel", "matched_ratio")}
        doubt = why_implausible(bounds, **times, **errors)
        if doubt is not None:
            _log.warning("%s: %s of %s is not used: %s", self.source, candidate, entry.call.definition, doubt)
        return doubt

    @property
    def _peaks(self) -> GpuPeaks | None:
        if "peaks" not in self.indexes:
            self.indexes["peaks"] = self.load_peaks()
        peaks: GpuPeaks | None = self.indexes["peaks"]
        return peaks

    def __iter__(self) -> Iterator[Entry]:
        """Yield every entry, Definition by Definition."""
        for definition in self.definitions:
            for dtypes in self.dtypes_of(definition):
                yield from self.entries(definition, dtypes)

    def requiring(self, required: frozenset[str]) -> ResolverTable:
        """Return a table of the same entries, whose kernels must have some properties to serve."""
        loaders = {name: partial(self._measured, name) for name in self._loaders}
        table = ResolverTable(self.gpu, self.sm, self.published, loaders, self.source, self.load_peaks)
        table.required = required
        return table

    def _measured(self, definition: str) -> MeasuredEntries:
        known = self._loaded.get(definition)
        if known is None:
            known = self._loaded[definition] = (
                self._loaders[definition]() if definition in self._loaders else MeasuredEntries({}, {})
            )
        return known


def table_folder(gpu: str, *, trust: bool = False) -> Path | None:
    """Return the snapshot of a GPU slug or family. One published on this machine wins over the shipped one of that GPU.

    A foreign snapshot is skipped with a warning, unless ``trust``.
    """
    places = (home() / "published", shipped_root() / "traces")
    published = [path for place in places for path in sorted(place.glob("*")) if _is_published(path)]
    for slug in gpus_meant(gpu, (path.name for path in published)):
        for path in published:
            if path.name == slug and (trust or _is_vouched_for(path)):
                return path
    return None


def published_gpus() -> list[str]:
    """Return the GPUs that this user, the package or a team published for, trusted or not."""
    places = (home() / "published", shipped_root() / "traces", tables_folder(home()))
    return sorted({path.name for place in places for path in place.glob("*") if path.is_dir()})


def _is_published(folder: Path) -> bool:
    return (folder / LOCK_NAME).is_file() or bool(trace_files(folder))


def _is_vouched_for(folder: Path) -> bool:
    snapshot = open_snapshot(folder, home())
    if snapshot.origin == "foreign":
        _log.warning("%s. Until then nothing in it is served.", snapshot.how_to_trust)
    return snapshot.origin != "foreign"


def load_table(gpu: str, *, trust: bool = False) -> ResolverTable | None:
    """Return the published table of a GPU, or None if it has none, or ``TILEGYM_DB_DISABLE`` is set.

    The table is cached until the snapshot changes. :func:`why_no_table` has the reason for None.

    Args:
        trust: also read snapshots that neither the package nor this installation published.

    Raises:
        RecordError: a file differs from its lock, or was written by a newer version.
    """
    if is_disabled():
        return None
    folder = table_folder(gpu, trust=trust)
    shared = _shared_tables(gpu if folder is None else folder.name, trust)
    stamps = () if folder is None else (_stamp(folder / LOCK_NAME),)
    if not shared:
        return None if folder is None else _cached_table(folder, trust, stamps)
    places = tuple(table.snapshot.folder for table in shared)
    return _cached_with_shared(folder, trust, (*stamps, *(_stamp(path / LOCK_NAME) for path in places)), places)


def table_for(catalog: Catalog, gpu: str) -> ResolverTable | None:
    """Return the published table of a GPU as a catalog may serve from it: with foreign traces, a lock, or requirements.

    Errors are those of :func:`load_table`.
    """
    table = load_table(gpu, trust=catalog.trust_foreign)
    if table is not None and catalog.lock is not None:
        table = _locked(catalog.lock, table)
    return table if table is None or not catalog.required else _requiring(catalog.required, table)


@lru_cache(maxsize=8)
def _requiring(required: frozenset[str], table: ResolverTable) -> ResolverTable:
    return table.requiring(required)


@lru_cache(maxsize=8)
def _locked(lock: ServingLock, table: ResolverTable) -> ResolverTable:
    return lock.applied_to(table)


def why_no_table(gpu: str) -> str:
    """Return the reason for which :func:`load_table` returned None."""
    return DISABLED if is_disabled() else f"nothing is published for {gpu}"


def _shared_tables(gpu: str, trust: bool) -> list[SharedTable]:
    """Return a team's tables for a GPU slug; for a family, those of its first slug that has any."""
    there = serving((table for slug in _shared_slugs(gpu) for table in tables_in(home(), slug)), trust=trust)
    slugs = gpus_meant(gpu, (table.gpu for table in there))
    return [table for table in there if table.gpu == slugs[0]] if slugs else []


def _shared_slugs(gpu: str) -> list[str]:
    try:
        names = os.listdir(tables_folder(home()))
    except OSError:  # the folder does not exist
        return []
    return gpus_meant(gpu, names)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=8)
def _cached_table(folder: Path, trust: bool, _stamps: tuple[tuple[int, int], ...]) -> ResolverTable:
    return read_folder(folder, trust=trust)


@lru_cache(maxsize=8)
def _cached_with_shared(
    folder: Path | None, trust: bool, _stamps: tuple[tuple[int, int], ...], shared: tuple[Path, ...]
) -> ResolverTable:
    """Return the published table of a folder, extended by the team's tables, which never change."""
    published = None if folder is None else _snapshot_of(folder, trust)
    own = {} if published is None else _trace_files(published)
    team = [open_snapshot(path, home()) for path in shared]
    theirs = [_trace_files(snapshot) for snapshot in team]
    loaders = {name: file.entries for name, file in own.items()}
    for name in {name for files in theirs for name in files}:
        added = [files[name] for files in theirs if name in files]
        loaders[name] = partial(merged_entries, own.get(name), added)

    def peaks() -> GpuPeaks | None:
        found = None if published is None else _peaks_of(published)
        return found or next(filter(None, map(_peaks_of_team, team)), None)

    snapshots = [*([published] if published is not None else []), *team]
    date = max(snapshot.published for snapshot in snapshots)
    sources = ", ".join(str(snapshot.folder) for snapshot in snapshots)
    return ResolverTable(snapshots[0].gpu, snapshots[0].sm, date, loaders, sources, peaks)


def read_folder(folder: Path, *, trust: bool) -> ResolverTable:
    """Return the table of one published folder (``traces/<gpu>``); arguments and errors as for :func:`load_table`."""
    snapshot = _snapshot_of(folder, trust)
    loaders = {name: file.entries for name, file in _trace_files(snapshot).items()}
    return ResolverTable(
        snapshot.gpu, snapshot.sm, snapshot.published, loaders, str(snapshot.folder), lambda: _peaks_of(snapshot)
    )


def _snapshot_of(folder: Path, trust: bool) -> Snapshot:
    snapshot = open_snapshot(folder, home())
    return replace(snapshot, files={}) if trust and snapshot.origin == "foreign" else snapshot


def _trace_files(snapshot: Snapshot) -> dict[str, TraceFile]:
    """Return the trace files of a folder, by Definition."""
    names = snapshot.files or [path.relative_to(snapshot.folder).as_posix() for path in trace_files(snapshot.folder)]
    paths = [snapshot.folder / name for name in names if is_trace_file(name)]
    return {definition_of(path): TraceFile(snapshot, path) for path in paths}


def _peaks_of(snapshot: Snapshot) -> GpuPeaks | None:
    path = snapshot.folder / PEAKS_NAME
    return GpuPeaks.from_json(snapshot.read(path, "peaks"), path) if path.is_file() else None


def _peaks_of_team(snapshot: Snapshot) -> GpuPeaks | None:
    """Return peaks as :func:`_peaks_of` does, but None for a file that differs from its lock."""
    try:
        return _peaks_of(snapshot)
    except RecordError as error:
        _log.warning("the peaks of a table of a team are passed over: %s", error)
        return None


# ---- merged ---------------------------------------------------------------------------------------
# Adds a team's tables to the published one, by Definition: new points, and candidates at points that both have.
# If the published table has a source and config at a point, other times of it do not count. A failure revokes passes of its
# source in all tables, as it does in the database.


@dataclass(frozen=True)
class TraceFile:
    """The trace file of a Definition in a published folder or a team's folder."""

    snapshot: Snapshot
    path: Path

    def traces(self) -> list[dict[str, Any]]:
        """Read the object of every line."""
        return read_lines(self.snapshot.read(self.path, "trace file"), self.path)

    def entries(self) -> MeasuredEntries:
        """Return the entries of the file, with the origin of the folder; raise the errors of :meth:`traces`."""
        traces = self.traces()
        lost = revoked_passes(traces)
        return self.entries_of([trace for trace in traces if trace.get("trace_id") not in lost])

    def entries_of(self, traces: Sequence[dict[str, Any]]) -> MeasuredEntries:
        """Return the entries of its traces, which :meth:`traces` read."""
        return entries_of(traces, self.path, self.snapshot.origin)


def merged_entries(own: TraceFile | None, shared: Sequence[TraceFile]) -> MeasuredEntries:
    """Return the entries of one Definition from the published table and those of a team.

    A team's file that differs from its lock is left out with a warning. For a file of the published table this is an
    error.
    """
    groups: list[MeasuredEntries] = []
    traces: list[dict[str, Any]] = []
    for file in [own, *shared] if own is not None else shared:
        try:
            found = file.traces()
            groups.append(file.entries_of(found))
        except RecordError as error:
            if file is own:
                raise
            _log.warning("a table of a team is passed over: %s", error)
            continue
        traces += found
    lost = revoked_passes(traces)
    keys = dict.fromkeys(key for measured in groups for key in measured.by_dtypes)
    by_dtypes = {key: partial(_joined, groups, key, lost) for key in keys}
    return MeasuredEntries(by_dtypes, groups[0].scalars if groups else {})


def revoked_passes(traces: Sequence[dict[str, Any]]) -> frozenset[str]:
    """Return the ids of passes revoked by a failure of the same source, as the view ``revocations`` does for the database."""
    overruled = {
        (trace.get("overrules") or {}).get("trace_id") for trace in traces if trace.get("status") == "OVERRULED"
    }
    failures = [trace for trace in traces if _revokes(trace) and trace["trace_id"] not in overruled]
    return frozenset(
        trace["trace_id"]
        for trace in traces
        if trace.get("status") == "PASSED" and any(_takes_back(failure, trace) for failure in failures)
    )


def _revokes(said: dict[str, Any]) -> bool:
    return said.get("status") not in ("PASSED", "UNSUPPORTED", "OVERRULED") and said.get("tier") != "interpreter"


def _takes_back(failure: dict[str, Any], passed: dict[str, Any]) -> bool:
    source = ("definition_digest", "solution_digest", "gpu")
    if any(failure[name] != passed[name] for name in source):
        return False
    is_final = is_wrong(failure["status"], (failure.get("failure") or {}).get("gate"))
    if not is_final and _time(failure) < _time(passed):
        return False
    if failure["status"] == "COMPILE_ERROR" and failure["workload_uuid"] != passed["workload_uuid"]:
        return False
    is_cheat = failure["status"] == "REJECTED"
    return is_cheat or config_id(failure.get("config", {})) == config_id(passed.get("config", {}))


def _time(trace: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(trace["timestamp"])


def _joined(groups: Sequence[MeasuredEntries], key: DtypesKey, lost: frozenset[str]) -> tuple[Entry, ...]:
    points: dict[str, Entry] = {}
    for measured in groups:
        load = measured.by_dtypes.get(key)
        for entry in load() if load is not None else ():
            candidates = [_ranged(one, measured) for one in entry.candidates if one.trace_id not in lost]
            where = _point(entry)
            known = points.get(where)
            if known is not None:
                has = {_identity(one) for one in known.candidates}
                candidates = [*known.candidates, *(one for one in candidates if _identity(one) not in has)]
                candidates.sort(key=lambda one: (one.latency_us or 0.0, one.trace_id or ""))
            points[where] = replace(known or entry, candidates=tuple(candidates))
    return tuple(entry for entry in points.values() if entry.candidates)


def _ranged(candidate: Candidate, measured: MeasuredEntries) -> Candidate:
    """Give a candidate older than recorded ranges (decision 0024) the scalar range of the table it came from."""
    return candidate if candidate.scalar_ranges is not None else replace(candidate, scalar_ranges=measured.scalars)


def _point(entry: Entry) -> str:
    parts = entry.call.axes, entry.call.scalars, entry.call.layouts
    return json.dumps([entry.definition_digest, *(sorted(part.items()) for part in parts)], default=str)


# ---- Locks of deployments --------------------------------------------------------------------------------

FORMAT = 1
REQUIRING_FORMAT = 2
"""The format of a lock that states ``require``. Readers of the first format would serve without it, so they refuse it."""
_TEXTS = ("definition", "definition_digest", "solution", "solution_digest", "gpu")


@dataclass(frozen=True)
class LockedKernel:
    """A kernel that served calls: its operator, source and config, by digest, and the GPU slug of its measurement."""

    definition: str
    definition_digest: str
    solution: str
    solution_digest: str
    gpu: str
    config_text: str = "{}"
    """The config as canonical JSON."""

    @property
    def config(self) -> Config:
        """A value per tunable."""
        config: Config = json.loads(self.config_text)
        return config

    def __str__(self) -> str:
        """Return the form ``rms_norm_triton[BLOCK_M=2]``."""
        return name_with_config(self.solution, self.config)

    @classmethod
    def of(cls, definition: str, definition_digest: str, candidate: Candidate, gpu: str) -> LockedKernel:
        """Return the entry of a candidate that a table of a GPU has."""
        text = json.dumps(dict(candidate.config), sort_keys=True)
        return cls(definition, definition_digest, candidate.solution, candidate.solution_digest, gpu, text)

    def candidates_in(self, table: ResolverTable) -> Iterator[Candidate]:
        """Yield the measurements of this kernel with this operator that a table has."""
        if table.gpu == self.gpu:
            for dtypes in table.dtypes_of(self.definition):
                for entry in table.entries(self.definition, dtypes):
                    if entry.definition_digest == self.definition_digest:
                        yield from (one for one in entry.candidates if _identity(one) == _identity(self))


@dataclass(frozen=True)
class ServingLock:
    """The kernels that may serve, as a file states them."""

    source: str
    """The file, for messages."""
    kernels: tuple[LockedKernel, ...]
    required: frozenset[Requirement] = frozenset()
    """What was required of the bits of these kernels, and is required wherever the lock is used."""

    @property
    def definitions(self) -> frozenset[str]:
        """The operators that have a locked kernel."""
        return frozenset(kernel.definition for kernel in self.kernels)

    @classmethod
    def read(cls, path: Path) -> ServingLock:
        """Read a lock; refuse one that a newer version wrote."""
        content = parse_object(read_bytes(path, "serving lock"), "serving lock", path)
        if not isinstance(content, dict) or content.get("serving_lock") not in (FORMAT, REQUIRING_FORMAT):
            raise RecordError(
                f'{path}: this is no lock of served kernels ("serving_lock": {FORMAT}). Write one with handle.write_lock(path).',
                code="serving_lock_invalid",
            )
        kernels = content.get("kernels")
        if not isinstance(kernels, list) or not all(map(_is_kernel, kernels)):
            raise RecordError(
                f"{path}: kernels: each has the texts {', '.join(_TEXTS)} and the object config. Write the lock again.",
                code="serving_lock_invalid",
            )
        stated = content.get("require", [])
        required = frozenset(name for name in REQUIREMENTS if isinstance(stated, list) and name in stated)
        is_requiring = content["serving_lock"] == REQUIRING_FORMAT
        if not isinstance(stated, list) or len(required) != len(stated) or bool(stated) != is_requiring:
            raise RecordError(
                f"{path}: require: format {REQUIRING_FORMAT} lists {' or '.join(REQUIREMENTS)}, and format {FORMAT} has no such "
                "key. Write the lock again: handle.write_lock(path)",
                code="serving_lock_invalid",
            )
        return cls(
            str(path),
            tuple(
                LockedKernel(
                    **{name: one[name] for name in _TEXTS}, config_text=json.dumps(one["config"], sort_keys=True)
                )
                for one in kernels
            ),
            required,
        )

    def applied_to(self, table: ResolverTable) -> ResolverTable:
        """Return a table whose candidates are stock code, other baselines and the locked kernels."""

        allowed = set(map(_identity, self.kernels))
        loaders = {name: partial(_kept, table, name, allowed) for name in table.definitions}
        return ResolverTable(table.gpu, table.sm, table.published, loaders, table.source, table.load_peaks)


def write_lock_file(path: Path, kernels: Iterable[LockedKernel], required: Collection[str]) -> None:
    """Write kernels as a lock, sorted; the same kernels give the same bytes."""
    rows = [
        {**{name: getattr(kernel, name) for name in _TEXTS}, "config": kernel.config}
        for kernel in sorted(kernels, key=lambda one: (one.definition, one.solution, one.config_text, one.gpu))
    ]
    content: dict[str, Any] = {"serving_lock": REQUIRING_FORMAT if required else FORMAT}
    content |= {"require": [name for name in REQUIREMENTS if name in required]} if required else {}
    content |= {"kernels": rows}
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def _identity(kernel: LockedKernel | Candidate) -> tuple[str, str, str]:
    """Return what tells a kernel from others: its name, the digest of its source, and its config."""
    return kernel.solution, kernel.solution_digest, config_id(kernel.config)


def _is_kernel(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(isinstance(value.get(name), str) for name in _TEXTS)
        and isinstance(value.get("config"), dict)
    )


def _kept(table: ResolverTable, definition: str, allowed: set[tuple[str, str, str]]) -> MeasuredEntries:
    by_dtypes = {
        tuple(sorted(dtypes.items())): partial(_kept_entries, table, definition, dtypes, allowed)
        for dtypes in table.dtypes_of(definition)
    }
    return MeasuredEntries(by_dtypes, table.scalar_hull(definition))


def _kept_entries(
    table: ResolverTable, definition: str, dtypes: Mapping[str, str], allowed: set[tuple[str, str, str]]
) -> tuple[Entry, ...]:
    return tuple(
        replace(
            entry,
            candidates=tuple(one for one in entry.candidates if one.role != "kernel" or _identity(one) in allowed),
        )
        for entry in table.entries(definition, dtypes)
    )
