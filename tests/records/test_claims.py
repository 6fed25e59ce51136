from __future__ import annotations

import pytest
from pydantic import ValidationError

from tilegym_db.records.loop import MIN_ROUNDS, Estimate, claim_of


def between(low: float, high: float) -> Estimate:
    return Estimate(median=(low * high) ** 0.5, ci_low=low, ci_high=high)


QUIET = between(0.995, 1.005)
GOOD = {"rounds": 10, "kernel_calls": 4, "control": QUIET}


def test_interval_beyond_stock_against_itself_is_a_claim():
    assert claim_of(between(1.05, 1.2), **GOOD).verdict == "faster"
    assert claim_of(between(0.8, 0.9), **GOOD).verdict == "slower"


@pytest.mark.parametrize(
    ("speedup", "changes", "verdict", "reason"),
    [
        (between(1.006, 1.484), {"kernel_calls": 0}, "nothing", "no kernel ran"),
        (between(1.006, 1.484), {"rounds": MIN_ROUNDS - 1}, "nothing", "7 rounds are too few"),
        (Estimate(median=1.2), {}, "nothing", "interval was not kept"),
        (between(1.1, 1.2), {"control": None}, "nothing", "no control"),
        (between(1.1, 1.2), {"control": Estimate(median=1.0)}, "nothing", "no control"),
        (between(1.1, 1.2), {"control": between(1.02, 1.05)}, "nothing", "something else changed during the run"),
        (between(1.02, 1.2), {"control": between(0.9, 1.01)}, "no difference", "differs by as much"),
        (between(0.995, 1.2), {}, "no difference", "differs by as much"),
    ],
)
def test_too_little_evidence_claims_nothing_and_says_why(speedup, changes, verdict, reason):
    claim = claim_of(speedup, **{**GOOD, **changes})
    assert claim.verdict == verdict
    assert reason in claim.reason


def test_an_interval_has_two_ends_or_none():
    with pytest.raises(ValidationError) as refused:
        Estimate(median=1.0, ci_low=0.9)
    (fault,) = refused.value.errors()
    assert fault["ctx"]["error"].code == "interval_open"


def test_eight_samples_are_the_fewest_with_a_99_percent_interval():
    assert 1 - 2 / 2**MIN_ROUNDS >= 0.99 > 1 - 2 / 2 ** (MIN_ROUNDS - 1)
