"""The published snapshot the resolver reads: per GPU, which verified solution took how long at which measured point.

A snapshot is one JSON file, ``resolver.json``, written by ``tilegym-db publish``. Serving reads this file and never the
live database: it does not change under a running model and needs no database engine. Parsing is the only work at load;
entries become objects per Definition, on first use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from tilegym_db.errors import RecordError
from tilegym_db.paths import home, shipped_root
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.hardware import same_gpu
from tilegym_db.records.solution import Config, name_with_config

__all__ = ["TABLE_FILE", "Candidate", "Entry", "ResolverTable", "load_table", "read_table", "table_path"]

TABLE_FILE = "resolver.json"
SCHEMA_VERSION = 2
_WRITE_ANEW = "Write it anew: tilegym-db publish"

DtypesKey = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Candidate:
    """A solution under one config, with what was measured for it; the measurement is absent where there was none.

    Times are microseconds of device time with their 99% confidence interval; ``host_us`` is what the call itself took, until it
    returned; ``speedup`` is against the stock code.
    """

    solution: str
    solution_digest: str
    language: str
    role: str
    provides: str | None = None
    config: Config = field(default_factory=dict)
    latency_us: float | None = None
    ci_low_us: float | None = None
    ci_high_us: float | None = None
    host_us: float | None = None
    speedup: float | None = None
    speedup_ci_low: float | None = None
    tier: str | None = None
    sandbox_level: int | None = None
    trace_id: str | None = None
    envelope_cases: int | None = None

    def __str__(self) -> str:
        """``rms_norm_triton[BLOCK_M=2, num_warps=4]``."""
        return name_with_config(self.solution, self.config)


@dataclass(frozen=True)
class Entry:
    """One measured point: a Definition at concrete axes, dtypes, scalars and layouts, with its verified candidates."""

    definition: str
    definition_version: str
    definition_digest: str
    op_type: str
    axes: Mapping[str, int]
    candidates: tuple[Candidate, ...]
    dtypes: Mapping[str, str] = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)

    def log_distance(self, axes: Mapping[str, int]) -> float:
        """Euclidean distance between two points in log2 of the axis sizes: 1.0 is one axis off by a factor of two."""
        return math.hypot(*(math.log2(max(size, 1) / max(self.axes[name], 1)) for name, size in axes.items()))


class ResolverTable:
    """The entries of one GPU, by Definition and dtypes."""

    def __init__(self, gpu: str, sm: str, published: str, entries: list[dict[str, Any]], source: str) -> None:
        """Group parsed JSON ``entries`` by Definition; ``source`` is the file, for error messages."""
        self.gpu = gpu
        self.sm = sm
        self.published = published
        self.source = source
        self.size = len(entries)
        self._raw: dict[str, list[dict[str, Any]]] = {}
        self._entries: dict[str, dict[DtypesKey, tuple[Entry, ...]]] = {}
        self.indexes: dict[Any, Any] = {}
        """Derived from the entries by :mod:`tilegym_db.resolver.index`; they live as long as the table."""
        for entry in entries:
            self._raw.setdefault(entry["definition"], []).append(entry)

    @property
    def definitions(self) -> tuple[str, ...]:
        """The Definitions that have at least one entry."""
        return tuple(sorted(self._raw))

    def dtypes_of(self, definition: str) -> tuple[Mapping[str, str], ...]:
        """The dtype bindings that a Definition was measured with."""
        return tuple(dict(key) for key in self._by_dtypes(definition))

    def entries(self, definition: str, dtypes: Mapping[str, str]) -> tuple[Entry, ...]:
        """Every measured point of a Definition under one dtype binding."""
        return self._by_dtypes(definition).get(_dtypes_key(dtypes), ())

    def __iter__(self) -> Iterator[Entry]:
        """Every entry, Definition by Definition."""
        for definition in self.definitions:
            for entries in self._by_dtypes(definition).values():
                yield from entries

    def _by_dtypes(self, definition: str) -> dict[DtypesKey, tuple[Entry, ...]]:
        known = self._entries.get(definition)
        if known is None:
            grouped: dict[DtypesKey, list[Entry]] = {}
            for raw in self._raw.get(definition, ()):
                entry = self._entry(raw)
                grouped.setdefault(_dtypes_key(entry.dtypes), []).append(entry)
            known = self._entries[definition] = {key: tuple(entries) for key, entries in grouped.items()}
        return known

    def _entry(self, raw: dict[str, Any]) -> Entry:
        try:
            return Entry(**{**raw, "candidates": tuple(Candidate(**candidate) for candidate in raw["candidates"])})
        except (TypeError, KeyError) as error:
            what = f"an entry of {raw.get('definition')} is not valid: {error}"
            raise RecordError(f"{self.source}: {what}. {_WRITE_ANEW}") from None


def _dtypes_key(dtypes: Mapping[str, str]) -> DtypesKey:
    return tuple(sorted(dtypes.items()))


def table_path(gpu: str) -> Path | None:
    """The snapshot of a GPU slug or family: one published on this machine wins over the shipped one of the same GPU."""
    for folder in (home() / "published", shipped_root() / "traces"):
        exact = folder / gpu / TABLE_FILE
        if exact.is_file():
            return exact
    for folder in (home() / "published", shipped_root() / "traces"):
        for path in sorted(folder.glob(f"*/{TABLE_FILE}")):
            if same_gpu(gpu, path.parent.name):
                return path
    return None


def load_table(gpu: str) -> ResolverTable | None:
    """The published table of a GPU, or None where nothing was published for it. Read once until the file changes.

    Raises:
        RecordError: the file is not a resolver table, or was written by a newer version.
    """
    path = table_path(gpu)
    if path is None:
        return None
    stat = path.stat()
    return _cached_table(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=8)
def _cached_table(path: Path, _mtime_ns: int, _size: int) -> ResolverTable:
    return read_table(path)


def read_table(path: Path) -> ResolverTable:
    """Parse one ``resolver.json``; raises as :func:`load_table` does."""
    try:
        content = from_json(path.read_bytes(), cache_strings="all")
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: cannot read this resolver table: {error}. {_WRITE_ANEW}") from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise RecordError(
            f"{path}: schema_version {version} was written by a newer tilegym-db (this one reads {SCHEMA_VERSION}). "
            "Upgrade tilegym-db, or publish again with this version."
        )
    try:
        return ResolverTable(content["gpu"], content["sm"], content["published"], content["entries"], str(path))
    except (TypeError, KeyError) as error:
        raise RecordError(f"{path}: not a resolver table: {error} is missing or wrong. {_WRITE_ANEW}") from None
