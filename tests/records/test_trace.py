from __future__ import annotations

from typing import Any

import pytest

from tilegym_db.errors import RecordError
from tilegym_db.records import Trace
from tilegym_db.records.trace import MAX_LOG_CHARACTERS, clip_log, new_trace_id

IDENTITY: dict[str, Any] = {
    "trace_id": "t",
    "run_id": "r",
    "timestamp": "2026-11-01T00:00:00Z",
    "definition": "row_scale",
    "definition_version": "1.0.0",
    "definition_digest": "d",
    "op_type": "elementwise",
    "solution": "row_scale_stock",
    "solution_digest": "s",
    "language": "python",
    "workload_uuid": "w",
    "axes": {"M": 4},
    "gpu": "cpu",
    "gpu_name": "a processor",
    "tier": "screen",
}
CORRECTNESS = {"rel_fro": 1e-3}
PERFORMANCE = {
    "latency_us": 2.0,
    "ci_low_us": 1.9,
    "ci_high_us": 2.1,
    "samples": 9,
    "timer": "wall",
    "comparisons": [{"with": "stock", "provides": "stock", "ratio": 2.0, "ci_low": 1.9, "ci_high": 2.1}],
}


def trace(status: str, **changes: Any) -> Trace:
    return Trace.from_dict({**IDENTITY, "status": status, **changes})


def test_a_pass_survives_a_round_trip():
    passed = trace("PASSED", correctness=CORRECTNESS, performance=PERFORMANCE)
    assert Trace.from_json(passed.to_json()) == passed
    assert '"with": "stock"' in passed.to_json()


@pytest.mark.parametrize(
    ("status", "changes", "message"),
    [
        ("PASSED", {"correctness": CORRECTNESS}, "a screen trace with status PASSED needs 'performance'"),
        ("PASSED", {"performance": PERFORMANCE}, "needs 'correctness'"),
        ("INCORRECT_NUMERICAL", {"reason": "off", "performance": PERFORMANCE}, "needs 'correctness'"),
        ("TIMEOUT", {"reason": "slow", "performance": PERFORMANCE}, "must not have 'performance'"),
        ("RUNTIME_ERROR", {}, "a trace with status RUNTIME_ERROR needs a reason"),
        ("PASSED", {"tier": "interpreter", "correctness": CORRECTNESS, "performance": PERFORMANCE}, "must not have"),
        ("FAILED", {"reason": "x"}, "status: "),
    ],
)
def test_metrics_are_present_exactly_when_the_status_allows(status, changes, message):
    with pytest.raises(RecordError, match=message):
        trace(status, **changes)


def test_the_same_measurement_has_the_same_id():
    first = new_trace_id("r", "screen", 0, "s", {"B": 1, "A": 2}, "w")
    assert new_trace_id("r", "screen", 0, "s", {"A": 2, "B": 1}, "w") == first
    assert new_trace_id("r", "screen", 1, "s", {"A": 2, "B": 1}, "w") != first


def test_a_long_log_keeps_its_head_and_tail():
    clipped = clip_log("first" + "x" * 10_000 + "last")
    assert clipped.startswith("first")
    assert clipped.endswith("last")
    assert len(clipped) <= MAX_LOG_CHARACTERS + 40
