"""Reads ``workloads/checked-records.json``, the list of shipped files that were validated at release, and decides
trust.

The list has each valid file with a digest of everything its validity depends on: its content, its sources, its
Definition, and the forward of that Definition. A Solution of a ``family.json`` is listed as
``family.json#<solution>``, and its content is its entry with the shared keys. A trace file is listed if every figure
was plausible by its Definition and the published peaks. A file that is not listed, or has another digest, is validated
again, which costs only time.

``python tools/write_checked_records.py`` writes the list. Only filling the database uses it: ``check``, and everything
that runs or serves a kernel, validates every record itself.

The second part compares the figures of a pass with the widest bound of any gate and the physics floor. It refuses
figures that no run can produce. It cannot prove the rest, because a trace within the bounds may still be invented.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from tilegym_db.catalog import Catalog
from tilegym_db.catalog.record_files import (
    CHECKED_RECORDS,
    content_of_family,
    family_content,
    file_of,
    of_family_file,
    read_sources,
)
from tilegym_db.errors import RecordError
from tilegym_db.files import read_bytes
from tilegym_db.paths import shipped_root
from tilegym_db.published.snapshot import PEAKS_NAME, definition_of, open_snapshot, published_folders, trace_files
from tilegym_db.records.definition import (
    CODES_EQUAL,
    MIN_ELEMENTS_FOR_NORMS,
    TAU_CAP,
    WORST_ROW_FACTOR,
    Definition,
    limits_for,
)
from tilegym_db.records.roofline import GpuPeaks, least_us, speed_of_light
from tilegym_db.records.solution import digest_of, source_names, without_defaults
from tilegym_db.records.text import length_prefixed_digest

MAX_BYTES = 8 << 20
_NOTHING: Mapping[str, Any] = {"definitions": {}, "files": {}}


def checked_file() -> Path:
    """Return the path of the list that comes with the package."""
    return shipped_root() / CHECKED_RECORDS


class Checked:
    """The list as seen from one catalog's files. It reads each file once."""

    def __init__(self, catalog: Catalog) -> None:
        """Read the list for a catalog whose first root is the shipped one."""
        self._catalog = catalog
        self._root = shipped_root()
        self._contents: dict[Path, bytes] = {}
        self._sources: dict[Path, bytes] = {}
        self._keys: dict[str, str] = {}

    def content(self, path: Path) -> bytes:
        """Return the bytes of a file.

        Raises:
            RecordError: it cannot be read.
        """
        if path not in self._contents:
            self._contents[path] = read_bytes(path, "record")
        return self._contents[path]

    def solution_record(self, path: Path) -> tuple[dict[str, Any], str] | None:
        """Return ``to_dict()`` and the digest of the Solution at a place that is known to be valid, else None.

        Its record is not validated: that took a third of the time of a new home.
        """
        if str(path) not in self._files:
            return None
        try:
            record = self.stated_solution(path)
            sources = read_sources(path, source_names(record), self._sources)
            if not self.solution(path, record["definition"], sources):
                return None
            return record, digest_of(record["definition"], record["spec"], sources)
        except (RecordError, ValueError, LookupError, AttributeError, TypeError):
            return None  # the ordinary reader reports the fault

    def stated_solution(self, path: Path) -> dict[str, Any]:
        """Return the content of the Solution's record at a place as ``to_dict()`` would, without validating it."""
        content = self.content(file_of(path))
        stated = content_of_family(content, path) if of_family_file(path) else from_json(content)
        return without_defaults(stated)

    def definition_digest(self, name: str) -> str | None:
        """Return the digest of a Definition that is known to be valid, else None."""
        known = self._listed["definitions"].get(name)
        return known[1] if known and known[0] == self.definition_key(name) else None

    def solution(self, path: Path, definition: str, sources: Mapping[str, bytes]) -> bool:
        """Return True if a Solution of a Definition is known to be valid."""
        return self._is(path, lambda: self.solution_key(path, definition, sources))

    def workloads(self, path: Path, definition: str) -> bool:
        """Return True if every line of a file is known to be a valid Workload of this Definition."""
        return self._is(path, lambda: self.workloads_key(path, definition))

    def plausible(self) -> frozenset[str]:
        """Return the Definitions whose shipped traces are all known to be plausible."""
        keys = self.trace_keys()
        return frozenset(
            name
            for name, of in keys.items()
            if all(self._files.get(str(path)) == key != "" for path, key in of.items())
        )

    # -- dependencies of validity ----------------------------------------------------------------------------------------

    def definition_key(self, name: str) -> str:
        """Return a digest of a Definition's file and its forward's file; '' if a file is missing or cannot be read."""
        if name not in self._keys:
            self._keys[name] = self._definition_key(name)
        return self._keys[name]

    def _definition_key(self, name: str) -> str:
        path = self._catalog.definition_paths.get(name)
        if path is None or not path.is_relative_to(self._root):
            return ""
        try:
            content = self.content(path)
            forward = from_json(content).get("backward_of")
            of_forward = self._catalog.definition_paths.get(forward)
            return _key(path.name, content, self.content(of_forward) if of_forward else b"")
        except (RecordError, ValueError, AttributeError, TypeError):
            return ""

    def solution_key(self, path: Path, definition: str, sources: Mapping[str, bytes]) -> str:
        """Return a digest of a Solution's record, its sources, and its Definition."""
        content = self.content(file_of(path))
        content = family_content(content, path) if of_family_file(path) else content
        parts = (part for name in sorted(sources) for part in (name.encode(), sources[name]))
        return self._of_definition(definition, content, *parts)

    def workloads_key(self, path: Path, definition: str) -> str:
        """Return a digest of a file of Workloads and of their Definition."""
        try:
            return self._of_definition(definition, self.content(path))
        except RecordError:
            return ""

    def trace_keys(self) -> dict[str, dict[Path, str]]:
        """Return Definition -> its shipped trace files, each with a digest of it, all published peaks, and the
        Definition.
        """
        folders = published_folders(self._catalog)
        if not all(folder.is_relative_to(self._root) for folder in folders):
            return {}  # other peaks were published; newer ones count
        try:
            locks = {folder: open_snapshot(folder, self._root).files for folder in folders}
        except RecordError:
            return {}
        peaks = "".join(files.get(PEAKS_NAME, "") for files in locks.values()).encode()
        found: dict[str, dict[Path, str]] = {}
        for folder, files in locks.items():
            for path in trace_files(folder):
                locked = files.get(path.relative_to(folder).as_posix(), "").encode()
                name = definition_of(path)
                found.setdefault(name, {})[path] = self._of_definition(name, locked, peaks)
        return found

    def _of_definition(self, name: str, *parts: bytes) -> str:
        key = self.definition_key(name)
        return _key(key, *parts) if key else ""

    # -- the list ----------------------------------------------------------------------------------------------------

    def _is(self, path: Path, key: Callable[[], str]) -> bool:
        expected = self._files.get(str(path))
        return expected is not None and expected == key()

    @cached_property
    def _files(self) -> Mapping[str, str]:
        return {f"{self._root}/{name}": key for name, key in self._listed["files"].items()}

    @cached_property
    def _listed(self) -> Mapping[str, Any]:
        try:
            content = from_json(read_bytes(checked_file(), "list of checked records", MAX_BYTES))
        except (RecordError, ValueError):
            return _NOTHING
        return content if _is_list(content) else _NOTHING


