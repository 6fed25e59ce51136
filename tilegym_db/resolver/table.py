"""The published snapshot the resolver reads: per GPU, which verified solution took how long at which measured point.

A snapshot is a folder, written by ``tilegym-db publish``: one trace set per Definition, and a lock with the digest of each.
Serving reads these files and never the live database: they do not change under a running model and need no database engine.
A Definition's set is read when that Definition is first asked for, so that loading costs the same however many there are.
What neither came with the package nor was published by this installation is not read, unless the caller trusts it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Self

from pydantic_core import from_json

from tilegym_db.errors import RecordError
from tilegym_db.paths import home, shipped_root
from tilegym_db.records import Definition
from tilegym_db.records.hardware import gpus_meant
from tilegym_db.records.peaks import GpuPeaks
from tilegym_db.records.plausible import bounds_of, why_implausible
from tilegym_db.resolver.entries import (
    Candidate,
    DtypesKey,
    Entry,
    MeasuredEntries,
    dtypes_key,
    entries_of,
    scalar_hull,
)
from tilegym_db.store.input_files import LOCK_NAME, OLD_TABLE_NAME, PEAKS_NAME, is_trace_file, trace_files
from tilegym_db.store.snapshot import Snapshot, open_snapshot

__all__ = ["Candidate", "Entry", "ResolverTable", "load_table", "read_folder", "table_folder"]

_log = logging.getLogger(__name__)

OLD_TABLE_VERSION = 2
_WRITE_ANEW = "Write it anew: tilegym-db publish --gpu GPU"


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
        """A table that reads a Definition's entries when they are asked for; ``source`` names it in error messages."""
        self.gpu = gpu
        self.sm = sm
        self.published = published
        self.source = source
        self._loaders = dict(loaders)
        self._load_peaks = peaks
        self._loaded: dict[str, MeasuredEntries] = {}
        self._entries: dict[tuple[str, DtypesKey], tuple[Entry, ...]] = {}
        self.indexes: dict[Any, Any] = {}
        """Derived from the entries by :mod:`tilegym_db.resolver.index`; they live as long as the table."""

    @classmethod
    def from_entries(
        cls, gpu: str, sm: str, published: str, entries: list[dict[str, Any]], source: str, origin: str = "local"
    ) -> Self:
        """A table of parsed JSON ``entries``, as ``resolver.json`` had them; ``source`` is the file, for error messages."""
        grouped: dict[str, list[dict[str, Any]]] = {}
        for raw in entries:
            grouped.setdefault(raw["definition"], []).append(raw)

        def loader(raws: list[dict[str, Any]]) -> Callable[[], MeasuredEntries]:
            return lambda: _old_entries([_old_entry(raw, source, origin) for raw in raws])

        return cls(gpu, sm, published, {name: loader(raws) for name, raws in grouped.items()}, source)

    @property
    def size(self) -> int:
        """How many entries there are; reads all of them."""
        return sum(1 for _ in self)

    @property
    def definitions(self) -> tuple[str, ...]:
        """The Definitions that have a set of traces."""
        return tuple(sorted(self._loaders))

    def scalar_hull(self, definition: str) -> Mapping[str, tuple[float, float]]:
        """Scalar -> the smallest and largest number among the points of a Definition: what its candidates were verified with."""
        return self._measured(definition).scalars

    def dtypes_of(self, definition: str) -> tuple[Mapping[str, str], ...]:
        """The dtype bindings that a Definition was measured with."""
        return tuple(dict(key) for key in self._measured(definition).by_dtypes)

    def entries(self, definition: str, dtypes: Mapping[str, str]) -> tuple[Entry, ...]:
        """Every measured point of a Definition under one dtype binding."""
        key = definition, dtypes_key(dtypes)
        known = self._entries.get(key)
        if known is None:
            load = self._measured(definition).by_dtypes.get(key[1])
            known = self._entries[key] = () if load is None else load()
        return known

    def believed_entries(self, definition: Definition, dtypes: Mapping[str, str]) -> tuple[Entry, ...]:
        """As :meth:`entries`, without candidates whose figures cannot be true of this Definition."""
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
            return entry  # of another meaning, and never served
        kept = tuple(item for item in entry.candidates if self._doubt(item, entry, definition) is None)
        return entry if len(kept) == len(entry.candidates) else replace(entry, candidates=kept)

    def _doubt(self, candidate: Candidate, entry: Entry, definition: Definition) -> str | None:
        if candidate.latency_us is None:
            return None
        figures = dict(candidate.figures)
        cold, timer = figures.pop("cold_l2", False), figures.pop("timer", "")
        bounds = bounds_of(definition, entry.axes, entry.dtypes, self._peaks, cold_l2=cold, timer=timer)
        times = {
            "latency_us": candidate.latency_us,
            "ci_low_us": candidate.ci_low_us,
            "ci_high_us": candidate.ci_high_us,
        }
        errors = {name: figures.get(name) for name in ("rel_fro", "worst_row_rel", "matched_ratio")}
        doubt = why_implausible(bounds, **times, **errors)
        if doubt is not None:
            _log.warning("%s: %s of %s is not used: %s", self.source, candidate, entry.definition, doubt)
        return doubt

    @property
    def _peaks(self) -> GpuPeaks | None:
        if "peaks" not in self.indexes:
            self.indexes["peaks"] = self._load_peaks()
        peaks: GpuPeaks | None = self.indexes["peaks"]
        return peaks

    def __iter__(self) -> Iterator[Entry]:
        """Every entry, Definition by Definition."""
        for definition in self.definitions:
            for dtypes in self.dtypes_of(definition):
                yield from self.entries(definition, dtypes)

    def _measured(self, definition: str) -> MeasuredEntries:
        known = self._loaded.get(definition)
        if known is None:
            known = self._loaded[definition] = (
                self._loaders[definition]() if definition in self._loaders else MeasuredEntries({}, {})
            )
        return known


