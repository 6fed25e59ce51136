"""The decision: which verified solution serves a request, and why every other one does not. Pure: no I/O, no torch.

A request is judged by one measured point: the exact one, else the nearest in log space. The nearest point must lie inside
the measured range, or a little beyond it along axes that only repeat work. Each candidate of the point must pass
:func:`~tilegym_db.published.servable.why_not_served`. The rest compete on latency. If no candidate passes, stock code runs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tilegym_db.catalog import SolutionFiles
from tilegym_db.published.entries import Candidate, Entry
from tilegym_db.published.servable import HOST_NOISE_US, MIN_SPEEDUP_CI_LOW, first_done, why_not_served
from tilegym_db.published.table import ResolverTable
from tilegym_db.records import Definition, axes_key
from tilegym_db.records.call import Request, is_code_selecting
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.solution import Config
from tilegym_db.records.trace import PROCESS_NOISE_US

MIN_COMPILED_US = 8.0
"""A shorter call is left to ``torch.compile``. Most of its time is the launch, which fusing it with its neighbours saves."""

NO_BACKWARD = "mode training: it has no verified backward"


class Rejection(NamedTuple):
    """A candidate that was not picked, and the reason in one sentence."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True)
class Evidence:
    """The basis of a decision: a measured point and its measurement, or the reason why stock code runs."""

    source: Literal["exact", "nearest", "stock"]
    reason: str
    gpu: str
    published: str | None = None
    axes: Mapping[str, int] | None = None
    """The measured point; differs from the request's axes if the source is ``nearest``."""
    candidate: Candidate | None = None


@dataclass(frozen=True)
class Decision:
    """The picked solution and the rejected ones. ``solution`` is None if stock code runs."""

    solution: SolutionFiles | None
    config: Config
    evidence: Evidence
    rejected: tuple[Rejection, ...]


def no_kernel(reason: str, gpu: str) -> Decision:
    """Return the decision for a call that cannot be requested, such as one whose sizes the Definition excludes."""
    return Decision(None, {}, Evidence("stock", reason, gpu), ())


def decide(
    request: Request,
    table: ResolverTable | None,
    solutions: Mapping[str, SolutionFiles],
    backward: Decision | None = None,
    missing: str = "",
) -> Decision:
    """Pick the fastest verified solution for a request, or none.

    Args:
        request: a checked request.
        table: the published measurements of the request's GPU; None if nothing is published.
        solutions: the catalog's solutions of the Definition, by name.
        backward: the decision about its backward, for a request in training. Without a kernel for the backward, stock code
            runs forward too, because autograd needs what stock code saves.
        missing: the reason for no table; by default that nothing is published.
    """
    if request.mode == "training" and request.definition.backward_of is None:
        if backward is None:
            return _stock(request, table, solutions, NO_BACKWARD)
        if backward.solution is None:
            return _stock(request, table, solutions, f"{NO_BACKWARD}: {backward.evidence.reason}")
    if table is None:
        return _stock(request, None, solutions, missing or f"nothing is published for {request.gpu}")
    point = find_point(request, table)
    if isinstance(point, str):
        return _stock(request, table, solutions, point)
    return judge(point, request, table, solutions)


def judge(
    point: MeasuredPoint, request: Request, table: ResolverTable, solutions: Mapping[str, SolutionFiles]
) -> Decision:
    """Decide by one measured point."""
    eligible, rejected = _sort_out(point, request, table, solutions)
    return _conclude(point, table, solutions, eligible, rejected, request.serving)


def not_in_compiled_code(decision: Decision) -> str | None:
    """Return why a kernel that serves a call in eager mode does not serve it in compiled code; None if it does.

    A compiler does not see into a kernel, so it cannot fuse the call with its neighbours. The kernel must win back that loss.
    """
    winner = decision.evidence.candidate
    if winner is None or winner.latency_us is None:
        return decision.evidence.reason
    if winner.latency_us < MIN_COMPILED_US:
        return f"a call of {winner.latency_us:.2f} us is left to the compiler, which fuses it with its neighbours"
    compiled = [lost.candidate.latency_us for lost in decision.rejected if lost.candidate.provides == "compile"]
    generated_us = min((latency for latency in compiled if latency is not None), default=math.inf)
    if winner.latency_us * MIN_SPEEDUP_CI_LOW < generated_us:
        return None
    return f"{winner} with {winner.latency_us:.2f} us is not faster than compiled stock code with {generated_us:.2f} us"


