from __future__ import annotations

import pytest

from tilegym_db.measurement.benchmark import cross_check
from tilegym_db.records import Trace
from tilegym_db.records.roofline import GpuPeaks, Measured
from tilegym_db.records.trace import Audit, Performance

LAUNCH_US = 4.0


def peaks(timer: str = "events") -> GpuPeaks:
    launch = Measured(value=LAUNCH_US, spread=0.01, rounds=5, how="an empty kernel")
    return GpuPeaks.model_construct(timer=timer, launch_us=launch)


def call(
    events_us: float, profiled_us: float | None, kernels: tuple[str, ...] = ("k",), status: str = "PASSED"
) -> Trace:
    performance = Performance(
        latency_us=events_us, ci_low_us=events_us, ci_high_us=events_us, samples=30, timer="events"
    )
    audit = Audit(profiled_us=profiled_us, kernels=kernels)
    return Trace.model_construct(status=status, performance=performance, audit=audit)


def test_clocks_that_differ_by_a_launch_agree():
    found = cross_check([call(5.3, 1.2), call(91.0, 87.1)] * 10, peaks())
    assert (found.compared, found.agree, found.problem) == (20, 20, None)


@pytest.mark.parametrize("wrong_us", [2.5, 40.0])
def test_a_clock_that_is_off_for_many_calls_is_named(wrong_us):
    found = cross_check([call(5.3, 1.2)] * 10 + [call(5.3 + wrong_us, 1.2)] * 5, peaks())
    assert (found.compared, found.agree) == (15, 10)
    assert found.problem is not None
    assert "agree on 10 of 15" in found.problem
    assert "4 us of an empty kernel" in found.problem


def test_a_long_call_may_differ_by_a_twentieth():
    found = cross_check([call(1000.0, 955.0)] * 10 + [call(1000.0, 940.0)] * 10, peaks())
    assert (found.compared, found.agree) == (20, 10)


def test_a_few_calls_off_are_kernels_that_vary():
    found = cross_check([call(5.3, 1.2)] * 18 + [call(60.0, 1.2)] * 2, peaks())
    assert (found.agree, found.problem) == (18, None)


def test_too_few_calls_say_nothing_of_a_clock():
    assert cross_check([call(60.0, 1.2)] * 5, peaks()).problem is None


@pytest.mark.parametrize(
    "other",
    [
        call(23.0, 4.0, kernels=("a", "b")),  # events count the gap between two kernels
        call(5.3, None),
        call(5.3, 1.2, status="REJECTED"),
        Trace.model_construct(status="PASSED", performance=None, audit=None),
    ],
)
def test_calls_that_only_one_clock_timed_are_not_compared(other):
    assert cross_check([other] * 20, peaks()).compared == 0


def test_a_launch_by_another_clock_is_no_reference():
    assert cross_check([call(5.3, 1.2)] * 20, peaks(timer="cupti")).compared == 0