def table_folder(gpu: str, *, trust: bool = False) -> Path | None:
    """The snapshot of a GPU slug or family: one published on this machine wins over the shipped one of the same GPU.

    A foreign one is passed over, with a warning, unless ``trust``.
    """
    places = (home() / "published", shipped_root() / "traces")
    published = [path for place in places for path in sorted(place.glob("*")) if _is_published(path)]
    for slug in gpus_meant(gpu, (path.name for path in published)):
        for path in published:
            if path.name == slug and (trust or _is_vouched_for(path)):
                return path
    return None


def _is_published(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (LOCK_NAME, OLD_TABLE_NAME)) or bool(trace_files(folder))


def _is_vouched_for(folder: Path) -> bool:
    snapshot = open_snapshot(folder, home())
    if snapshot.origin == "foreign":
        _log.warning("%s. Until then nothing in it is served.", snapshot.how_to_trust)
    return snapshot.origin != "foreign"


def load_table(gpu: str, *, trust: bool = False) -> ResolverTable | None:
    """The published table of a GPU, or None where nothing was published for it. Kept until the snapshot changes.

    Args:
        gpu: a slug or a family.
        trust: read also what neither came with the package nor was published by this installation.

    Raises:
        RecordError: a file is not what was published, or was written by a newer version.
    """
    folder = table_folder(gpu, trust=trust)
    if folder is None:
        return None
    return _cached_table(folder, trust, *(_stamp(folder / name) for name in (LOCK_NAME, OLD_TABLE_NAME)))


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=8)
def _cached_table(folder: Path, trust: bool, _lock: tuple[int, int], _old: tuple[int, int]) -> ResolverTable:
    return read_folder(folder, trust=trust)


def read_folder(folder: Path, *, trust: bool = False) -> ResolverTable:
    """The table of one published folder (``traces/<gpu>``); arguments and errors as for :func:`load_table`."""
    snapshot = open_snapshot(folder, home())
    if trust and snapshot.origin == "foreign":
        snapshot = replace(snapshot, files={})
    old = folder / OLD_TABLE_NAME
    if old.is_file() and (OLD_TABLE_NAME in snapshot.files or not trace_files(folder)):
        return _old_table(snapshot.read(old, "resolver table"), old, snapshot.origin)
    return _table_of_sets(snapshot)


def _table_of_sets(snapshot: Snapshot) -> ResolverTable:
    names = snapshot.files or [path.relative_to(snapshot.folder).as_posix() for path in trace_files(snapshot.folder)]
    paths = [snapshot.folder / name for name in names if is_trace_file(name)]

    def loader(path: Path) -> Callable[[], MeasuredEntries]:
        return lambda: entries_of(snapshot.read(path, "trace set"), path, snapshot.origin)

    def peaks() -> GpuPeaks | None:
        path = snapshot.folder / PEAKS_NAME
        return GpuPeaks.from_json(snapshot.read(path, "peaks"), path) if path.is_file() else None

    loaders = {path.stem: loader(path) for path in paths}
    return ResolverTable(snapshot.gpu, snapshot.sm, snapshot.published, loaders, str(snapshot.folder), peaks)


def _old_table(text: bytes, path: Path, origin: str) -> ResolverTable:
    try:
        content = from_json(text, cache_strings="all")
    except ValueError as error:
        raise RecordError(f"{path}: cannot read this resolver table: {error}. {_WRITE_ANEW}") from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > OLD_TABLE_VERSION:
        raise RecordError(
            f"{path}: schema_version {version} was written by a newer tilegym-db (this one reads {OLD_TABLE_VERSION}). "
            "Upgrade tilegym-db, or publish again with this version."
        )
    try:
        head = content["gpu"], content["sm"], content["published"]
        return ResolverTable.from_entries(*head, content["entries"], str(path), origin)
    except (TypeError, KeyError) as error:
        raise RecordError(f"{path}: not a resolver table: {error} is missing or wrong. {_WRITE_ANEW}") from None


def _old_entries(entries: list[Entry]) -> MeasuredEntries:
    grouped: dict[DtypesKey, list[Entry]] = {}
    for entry in entries:
        grouped.setdefault(dtypes_key(entry.dtypes), []).append(entry)
    by_dtypes = {key: partial(tuple, found) for key, found in grouped.items()}
    return MeasuredEntries(by_dtypes, scalar_hull(entry.scalars for entry in entries))


def _old_entry(raw: dict[str, Any], source: str, origin: str) -> Entry:
    try:
        candidates = tuple(Candidate(**{"origin": origin, **candidate}) for candidate in raw["candidates"])
        return Entry(**{**raw, "candidates": candidates})
    except (TypeError, KeyError) as error:
        what = f"an entry of {raw.get('definition')} is not valid: {error}"
        raise RecordError(f"{source}: {what}. {_WRITE_ANEW}") from None
