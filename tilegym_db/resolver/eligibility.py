"""Which measured candidates may serve a request, and which of them are as fast as each other. Pure: no I/O, no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tilegym_db.catalog import SolutionFiles
from tilegym_db.records.omitted import why_not_timed
from tilegym_db.records.trace import PROCESS_NOISE_US
from tilegym_db.resolver.request import Request
from tilegym_db.resolver.table import Candidate
from tilegym_db.store.confinement_rule import why_not_believed
from tilegym_db.store.statements import VERIFIED_TIERS

__all__ = [
    "HOST_NOISE_US",
    "MIN_BACKWARD_SPEEDUP_CI_LOW",
    "MIN_SPEEDUP_CI_LOW",
    "disqualify",
    "host_us",
    "later_launched",
    "ranked",
    "soonest_done",
    "tied",
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


def disqualify(candidate: Candidate, request: Request, files: SolutionFiles | None, *, exact: bool) -> str | None:
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
    reason = (
        why_not_timed("it", spec.omits)
        or _not_verified(candidate)
        or files.record.unsupported(request.axes, request.dtypes, request.layouts, target=request.sm)
    )
    if reason is None and spec.language in request.unavailable:
        reason = request.unavailable[spec.language]
    if reason is None and not exact and not candidate.envelope_cases:
        reason = "it was verified at the measured shape only, without fuzz cases that cover others"
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
    if candidate.tier != "promotion":
        return None
    level, shipped = candidate.sandbox_level or 0, candidate.shipped_source
    return why_not_believed(level, is_shipped=shipped, origin=candidate.origin, audience="this user")


def _not_faster(candidate: Candidate, bar: float) -> str | None:
    """Why the measurement does not say "faster than stock, by more than noise"."""
    if candidate.latency_us is None or candidate.speedup_ci_low is None:
        return "it was not compared with the stock code"
    if candidate.speedup_ci_low > bar:
        return None
    ratio = f"{candidate.speedup:.2f}x" if candidate.speedup is not None else "unknown"
    verdict = "slower than stock" if (candidate.speedup or 1.0) < 1.0 else "not faster than stock by more than noise"
    return f"{verdict}: speedup {ratio}, CI low {candidate.speedup_ci_low:.3f} <= {bar}"


def soonest_done(candidates: Sequence[Candidate]) -> Candidate | None:
    """Of several ways in which models run an operator, the one whose call ends first, on the device and on the host."""
    timed = [one for one in candidates if one.latency_us is not None and one.host_us is not None]
    return min(timed, key=lambda one: max(one.latency_us or 0.0, one.host_us or 0.0), default=None)


def later_launched(candidate: Candidate, stock: Candidate | None) -> str | None:
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


def host_us(candidate: Candidate) -> float:
    """What a call takes the host; more than anything where nobody knows."""
    return sys.float_info.max if candidate.host_us is None else candidate.host_us


def ranked(eligible: Sequence[Candidate]) -> list[Candidate]:
    """By latency; the spelling decides between equal ones, so that the order of the table does not."""
    return sorted(eligible, key=lambda candidate: (candidate.latency_us or 0.0, str(candidate)))


def tied(ranked: Sequence[Candidate]) -> list[Candidate]:
    """The fastest candidate and those inside its noise."""
    return [candidate for candidate in ranked if _inside_noise(candidate, ranked[0])]


def _inside_noise(candidate: Candidate, best: Candidate) -> bool:
    """True where the confidence intervals overlap, or the next process may see it otherwise; a missing interval is the point."""
    if (candidate.latency_us or 0.0) - (best.latency_us or 0.0) <= PROCESS_NOISE_US:
        return True
    low = candidate.ci_low_us if candidate.ci_low_us is not None else candidate.latency_us
    high = best.ci_high_us if best.ci_high_us is not None else best.latency_us
    return low is not None and high is not None and low <= high
