from __future__ import annotations

import pytest

FAILURE = {
    "gate": "elementwise",
    "axes": {"M": 17, "N": 8},
    "dtypes": {"T": "bfloat16"},
    "layouts": {"x": "strided(2 * N, 1)"},
    "contents": "outliers",
    "seed": "123456789",
    "offset": 1,
    "output": "out",
    "index": [16, 7],
    "expected": "1.5",
    "got": "nan",
    "worst_row": 16,
    "command": "tilegym-db debug reproduce row_scale_stock --gpu h200 --axes M=17 --distribution outliers --seed 123456789",
}
FAILED = {
    "status": "INCORRECT_NUMERICAL",
    "reason": "1 of 136 elements is off by more than the bound",
    "performance": None,
    "failure": FAILURE,
}


@pytest.fixture
def failed(journal_traces):
    (trace_id,) = journal_traces(1.0, **FAILED)
    return trace_id


def test_failed_trace_says_where_it_failed_and_how_to_repeat_it(cli, failed):
    result = cli("show", failed[:8])
    assert result.code == 0
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert lines[0] == "INCORRECT_NUMERICAL row_scale_stock for row_scale on h200, promotion tier"
    for line in (
        "reason 1 of 136 elements is off by more than the bound",
        "gate elementwise",
        "shape M=17, N=8; T=bfloat16",
        "layout x=strided(2 * N, 1)",
        "address every tensor off its alignment, elements: 1",
        "contents outliers, seed 123456789",
        "first wrong out[16, 7]: expected 1.5, got nan",
        "worst row 16",
    ):
        assert line in lines
    assert lines[-1] == FAILURE["command"]


def test_a_trace_is_also_one_json_object(cli, failed):
    content = cli("show", failed, "--json").json()
    assert (content["trace_id"], content["failure"]["index"], content["is_verified"]) == (failed, [16, 7], False)


def test_the_traces_of_a_solution_lead_to_the_one_that_failed(cli, failed):
    result = cli("show", "row_scale_stock")
    assert f"details of a failure: tilegym-db show {failed[:8]}" in result.err
    assert failed[:8] in result.out


def test_a_compilers_message_is_shown_and_how_to_build_it_alone(cli, journal_traces):
    log = "\n".join(["kernel.py:7:9: error: expected 2 arguments", *(f"note {i}" for i in range(200)), "x" * 1000])
    (trace_id,) = journal_traces(
        1.0, status="COMPILE_ERROR", reason="did not compile\nat all", correctness=None, performance=None, log=log
    )
    result = cli("show", trace_id)
    assert "  kernel.py:7:9: error: expected 2 arguments" in result.out
    assert "lines cut" in result.out
    assert max(map(len, result.out.splitlines())) < 500
    assert len(result.out.splitlines()) < 80
    assert "  at all" in result.out
    assert "Build it alone: tilegym-db compile row_scale_stock" in result.err


def test_nothing_in_a_trace_can_move_the_cursor(cli, journal_traces):
    (trace_id,) = journal_traces(
        1.0,
        status="RUNTIME_ERROR",
        reason="\x1b[2Jgone\rPASSED",
        correctness=None,
        performance=None,
        log="\x1b]0;title\x07 and \x9b2J",
    )
    out = cli("show", trace_id).out
    assert not [c for c in out if not (c.isprintable() or c == "\n")]


def test_a_pass_says_how_fast_and_what_was_looked_into(cli, journal_traces):
    (trace_id,) = journal_traces(
        10.0,
        envelope={"cases": 24, "digest": "d", "seed": "7", "dropped": ["M=1"]},
        audit={
            "wall_us": 10.25,
            "owned_share": 0.995,
            "profiled_us": 10.0,
            "kernels": ["k1", "k2"],
            "notes": ["kernel.py:3: try"],
        },
    )
    lines = [" ".join(line.split()) for line in cli("show", trace_id).out.splitlines()]
    for line in (
        "verified yes",
        "time 10 us (9.9 to 10.1), 50 samples by events",
        "wall clock 10.25 us a call",
        "speed 1.5x row_scale_stock",
        "envelope 24 cases, and 1 that the reference fails itself",
        "profiler 10.0 us of device time a call (CUPTI)",
        "own kernels 99.5% of the device time",
        "kernels k1, k2",
        "scan notes kernel.py:3: try",
    ):
        assert line in lines


def test_pass_says_its_share_of_the_speed_of_light_and_its_clock(cli, journal_traces):
    timing = {"latency_us": 10.0, "ci_low_us": 9.9, "ci_high_us": 10.1, "samples": 50, "timer": "events"}
    light = {"sol_us": 8.25, "sol_ratio": 0.825, "clock_mhz": 1755, "throttled": True}
    (trace_id,) = journal_traces(10.0, performance=timing | light)
    lines = [" ".join(line.split()) for line in cli("show", trace_id).out.splitlines()]
    assert "speed of light 82.5%, which is 8.25 us" in lines
    assert "clock 1755 MHz, slowed down at times, in rounds that were discarded" in lines


@pytest.mark.parametrize(
    ("changes", "standing"),
    [
        ({"tier": "interpreter", "performance": None}, "no: the interpreter tier is not enough"),
        ({"solution_digest": "0" * 64}, "no: the definition or the source has changed since"),
        ({"timestamp": "2026-10-31T00:00:00Z"}, "no: there is a newer pass"),
    ],
)
def test_a_pass_that_does_not_count_says_why(cli, journal_traces, changes, standing):
    (trace_id,) = journal_traces(10.0, config={"A": 1}, **changes)
    journal_traces(9.0, 9.0, config={"A": 1}, **({} if "timestamp" in changes else {"tier": "screen"}))
    assert standing in " ".join(cli("show", trace_id).out.split())


def test_a_pass_that_was_taken_back_names_the_failure(cli, journal_traces):
    passed, failed = journal_traces(10.0), None
    (_, failed) = journal_traces(1.0, 1.0, **FAILED, tier="screen")
    shown = " ".join(cli("show", passed[0]).out.split())
    assert f"no: a failure revoked it, see tilegym-db show {failed[:8]}" in shown


def test_several_traces_with_one_prefix_are_listed(cli, journal_traces):
    for name in ("abcdef01", "abcdef02"):
        journal_traces(1.0, trace_id=name)
    result = cli("show", "abcdef")
    assert result.code == 2
    assert "abcdef01, abcdef02" in result.err
    assert cli("show", "abcdef02").code == 0


def test_a_failure_without_a_case_has_no_section_for_it(cli, journal_traces):
    (trace_id,) = journal_traces(1.0, status="TIMEOUT", reason="60 s", correctness=None, performance=None)
    assert "failed at" not in cli("show", trace_id).out


def test_overruled_failure_says_by_whom_and_why(cli, journal_traces):
    (passed,) = journal_traces(10.0)
    (failed,) = journal_traces(1.0, **FAILED, tier="screen")
    refused = cli("data", "overrule", failed[:8])
    assert refused.code == 2
    assert cli("data", "overrule", failed[:8], "--because", "a loose cable").code == 0
    shown = " ".join(cli("show", failed).out.split())
    assert "counts overruled by" in shown
    assert "a loose cable" in shown
    assert "verified yes" in " ".join(cli("show", passed).out.split())
