"""What a latency may claim, given how long the harness waited."""

from __future__ import annotations

import pytest

from tilegym_db.measurement.runner import Elapsed, WallRun, alone_us, check_latency, may_be_host_delay

NULL = 120.0


def honest(latency_us: float, calls: int = 8, **changes: float) -> WallRun:
    values = {
        "short_us": NULL + calls * latency_us,
        "long_us": NULL + 3 * calls * latency_us,
        "null_us": NULL,
        "noise_us": 30.0,
        **changes,
    }
    return WallRun(calls, **values)


@pytest.mark.parametrize("latency_us", [2.0, 30.0, 5000.0])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_true_latency_is_believed(latency_us, on_gpu):
    run = honest(latency_us)
    assert check_latency(latency_us, run, on_gpu=on_gpu) is None
    assert run.slope_us == pytest.approx(latency_us)
    assert run.absolute_us == pytest.approx(latency_us)


def test_a_latency_that_the_slope_contradicts_is_not_believed():
    problem = check_latency(10.0, honest(100.0), on_gpu=True)
    assert problem is not None
    assert "took 10 us by the worker's clock, but 100 us by the harness's (the slope" in problem


def test_dawdling_in_the_short_run_does_not_help():
    run = honest(100.0, short_us=NULL + 24 * 100.0)
    assert run.slope_us == 0
    problem = check_latency(10.0, run, on_gpu=True)
    assert problem is not None
    assert "less the cost of asking" in problem


def test_dawdling_in_both_runs_only_makes_the_solution_slower():
    assert check_latency(10.0, honest(10.0, short_us=NULL + 9000, long_us=NULL + 9000), on_gpu=True) is not None


def test_a_slow_answer_within_the_noise_is_no_proof():
    run = honest(5.0, calls=1, long_us=NULL + 15.0 + 40.0, noise_us=100.0)
    assert check_latency(5.0, run, on_gpu=True) is None


def contended(latency_us: float, **changes: float) -> WallRun:
    """Twice as slow by the clock because others had the processor half of the time."""
    elapsed = {"wall_us": NULL + 24 * 2 * latency_us, "processor_us": 24 * latency_us, "queued_us": 24 * latency_us}
    alone = alone_us(Elapsed(**{**elapsed, **changes}), NULL, calls=24, processors=1)
    return honest(2 * latency_us, alone_us=alone)


def test_processor_that_others_used_in_between_is_no_proof():
    assert check_latency(100.0, honest(400.0), on_gpu=False) is not None
    assert check_latency(200.0, contended(250.0), on_gpu=False) is None


@pytest.mark.parametrize(
    "lie",
    [
        contended(250.0),
        contended(250.0, processor_us=0.0, queued_us=0.0),  # it slept
        contended(250.0, processor_us=24 * 500.0, queued_us=1e9),  # its threads, which only kept each other waiting
    ],
)
def test_false_clock_is_rejected_on_a_busy_machine_too(lie):
    assert check_latency(2.0, lie, on_gpu=False) is not None


def test_threads_share_the_processor_time_of_a_call():
    assert alone_us(Elapsed(0.0, 4800.0, 0.0), NULL, calls=8, processors=2) == 300.0


def on_a_host(elapsed: Elapsed) -> WallRun:
    """500 us a call by the clock, in a virtual machine."""
    alone, unstolen = (alone_us(run, NULL, calls=24, processors=1) for run in (elapsed, elapsed.unstolen))
    return honest(500.0, alone_us=alone, unstolen_us=unstolen)


@pytest.mark.parametrize(("stolen_us", "known"), [(0.0, True), (24 * 100.0, True), (24 * 240.0, False)])
def test_time_taken_by_the_host_can_leave_a_claim_open(stolen_us, known):
    run = on_a_host(Elapsed(NULL + 24 * 500.0, 0.0, 0.0, stolen_us))  # it slept
    assert check_latency(100.0, run, on_gpu=False) is not None
    assert may_be_host_delay(100.0, run) is not known


@pytest.mark.turn("tilegym_db/sandbox/")  # takes processor time
def test_what_the_host_took_does_not_excuse_processor_time():
    spun = on_a_host(Elapsed(NULL + 24 * 500.0, 24 * 500.0, 0.0, 24 * 500.0))
    assert not may_be_host_delay(100.0, spun)
