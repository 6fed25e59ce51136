"""Measured points and their candidates for the resolver, and how they are read from a trace file."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tilegym_db.catalog import SolutionFiles
from tilegym_db.published.input_files import damaged
from tilegym_db.published.snapshot import shipped_keys, source_key
from tilegym_db.records.call import Call, Launch, Request, is_code_selecting
from tilegym_db.records.definition import Definition
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.solution import Config, name_with_config, why_not_timed
from tilegym_db.records.text import binding_key
from tilegym_db.records.verdicts import PUBLISHED_SANDBOX_LEVEL, VERIFIED_TIERS


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
    deterministic: bool = False
    """True if its trace states that repeated calls gave equal bits."""
    batch_slices: int = 0
    """Slices of calls that had the same bits alone; 0 for a kernel that does not promise batch invariance."""
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
    """Return the passes of a trace file. Entries are built when their dtype binding is first used; errors name ``path``."""
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
            key = (*(binding_key(part) for part in (axes, scalars, layouts)), trace["definition_digest"])
            call = Call(trace["definition"], axes, dtypes, layouts, scalars)
            about = {name: trace[name] for name in ("definition_version", "definition_digest", "op_type")}
            grouped.setdefault(key, (call, about, []))[2].append(_candidate(trace, origin))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise damaged(path, error) from None
    entries = []
    host = _host_times(one for _, _, candidates in grouped.values() for one in candidates)
    # In file order, which is the publishing order. Of equally near points the first decides.
    for call, about, candidates in grouped.values():
        candidates = [replace(one, host_us=_host_time(one, host)) for one in candidates]
        candidates = [_with_source_known(one, call.definition, about["definition_digest"]) for one in candidates]
        candidates.sort(key=lambda item: (item.latency_us, item.trace_id))
        entries.append(Entry(call, **about, candidates=tuple(candidates)))
    return tuple(entries)


def _host_times(candidates: Iterable[Candidate]) -> dict[str, float]:
    """Return the digest of a solution -> its median host time in microseconds over all sizes.

    A launch takes the host the same time at most sizes, but a single measurement of it may be off by half.
    """
    times: dict[str, list[float]] = {}
    for one in candidates:
        if one.host_us is not None:
            times.setdefault(one.solution_digest, []).append(one.host_us)
    return {digest: statistics.median(found) for digest, found in times.items()}


MAX_HOST_SPREAD = 1.5
"""Ratio of a host time to the median up to which they differ by chance. Beyond, the kernel has more launches at this size."""


def _host_time(one: Candidate, medians: Mapping[str, float]) -> float | None:
    """Return the host time that counts: the median, but the own time of a kernel with more launches, or of quicker stock code."""
    if one.host_us is None:
        return None
    median = medians[one.solution_digest]
    if one.role == "kernel":
        return one.host_us if one.host_us > MAX_HOST_SPREAD * median else median
    return min(one.host_us, median)


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
        deterministic=correctness.get("deterministic") is True,
        batch_slices=envelope.get("batch_slices", 0),
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


# ---- may it serve? --------------------------------------------------------------------------------
# Answers in one place whether a measured kernel may serve a call. Pure: no I/O, no torch, and every no has a reason.
#
# Three questions are asked in this order:
#
# 1. :func:`why_not_trusted`: does the measurement count, and for which users? ``publish`` and awards ask only this.
# 2. :func:`why_not_for_call`: was the kernel verified for such a call?
# 3. :func:`why_not_faster`: is it faster than the stock code by more than noise?
#
# :func:`why_not_served` asks all three. The resolver, ``explain`` and ``patch`` use it.

MIN_SPEEDUP_CI_LOW = 1.02
"""Lower confidence bound of the speedup over stock that a kernel must exceed, so that it is faster by more than noise."""

MIN_BACKWARD_SPEEDUP_CI_LOW = 1.25
"""The same bound for a backward. Stock code gets the inputs of the forward, although autograd would have kept what it needs.
It moves at most 22 bytes for 18 (swiglu_backward); a kernel must not be credited with the difference."""

CALL_SITE_US = 3.0
"""Host time of a call site in a patched model, in microseconds, beside that of the kernel's own launch."""

MAX_LAUNCH_SHARE = 0.9
"""Maximum share of a stock call, by the longer of its device and host time, that the launch of a kernel may take the host.
Host times differ by that much between machines."""

HOST_NOISE_US = 5.0
"""Uncertainty of a host time in microseconds. Between kernels a smaller difference is ignored, because host load varies."""

