"""Measured points and their candidates for the resolver, and how they are read from a trace file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tilegym_db.published.checked import shipped_keys, source_key
from tilegym_db.published.input_files import damaged
from tilegym_db.records.call import Call
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.solution import Config, name_with_config
from tilegym_db.records.trace import PUBLISHED_SANDBOX_LEVEL


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
    verified_sizes: Mapping[str, int] = field(default_factory=dict)
    """Independent axis -> the largest size at which outputs were compared; empty in traces that do not state it."""
    verified_elements: int = 0
    """Elements of the largest tensor of such a call; 0 in traces that do not state it."""
    origin: str = "local"
    """``shipped`` with the package, measured by this installation (``local``), or ``foreign``."""
    of_files: bool = False
    """True if it was measured on the contents of files."""
    shipped_source: bool = False
    """True if the package ships its source; computed only if it was measured here without confinement."""
    libs: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Package -> its version in the measurement; with a hash of its code if the solution declares it."""
    figures: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """Figures that are compared with the gates' bounds and the physics floor; empty for candidates that were made by hand."""

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


DtypesKey = tuple[tuple[str, str], ...]


class MeasuredEntries(NamedTuple):
    """The measurements of a Definition: a source of entries for each dtype binding, and the range of each scalar."""

    by_dtypes: Mapping[DtypesKey, Callable[[], tuple[Entry, ...]]]
    scalars: Mapping[str, tuple[float, float]]


def dtypes_key(dtypes: Mapping[str, str]) -> DtypesKey:
    """Return a dtype binding as a key."""
    return tuple(sorted(dtypes.items()))


def entries_of(traces: Iterable[Mapping[str, Any]], path: Path, origin: str) -> MeasuredEntries:
    """Return the passes of a trace file. Entries are built when their dtype binding is first used; errors name ``path``.

    Args:
        traces: the lines of the file (:func:`tilegym_db.published.input_files.read_lines`).
        path: the file.
        origin: of the folder: ``shipped``, ``local`` or ``foreign``.

    Raises:
        RecordError: a line does not have the form of a trace.
    """
    grouped: dict[DtypesKey, list[Mapping[str, Any]]] = {}
    scalars: list[Mapping[str, Scalar]] = []
    try:
        for trace in traces:
            if trace.get("status") == "PASSED" and "performance" in trace:
                grouped.setdefault(dtypes_key(trace.get("dtypes", {})), []).append(trace)
                scalars.append(trace.get("scalars", {}))
        hull = scalar_hull(scalars)
    except (TypeError, AttributeError) as error:
        raise damaged(path, error) from None
    by_dtypes = {key: partial(_entries, found, path, origin) for key, found in grouped.items()}
    return MeasuredEntries(by_dtypes, hull)


def scalar_hull(points: Iterable[Mapping[str, Scalar]]) -> dict[str, tuple[float, float]]:
    """Return scalar -> the smallest and largest number among points."""
    values: dict[str, list[float]] = {}
    for name, value in (item for scalars in points for item in scalars.items()):
        if isinstance(value, int | float) and not isinstance(value, bool):
            values.setdefault(name, []).append(float(value))
    return {name: (min(found), max(found)) for name, found in values.items()}


def _entries(traces: Iterable[Mapping[str, Any]], path: Path, origin: str) -> tuple[Entry, ...]:
    """Return the entries of some passes, each with its candidates, fastest first."""
    grouped: dict[tuple[str, ...], tuple[Call, dict[str, Any], list[Candidate]]] = {}
    try:
        for trace in traces:
            axes, dtypes, scalars, layouts = (trace.get(name, {}) for name in ("axes", "dtypes", "scalars", "layouts"))
            key = (*(_spelled(part) for part in (axes, scalars, layouts)), trace["definition_digest"])
            call = Call(trace["definition"], axes, dtypes, layouts, scalars)
            about = {name: trace[name] for name in ("definition_version", "definition_digest", "op_type")}
            grouped.setdefault(key, (call, about, []))[2].append(_candidate(trace, origin))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise damaged(path, error) from None
    entries = []
    # In file order, which is the publishing order. Of equally near points the first decides.
    for call, about, candidates in grouped.values():
        candidates = [_with_source_known(one, call.definition, about["definition_digest"]) for one in candidates]
        candidates.sort(key=lambda item: (item.latency_us, item.trace_id))
        entries.append(Entry(call, **about, candidates=tuple(candidates)))
    return tuple(entries)


def _with_source_known(candidate: Candidate, definition: str, digest: str) -> Candidate:
    if candidate.origin != "local" or (candidate.sandbox_level or 0) >= PUBLISHED_SANDBOX_LEVEL:
        return candidate
    key = source_key(digest, candidate.solution_digest)
    return replace(candidate, shipped_source=key in shipped_keys((definition,)))


def _candidate(trace: Mapping[str, Any], origin: str) -> Candidate:
    performance, correctness = trace["performance"], trace.get("correctness") or {}
    envelope = trace.get("envelope") or {}
    stock = [item for item in performance.get("comparisons", ()) if item.get("provides") == "stock"]
    # This installation may have published a run that it did not measure, because the user trusted it.
    is_borrowed = origin == "local" and trace.get("origin") == "foreign"
    return Candidate(
        **{name: trace[name] for name in ("solution", "solution_digest", "language", "trace_id")},
        role=trace.get("role", "kernel"),
        provides=trace.get("provides"),
        config=trace.get("config", {}),
        latency_us=performance["latency_us"],
        **{name: performance.get(name) for name in ("ci_low_us", "ci_high_us", "host_us")},
        # If a trace was compared with several stock implementations, the smallest speedup counts.
        speedup=min((item["ratio"] for item in stock), default=None),
        speedup_ci_low=min((item["ci_low"] for item in stock), default=None),
        tier=trace.get("tier"),
        sandbox_level=trace.get("sandbox_level", 0),
        envelope_cases=envelope.get("cases", 0),
        scalar_ranges=_ranges(envelope),
        verified_sizes=dict(envelope.get("largest") or {}),
        verified_elements=envelope.get("largest_elements", 0),
        origin="foreign" if is_borrowed else origin,
        of_files=bool(trace.get("blobs")),
        libs=trace.get("libs") or {},
        figures={
            **{name: correctness.get(name) for name in ("rel_fro", "worst_row_rel", "matched_ratio")},
            **{name: performance[name] for name in ("cold_l2", "timer") if name in performance},
        },
    )


def _ranges(said: Mapping[str, Any]) -> dict[str, tuple[float, float]] | None:
    found = said.get("scalars")
    return {name: (low, high) for name, (low, high) in found.items()} if found else None


def _spelled(mapping: Mapping[str, Any]) -> str:
    return ",".join(f"{name}={mapping[name]}" for name in sorted(mapping))
