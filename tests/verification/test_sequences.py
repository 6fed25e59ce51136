"""Sequences of calls: what is drawn, and when memory has grown. The cheats of tests/exploits show what they find."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilegym_db.verification.sequences import PAIRS, drawn_pairs, growth, steady_growth


@given(sizes=st.sets(st.integers(1, 999), min_size=2, max_size=300), seed=st.integers(0, 1 << 60))
def test_pairs_are_neighbours_and_share_no_size(sizes, seed):
    ordered = sorted(sizes)
    pairs = drawn_pairs(ordered, random.Random(seed))
    assert 1 <= len(pairs) <= PAIRS
    assert all(ordered.index(high) == ordered.index(low) + 1 for low, high in pairs.items())
    used = [*pairs, *pairs.values()]
    assert len(used) == len(set(used))


def test_pairs_prefer_a_size_and_one_more():
    sizes = [*range(1, 100, 7), 2, 9]
    assert {1: 2, 8: 9}.items() <= drawn_pairs(sorted(sizes), random.Random(0)).items()


@pytest.mark.parametrize(
    ("calls", "device_bytes", "blocks", "host_bytes", "grows"),
    [
        (20_000, 0, 300, 4 << 20, False),
        (20_000, 512 * 20_000, 300, 0, True),
        (20_000, 0, 20_000, 0, True),
        (20_000, 0, 0, 256 << 20, True),
        (300, 0, 900, 0, False),
    ],
)
def test_memory_that_grows_with_the_calls_is_named(calls, device_bytes, blocks, host_bytes, grows):
    before = {"device_bytes": 1000, "blocks": 70_000}
    after = {"device_bytes": 1000 + device_bytes, "blocks": 70_000 + blocks}
    assert (growth(calls, before, after, host_bytes) is not None) is grows


@pytest.mark.parametrize("report", [None, [], "much"])
def test_a_report_of_another_form_counts_as_no_growth(report):
    assert growth(1000, report, report, 0) is None
    assert growth(1000, report, report, 1 << 30) is not None


@pytest.mark.parametrize(
    ("first", "second", "grows"), [(90_000, 90_000, True), (90_000, 0, False), (20_000, 20_000, False)]
)
def test_bytes_that_grow_in_each_half_of_a_run_are_a_leak(first, second, grows):
    reports = [{"blocks": 9, "bytes": size} for size in (1000, 1000 + first, 1000 + first + second)]
    assert (steady_growth([5000, 5000], reports) is not None) == grows