def _is_list(content: Any) -> bool:
    if not isinstance(content, dict) or not all(isinstance(content.get(key), dict) for key in _NOTHING):
        return False
    pairs = content["definitions"].values()
    return all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)


def _key(name: str, *parts: bytes) -> str:
    return length_prefixed_digest([name.encode(), *parts])[:32]


# ---- shipped sources ------------------------------------------------------------------------------
# Shipped sources are those on the list, by digest. A kernel in a checkout counts as shipped once
# ``tools/write_checked_records.py`` listed it, which is a step of its release.


def shipped_keys(definitions: Iterable[str]) -> frozenset[str]:
    """Return the :func:`source_key` of every shipped Solution of some Definitions, by names."""
    path = checked_file()
    try:
        stamp = path.stat().st_mtime_ns
    except OSError:  # without the list no source counts as shipped
        return frozenset()
    return frozenset().union(*(_keys(path, stamp, name) for name in definitions))


@lru_cache(maxsize=1024)
def _keys(path: Path, _stamp: int, definition: str) -> frozenset[str]:
    catalog = Catalog((path.parents[1],))
    checked = Checked(catalog)
    record = catalog.definitions.get(definition)
    if record is None:
        return frozenset()
    return frozenset(  # a listed Solution covers the file of its Definition
        source_key(record.digest, files.digest)
        for files in catalog.solutions_for(definition)
        if checked.solution(catalog.solution_paths[files.name], definition, files.sources)
    )


