from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilegym_db.measurement.timing import Interval, median, median_interval, paired_ratio

times = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=60)


def coverage(count: int, left_out: int) -> float:
    """The exact probability that an interval without the ``left_out`` lowest and highest samples holds the median."""
    return 1 - 2 * sum(math.comb(count, k) for k in range(left_out + 1)) / 2**count


def left_out(count: int) -> int:
    return int(median_interval([float(value) for value in range(count)]).low)


@pytest.mark.parametrize(
    ("samples", "middle"), [([3.0], 3), ([1.0, 2.0], 1.5), ([5.0, 1.0, 3.0], 3), ([4.0, 1.0, 2.0, 3.0], 2.5)]
)
def test_the_median_is_the_middle_value(samples, middle):
    assert median(samples) == median_interval(samples).median == middle


@pytest.mark.parametrize("count", [*range(8, 200, 7), 500, 999])
def test_interval_is_the_narrowest_that_covers_99_percent(count):
    assert coverage(count, left_out(count)) >= 0.99 > coverage(count, left_out(count) + 1)


@pytest.mark.parametrize("count", [1000, 1001, 3000])
def test_interval_of_many_samples_covers_99_percent_too(count):
    assert 0.99 <= coverage(count, left_out(count)) < 0.9925


@pytest.mark.parametrize("count", range(1, 8))
def test_interval_of_fewer_than_eight_samples_is_their_range(count):
    samples = [float(value) for value in range(1, count + 1)]
    assert median_interval(samples) == Interval(median(samples), 1.0, float(count))


def test_the_interval_covers_as_often_as_it_says():
    generator = random.Random(0)
    truth = math.exp(0)  # the median of a lognormal: skewed, as times are
    hits = 0
    for _ in range(2000):
        interval = median_interval([generator.lognormvariate(0, 1) for _ in range(40)])
        hits += interval.low <= truth <= interval.high
    assert hits / 2000 > 0.985


@given(times)
def test_interval_holds_its_median_and_lies_within_the_samples(samples):
    interval = median_interval(samples)
    assert min(samples) <= interval.low <= interval.median <= interval.high <= max(samples)


def test_no_samples_have_no_median():
    with pytest.raises(ValueError, match="at least one sample"):
        median_interval([])


def test_pairing_cancels_a_drift_that_both_see():
    generator = random.Random(0)
    drift = [1 + 0.5 * number / 40 for number in range(40)]
    this = [10 * factor * generator.uniform(0.999, 1.001) for factor in drift]
    other = [12 * factor * generator.uniform(0.999, 1.001) for factor in drift]
    ratio = paired_ratio(this, other)
    assert ratio.low < 1.2 < ratio.high
    assert ratio.half_width < 0.002
    assert median_interval(this).half_width > 0.05


def test_a_ratio_above_one_means_that_this_one_is_faster():
    assert paired_ratio([1.0] * 9, [2.0] * 9) == Interval(2, 2, 2)


@given(st.lists(st.tuples(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6)), min_size=1, max_size=30))
def test_a_ratio_and_its_reverse_are_reciprocal(pairs):
    one, two = zip(*pairs, strict=True)
    forth, back = paired_ratio(one, two), paired_ratio(two, one)
    assert math.isclose(forth.median * back.median, 1, rel_tol=1e-9)
    assert math.isclose(forth.low * back.high, 1, rel_tol=1e-9)
