"""Times of a CPU on which threads had to wait for a processor: repeated once, and then they decide nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tilegym_db.measurement import runner, time_workload
from tilegym_db.measurement.benchmark import verify
from tilegym_db.measurement.runner import Waits, why_too_busy
from tilegym_db.records import Trace
from tilegym_db.records.verdicts import MACHINE_SLOW

HONEST = "def run(x, weight, factor, out):\n    out.copy_(x * weight * factor)\n"
QUIET, BUSY = Waits(1000.0, 100.0), Waits(1000.0, 101.0)


@pytest.mark.parametrize(
    ("waits", "culprit"),
    [
        ({}, None),
        ({"kernel": Waits()}, None),
        ({"kernel": QUIET, "stock": QUIET}, None),
        ({"kernel": QUIET, "stock": BUSY}, "stock"),
        ({"kernel": Waits(10.0, 9.0), "stock": BUSY}, "kernel"),
    ],
)
def test_the_runner_that_waits_longest_decides(waits: dict[str, Waits], culprit: str | None) -> None:
    reason = why_too_busy(waits, 0.1, load=7.5)
    assert (reason is None) == (culprit is None)
    if reason is not None:
        assert f"threads of {culprit} waited" in reason
        assert "load 7.5" in reason
        assert "repeat the command" in reason


@pytest.fixture
def promoted(make_catalog: Callable[..., Any], tmp_path: Path) -> Callable[[], Trace]:
    """Return the trace of an honest kernel through the promotion tier."""

    def run() -> Trace:
        catalog = make_catalog(tmp_path / "catalog", {"honest": HONEST})
        report = verify(devices="cpu", catalog=catalog, store_home=tmp_path / "home", quick=True)
        (trace,) = (trace for trace in report.traces if trace.solution == "honest")
        return trace

    return run


@pytest.mark.turn("tilegym_db/measurement/time_workload.py")  # a whole bench run
def test_pass_on_a_busy_machine_is_unsupported(promoted: Callable[[], Trace], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(runner.MAX_WAITING)
    monkeypatch.setattr(runner, "stolen_us", lambda: [time.perf_counter_ns() / 1e3])  # the host takes all of it
    trace = promoted()
    assert trace.status == "UNSUPPORTED"
    assert trace.reason.startswith(f"{MACHINE_SLOW}: threads of ")


@pytest.mark.turn("tilegym_db/measurement/timing.py", "tilegym_db/measurement/time_workload.py")  # a promotion
def test_timing_that_was_disturbed_once_is_repeated(
    promoted: Callable[[], Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts: Iterator[str | None] = iter(["busy", None])
    timed = []
    original = time_workload.time_interleaved
    monkeypatch.setattr(time_workload, "why_too_busy", lambda *given: next(verdicts))
    monkeypatch.setattr(time_workload, "time_interleaved", lambda *given: timed.append(given[3]) or original(*given))
    trace = promoted()
    assert len(set(timed)) == 2, "the second timing has its own order"
    assert trace.status == "PASSED" or MACHINE_SLOW in trace.reason  # by the clock audit
