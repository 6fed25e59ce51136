"""The decision: which verified solution serves a request, and why every other one does not. Pure: no I/O, no torch.

The measured point is the exact one, else the nearest in log space inside the measured range or, along independent work, a
little beyond it, else there is none. Of its
candidates, those that are verified with today's source, declared for the request, faster than the stock code by more than
noise and not launched later than it is done compete on latency. Where nobody is left, the stock code runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tilegym_db.catalog import SolutionFiles
from tilegym_db.records import axes_key
from tilegym_db.records.solution import Config
from tilegym_db.resolver.eligibility import (
    HOST_NOISE_US,
    MIN_BACKWARD_SPEEDUP_CI_LOW,
    MIN_SPEEDUP_CI_LOW,
    disqualify,
    host_us,
    later_launched,
    ranked,
    soonest_done,
    tied,
)
from tilegym_db.resolver.measured_points import MeasuredPoint, find_point, outside_scalars
from tilegym_db.resolver.request import Request
from tilegym_db.resolver.table import Candidate, ResolverTable

__all__ = [
    "MIN_BACKWARD_SPEEDUP_CI_LOW",
    "MIN_SPEEDUP_CI_LOW",
    "Decision",
    "Evidence",
    "Rejection",
    "decide",
    "judge",
    "judge_each_serving",
    "no_kernel",
    "not_in_compiled_code",
]

MIN_COMPILED_US = 8.0
"""A shorter call is left to ``torch.compile``: most of it is the launch, which is what fusing it with its neighbours saves."""

NO_BACKWARD = "mode training: it has no verified backward"


class Rejection(NamedTuple):
    """A candidate that was not picked, and the reason in one sentence."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True)
class Evidence:
    """What a decision rests on: a measured point and its measurement, or the reason why stock code runs."""

    source: Literal["exact", "nearest", "stock"]
    reason: str
    gpu: str
    published: str | None = None
    axes: Mapping[str, int] | None = None
    """The measured point; differs from the request's axes where the source is ``nearest``."""
    candidate: Candidate | None = None


@dataclass(frozen=True)
class Decision:
    """``solution`` is None where stock code runs."""

    solution: SolutionFiles | None
    config: Config
    evidence: Evidence
    rejected: tuple[Rejection, ...]


def no_kernel(reason: str, gpu: str) -> Decision:
    """The decision about a call that cannot be asked for, such as one whose sizes the Definition excludes."""
    return Decision(None, {}, Evidence("stock", reason, gpu), ())


def decide(
    request: Request,
    table: ResolverTable | None,
    solutions: Mapping[str, SolutionFiles],
    backward: Decision | None = None,
) -> Decision:
    """Pick the fastest verified solution for a request, or none.

    Args:
        request: a checked request.
        table: the published measurements of the request's GPU; None where there are none.
        solutions: the catalog's solutions of the Definition, by name.
        backward: what was decided about its backward, for a request in training. Without a kernel there, stock code runs
            forward too: autograd goes back the way that it came.
    """
    if request.mode == "training" and request.definition.backward_of is None:
        if backward is None:
            return _stock(request, table, solutions, NO_BACKWARD)
        if backward.solution is None:
            return _stock(request, table, solutions, f"{NO_BACKWARD}: {backward.evidence.reason}")
    if table is None:
        return _stock(request, None, solutions, f"nothing is published for {request.gpu}")
    point = find_point(request, table)
    if isinstance(point, str):
        return _stock(request, table, solutions, point)
    return judge(point, request, table, solutions)


def judge(
    point: MeasuredPoint, request: Request, table: ResolverTable, solutions: Mapping[str, SolutionFiles]
) -> Decision:
    """The decision by one measured point."""
    eligible, rejected = _sort_out(point, request, table, solutions)
    return _conclude(point, table, solutions, eligible, rejected, request.serving)


def not_in_compiled_code(decision: Decision) -> str | None:
    """Why a kernel that serves a call in eager mode stays out of code that is compiled; None where it pays there too.

    A compiler does not see into a kernel: what it could have fused with the call's neighbours is what the kernel must win back.
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
    """:func:`judge` for each that may be serving: under its name where it ties with the fastest; any other is as None."""
    eligible, rejected = _sort_out(point, request, table, solutions)
    as_fast = tied(ranked(eligible))
    names = [None, *{candidate.solution for candidate in as_fast}] if len(as_fast) > 1 else [None]
    return {name: _conclude(point, table, solutions, eligible, rejected, name) for name in names}


def _sort_out(
    point: MeasuredPoint, request: Request, table: ResolverTable, solutions: Mapping[str, SolutionFiles]
) -> tuple[list[Candidate], list[Rejection]]:
    """The candidates of a point that may serve the request, and why each of the others may not."""
    eligible: list[Candidate] = []
    rejected: list[Rejection] = []
    stock = soonest_done([candidate for candidate in point.entry.candidates if candidate.provides == "stock"])
    for candidate in point.entry.candidates:
        reason = disqualify(candidate, request, solutions.get(candidate.solution), exact=point.exact)
        reason = reason or later_launched(candidate, stock)
        verified = candidate.scalar_ranges
        if verified is None:  # published before ranges were recorded (decision 0024)
            verified = table.scalar_hull(request.definition.name)
        reason = reason or outside_scalars(request.definition, request.scalars, verified)
        if reason is None:
            eligible.append(candidate)
        else:
            rejected.append(Rejection(candidate, reason))
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
    axes, where = point.entry.axes, _where(point, table)
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
    """What is to be known of a measurement that was not made here and confined, nor shipped."""
    if winner.shipped_source:
        level = f"sandbox level {winner.sandbox_level}"
        return f"; its worker was not confined ({level}), so it serves this user alone: the package ships its source"
    return "; another installation measured it, which is trusted here" if winner.origin == "foreign" else ""


def _where(point: MeasuredPoint, table: ResolverTable) -> str:
    return f"{axes_key(dict(point.entry.axes))} on {table.gpu}"


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
    """The lowest latency; inside its noise what is serving, else what is launched clearly sooner; and why the others lost.

    Small kernels take a few microseconds on the device whoever wrote them, and several times that to launch: there the
    host decides how fast a model is.
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
        if held is not None and held is not best and candidate in as_fast:
            lost.append(Rejection(candidate, f"inside noise of what is serving, which stays: {times}"))
        elif winner is not best and candidate in as_fast:
            known = "unknown" if candidate.host_us is None else f"{candidate.host_us:.1f} us"
            host = f"{known} of host time a call against {winner.host_us:.1f} us"
            lost.append(Rejection(candidate, f"as fast on the device, and later launched: {host} of {winner}"))
        else:
            lost.append(Rejection(candidate, f"slower: {times}"))
    return winner, lost
