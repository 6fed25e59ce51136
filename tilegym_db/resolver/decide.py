"""The decision: which verified solution serves a request, and why every other one does not. Pure: no I/O, no torch.

A request is judged by the measured point of its sizes. Without one, a rule finds others (:data:`Rule`). Each candidate must pass
:func:`~tilegym_db.published.entries.why_not_served`, and at another point what the rule asks. The rest compete on latency. If no
candidate passes, stock code runs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tilegym_db.catalog import SolutionFiles
from tilegym_db.published.entries import (
    HOST_NOISE_US,
    MIN_SPEEDUP_CI_LOW,
    Candidate,
    Entry,
    Requirement,
    first_done,
    spelled_requirements,
    why_not_as_required,
    why_not_served,
)
from tilegym_db.published.neighbours import (
    MIN_SPEEDUP_BETWEEN,
    Axes,
    log_distance,
    neighbours,
    padding_of_widths,
    why_beyond_verified,
    why_more_costs_more,
    why_unaligned,
)
from tilegym_db.published.table import ResolverTable
from tilegym_db.records import Definition, axes_key
from tilegym_db.records.call import Launch, Request, is_code_selecting
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.solution import Config
from tilegym_db.records.trace import PROCESS_NOISE_US

MIN_COMPILED_US = 8.0
"""A shorter call is left to ``torch.compile``. Most of its time is the launch, which fusing it with its neighbours saves."""

Rule = Literal["padded", "known"]
"""The rule by which a measured point stands for another call.

``padded`` takes the nearest point in log space, inside the measured range or a little beyond it along axes that only repeat work.
A kernel must keep its lead there even if it pads widths. ``known`` takes two points around the call, from which its cost is known
(:mod:`tilegym_db.published.neighbours`)."""
RULE: Rule = "padded"

NOTHING_PUBLISHED = "nothing is published for"
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
    rule: Rule = RULE,
    missing: str = "",
) -> Decision:
    """Pick the fastest verified solution for a request, or none.

    Args:
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
        return _stock(request, None, solutions, missing or f"{NOTHING_PUBLISHED} {request.gpu}")
    point = find_point(request, table, rule)
    if isinstance(point, str):
        return _stock(request, table, solutions, point)
    return judge(point, request, table, solutions)


def judge(
    point: MeasuredPoint, request: Request, table: ResolverTable, solutions: Mapping[str, SolutionFiles]
) -> Decision:
    """Decide by one measured point."""
    eligible, rejected = _sort_out(point, request, table, solutions)
    return _conclude(point, table, solutions, eligible, rejected, request.serving, request.launch)


