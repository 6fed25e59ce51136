"""What a comparison of a patched model with itself as it is may claim: pure, and every "no" has its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tilegym_db.records.model_run import Estimate, ModelRun

__all__ = ["CONTROL", "MIN_ROUNDS", "Claim", "claim_of", "claims_of"]

CONTROL = "stock_again"
"""The way that is stock once more, in the same rounds: what it shows against stock is no effect of any kernel."""

MIN_ROUNDS = 8
"""The fewest samples whose whole range is a 99% interval of their median: 1 - 2 / 2**8 = 0.992."""

Verdict = Literal["faster", "slower", "no difference", "nothing"]


@dataclass(frozen=True)
class Claim:
    """What may be said of a speedup, and why no more. ``nothing``: not even its interval may be shown."""

    verdict: Verdict
    reason: str = ""


def claim_of(speedup: Estimate, *, rounds: int, kernel_calls: int, control: Estimate | None) -> Claim:
    """What rounds of stock against patched may claim.

    Args:
        speedup: stock time over patched time with its interval, where there is one.
        rounds: that count, by each way.
        kernel_calls: calls in one generation of the patched model that ran a verified kernel.
        control: stock time over the time of :data:`CONTROL` in the same rounds; None where it took no part.
    """
    if kernel_calls == 0:
        return Claim("nothing", "no kernel ran in the patched model, so both ran stock code")
    if rounds < MIN_ROUNDS:
        return Claim("nothing", f"{rounds} rounds are too few for a 99% interval; it takes {MIN_ROUNDS} at least")
    if speedup.ci_low is None or speedup.ci_high is None:
        return Claim("nothing", "its interval was not kept")
    if control is None or control.ci_low is None or control.ci_high is None:
        return Claim("nothing", "no control, stock against itself, took part in the rounds")
    shown = f"{control.ci_low:.3f} to {control.ci_high:.3f}"
    if not control.ci_low <= 1 <= control.ci_high:
        return Claim("nothing", f"stock against itself differs by {shown}: something else moved meanwhile. Repeat it")
    margin = max(control.ci_high, 1 / control.ci_low)
    if speedup.ci_low > margin:
        return Claim("faster")
    if speedup.ci_high < 1 / margin:
        return Claim("slower")
    return Claim("no difference", f"stock against itself differs by as much ({shown})")


def claims_of(run: ModelRun) -> dict[str, Claim]:
    """Figure (``ttft``, ``tpot``, ``total``) -> what may be said of its speedup; ``tpot`` where there are steps."""
    control = run.ways[CONTROL].against.get("stock") if CONTROL in run.ways else None
    speedups = {"ttft": run.ttft_speedup, "tpot": run.tpot_speedup, "total": run.total_speedup}
    return {
        what: claim_of(
            speedup,
            rounds=run.rounds,
            kernel_calls=sum(run.kernels.values()),
            control=None if control is None else getattr(control, what),
        )
        for what, speedup in speedups.items()
        if speedup is not None
    }
