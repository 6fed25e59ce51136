"""Measured points and their candidates for the resolver, and how they are read from a trace set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tilegym_db.errors import RecordError
from tilegym_db.published.checked import shipped_keys, source_key
from tilegym_db.published.trace_set import NANO, RATIO, Point, TraceSet, is_trace_set
from tilegym_db.records.call import Call
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.solution import Config, name_with_config
from tilegym_db.records.trace import PUBLISHED_SANDBOX_LEVEL, new_trace_id


@dataclass(frozen=True)
class Candidate:
    """A solution under one config with its measurement, if it has one.

    Times are microseconds of device time with their 99% confidence interval. ``host_us`` is the host time of the call
    until it returned. ``speedup`` is relative to the stock code.
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
    scalar_ranges: Mapping[str, tuple[float, float]] | None = None
    """Continuous scalar -> the smallest and largest value verified; None in traces older than this field."""
    origin: str = "local"
    """``shipped`` with the package, measured by this installation (``local``), or ``foreign``."""
    shipped_source: bool = False
    """True if the package ships its source; computed only if it was measured here without confinement."""
    figures: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """Figures that are compared with the gates' bounds and the physics floor; empty in tables older than trace sets."""

    def __str__(self) -> str:
        """Return the form ``rms_norm_triton[BLOCK_M=2, num_warps=4]``."""
        return name_with_config(self.solution, self.config)


@dataclass(frozen=True)
class Entry:
    """One measured point: a Definition at concrete axes, dtypes, scalars and layouts, with its verified candidates."""

    call: Call
    definition_version: str
    definition_digest: str
    op_type: str
    candidates: tuple[Candidate, ...]

    def log_distance(self, axes: Mapping[str, int]) -> float:
        """Return the Euclidean distance of two points in log2 of axis sizes: 1.0 is a factor of two on one axis."""
        return math.hypot(*(math.log2(max(size, 1) / max(self.call.axes[name], 1)) for name, size in axes.items()))


DtypesKey = tuple[tuple[str, str], ...]


class MeasuredEntries(NamedTuple):
    """The measurements of a Definition: a source of entries for each dtype binding, and the range of each scalar."""

    by_dtypes: Mapping[DtypesKey, Callable[[], tuple[Entry, ...]]]
    scalars: Mapping[str, tuple[float, float]]


_Rows = list[tuple[Point, list[list[Any]]]]


def dtypes_key(dtypes: Mapping[str, str]) -> DtypesKey:
    """Return a dtype binding as a key."""
    return tuple(sorted(dtypes.items()))


def entries_of(content: bytes, path: Path, origin: str) -> MeasuredEntries:
    """Return the passes of a trace set. Entries are built when their dtype binding is first used; errors name ``path``.

    Raises:
        RecordError: not a trace set, or damaged.
    """
    if not is_trace_set(content):
        raise RecordError(
            f"{path}: not a trace set. Try: python -m tilegym_db.store.migrate {path.parent.parent}",
            code="trace_set_invalid",
        )
    parsed = TraceSet.parse(content, path)
    grouped: dict[DtypesKey, _Rows] = {}
    for point, rows in parsed.rows():
        if any(_is_pass(parsed, row) for row in rows):
            grouped.setdefault(dtypes_key(point.dtypes), []).append((point, rows))
    by_dtypes = {key: partial(_entries, parsed, places, origin) for key, places in grouped.items()}
    return MeasuredEntries(by_dtypes, scalar_hull(point.scalars for places in grouped.values() for point, _ in places))


def scalar_hull(points: Iterable[Mapping[str, Scalar]]) -> dict[str, tuple[float, float]]:
    """Return scalar -> the smallest and largest number among points."""
    values: dict[str, list[float]] = {}
    for name, value in (item for scalars in points for item in scalars.items()):
        if isinstance(value, int | float) and not isinstance(value, bool):
            values.setdefault(name, []).append(float(value))
    return {name: (min(found), max(found)) for name, found in values.items()}


def _entries(parsed: TraceSet, places: _Rows, origin: str) -> tuple[Entry, ...]:
    """Return the entries of some points, each with its candidates, fastest first."""
    borrowed = parsed.foreign_runs if origin == "local" else frozenset()
    grouped: dict[tuple[str, ...], tuple[Point, dict[str, Any], list[Candidate]]] = {}
    for point, identity, candidate in _passes(parsed, places, origin, borrowed):
        spelled = [_spelled(part) for part in (point.axes, point.scalars, point.layouts)]
        key = (*spelled, identity["definition_digest"])
        grouped.setdefault(key, (point, identity, []))[2].append(candidate)
    entries = []
    # In file order, which is the publishing order. Of equally near points the first decides.
    for point, identity, candidates in grouped.values():
        candidates = [_with_source_known(one, identity) for one in candidates]
        candidates.sort(key=lambda item: (item.latency_us, item.trace_id))
        call = Call(identity["definition"], point.axes, point.dtypes, point.layouts, point.scalars)
        about = {name: value for name, value in identity.items() if name != "definition"}
        entries.append(Entry(call, **about, candidates=tuple(candidates)))
    return tuple(entries)


def _with_source_known(candidate: Candidate, identity: Mapping[str, Any]) -> Candidate:
    if candidate.origin != "local" or (candidate.sandbox_level or 0) >= PUBLISHED_SANDBOX_LEVEL:
        return candidate
    key = source_key(identity["definition_digest"], candidate.solution_digest)
    return replace(candidate, shipped_source=key in shipped_keys((identity["definition"],)))


