"""How many calls the clock audit makes behind a device that is kept busy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tilegym_db.measurement import audit
from tilegym_db.measurement.audit import (
    BASELINE_BUSY_US,
    BUSY_US,
    MAX_QUEUED,
    MIN_CALLS_BY_TIME,
    affordable_calls,
    hidden_calls,
)


@pytest.mark.parametrize(
    ("launches", "host_us", "calls"),
    [
        pytest.param(1, 10.0, 16, id="a kernel of one launch takes every buffer"),
        pytest.param(0, 0.0, 16, id="nobody counted on a CPU"),
        pytest.param(100, 450.0, 3, id="a hundred launches a call fill the queue"),
        pytest.param(4, 700.0, 5, id="a slow host outlasts the busy time"),
        pytest.param(1, 9000.0, 4, id="what launching is said to take buys no more slack than that"),
        pytest.param(300, 1400.0, 1, id="three hundred launches a call leave room for one call and three"),
        pytest.param(2000, 9000.0, 1, id="there is a slope from one call to three, and no less"),
    ],
)
def test_launching_a_long_run_hides_behind_a_busy_device(launches: int, host_us: float, calls: int) -> None:
    assert hidden_calls(16, launches, host_us) == calls
    assert calls == 1 or 3 * calls * launches <= MAX_QUEUED
    assert calls <= MIN_CALLS_BY_TIME or 3 * calls * host_us <= BUSY_US[-1]


def test_baseline_of_many_launches_gets_a_longer_busy_device() -> None:
    launches, host_us = 65, 1600.0  # get_fused_mapping_stock on a host with two H100
    calls = hidden_calls(8, launches, host_us, BASELINE_BUSY_US[-1])
    assert calls == 4
    assert 3 * calls * host_us <= BASELINE_BUSY_US[-1]
    assert 3 * MIN_CALLS_BY_TIME * host_us > BUSY_US[-1]


@pytest.mark.parametrize(("role", "longest_us"), [("kernel", BUSY_US[-1]), ("baseline", BASELINE_BUSY_US[-1])])
def test_dispatched_code_gets_no_more_time_to_hide_work_behind(role: str, longest_us: float) -> None:
    """A worker that says that launching takes it a second asks for the longest time that there is."""
    asked: list[float] = []

    def null_us(busy_us: float) -> list[float]:
        asked.append(busy_us)
        raise InterruptedError

    solution = SimpleNamespace(record=SimpleNamespace(spec=SimpleNamespace(role=role)))
    runner: Any = SimpleNamespace(device="cuda:0", solution=solution)
    pool: Any = SimpleNamespace(slots=32, fill_with=lambda fresh: None)
    contents: Any = SimpleNamespace(fresh=lambda attempt, count: [attempt] * count, seconds_of_fresh=0.0)
    worker: Any = SimpleNamespace(null_us=null_us)
    with pytest.raises(InterruptedError):
        audit._run(runner, worker, pool, contents, SimpleNamespace(host_us=1e6, latency_us=50.0), 0, activities=2)  # type: ignore[arg-type]
    assert asked == [longest_us]


def test_there_are_never_more_calls_than_buffers() -> None:
    assert hidden_calls(1, 500, 5000.0) == 1


@pytest.mark.parametrize(
    ("content_s", "latency_us", "calls"),
    [
        (0.0, 50.0, 16),  # contents that are there already
        (0.01, 1000.0, 16),  # and quick ones: as many as there are buffers
        (0.2, 1000.0, 2),  # what two seconds allow
        (2.0, 1000.0, 1),
        (0.2, 100.0, 6),  # a short call is never timed by fewer than tell it from noise
        (2.0, 5.0, 16),
    ],
)
def test_slow_references_leave_fewer_calls(content_s, latency_us, calls):
    assert affordable_calls(16, content_s, latency_us) == calls