Audience = Literal["this user", "others"]
"""The users served: the user of the measuring machine, or all users of a published file."""


class Refusal(NamedTuple):
    """The reason why a measurement may not serve: a stable code, and a sentence for the user."""

    code: str
    reason: str


# ---- all three ------------------------------------------------------------------------------------


def why_not_served(
    candidate: Candidate,
    files: SolutionFiles | None,
    request: Request,
    *,
    is_exact: bool,
    scalar_ranges: Mapping[str, tuple[float, float]],
    stock: Candidate | None = None,
) -> Refusal | None:
    """Return why a measured kernel may not serve a call, or None if it may.

    Args:
        files: the catalog's Solution of that name; None if the catalog has none.
        is_exact: True if the call has the sizes of the point; otherwise the point is the nearest one.
        scalar_ranges: scalar -> verified range, for candidates that state none.
        stock: the stock code at the same point, if it was measured.
    """
    if files is None:
        return Refusal("solution_missing", "it is not in the catalog any more")
    ranges = candidate.scalar_ranges if candidate.scalar_ranges is not None else scalar_ranges
    return (
        why_not_current(candidate, files)
        or why_not_trusted(candidate, audience="this user")
        or why_not_for_call(candidate, files, request, is_exact=is_exact)
        or why_not_faster(candidate, request.definition, stock, request.launch)
        or why_outside_scalars(request.definition, request.call.scalars, ranges)
    )


# ---- the measurement ------------------------------------------------------------------------------


def why_not_current(candidate: Candidate, files: SolutionFiles) -> Refusal | None:
    """Return why a measurement does not count for the catalog's kernel of that name; None if it counts."""
    if candidate.solution_digest != files.digest:
        return Refusal(
            "source_changed",
            f"its digest differs from the catalog's source: verified {candidate.solution_digest[:12]}, "
            f"now {files.digest[:12]}; bench and publish it again",
        )
    spec = files.record.spec
    if spec.role != "kernel":
        what = f" ({spec.provides})" if spec.provides else ""
        return Refusal("baseline", f"role {spec.role}{what}: measured to compare with, never dispatched")
    omitted = why_not_timed("it", spec.omits)
    return None if omitted is None else Refusal("output_omitted", omitted)


def why_not_trusted(candidate: Candidate, *, audience: Audience) -> Refusal | None:
    """Return why a measurement does not count for an audience; None if it counts."""
    if candidate.tier not in VERIFIED_TIERS:
        return Refusal(
            "unverified",
            f"tier {candidate.tier or 'unknown'}: not a verified measurement; verify it (tilegym-db verify "
            f"{candidate.solution}) and publish again",
        )
    if candidate.of_files:
        return Refusal("of_files", "measured on contents of files, which say nothing of a call on others")
    return why_unconfined(
        candidate.sandbox_level or 0,
        is_shipped=candidate.shipped_source,
        origin=candidate.origin,
        audience=audience,
    )


def why_unconfined(level: int, *, is_shipped: bool, origin: str = "local", audience: Audience) -> Refusal | None:
    """Return why a verified result needs a better confined worker to reach an audience; None if its worker suffices.

    An unconfined worker could have tampered with its own verification. The author of a release ran shipped sources
    confined, or at least read them. On a machine without a sandbox they may serve its own user only.

    Args:
        is_shipped: True if the package ships this definition and source, by their digests.
    """
    if level >= PUBLISHED_SANDBOX_LEVEL:
        return None
    why = f"sandbox level {level}: its worker could have reached what judged it"
    if level < 1:
        return Refusal("unconfined", why)
    if not is_shipped:
        return Refusal("unconfined", f"{why}, and its source is not one that the package ships")
    if origin != "local" or audience != "this user":
        return Refusal("unconfined", f"{why}, so it serves the user of the machine that measured it, and not others")
    return None


# ---- the call -------------------------------------------------------------------------------------


def why_not_for_call(candidate: Candidate, files: SolutionFiles, request: Request, *, is_exact: bool) -> Refusal | None:
    """Return why a kernel does not fit a call or this process, or None if it does."""
    call, language = request.call, files.record.spec.language
    unsupported = files.record.unsupported(call.axes, call.dtypes, call.layouts, target=request.sm)
    if unsupported is not None:
        return Refusal("unsupported", unsupported)
    if language in request.unavailable:
        return Refusal("language_unavailable", request.unavailable[language])
    if not is_exact and not candidate.envelope_cases:
        return Refusal(
            "shape_unverified", "it was verified at the measured shape only, without fuzz cases that cover others"
        )
    return None


