"""The decision: which verified solution serves a request, and why every other one does not. Pure: no I/O, no torch.

The measured point is the exact one, else the nearest in log space inside the measured range, else there is none. Of its
candidates, those that are verified with today's source, declared for the request, faster than the stock code by more than
noise and not launched later than it is done compete on latency. Where nobody is left, the stock code runs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tilegym_db.catalog import SolutionFiles
from tilegym_db.records import axes_key
from tilegym_db.records.solution import Config
from tilegym_db.records.trace import PROCESS_NOISE_US
from tilegym_db.resolver.points import Point, find_point
from tilegym_db.resolver.request import Request
from tilegym_db.resolver.table import Candidate, ResolverTable
from tilegym_db.store.statements import PUBLISHED_SANDBOX_LEVEL, VERIFIED_TIERS

__all__ = [
    "MIN_BACKWARD_SPEEDUP_CI_LOW",
    "MIN_SPEEDUP_CI_LOW",
    "Decision",
    "Evidence",
    "Rejection",
    "decide",
    "judge",
    "judge_incumbents",
    "no_kernel",
    "not_in_compiled_code",
]

MIN_SPEEDUP_CI_LOW = 1.02
"""The lower end of the speedup against stock that a kernel must exceed: faster by more than noise."""

MIN_BACKWARD_SPEEDUP_CI_LOW = 1.25
"""The same for a backward. Stock code is given what the forward was given, where autograd has kept what it needs: at most it
moves 22 bytes for 18 (swiglu_backward), which a kernel must not be credited with."""

MAX_LAUNCH_RATIO = 1.1
"""How much longer a call of a kernel may take than one of the stock code, each by the longer of its device and host time."""

HOST_NOISE_US = 5.0
"""What a host time may be off by: it depends on what else the host does. A smaller difference between two decides nothing."""

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


def judge(point: Point, request: Request, table: ResolverTable, solutions: Mapping[str, SolutionFiles]) -> Decision:
    """The decision by one measured point."""
    eligible, rejected = _sort_out(point, request, table, solutions)
    return _conclude(point, table, solutions, eligible, rejected, request.incumbent)


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


def judge_incumbents(
    point: Point, request: Request, table: ResolverTable, solutions: Mapping[str, SolutionFiles]
) -> dict[str | None, Decision]:
    """:func:`judge` for every incumbent at once: under its name where it ties with the fastest; any other is as None."""
    eligible, rejected = _sort_out(point, request, table, solutions)
    tied = _tied(_ranked(eligible))
    names = [None, *{candidate.solution for candidate in tied}] if len(tied) > 1 else [None]
    return {name: _conclude(point, table, solutions, eligible, rejected, name) for name in names}


def _sort_out(
    point: Point, request: Request, table: ResolverTable, solutions: Mapping[str, SolutionFiles]
) -> tuple[list[Candidate], list[Rejection]]:
    """The candidates of a point that may serve the request, and why each of the others may not."""
    eligible: list[Candidate] = []
    rejected: list[Rejection] = []
    stock = next((candidate for candidate in point.entry.candidates if candidate.provides == "stock"), None)
    for candidate in point.entry.candidates:
        reason = _disqualify(candidate, request, solutions.get(candidate.solution), exact=point.exact)
        reason = reason or _later_launched(candidate, stock)
        if reason is None:
            eligible.append(candidate)
        else:
            rejected.append(Rejection(candidate, reason))
    measured = {candidate.solution for candidate in point.entry.candidates}
    unmeasured = f"not in the table: no verified measurement at {_where(point, table)}"
    return eligible, rejected + _unmeasured(solutions, measured, unmeasured)


def _conclude(
    point: Point,
    table: ResolverTable,
    solutions: Mapping[str, SolutionFiles],
    eligible: Sequence[Candidate],
    rejected: Sequence[Rejection],
    incumbent: str | None,
) -> Decision:
    axes, where = point.entry.axes, _where(point, table)
    if not eligible:
        reason = f"no verified solution is faster than stock at {where}"
        return Decision(None, {}, Evidence("stock", reason, table.gpu, table.published, axes), tuple(rejected))
    winner, lost = _fastest(eligible, incumbent)
    source: Literal["exact", "nearest"] = "exact" if point.exact else "nearest"
    reason = (
        f"fastest verified solution at {where}" if point.exact else f"fastest at {where}, the nearest measured point"
    )
    evidence = Evidence(source, reason, table.gpu, table.published, axes, winner)
    return Decision(solutions[winner.solution], dict(winner.config), evidence, (*lost, *rejected))


def _where(point: Point, table: ResolverTable) -> str:
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


# -- the candidates of a point ----------------------------------------------------------------------------------------


def _disqualify(candidate: Candidate, request: Request, files: SolutionFiles | None, *, exact: bool) -> str | None:
    """Why a measured candidate may not serve the request, whatever its latency; None where it may."""
    if files is None:
        return "it is not in the catalog any more"
    if candidate.solution_digest != files.digest:
        return (
            f"its digest differs from the catalog's source: verified {candidate.solution_digest[:12]}, "
            f"now {files.digest[:12]}; bench and publish it again"
        )
    spec = files.record.spec
    if spec.role != "kernel":
        what = f" ({spec.provides})" if spec.provides else ""
        return f"role {spec.role}{what}: measured to compare with, never dispatched"
    reason = _not_verified(candidate) or files.record.unsupported(
        request.axes, request.dtypes, request.layouts, target=request.sm
    )
    if reason is None and spec.language in request.unavailable:
        reason = request.unavailable[spec.language]
    if reason is None and not exact and not candidate.envelope_cases:
        reason = "it was verified at the measured shape only, without an envelope that covers others"
    return reason or _not_faster(
        candidate, MIN_SPEEDUP_CI_LOW if request.definition.backward_of is None else MIN_BACKWARD_SPEEDUP_CI_LOW
    )


def _not_verified(candidate: Candidate) -> str | None:
    """Why the measurement is not one to trust. Publishing leaves such out; a table may have been written by hand."""
    if candidate.tier not in VERIFIED_TIERS:
        return (
            f"tier {candidate.tier or 'unknown'}: not a verified measurement; promote it (tilegym-db promote "
            f"{candidate.solution}) and publish again"
        )
    if candidate.tier == "promotion" and (candidate.sandbox_level or 0) < PUBLISHED_SANDBOX_LEVEL:
        return f"sandbox level {candidate.sandbox_level or 0}: its worker could have reached what judged it"
    return None


def _not_faster(candidate: Candidate, bar: float) -> str | None:
    """Why the measurement does not say "faster than stock, by more than noise"."""
    if candidate.latency_us is None or candidate.speedup_ci_low is None:
        return "it was not compared with the stock code"
    if candidate.speedup_ci_low > bar:
        return None
    ratio = f"{candidate.speedup:.2f}x" if candidate.speedup is not None else "unknown"
    verdict = "slower than stock" if (candidate.speedup or 1.0) < 1.0 else "not faster than stock by more than noise"
    return f"{verdict}: speedup {ratio}, CI low {candidate.speedup_ci_low:.3f} <= {bar}"


def _later_launched(candidate: Candidate, stock: Candidate | None) -> str | None:
    """Why a kernel that is faster on the device holds a model up all the same: the host is not done with it in time."""
    if stock is None or stock.latency_us is None or stock.host_us is None:
        return None
    if candidate.latency_us is None or candidate.host_us is None:
        return None
    until = max(stock.latency_us, stock.host_us)
    if max(candidate.latency_us, candidate.host_us) <= MAX_LAUNCH_RATIO * until + HOST_NOISE_US:
        return None
    return (
        f"launch-bound: a call takes the host {candidate.host_us:.1f} us, the stock code is done after {until:.1f} us"
    )


def _fastest(eligible: Sequence[Candidate], incumbent: str | None) -> tuple[Candidate, list[Rejection]]:
    """The lowest latency; inside its noise the incumbent, else what is launched clearly sooner; and why each of the others lost.

    Small kernels take a few microseconds on the device whoever wrote them, and several times that to launch: there the
    host decides how fast a model is.
    """
    ranked = _ranked(eligible)
    best, tied = ranked[0], _tied(ranked)
    held = next((candidate for candidate in tied if candidate.solution == incumbent), None)
    soonest = min(tied, key=_host_us)
    winner = held or (soonest if _host_us(best) - _host_us(soonest) > HOST_NOISE_US else best)
    lost = []
    for candidate in ranked:
        times = f"{candidate.latency_us:.2f} us against {winner.latency_us:.2f} us of {winner}"
        if candidate is winner:
            continue
        if held is not None and held is not best and candidate in tied:
            lost.append(Rejection(candidate, f"inside noise of the incumbent, which stays: {times}"))
        elif winner is not best and candidate in tied:
            known = "unknown" if candidate.host_us is None else f"{candidate.host_us:.1f} us"
            host = f"{known} of host time a call against {winner.host_us:.1f} us"
            lost.append(Rejection(candidate, f"as fast on the device, and later launched: {host} of {winner}"))
        else:
            lost.append(Rejection(candidate, f"slower: {times}"))
    return winner, lost


def _host_us(candidate: Candidate) -> float:
    """What a call takes the host; more than anything where nobody knows."""
    return sys.float_info.max if candidate.host_us is None else candidate.host_us


def _ranked(eligible: Sequence[Candidate]) -> list[Candidate]:
    """By latency; the spelling decides between equal ones, so that the order of the table does not."""
    return sorted(eligible, key=lambda candidate: (candidate.latency_us or 0.0, str(candidate)))


def _tied(ranked: Sequence[Candidate]) -> list[Candidate]:
    """The fastest candidate and those inside its noise."""
    return [candidate for candidate in ranked if _inside_noise(candidate, ranked[0])]


def _inside_noise(candidate: Candidate, best: Candidate) -> bool:
    """True where the confidence intervals overlap, or the next process may see it otherwise; a missing interval is the point."""
    if (candidate.latency_us or 0.0) - (best.latency_us or 0.0) <= PROCESS_NOISE_US:
        return True
    low = candidate.ci_low_us if candidate.ci_low_us is not None else candidate.latency_us
    high = best.ci_high_us if best.ci_high_us is not None else best.latency_us
    return low is not None and high is not None and low <= high
