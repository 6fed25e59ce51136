from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

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


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"scalars": {"eps": "1e-5"}}, "scalars.eps"),
        ({"envelope": {"cases": 1, "digest": "d", "seed": "1", "scalars": {"eps": ["1e-6", "1e-4"]}}}, "scalars.eps"),
        ({"envelope": {"cases": 1, "digest": "d", "seed": "1", "scalars": {"eps": [False, True]}}}, "scalars.eps"),
    ],
)
def test_text_and_flags_are_no_numbers_of_a_trace(changes, key):
    with pytest.raises(RecordError, match=key):
        trace("PASSED", correctness=CORRECTNESS, performance=PERFORMANCE, **changes)


def test_a_pass_survives_a_round_trip():
    passed = trace("PASSED", correctness=CORRECTNESS, performance=PERFORMANCE)
    assert Trace.from_json(passed.to_json()) == passed
    assert '"with": "stock"' in passed.to_json()


@pytest.mark.parametrize(
    ("status", "changes", "code", "name"),
    [
        ("PASSED", {"correctness": CORRECTNESS}, "figures_missing", "'performance'"),
        ("PASSED", {"performance": PERFORMANCE}, "figures_missing", "'correctness'"),
        ("INCORRECT_NUMERICAL", {"reason": "off", "performance": PERFORMANCE}, "figures_missing", "'correctness'"),
        ("TIMEOUT", {"reason": "slow", "performance": PERFORMANCE}, "figures_unexpected", "'performance'"),
        ("RUNTIME_ERROR", {}, "reason_missing", "RUNTIME_ERROR"),
        (
            "PASSED",
            {"tier": "interpreter", "correctness": CORRECTNESS, "performance": PERFORMANCE},
            "figures_unexpected",
            "'performance'",
        ),
        ("FAILED", {"reason": "x"}, "value_unknown", "status: "),
    ],
)
def test_metrics_are_present_exactly_when_the_status_allows(status, changes, code, name):
    with raises(RecordError, code, name):
        trace(status, **changes)


@pytest.mark.parametrize(
    ("text", "code", "name"),
    [
        ('"max_abs": 1e999', "number_not_finite", "correctness.max_abs: "),
        ('"max_abs": NaN', "json_syntax", ""),
        ('"cases": 9223372036854775808', "number_out_of_range", "correctness.cases: "),
        ('"gate": "\\ud800"', "json_syntax", ""),
    ],
)
def test_what_the_database_cannot_hold_is_refused(text, code, name):
    line = trace("PASSED", correctness=CORRECTNESS, performance=PERFORMANCE).to_json()
    with raises(RecordError, code, name):
        Trace.from_json(line.replace('"rel_fro": 0.001', text))


@pytest.mark.parametrize("written", ["2026-11-01T00:00:00", "2026-11-01T02:00:00+02:00", 1793491200])
def test_times_are_utc_however_they_are_written(written):
    assert '"timestamp": "2026-11-01T00:00:00Z"' in trace("TIMEOUT", reason="slow", timestamp=written).to_json()


def test_a_time_before_the_first_year_is_refused():
    with raises(RecordError, "time_out_of_range"):
        trace("TIMEOUT", reason="slow", timestamp="0001-01-01T00:00:00+01:00")


def test_the_same_measurement_has_the_same_id():
    first = new_trace_id("r", "screen", 0, "s", {"B": 1, "A": 2}, "w")
    assert new_trace_id("r", "screen", 0, "s", {"A": 2, "B": 1}, "w") == first
    assert new_trace_id("r", "screen", 1, "s", {"A": 2, "B": 1}, "w") != first


def test_a_long_log_keeps_its_head_and_tail():
    clipped = clip_log("first" + "x" * 10_000 + "last")
    assert clipped.startswith("first")
    assert clipped.endswith("last")
    assert " characters cut ..." in clipped
    assert len(clipped) <= MAX_LOG_CHARACTERS


@pytest.mark.parametrize(
    "line", ["kernel.py:7:9: error: expected 2 arguments", "ptxas fatal   : out of registers", "  E  ValueError: no"]
)
def test_a_long_log_keeps_the_lines_that_name_an_error(line):
    listing = [f"  %{number} = arith.addf" for number in range(1000)]
    clipped = clip_log("\n".join([*listing, line, *listing, "the end"]))
    assert line in clipped.splitlines()
    assert clipped.endswith("the end")
    assert len(clipped) <= MAX_LOG_CHARACTERS


@given(st.lists(st.text(max_size=3000) | st.just("an error of " + "long " * 200), max_size=8))
def test_a_clipped_log_is_short_whatever_is_in_it(lines):
    text = "\n".join(lines)
    clipped = clip_log(text)
    assert len(clipped) <= MAX_LOG_CHARACTERS
    assert clipped == text or (clipped[:1000] == text[:1000] and clipped[-1000:] == text[-1000:])