def why_outside_scalars(
    definition: Definition, scalars: Mapping[str, Scalar], ranges: Mapping[str, tuple[float, float]]
) -> Refusal | None:
    """Return why a continuous scalar lies outside its verified range; None if every scalar with a range is inside."""
    for name, value in scalars.items():
        if name not in ranges or name in definition.size_scalars or is_code_selecting(definition, name):
            continue
        if not isinstance(value, int | float):
            continue
        low, high = ranges[name]
        if not low <= value <= high:  # NaN is outside, too
            return Refusal("scalar_outside", f"{name}={value:g} is outside the verified range {low:g}..{high:g}")
    return None


# ---- what is required of its bits -----------------------------------------------------------------

Requirement = Literal["deterministic", "batch_invariant"]
"""What a caller may require of the bits of kernels. Each rests on the verification of the kernel, and not on its record alone."""
REQUIREMENTS: tuple[Requirement, ...] = ("deterministic", "batch_invariant")


def spelled_requirements(required: Collection[str]) -> str:
    """Return the requirements as a clause, such as `` that is batch-invariant``; "" without requirements."""
    return f" that is {spelled_bits(required)}" if required else ""


def spelled_bits(required: Collection[str]) -> str:
    """Return ``deterministic and batch-invariant``, or the one of them that is required."""
    return " and ".join(name.replace("_", "-") for name in REQUIREMENTS if name in required)


def why_not_as_required(
    candidate: Candidate, files: SolutionFiles, required: Collection[str], batch_axis: str
) -> Refusal | None:
    """Return why the bits of a kernel do not meet a caller's requirements; None if they meet them."""
    spec = files.record.spec
    if required and not spec.deterministic:
        return Refusal("not_deterministic", "deterministic kernels are required, and it declares that it is not")
    if required and not candidate.deterministic:
        what = "deterministic kernels are required, and its trace does not state that repeated calls gave equal bits"
        return Refusal("not_deterministic", what)
    if "batch_invariant" not in required:
        return None
    if not batch_axis:
        why = "batch-invariant kernels are required, and no row of this operator can be called alone to verify that"
    elif not spec.batch_invariant:
        why = "batch-invariant kernels are required, and it does not promise to be one (spec.batch_invariant)"
    elif not candidate.batch_slices:
        why = "batch-invariant kernels are required, and its promise is not verified: bench and publish it again"
    else:
        return None
    return Refusal("not_batch_invariant", why)


# ---- the speed ------------------------------------------------------------------------------------


def why_not_faster(
    candidate: Candidate, definition: Definition, stock: Candidate | None, launch: Launch = "call"
) -> Refusal | None:
    """Return why a measurement does not show a speedup beyond noise, or a later launch; None if it is faster.

    A replay of a CUDA graph does not repeat what the host did, so only the device time counts there.
    """
    bar = MIN_SPEEDUP_CI_LOW if definition.backward_of is None else MIN_BACKWARD_SPEEDUP_CI_LOW
    if candidate.latency_us is None or candidate.speedup_ci_low is None:
        return Refusal("not_compared", "it was not compared with the stock code")
    if not candidate.speedup_ci_low > bar:
        ratio = f"{candidate.speedup:.2f}x" if candidate.speedup is not None else "unknown"
        # Published files have no upper end. The interval of a ratio is symmetric in its logarithm.
        is_slower = (candidate.speedup or 1.0) ** 2 < candidate.speedup_ci_low
        verdict = "slower than stock" if is_slower else "not faster than stock by more than noise"
        return Refusal("not_faster", f"{verdict}: speedup {ratio}, CI low {candidate.speedup_ci_low:.3f} <= {bar}")
    return None if launch == "replay" else _why_launched_later(candidate, stock)


def _why_launched_later(candidate: Candidate, stock: Candidate | None) -> Refusal | None:
    if stock is None or stock.latency_us is None or stock.host_us is None or candidate.host_us is None:
        return None
    until = max(stock.latency_us, stock.host_us)
    if candidate.host_us + CALL_SITE_US <= MAX_LAUNCH_SHARE * until:
        return None
    return Refusal(
        "launch_bound",
        f"launch-bound: a call takes the host {candidate.host_us:.1f} us and {CALL_SITE_US:g} us of the call site, "
        f"the stock code is done after {until:.1f} us",
    )


def first_done(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the candidate whose call ends first, by the longer of its device and host time; None if no candidate has both."""
    timed = [one for one in candidates if one.latency_us is not None and one.host_us is not None]
    return min(timed, key=lambda one: max(one.latency_us or 0.0, one.host_us or 0.0), default=None)