def _is_pass(parsed: TraceSet, row: list[Any]) -> bool:
    said = parsed.header.facts[parsed.header.setups[row[0]][3]]
    return said["status"] == "PASSED" and row[2] is not None


_IDENTITY = ("definition", "definition_version", "definition_digest", "op_type")


def _passes(
    parsed: TraceSet, places: _Rows, origin: str, borrowed: frozenset[str]
) -> Iterator[tuple[Point, dict[str, Any], Candidate]]:
    """Yield every pass with its time, without unused fields (kernels, notes, times of day)."""
    header = parsed.header
    shared = {name: getattr(header, name) for name in _IDENTITY}
    for point, rows in places:
        if any("other" in header.facts[header.setups[row[0]][3]] for row in rows):
            yield from _whole_passes(parsed, point, rows, origin, borrowed)
            continue
        known = parsed.first_rows(rows)
        for row in rows:
            if _is_pass(parsed, row):
                run = header.setups[row[0]][0]
                of = "foreign" if header.runs[run][0] in borrowed else origin
                yield point, shared, _candidate(parsed, point, row, known, of)


def _candidate(
    parsed: TraceSet, point: Point, row: list[Any], known: dict[tuple[str, str], list[Any]], origin: str
) -> Candidate:
    header = parsed.header
    run, solution, config_index, facts, alternatives, *_ = header.setups[row[0]]
    name, digest, language, role, provides = header.solutions[solution]
    said, config = header.facts[facts], header.configs[config_index]
    latency, below, above, host = row[2:6]
    stock = [
        parsed.comparison(row, place, known)
        for place, index in enumerate(alternatives)
        if header.alternatives[index][1] == "stock"
    ]
    tier, attempt, timing = said["tier"], said.get("attempt", 0), said.get("performance", {})
    return Candidate(
        solution=name,
        solution_digest=digest,
        language=language,
        role=role,
        provides=provides,
        config=config,
        latency_us=latency / NANO,
        ci_low_us=(latency - below) / NANO,
        ci_high_us=(latency + above) / NANO,
        host_us=None if host is None else host / NANO,
        # If a trace was compared with several stock implementations, the smallest speedup counts.
        speedup=min((ratio / RATIO for ratio, _, _ in stock), default=None),
        speedup_ci_low=min(((ratio - low) / RATIO for ratio, low, _ in stock), default=None),
        tier=tier,
        sandbox_level=said.get("sandbox_level", 0),
        trace_id=new_trace_id(header.runs[run][0], tier, attempt, digest, config, point.workload_uuid),
        envelope_cases=row[13] if row[14] is not None else 0,
        scalar_ranges=_ranges(said),
        origin=origin,
        figures={
            "rel_fro": row[7],
            "worst_row_rel": row[8],
            "matched_ratio": said.get("correctness", {}).get("matched_ratio"),
            **{key: timing[key] for key in ("cold_l2", "timer") if key in timing},
        },
    )


def _whole_passes(
    parsed: TraceSet, point: Point, rows: list[list[Any]], origin: str, borrowed: frozenset[str]
) -> Iterator[tuple[Point, dict[str, Any], Candidate]]:
    """Yield as :func:`_passes` does, for a point with a trace that does not fit the columns."""
    provides = parsed.provides
    for trace in parsed.traces_of(point, rows):
        if trace["status"] != "PASSED" or "performance" not in trace:
            continue
        performance, correctness = trace["performance"], trace.get("correctness") or {}
        stock = [item for item in performance.get("comparisons", ()) if item.get("provides") == "stock"]
        candidate = Candidate(
            **{name: trace[name] for name in ("solution", "solution_digest", "language", "tier", "trace_id")},
            role=trace.get("role", "kernel"),
            provides=provides.get(trace["solution"]),
            config=trace.get("config", {}),
            **{name: performance.get(name) for name in ("latency_us", "ci_low_us", "ci_high_us", "host_us")},
            speedup=min((item["ratio"] for item in stock), default=None),
            speedup_ci_low=min((item["ci_low"] for item in stock), default=None),
            sandbox_level=trace.get("sandbox_level", 0),
            envelope_cases=(trace.get("envelope") or {}).get("cases", 0),
            scalar_ranges=_ranges(trace.get("envelope") or {}),
            origin="foreign" if trace["run_id"] in borrowed else origin,
            figures={
                **{name: correctness.get(name) for name in ("rel_fro", "worst_row_rel", "matched_ratio")},
                **{name: performance[name] for name in ("cold_l2", "timer") if name in performance},
            },
        )
        # Any field may be among those that do not fit, sizes and meaning included.
        axes, dtypes, scalars, layouts = (trace.get(name, {}) for name in ("axes", "dtypes", "scalars", "layouts"))
        where = Point(trace["workload_uuid"], axes, dtypes, scalars, layouts, None)
        yield where, {name: trace[name] for name in _IDENTITY}, candidate


def _ranges(said: Mapping[str, Any]) -> dict[str, tuple[float, float]] | None:
    found = said.get("scalars")
    return {name: (low, high) for name, (low, high) in found.items()} if found else None


def _spelled(mapping: Mapping[str, Any]) -> str:
    return ",".join(f"{name}={mapping[name]}" for name in sorted(mapping))