def judge_each_serving(
    point: MeasuredPoint, request: Request, table: ResolverTable, solutions: Mapping[str, SolutionFiles]
) -> dict[str | None, Decision]:
    """Run :func:`judge` for each solution that may be serving now, and return the decisions by its name.

    Only solutions that tie with the fastest can change the decision. None stands for all others.
    """
    eligible, rejected = _sort_out(point, request, table, solutions)
    as_fast = tied(ranked(eligible))
    names = [None, *{candidate.solution for candidate in as_fast}] if len(as_fast) > 1 else [None]
    return {name: _conclude(point, table, solutions, eligible, rejected, name) for name in names}


def _sort_out(
    point: MeasuredPoint, request: Request, table: ResolverTable, solutions: Mapping[str, SolutionFiles]
) -> tuple[list[Candidate], list[Rejection]]:
    """Return the candidates of a point that may serve the request, and the others with the reason."""
    eligible: list[Candidate] = []
    rejected: list[Rejection] = []
    stock = first_done([candidate for candidate in point.entry.candidates if candidate.provides == "stock"])
    ranges = table.scalar_hull(request.definition.name)
    for candidate in point.entry.candidates:
        files = solutions.get(candidate.solution)
        refusal = why_not_served(candidate, files, request, is_exact=point.exact, scalar_ranges=ranges, stock=stock)
        if refusal is None:
            eligible.append(candidate)
        else:
            rejected.append(Rejection(candidate, refusal.reason))
    measured = {candidate.solution for candidate in point.entry.candidates}
    unmeasured = f"not in the table: no verified measurement at {_where(point, table)}"
    return eligible, rejected + _unmeasured(solutions, measured, unmeasured)


def _conclude(
    point: MeasuredPoint,
    table: ResolverTable,
    solutions: Mapping[str, SolutionFiles],
    eligible: Sequence[Candidate],
    rejected: Sequence[Rejection],
    serving: str | None,
) -> Decision:
    axes, where = point.entry.call.axes, _where(point, table)
    if not eligible:
        reason = f"no verified solution is faster than stock at {where}"
        return Decision(None, {}, Evidence("stock", reason, table.gpu, table.published, axes), tuple(rejected))
    winner, lost = _fastest(eligible, serving)
    source: Literal["exact", "nearest"] = "exact" if point.exact else "nearest"
    reason = (
        f"fastest verified solution at {where}" if point.exact else f"fastest at {where}, the nearest measured point"
    )
    if point.beyond:
        reason += f"; beyond the measured range of {' and '.join(point.beyond)}, more or less of which is only repeated"
    reason += _whose_word(winner)
    evidence = Evidence(source, reason, table.gpu, table.published, axes, winner)
    return Decision(solutions[winner.solution], dict(winner.config), evidence, (*lost, *rejected))


def _whose_word(winner: Candidate) -> str:
    """Return a note on a winner that was measured without confinement or by another installation; else ""."""
    if winner.shipped_source:
        level = f"sandbox level {winner.sandbox_level}"
        return f"; its worker was not confined ({level}), so it serves this user alone: the package ships its source"
    return "; another installation measured it, which is trusted here" if winner.origin == "foreign" else ""


def _where(point: MeasuredPoint, table: ResolverTable) -> str:
    return f"{axes_key(dict(point.entry.call.axes))} on {table.gpu}"


def _stock(
    request: Request, table: ResolverTable | None, solutions: Mapping[str, SolutionFiles], reason: str
) -> Decision:
    gpu, published = (table.gpu, table.published) if table else (request.gpu, None)
    evidence = Evidence("stock", reason, gpu, published)
    return Decision(None, {}, evidence, tuple(_unmeasured(solutions, set(), reason)))