def not_in_compiled_code(decision: Decision) -> str | None:
    """Return why a kernel that serves a call in eager mode cannot serve it in compiled code; None if it can.

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


def decide_first_call(
    request: Request, table: ResolverTable | None, solutions: Mapping[str, SolutionFiles]
) -> Decision | None:
    """Return the kernel to check at the first call of a request that was not measured.

    Return None if the request was measured or no kernel can be checked. The kernel is the fastest one at the nearest
    measured point, and verified for the request. Its time at the request is not known, so it must not serve unchecked.
    """
    if table is None or request.mode != "inference" or BATCH_INVARIANT in table.required:
        return None  # a kernel that passes at some sizes alone would change the bits between them
    entries = comparable_entries(request, table)
    if isinstance(entries, str):
        return None
    definition, asked = request.definition, request.call.axes
    ordered = sorted(entries, key=lambda entry: log_distance(definition, asked, entry.call.axes))
    if log_distance(definition, asked, ordered[0].call.axes) == 0:
        return None
    for entry in ordered[:MAX_TRIED_POINTS]:
        eligible, rejected = _sort_out(MeasuredPoint(entry, False), request, table, solutions, is_checked=True)
        if eligible:
            point = MeasuredPoint(entry, False)
            return _conclude(point, table, solutions, eligible, rejected, request.serving, request.launch)
    return None


MAX_TRIED_POINTS = 3
"""Nearest measured points that are searched for a kernel to check at a first call."""


def judge_each_serving(
    point: MeasuredPoint, request: Request, table: ResolverTable, solutions: Mapping[str, SolutionFiles]
) -> dict[str | None, Decision]:
    """Run :func:`judge` for each solution that may be serving now, and return the decisions by its name.

    Only solutions that tie with the fastest can change the decision. None stands for all others.
    """
    eligible, rejected = _sort_out(point, request, table, solutions)
    as_fast = tied(ranked(eligible))
    names = [None, *{candidate.solution for candidate in as_fast}] if len(as_fast) > 1 else [None]
    return {name: _conclude(point, table, solutions, eligible, rejected, name, request.launch) for name in names}


def _sort_out(
    point: MeasuredPoint,
    request: Request,
    table: ResolverTable,
    solutions: Mapping[str, SolutionFiles],
    *,
    is_checked: bool = False,
) -> tuple[list[Candidate], list[Rejection]]:
    """Return the candidates of a point that may serve the request, and the others with the reason.

    If ``is_checked`` is true, the time of a kernel is measured before it serves, and only its indices must be known to reach.
    """
    eligible: list[Candidate] = []
    rejected: list[Rejection] = []
    stock = first_done([candidate for candidate in point.entry.candidates if candidate.provides == "stock"])
    ranges = table.scalar_hull(request.definition.name)
    for candidate in point.entry.candidates:
        files = solutions.get(candidate.solution)
        refusal = why_not_served(candidate, files, request, is_exact=point.exact, scalar_ranges=ranges, stock=stock)
        if refusal is not None:
            reason: str | None = refusal.reason
        elif is_checked:
            reason = _why_beyond(candidate, request, table)
        else:
            reason = _why_not_near(candidate, files, point, request, table)
        reason = reason or _why_not_as_required(candidate, files, request, table)
        if reason is None:
            eligible.append(candidate)
        else:
            rejected.append(Rejection(candidate, reason))
    if eligible and BATCH_INVARIANT in table.required:
        eligible, dropped = _one_for_every_batch(eligible, request, table, solutions)
        rejected += dropped
    measured = {candidate.solution for candidate in point.entry.candidates}
    unmeasured = f"not in the table: no verified measurement at {_where(point, table)}"
    return eligible, rejected + _unmeasured(solutions, measured, unmeasured)


BATCH_INVARIANT: Requirement = "batch_invariant"


def _why_not_as_required(
    candidate: Candidate, files: SolutionFiles | None, request: Request, table: ResolverTable
) -> str | None:
    if not table.required or files is None:
        return None
    refusal = why_not_as_required(candidate, files, table.required, request.definition.batch_axis)
    return None if refusal is None else refusal.reason


def _one_for_every_batch(
    eligible: Sequence[Candidate], request: Request, table: ResolverTable, solutions: Mapping[str, SolutionFiles]
) -> tuple[list[Candidate], list[Rejection]]:
    """Return the one kernel that serves every measured size of the batch axis, if it is eligible, and what it excludes.

    Two kernels sum in different orders, so a row has other bits in a larger batch if another kernel or stock code serves
    that. The choice does not depend on the size of the batch, nor on how the calls get to the device.
    """
    axis, sizes, entries = request.definition.batch_axis, request.call.axes, comparable_entries(request, table)
    others = [name for name in request.definition.var_axes if name != axis]
    points = [
        entry
        for entry in (() if isinstance(entries, str) else entries)
        if all(entry.call.axes[name] == sizes[name] for name in others)
    ]
    required = "batch-invariant kernels are required, and"
    if not points:
        where = axes_key({name: sizes[name] for name in others})
        return [], [Rejection(one, f"{required} no call with {where} was measured") for one in eligible]
    times: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for candidate in points[0].candidates:
        found = _product_of_times(candidate, points, request, table, solutions)
        if isinstance(found, str):
            reasons[str(candidate)] = f"{required} {found}"
        else:
            times[str(candidate)] = found
    winner = min(times, key=lambda name: (times[name], name), default="")
    kept = [one for one in eligible if str(one) == winner]
    missing = (
        f"{required} it was not measured at every {axis}" if not winner else f"{required} {winner} serves every {axis}"
    )
    return kept, [Rejection(one, reasons.get(str(one), missing)) for one in eligible if one not in kept]


def _product_of_times(
    candidate: Candidate,
    points: Sequence[Entry],
    request: Request,
    table: ResolverTable,
    solutions: Mapping[str, SolutionFiles],
) -> float | str:
    """Return the product of a kernel's latencies at all points, or the first point that it does not serve with the reason."""
    axis, product = request.definition.batch_axis, 1.0
    for point in points:
        there = next((one for one in point.candidates if _is_same_kernel(one, candidate)), None)
        reason = _why_not_there(there, point, request, table, solutions)
        if reason or there is None or there.latency_us is None:
            return f"at {axis}={point.call.axes[axis]} {reason or 'it was not measured'}"
        product *= there.latency_us
    return product