def source_key(definition_digest: str, solution_digest: str) -> str:
    """Return the common key of a Definition and a source of it."""
    return f"{definition_digest}/{solution_digest}"


# ---- Plausible figures -----------------------------------------------------------------------------------

SLACK = 1.001
"""Allowance for rounding: published figures keep at least three digits."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of the figures of a pass at one point; None if a bound is unknown. Times are microseconds."""

    least_us: float | None = None
    rel_fro: float | None = None
    worst_row_rel: float | None = None
    matched_ratio: float = 1.0


def bounds_of(
    definition: Definition,
    axes: Mapping[str, int],
    dtypes: Mapping[str, str],
    peaks: GpuPeaks | None,
    *,
    cold_l2: bool,
    timer: str,
) -> Bounds:
    """Return the bounds at one point.

    Args:
        definition: the operator; states tolerances and the compulsory work.
        axes: every axis, const ones included.
        dtypes: every dtype variable.
        peaks: of the GPU; None for a CPU, or if they are unknown.
        cold_l2: the L2 was flushed before every call.
        timer: the timer that measured.
    """
    rel_fro, worst_row, matched = _error_bounds(definition, axes, dtypes)
    light = speed_of_light(definition, axes, dtypes, peaks) if peaks is not None else None
    least = least_us(light, peaks, cold_l2=cold_l2, timer=timer) if light is not None and peaks is not None else None
    return Bounds(least, rel_fro, worst_row, matched)


def _error_bounds(
    definition: Definition, axes: Mapping[str, int], dtypes: Mapping[str, str]
) -> tuple[float | None, float | None, float]:
    """Return the widest bounds over all outputs, since a trace states the worst error but not its output."""
    rel_fro, worst_row, matched = 0.0, 0.0, 1.0
    for name in definition.outputs:
        limits = limits_for(definition, definition.dtype_of(name, dtypes), "tf32")
        if limits is None or limits.codes or name in definition.gathers:
            rel_fro = worst_row = math.inf
            matched = min(matched, CODES_EQUAL)
        elif math.prod(definition.shape_of(name, axes)) < MIN_ELEMENTS_FOR_NORMS:
            rel_fro = worst_row = math.inf  # norms would be noise, so no gate checks them
        else:
            rel_fro = max(rel_fro, TAU_CAP * limits.tau)
            worst_row = max(worst_row, WORST_ROW_FACTOR * TAU_CAP * max(limits.tau, limits.row_tau))
        if limits is not None:
            matched = min(matched, limits.share)
    return _finite(rel_fro), _finite(worst_row), matched


def _finite(bound: float) -> float | None:
    return None if math.isinf(bound) else bound * SLACK


def why_implausible(
    bounds: Bounds,
    *,
    latency_us: float | None,
    ci_low_us: float | None,
    ci_high_us: float | None,
    rel_fro: float | None,
    worst_row_rel: float | None,
    matched_ratio: float | None,
) -> str | None:
    """Return the reason why the figures of a pass cannot be true, or None if they can."""
    if latency_us is not None and ci_low_us is not None and ci_high_us is not None:
        if bounds.least_us is not None and latency_us < bounds.least_us:
            return f"{latency_us:.4g} us is below the physics floor of {bounds.least_us:.4g} us"
        if not ci_low_us * (1 / SLACK) <= latency_us <= ci_high_us * SLACK:
            return f"{latency_us:.4g} us lies outside its own interval, {ci_low_us:.4g} to {ci_high_us:.4g} us"
    for name, value, bound in (
        ("rel_fro", rel_fro, bounds.rel_fro),
        ("worst row", worst_row_rel, bounds.worst_row_rel),
    ):
        if value is not None and bound is not None and value > bound:
            return f"{name} {value:.3g} exceeds {bound:.3g}, which no gate lets pass"
    if matched_ratio is not None and matched_ratio < bounds.matched_ratio:
        return f"only {matched_ratio:.4g} of the elements match; a pass needs {bounds.matched_ratio:g}"
    return None
