"""Intervals and verdicts on samples such as GPUs give: heavy tails, two clock states, a coarse clock, drift."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilegym_db.measurement.timing import Interval, median_interval, paired_ratio, verdict_of

REPEATS = 600
FEW_MISSES = 20
"""Of 600 intervals that hold the median 99% of the time, more than 20 miss it with a probability of 1e-6."""


def misses(draw: Callable[[], float], truth: float, count: int) -> int:
    missed = 0
    for _ in range(REPEATS):
        interval = median_interval([draw() for _ in range(count)])
        missed += not interval.low <= truth <= interval.high
    return missed


@settings(max_examples=12)
@given(st.floats(0.3, 4.0), st.integers(8, 80), st.integers(0, 2**32))
def test_the_median_of_a_pareto_tail_is_covered_however_heavy(tail, count, seed):
    generator = random.Random(seed)  # below 1, not even the mean exists
    assert misses(lambda: generator.paretovariate(tail), 2 ** (1 / tail), count) <= FEW_MISSES


@settings(max_examples=8)
@given(st.floats(0.05, 0.45), st.floats(1.01, 1.5), st.integers(8, 60), st.integers(0, 2**32))
def test_median_is_covered_if_the_clock_hops_between_two_states(share, slower, count, seed):
    generator = random.Random(seed)

    def draw() -> float:
        return slower if generator.random() < share else generator.uniform(0.98, 1.0)

    # Half of all samples lie below the median, all of them in the faster state.
    assert misses(draw, 0.98 + 0.02 * 0.5 / (1 - share), count) <= FEW_MISSES


@settings(max_examples=8)
@given(st.floats(0.01, 1.0), st.integers(8, 60), st.integers(0, 2**32))
def test_the_median_is_covered_when_a_coarse_clock_makes_ties(scale, count, seed):
    generator = random.Random(seed)
    step = 0.032
    truth = round((10 + scale * math.log(2)) / step) * step
    drawn = misses(lambda: round((10 + generator.expovariate(1 / scale)) / step) * step, truth, count)
    assert drawn <= FEW_MISSES


def rounds(generator: random.Random, speedup: float, count: int) -> tuple[list[float], list[float]]:
    """Return times of both in interleaved rounds: 2% of drift that both see, and separate heavy-tailed noise."""
    this, other, level = [], [], 0.0
    for _ in range(count):
        level += generator.gauss(0, 0.02 / math.sqrt(count))
        this.append(math.exp(level) * (1 + 0.002 * generator.paretovariate(2)))
        other.append(speedup * math.exp(level) * (1 + 0.002 * generator.paretovariate(2)))
    return this, other


@pytest.mark.parametrize("count", [8, 12, 40])
def test_equal_kernels_differ_in_one_of_a_hundred_runs_at_most(count):
    generator = random.Random(count)
    decided = sum(verdict_of(paired_ratio(*rounds(generator, 1.0, count))) != "tie" for _ in range(REPEATS))
    assert decided <= FEW_MISSES


@pytest.mark.parametrize(("speedup", "verdict"), [(1.03, "faster"), (1 / 1.03, "slower")])
def test_three_percent_are_found_in_twelve_rounds_despite_drift(speedup, verdict):
    generator = random.Random(1)
    found = [verdict_of(paired_ratio(*rounds(generator, speedup, 12))) for _ in range(REPEATS)]
    assert found.count(verdict) / REPEATS > 0.98


@pytest.mark.parametrize(
    ("low", "high", "noise", "verdict"),
    [
        (1.01, 1.02, 0.0, "faster"),
        (0.98, 0.99, 0.0, "slower"),
        (0.99, 1.01, 0.0, "tie"),
        (1.0, 1.1, 0.0, "tie"),  # no difference is not excluded
        (0.9, 1.0, 0.0, "tie"),
        (1.01, 1.015, 0.02, "tie"),  # sure, and still within the noise
        (1.019, 1.5, 0.02, "tie"),
        (1.021, 1.5, 0.02, "faster"),
        (0.5, 0.97, 0.02, "slower"),
        (0.5, 0.985, 0.02, "tie"),
    ],
)
def test_a_verdict_needs_the_whole_interval_beyond_the_noise(low, high, noise, verdict):
    assert verdict_of(Interval((low + high) / 2, low, high), noise) == verdict


intervals = st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3).map(sorted)


@given(intervals, st.floats(0, 0.5))
def test_the_reverse_of_a_ratio_has_the_reverse_verdict(bounds, noise):
    low, middle, high = bounds
    forth = verdict_of(Interval(middle, low, high), noise)
    back = verdict_of(Interval(1 / middle, 1 / high, 1 / low), noise)
    edge = min(abs(low - (1 + noise)), abs(high - 1 / (1 + noise)))
    assert edge < 1e-9 or {forth, back} in ({"faster", "slower"}, {"tie"})


@given(intervals, st.floats(0, 0.2), st.floats(0, 0.2))
def test_more_noise_never_makes_a_verdict_out_of_a_tie(bounds, noise, more):
    low, middle, high = bounds
    ratio = Interval(middle, low, high)
    assert verdict_of(ratio, noise + more) in (verdict_of(ratio, noise), "tie")


def test_noise_is_not_negative():
    with pytest.raises(ValueError, match="noise is a relative difference"):
        verdict_of(Interval(1, 1, 1), -0.01)