def _why_not_there(
    candidate: Candidate | None,
    point: Entry,
    request: Request,
    table: ResolverTable,
    solutions: Mapping[str, SolutionFiles],
) -> str:
    """Return why a kernel does not serve a point in each way of launching it; "" if it does."""
    if candidate is None:
        return "it was not measured"
    files = solutions.get(candidate.solution)
    call = replace(request.call, axes={**request.call.axes, **point.call.axes})
    stock = first_done([one for one in point.candidates if one.provides == "stock"])
    refusal = why_not_served(
        candidate,
        files,
        replace(request, call=call, launch="call"),
        is_exact=True,
        scalar_ranges=table.scalar_hull(request.definition.name),
        stock=stock,
    )
    return (refusal.reason if refusal is not None else _why_not_as_required(candidate, files, request, table)) or ""


def _why_not_near(
    candidate: Candidate, files: SolutionFiles | None, point: MeasuredPoint, request: Request, table: ResolverTable
) -> str | None:
    """Return why a kernel that is faster at a point may be slower at the sizes of the request; None if it is faster there."""
    if point.exact:
        return None
    if point.between is not None:
        return _why_not_between(candidate, files, point.entry, point.between, request, table)
    factor, width = point.padding
    lead = candidate.speedup_ci_low or 0.0
    if lead >= factor:
        return None
    sizes = f"{width}={request.call.axes[width]}", f"{width}={point.entry.call.axes[width]}"
    return (
        f"{sizes[0]} was not measured, and padding may cost {factor:.2f} times more than at {sizes[1]}: the measured "
        f"speedup {lead:.2f} (CI low) does not outlast that"
    )


def _why_not_between(
    candidate: Candidate,
    files: SolutionFiles | None,
    nearest: Entry,
    between: Between,
    request: Request,
    table: ResolverTable,
) -> str | None:
    """Return why a kernel that is faster at the nearest point may be slower at the call; None if it stays faster."""
    bar = MIN_SPEEDUP_BETWEEN * between.padding
    around = nearest, *between.others
    for entry in around:
        there = next((one for one in entry.candidates if _is_same_kernel(one, candidate)), None)
        where = axes_key(dict(entry.call.axes))
        if there is None:
            return f"it was not measured at {where}, the other point around this call"
        stock = first_done([one for one in entry.candidates if one.provides == "stock"])
        ranges = table.scalar_hull(request.definition.name)
        refusal = why_not_served(there, files, request, is_exact=False, scalar_ranges=ranges, stock=stock)
        if refusal is not None:
            return f"at {where}, the other point around this call: {refusal.reason}"
        if not (there.speedup_ci_low or 0.0) > bar:
            return (
                f"between measured points a speedup above {bar:.2f} at both is needed, for a tile that is not full: "
                f"CI low {there.speedup_ci_low or 0.0:.3f} at {where}"
            )
    for entry, half in zip(around, between.halves, strict=False):
        reason = _why_more_costs_more(candidate, entry, half, between.factor)
        if reason is not None:
            return reason
    return _why_beyond(candidate, request, table)


def _why_beyond(candidate: Candidate, request: Request, table: ResolverTable) -> str | None:
    """Return why the offsets of a call may be too large for the indices of a kernel; None if verified sizes cover them."""
    measured = [
        entry.call.axes
        for entry in table.believed_entries(request.definition, request.call.dtypes)
        if any(one.solution_digest == candidate.solution_digest for one in entry.candidates)
    ]
    return why_beyond_verified(
        request.definition, request.call.axes, measured, candidate.verified_sizes, candidate.verified_elements
    )