def _unmeasured(solutions: Mapping[str, SolutionFiles], measured: set[str], reason: str) -> list[Rejection]:
    found = []
    for name, files in sorted(solutions.items()):
        if name not in measured:
            spec = files.record.spec
            found.append(Rejection(Candidate(name, files.digest, spec.language, spec.role, spec.provides), reason))
    return found


def _fastest(eligible: Sequence[Candidate], serving: str | None) -> tuple[Candidate, list[Rejection]]:
    """Return the winner, and the others with the reason why they lost.

    The lowest latency wins. Of candidates within its noise, the one that is serving stays; otherwise the one that is launched
    clearly sooner wins. A small kernel takes a few microseconds on the device and several times that to launch, so the host
    time decides how fast a model is.
    """
    by_latency = ranked(eligible)
    best, as_fast = by_latency[0], tied(by_latency)
    held = next((candidate for candidate in as_fast if candidate.solution == serving), None)
    soonest = min(as_fast, key=host_us)
    winner = held or (soonest if host_us(best) - host_us(soonest) > HOST_NOISE_US else best)
    lost = []
    for candidate in by_latency:
        times = f"{candidate.latency_us:.2f} us against {winner.latency_us:.2f} us of {winner}"
        if candidate is winner:
            continue
        if winner is best and candidate in as_fast:
            lost.append(Rejection(candidate, f"not faster by more than noise: {times}"))
        elif held is not None and held is not best and candidate in as_fast:
            lost.append(Rejection(candidate, f"inside noise of what is serving, which stays: {times}"))
        elif winner is not best and candidate in as_fast:
            known = "unknown" if candidate.host_us is None else f"{candidate.host_us:.1f} us"
            host = f"{known} of host time a call against {winner.host_us:.1f} us"
            lost.append(Rejection(candidate, f"as fast on the device, and later launched: {host} of {winner}"))
        else:
            lost.append(Rejection(candidate, f"slower: {times}"))
    return winner, lost


# ---- ranking --------------------------------------------------------------------------------------
# Which of the candidates that may serve are as fast as each other.


def host_us(candidate: Candidate) -> float:
    """Return the host time of a call in microseconds; the largest float if it is unknown."""
    return sys.float_info.max if candidate.host_us is None else candidate.host_us


