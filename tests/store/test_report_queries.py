from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tilegym_db.store.journal import Journal
from tilegym_db.store.queries.report_rows import change_rows, history_rows, model_rows, open_rows


def kinds(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["kind"], []).append(row["solution"])
    return found


def journaled(home: Path, *traces: Any) -> None:
    with Journal("run", home) as journal:
        for one in traces:
            journal.append(one)


def test_a_slower_pass_is_a_regression_only_beyond_its_interval(trace: Any, home: Path, opened: Callable[..., Any]):
    journaled(
        home,
        trace(latency_us=10.0), trace(latency_us=13.0),
        trace(kind="tilelang", latency_us=10.0), trace(kind="tilelang", latency_us=10.1),
    )  # fmt: skip
    with opened() as store:
        rows = change_rows(store)
    assert kinds(rows)["regression"] == ["scale_triton"]
    assert [row["ratio"] for row in rows if row["kind"] == "regression"] == [1.3]
    assert sorted(kinds(rows)["verified"]) == ["scale_tilelang", "scale_triton"]


def test_history_compares_a_pass_with_the_one_before(trace: Any, home: Path, opened: Callable[..., Any]):
    journaled(
        home,
        trace(latency_us=10.0), trace(latency_us=13.0), trace(latency_us=13.1), trace(latency_us=9.0),
        trace(tier="screen", latency_us=99.0), trace(m=64, latency_us=50.0),
        trace(status="INCORRECT_NUMERICAL"), trace(kind="tilelang", latency_us=10.0),
    )  # fmt: skip
    with opened() as store:
        shown = history_rows(store)
        whole = store.rows("FROM history ORDER BY timestamp")
    expected = [(1, 10.0, None), (2, 13.0, "slower"), (3, 13.1, "same"), (4, 9.0, "faster")]
    assert [(row["number"], row["latency_us"], row["change"]) for row in shown] == expected
    assert [(row["ci_low_us"], row["ci_high_us"]) for row in shown[:1]] == [(9.9, 10.1)]
    assert shown[1]["ratio"] == pytest.approx(1.3)
    assert all(row["is_current"] for row in shown)
    assert len(whole) == 7  # also what was timed once, and no failure


def test_failure_revokes_only_after_a_promotion(trace: Any, home: Path, opened: Callable[..., Any]):
    passed, failed = trace(), trace(status="INCORRECT_NUMERICAL")
    early, late = trace(kind="tilelang", status="RUNTIME_ERROR"), trace(kind="tilelang")
    journaled(home, passed, failed, early, late)
    with opened() as store:
        rows = change_rows(store)
        assert kinds(rows)["revocation"] == ["scale_triton"]
        assert [row["trace_id"] for row in rows if row["kind"] == "revocation"] == [failed.trace_id]
        after = late.timestamp.replace(tzinfo=None) + timedelta(seconds=1)
        assert change_rows(store, after) == []


def test_work_waiting_for_promotion_is_open_and_no_run_is_no_row(trace: Any, home: Path, opened: Callable[..., Any]):
    journaled(home, trace(tier="screen"))
    with opened() as store:
        waiting = [row for row in open_rows(store) if row["kind"].startswith("passed a screen")]
        assert [(row["solution"], row["gpu"], row["cases"]) for row in waiting] == [("scale_triton", "h200", 1)]
        assert model_rows(store) == []