def _why_more_costs_more(candidate: Candidate, entry: Entry, half: Entry, factor: float) -> str | None:
    times = []
    for at in (entry, half):
        there = next((one for one in at.candidates if _is_same_kernel(one, candidate)), None)
        if there is None or there.latency_us is None or there.speedup is None:
            return (
                f"it was not measured at {axes_key(dict(at.call.axes))}, so that it is not known what more work costs"
            )
        times.append((there.latency_us, there.latency_us * there.speedup))
    (latency, stock), (half_latency, half_stock) = times
    return why_more_costs_more(latency, half_latency, stock, half_stock, factor)


def _is_same_kernel(one: Candidate, other: Candidate) -> bool:
    return (
        one.solution_digest == other.solution_digest and one.solution == other.solution and one.config == other.config
    )


def _conclude(
    point: MeasuredPoint,
    table: ResolverTable,
    solutions: Mapping[str, SolutionFiles],
    eligible: Sequence[Candidate],
    rejected: Sequence[Rejection],
    serving: str | None,
    launch: Launch,
) -> Decision:
    axes, where = point.entry.call.axes, _where(point, table)
    other = point.between.others[0].call.axes if point.between is not None and point.between.others else None
    if not eligible:
        reason = _why_nothing_eligible(point, where, rejected, table.required) + _REPLAYED[launch]
        evidence = Evidence("stock", reason, table.gpu, table.published, axes)
        return Decision(None, {}, evidence, tuple(rejected))
    winner, lost = _fastest(eligible, serving, launch)
    source: Literal["exact", "nearest"] = "exact" if point.exact else "nearest"
    reason = (
        f"fastest verified solution at {where}" if point.exact else f"fastest at {where}, the nearest measured point"
    )
    if point.beyond:
        reason += f"; beyond the measured range of {' and '.join(point.beyond)}, more or less of which is only repeated"
    if point.padding.factor > 1.0:
        least = (winner.speedup_ci_low or 0.0) / point.padding.factor
        reason += (
            f"; padding {point.padding.width} may cost {point.padding.factor:.2f} times more than there, which leaves at least "
            f"{least:.2f}x stock"
        )
    if other is not None:
        reason += f", and as sure at {axes_key(dict(other))}"
    if point.between is not None and point.between.halves:
        reason += "; beyond the measured work, more of which is only repeated"
    reason += _whose_word(winner) + _REPLAYED[launch]
    evidence = Evidence(source, reason, table.gpu, table.published, axes, winner)
    return Decision(solutions[winner.solution], dict(winner.config), evidence, (*lost, *rejected))


_REPLAYED: Mapping[Launch, str] = {"call": "", "replay": "; calls are replayed, so only the device time counts"}


def _why_nothing_eligible(
    point: MeasuredPoint, where: str, rejected: Sequence[Rejection], required: Collection[str]
) -> str:
    """Return why no candidate of a point serves a request: it is slower there, or its lead is not known elsewhere."""
    if required:
        return f"no verified solution{spelled_requirements(required)} is known to be faster than stock at {where}"
    if point.between is not None:
        return f"not measured, and no verified solution is surely faster than stock around {where}"
    if point.padding.factor > 1.0 and any(
        (one.candidate.speedup_ci_low or 0.0) > MIN_SPEEDUP_CI_LOW for one in rejected if one.candidate.role == "kernel"
    ):
        return f"no verified solution is known to keep its lead at {where}, if it pads {point.padding.width}"
    return f"no verified solution is faster than stock at {where}"


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


def _fastest(eligible: Sequence[Candidate], serving: str | None, launch: Launch) -> tuple[Candidate, list[Rejection]]:
    """Return the winner, and the others with the reason why they lost.

    The lowest latency wins. Of candidates within its noise, the one that is serving stays; otherwise the one that is launched
    clearly sooner wins. A small kernel takes a few microseconds on the device and several times that to launch, so the host
    time decides how fast a model is. In replays it does not, and the lowest latency wins.
    """
    by_latency = ranked(eligible)
    best, as_fast = by_latency[0], tied(by_latency)
    held = next((candidate for candidate in as_fast if candidate.solution == serving), None)
    soonest = best if launch == "replay" else min(as_fast, key=host_us)
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