def ranked(eligible: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates sorted by latency; their text breaks ties, so that the order of the table does not."""
    return sorted(eligible, key=lambda candidate: (candidate.latency_us or 0.0, str(candidate)))


def tied(ranked: Sequence[Candidate]) -> list[Candidate]:
    """Return the fastest candidate and those within its noise."""
    return [candidate for candidate in ranked if _inside_noise(candidate, ranked[0])]


def _inside_noise(candidate: Candidate, best: Candidate) -> bool:
    """Return True if the latencies differ by at most PROCESS_NOISE_US or the confidence intervals overlap.

    A missing bound is replaced by the latency.
    """
    if (candidate.latency_us or 0.0) - (best.latency_us or 0.0) <= PROCESS_NOISE_US:
        return True
    low = candidate.ci_low_us if candidate.ci_low_us is not None else candidate.latency_us
    high = best.ci_high_us if best.ci_high_us is not None else best.latency_us
    return low is not None and high is not None and low <= high


# ---- measured points ------------------------------------------------------------------------------
# Finds the measured point to judge a request by: the exact one, else the nearest in log space. This searches all
# entries; the index in :mod:`tilegym_db.resolver.resolve` finds exact points faster.

CONTIGUOUS = "contiguous"


class MeasuredPoint(NamedTuple):
    """A measured point, a flag for an exact match, and the independent axes on which the request exceeds the measured range."""

    entry: Entry
    exact: bool
    beyond: tuple[str, ...] = ()


def find_point(request: Request, table: ResolverTable) -> MeasuredPoint | str:
    """Return the measured point to judge the request by, or the reason if there is no such point."""
    definition = request.definition
    entries: Sequence[Entry] = table.believed_entries(definition, request.call.dtypes)
    if not entries:
        return _why_no_entries(request, table)
    entries = [entry for entry in entries if entry.definition_digest == definition.digest]
    if not entries:
        return f"{definition.name} was measured on {table.gpu} under another meaning than version {definition.version}"
    selecting = {
        name: request.call.scalars.get(name) for name in selecting_scalars(definition) if name in request.call.scalars
    }
    entries = [entry for entry in entries if equal_scalars(entry, selecting) == len(selecting)]
    if not entries:
        return f"{definition.name} was not measured on {table.gpu} with these code-selecting scalars"
    entries = [entry for entry in entries if layouts_match(entry, request.call.layouts, definition)]
    if not entries:
        spelled = (
            ", ".join(f"{name} {layout}" for name, layout in sorted(request.call.layouts.items())) or "all contiguous"
        )
        return f"{definition.name} was not measured on {table.gpu} with these layouts ({spelled})"
    sizes = {name: request.call.axes[name] for name in definition.var_axes}  # const axes are the same everywhere
    exact = [entry for entry in entries if all(entry.call.axes[name] == size for name, size in sizes.items())]
    if exact:
        return MeasuredPoint(max(exact, key=lambda entry: equal_scalars(entry, request.call.scalars)), exact=True)
    beyond = axes_beyond(definition, request.call.axes, request.call.dtypes, [entry.call.axes for entry in entries])
    if isinstance(beyond, str):
        return beyond
    nearest = min(entries, key=lambda entry: (entry.log_distance(sizes), axes_key(dict(entry.call.axes))))
    return MeasuredPoint(nearest, exact=False, beyond=beyond)


def selecting_scalars(definition: Definition) -> tuple[str, ...]:
    """Return the scalars that select code, which must be equal.

    A continuous scalar such as eps does not change which kernel is fastest.
    """
    return tuple(
        name for name, spec in definition.inputs.items() if spec.is_scalar and is_code_selecting(definition, name)
    )


def equal_scalars(entry: Entry, scalars: Mapping[str, Scalar]) -> int:
    """Return the number of scalars that have the measured value."""
    return sum(entry.call.scalars.get(name) == value for name, value in scalars.items())


def layouts_match(entry: Entry, layouts: Mapping[str, str], definition: Definition) -> bool:
    """Return True if the entry was measured with these layouts; outputs are compared only if ``layouts`` names them."""
    for name, spec in definition.inputs.items():
        if not spec.is_scalar and entry.call.layouts.get(name, CONTIGUOUS) != layouts.get(name, CONTIGUOUS):
            return False
    return all(
        name not in layouts or entry.call.layouts.get(name, CONTIGUOUS) == layouts[name] for name in definition.outputs
    )


def _why_no_entries(request: Request, table: ResolverTable) -> str:
    measured = [", ".join(f"{k}={v}" for k, v in dtypes.items()) for dtypes in table.dtypes_of(request.definition.name)]
    if not measured:
        return f"{request.definition.name} was not measured on {table.gpu}"
    asked = ", ".join(f"{name}={dtype}" for name, dtype in request.call.dtypes.items())
    return f"{request.definition.name} was not measured on {table.gpu} with {asked} (measured: {'; '.join(measured)})"


# ---- reach ----------------------------------------------------------------------------------------
# Measured points cover the range of every axis, and sizes beyond it along axes that only repeat work. Pure.
#
# Each key head is the same work, whether a model has 8 or 16. More heads do not change a kernel that passed the fuzz
# cases and is faster at points with different numbers of heads. Four more conditions must hold: the Definition
# declares the axis independent, several of its sizes were measured, the size is near them, and the total work lies
# inside the measured range. Below that range launch time decides what is faster; above it integers may overflow.

LEAST_SIZES = 2
"""Minimum number of measured sizes of an axis before larger sizes count as repeated work."""
FARTHEST = 4
"""Maximum factor between a size and the measured range, above its maximum or below its minimum."""

Axes = Mapping[str, int]


def axes_beyond(
    definition: Definition, asked: Axes, dtypes: Mapping[str, str], points: Sequence[Axes]
) -> tuple[str, ...] | str:
    """Return the axes on which a request may exceed the measured range, or the reason why it may not.

    Args:
        definition: the operator.
        asked: every axis of the request.
        dtypes: every dtype of the request, which is that of the points.
        points: the axes of the measured points; at least one.
    """
    beyond = []
    for name in definition.var_axes:
        sizes = {point[name] for point in points}
        if min(sizes) <= asked[name] <= max(sizes):
            continue
        outside = f"{name}={asked[name]} is outside the measured range {min(sizes)}..{max(sizes)}"
        group = _group_of(definition, name)
        if not group:
            return outside
        why = _why_far(asked[name], sizes) or _why_other_ratio(name, group, asked, points)
        if why:
            return f"{outside}, and {why}"
        beyond.append(name)
    if beyond:
        why = _why_other_work(definition, asked, dtypes, points)
        if why:
            return f"{beyond[0]}={asked[beyond[0]]} was not measured, and {why}"
    return tuple(beyond)


def _group_of(definition: Definition, name: str) -> tuple[str, ...]:
    groups = () if definition.serving is None else definition.serving.independent
    return next((group for group in groups if name in group), ())


def _why_far(size: int, sizes: set[int]) -> str:
    if len(sizes) < LEAST_SIZES:
        return f"{len(sizes)} measured size does not show that more of it is only more work"
    if size > FARTHEST * max(sizes) or size * FARTHEST < min(sizes):
        return f"further from it than a factor of {FARTHEST}"
    return ""


def _why_other_ratio(name: str, group: Sequence[str], asked: Axes, points: Sequence[Axes]) -> str:
    """Return why the ratio of an axis to another of its group lies outside the measured ratios; "" if it does not."""
    for other in group:
        if other == name or not asked[other]:
            continue
        known = [point[name] / point[other] for point in points if point[other]]
        ratio = asked[name] / asked[other]
        if not known or not min(known) <= ratio <= max(known):
            measured = f"{min(known):g}..{max(known):g}" if known else "none"
            return f"so is {name}/{other}={ratio:g} (measured: {measured})"
    return ""


def _why_other_work(definition: Definition, asked: Axes, dtypes: Mapping[str, str], points: Sequence[Axes]) -> str:
    """Return why the bytes that a request must move lie outside the range of all points; "" if they do not."""
    work = definition.cost_of(asked, dtypes)[1]
    known = [definition.cost_of({**asked, **point}, dtypes)[1] for point in points]
    if min(known) <= work <= max(known):
        return ""
    return f"its {_megabytes(work)} MB are outside the measured {_megabytes(min(known))}..{_megabytes(max(known))} MB"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.3g}"


# ---- words ----------------------------------------------------------------------------------------
# A decision as one line and as a table of a notebook.

MEASURED = ("solution", "language", "config", "latency_us", "speedup", "speedup_ci_low")
"""The fields of a candidate that a table shows."""


def spelled_decision(request: Request, served: str, evidence: Evidence) -> str:
    """Return ``rms_norm M=4096,N=4096 bfloat16 on h200: <served>, 2.10x stock (<reason>)``."""
    chosen, call = evidence.candidate, request.call
    speedup = f", {chosen.speedup:.2f}x stock" if chosen is not None and chosen.speedup is not None else ""
    asked = " ".join(filter(None, [axes_key(dict(call.axes)), ",".join(call.dtypes.values())]))
    return f"{request.definition.name} {asked} on {request.gpu}: {served}{speedup} ({evidence.reason})"


def candidates_table(request: Request, evidence: Evidence, rejected: Sequence[Rejection], served: str | None) -> str:
    """Return an HTML table with one row per candidate: the picked one first, then the others with their reasons."""
    from tilegym_db.store.answer import html_table  # only a notebook needs it

    chosen = evidence.candidate
    first = (
        [getattr(chosen, name) for name in MEASURED] if chosen is not None else [served, *[None] * (len(MEASURED) - 1)]
    )
    rows = [("picked", *first, evidence.reason)]
    rows += [("", *(getattr(candidate, name) for name in MEASURED), reason) for candidate, reason in rejected]
    caption = spelled_decision(request, str(chosen or served or "no solution"), evidence)
    return html_table(("", *MEASURED, "why"), rows, caption)
