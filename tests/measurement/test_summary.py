from __future__ import annotations

import pytest

from tilegym_db.measurement.plan import SummaryRow, summarise
from tilegym_db.records import Trace
from tilegym_db.records.trace import Comparison, Correctness, Performance


def trace(
    solution: str,
    status: str = "PASSED",
    reason: str = "",
    tier: str = "screen",
    ratio: float | None = None,
    sol_ratio: float | None = None,
    over_best: float | None = None,
    workload: str = "w",
) -> Trace:
    passed = status == "PASSED"
    performance = None
    if passed and tier != "interpreter":
        against = [] if ratio is None else [("stock", ratio), ("library", 9.0)]
        against += [] if over_best is None else [("incumbent", over_best)]
        comparisons = [Comparison.against(f"a_{p}", p, ratio=r, ci_low=r, ci_high=r) for p, r in against]
        performance = Performance(
            latency_us=1,
            ci_low_us=1,
            ci_high_us=1,
            samples=9,
            timer="wall",
            comparisons=tuple(comparisons),
            sol_ratio=sol_ratio,
        )
    return Trace.model_construct(
        solution=solution,
        language="python",
        status=status,
        reason=reason,
        tier=tier,
        workload_uuid=workload,
        config={},
        performance=performance,
        correctness=Correctness() if passed else None,
    )


def test_the_speedup_is_the_geometric_mean_against_stock_alone():
    (row,) = summarise([trace("kernel", ratio=4.0), trace("kernel", ratio=1.0)])
    assert (row.passed, row.total, row.note) == (2, 2, "")
    assert row.speedup == pytest.approx(2)
    assert row.spread == (1.0, 4.0)


def test_ratio_to_the_best_before_covers_workloads_with_a_best():
    (row,) = summarise([trace("kernel", ratio=4.0, over_best=1.2), trace("kernel", ratio=4.0)])
    assert (row.over_best, row.speedup) == (pytest.approx(1.2), pytest.approx(4))


def test_the_share_of_the_speed_of_light_is_a_geometric_mean_too():
    traces = [trace("kernel", sol_ratio=0.9), trace("kernel", sol_ratio=0.4), trace("stock")]
    kernel, stock = summarise(traces)
    assert kernel.sol_ratio == pytest.approx(0.6)
    assert stock.sol_ratio is None


def test_first_failure_gives_the_note_and_exclusions_are_ignored():
    traces = [
        trace("kernel", "UNSUPPORTED", "N <= 8"),
        trace("kernel", "TIMEOUT", "too slow"),
        trace("kernel", "RUNTIME_ERROR", "died"),
        trace("kernel", ratio=2.0),
    ]
    assert summarise(traces) == [SummaryRow("kernel", "python", 1, 3, 2.0, "TIMEOUT: too slow", spread=(2.0, 2.0))]


def test_a_solution_that_was_not_run_at_all_says_why():
    assert summarise([trace("kernel", "UNSUPPORTED", "N <= 8")])[0].note == "UNSUPPORTED: N <= 8"


def test_a_solution_that_was_only_interpreted_says_so():
    (row,) = summarise([trace("kernel", tier="interpreter")])
    assert (row.speedup, row.note) == (None, "verified in the interpreter, not timed")


def test_solutions_come_in_the_order_in_which_they_were_measured():
    assert [row.solution for row in summarise([trace("b"), trace("a"), trace("b")])] == ["b", "a"]


def test_ratio_of_a_verified_solution_leaves_its_screen_out():
    traces = [
        trace("kernel", ratio=4.0, sol_ratio=0.9),
        trace("kernel", ratio=4.0, workload="other"),
        trace("kernel", tier="promotion", ratio=0.5, sol_ratio=0.2),
    ]
    (row,) = summarise(traces)
    assert (row.passed, row.total) == (2, 2)
    assert (row.speedup, row.sol_ratio) == (pytest.approx(0.5), pytest.approx(0.2))


def test_failed_verification_replaces_the_pass_of_the_screen():
    (row,) = summarise([trace("kernel", ratio=4.0), trace("kernel", "TIMEOUT", "too slow", tier="promotion")])
    assert (row.passed, row.total, row.speedup, row.note) == (0, 1, None, "TIMEOUT: too slow")


def test_verification_that_decided_nothing_gives_its_reason():
    busy = trace("kernel", "UNSUPPORTED", "busy", tier="promotion")
    (row,) = summarise([trace("kernel", ratio=4.0), busy])
    assert (row.passed, row.total, row.speedup, row.note) == (0, 0, None, "UNSUPPORTED: busy")