class Padding(NamedTuple):
    """The factor by which padding may cost more at a request than at its point, and the width of the largest share."""

    factor: float = 1.0
    width: str = ""


class Between(NamedTuple):
    """The other points on which an answer for a neighbour rests, by the rule of :mod:`tilegym_db.published.neighbours`."""

    others: tuple[Entry, ...]
    halves: tuple[Entry, ...]
    """Points of half the work of the nearest point and ``others``, if no measured point has as much work as the request."""
    factor: float
    """The work of the request over that of the largest measured point."""
    padding: float
    """Factor by which tiles may be emptier than at the points."""


class MeasuredPoint(NamedTuple):
    """A measured point, a flag for an exact match, and what is known of a request with other sizes."""

    entry: Entry
    exact: bool
    beyond: tuple[str, ...] = ()
    """The independent axes on which the request exceeds the measured range."""
    padding: Padding = Padding()
    between: Between | None = None
    """The other points by the rule ``known``."""


def find_point(request: Request, table: ResolverTable, rule: Rule = RULE) -> MeasuredPoint | str:
    """Return the measured point to judge the request by, or the reason if there is no such point."""
    definition, entries = request.definition, comparable_entries(request, table)
    if isinstance(entries, str):
        return entries
    sizes = {name: request.call.axes[name] for name in definition.var_axes}  # const axes are the same everywhere
    exact = [entry for entry in entries if all(entry.call.axes[name] == size for name, size in sizes.items())]
    if exact:
        return MeasuredPoint(max(exact, key=lambda entry: equal_scalars(entry, request.call.scalars)), exact=True)
    return _find_near(definition, request.call.axes, request.call.dtypes, entries, rule)


def _find_near(
    definition: Definition, asked: Axes, dtypes: Mapping[str, str], entries: Sequence[Entry], rule: Rule
) -> MeasuredPoint | str:
    """Return the measured point that stands for a request with other sizes, or the reason if there is no such point."""
    points = [entry.call.axes for entry in entries]
    if rule == "padded":
        beyond = axes_beyond(definition, asked, dtypes, points)
        if isinstance(beyond, str):
            return beyond
        unaligned = [why_unaligned(definition, asked, point) for point in points]
        if all(unaligned):
            return unaligned[0]
        nearest = min(
            (one for one, reason in zip(entries, unaligned, strict=True) if not reason),
            key=lambda one: (log_distance(definition, asked, one.call.axes), axes_key(dict(one.call.axes))),
        )
        padding = Padding(*padding_of_widths(definition, asked, nearest.call.axes))
        return MeasuredPoint(nearest, False, beyond, padding)
    found = neighbours(definition, asked, dtypes, points)
    if isinstance(found, str):
        return found
    order = sorted({found.lower, found.upper}, key=lambda index: index != found.nearest)
    halves = dict(zip((found.lower, found.upper), found.halves, strict=False))
    between = Between(
        tuple(entries[index] for index in order[1:]),
        tuple(entries[halves[index]] for index in order if index in halves),
        found.factor,
        found.padding,
    )
    return MeasuredPoint(entries[order[0]], False, between=between)


def comparable_entries(request: Request, table: ResolverTable) -> Sequence[Entry] | str:
    """Return the measured points of the dtypes, layouts and selecting scalars of a request, or the reason if there are none."""
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
    alike = [entry for entry in entries if layouts_match(entry, request.call.layouts, definition)]
    if not alike:
        asked = _spelled_layouts(request.call.layouts)
        measured = "; ".join(dict.fromkeys(_spelled_layouts(entry.call.layouts) for entry in entries))
        return f"{definition.name} was not measured on {table.gpu} with these layouts ({asked}), but with others ({measured})"
    return alike


def _spelled_layouts(layouts: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {layout}" for name, layout in sorted(layouts.items())) or "all contiguous"


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


def axes_beyond(
    definition: Definition, asked: Axes, dtypes: Mapping[str, str], points: Sequence[Axes]
) -> tuple[str, ...] | str:
    """Return the axes on which a request may exceed the measured range, or the reason why it may not.

    Args:
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
