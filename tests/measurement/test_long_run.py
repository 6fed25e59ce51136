"""How often a call is repeated before its clock is audited."""

from __future__ import annotations

from tilegym_db.measurement.time_workload import LONG_RUN_CALLS, LONG_RUN_S, long_run_calls
from tilegym_db.records.trace import Performance


def performance(latency_us: float, host_us: float | None = None) -> Performance:
    return Performance(
        latency_us=latency_us, ci_low_us=latency_us, ci_high_us=latency_us, samples=9, host_us=host_us, timer="wall"
    )


def test_cheap_call_is_made_an_unpredictable_number_of_times() -> None:
    counts = {long_run_calls(performance(5.0), seed) for seed in range(40)}
    assert len(counts) > 30
    assert min(counts) >= LONG_RUN_CALLS // 2
    assert max(counts) <= LONG_RUN_CALLS


def test_a_slow_call_takes_no_longer_than_the_time_there_is() -> None:
    for latency_us, host_us in ((1_000.0, None), (3.0, 1_000.0)):
        count = long_run_calls(performance(latency_us, host_us), seed=1)
        assert 8 <= count <= LONG_RUN_S * 1e6 / 1_000.0


def test_even_the_slowest_call_is_repeated() -> None:
    assert long_run_calls(performance(1e7), seed=1) >= 4


def test_one_seed_gives_one_number() -> None:
    assert long_run_calls(performance(5.0), 3) == long_run_calls(performance(5.0), 3)
