"""What counts as a regression, on rounds that are made up."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilegym_db.measurement.regress import Bars, Control, bars_for, compare_control, compare_versions, void_reason

ROUNDS = 20


def rounds(latency_us: float, noise: float = 0.002, seed: int = 0) -> list[float]:
    """Block medians with a drift that everything timed in the same rounds sees."""
    generator = random.Random(f"{latency_us} {seed}")
    return [latency_us * (1 + 0.02 * number) * generator.uniform(1 - noise, 1 + noise) for number in range(ROUNDS)]


def control(noise: float = 0.002, apart: float = 0.0) -> Control:
    return compare_control(rounds(100, noise, seed=1), rounds(100 * (1 + apart), noise, seed=2))


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (100, 100, "same"),
        (100, 102, "same"),  # below 3%
        (100, 104, "regression"),
        (104, 100, "improvement"),
        (5.0, 5.4, "same"),  # 8%, but less than half a microsecond
        (5.0, 5.6, "regression"),
    ],
)
def test_change_counts_beyond_3_percent_and_half_a_microsecond(old, new, verdict):
    found = compare_versions(rounds(old), rounds(new, seed=3), control(), Bars())
    assert found.verdict == verdict
    assert found.change == pytest.approx(new / old - 1, abs=0.005)
    assert found.threshold == 0.03


def test_a_control_that_scatters_raises_the_threshold():
    noisy = control(noise=0.06)
    found = compare_versions(rounds(100), rounds(105, seed=3), noisy, Bars())
    assert found.verdict == "same"
    assert found.threshold == pytest.approx(3 * noisy.mad)
    assert found.threshold > 0.05
    assert "the noise of this session" in found.reason


def test_rounds_that_do_not_agree_are_no_regression():
    new = [80.0 if number % 3 == 0 else 110.0 for number in range(ROUNDS)]
    found = compare_versions([100.0] * ROUNDS, new, control(), Bars())
    assert (found.verdict, found.reason) == ("same", "the rounds do not agree on which is faster")


@pytest.mark.parametrize("apart", [0.03, -0.03])
def test_a_control_that_differs_from_itself_voids_the_session(apart):
    assert void_reason(control(apart=apart), Bars()).startswith("differs from itself by 3.")
    assert void_reason(control(apart=apart / 3), Bars()) is None


def test_control_may_differ_by_less_than_a_change():
    assert void_reason(compare_control(rounds(5), rounds(5.3, seed=1)), Bars()) is None


def test_a_drift_that_both_versions_see_is_no_change():
    drifting = [100.0 * 1.05**number for number in range(ROUNDS)]
    assert compare_versions(drifting, drifting, control(), Bars()).change == 0


@given(old=st.floats(1, 1e5), factor=st.floats(0.2, 5))
def test_the_reverse_of_an_improvement_is_a_regression(old, factor):
    one, other = rounds(old), rounds(old * factor, seed=3)
    reverse = {"regression": "improvement", "improvement": "regression", "same": "same"}
    forth = compare_versions(one, other, control(), Bars())
    assert compare_versions(other, one, control(), Bars()).verdict == reverse[forth.verdict]


def test_a_cpu_is_asked_for_less():
    assert bars_for("cpu").control_shift > bars_for("h200").control_shift == 0.02
