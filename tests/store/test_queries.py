from __future__ import annotations

from contextlib import contextmanager

import pytest

from tilegym_db.store.ingest import ingest
from tilegym_db.store.queries import best_rows, done_keys, leaderboard_rows, measured_gpus, traces_of, verified_rows

REVOKING = ["INCORRECT_SHAPE", "INCORRECT_DTYPE", "INCORRECT_NUMERICAL", "RUNTIME_ERROR", "TIMEOUT", "REJECTED"]


@pytest.fixture
def filled(opened, write_traces):
    """``filled(trace, ...)``: a store that holds exactly those."""

    @contextmanager
    def fill(*traces):
        with opened() as store:
            ingest(store, [write_traces(*traces)])
            yield store

    return fill


def verified_ids(store, gpu="h200"):
    return [row["trace_id"] for row in verified_rows(store, gpu)]


def test_best_is_the_fastest_verified_solution_per_shape_and_gpu(filled, trace):
    winner = trace(latency_us=8.0, speedup=1.5)
    other_shape = trace(kind="stock", m=1, latency_us=3.0)
    other_gpu = trace(latency_us=50.0, gpu="l4")
    with filled(
        trace(latency_us=9.0),
        winner,
        trace(kind="tilelang", latency_us=8.5),
        trace(kind="stock", latency_us=12.0),
        trace(kind="tilelang", latency_us=1.0, tier="interpreter"),
        trace(kind="tilelang", m=1, latency_us=4.0),
        other_shape,
        other_gpu,
    ) as store:
        rows = best_rows(store)
        assert [row["trace_id"] for row in rows] == [other_shape.trace_id, winner.trace_id, other_gpu.trace_id]
        assert (rows[1]["latency_us"], rows[1]["speedup"], rows[1]["axes"]) == (8.0, 1.5, {"M": 4096, "N": 4096})
        assert measured_gpus(store) == ["h200", "l4"]


def test_best_can_be_narrowed(filled, trace):
    norm, activation, pcie = trace(), trace("shift"), trace(gpu="h100-pcie")
    with filled(norm, activation, pcie) as store:
        assert [row["trace_id"] for row in best_rows(store, definition="shift")] == [activation.trace_id]
        assert {row["trace_id"] for row in best_rows(store, op_type="norm")} == {norm.trace_id, pcie.trace_id}
        assert [row["trace_id"] for row in best_rows(store, gpu="h100")] == [pcie.trace_id]
        assert best_rows(store, gpu="h100-sxm") == []


def test_shapes_differ_by_dtypes_scalars_and_layouts_too(filled, trace):
    variants = [
        {},
        {"dtypes": {"T": "float32"}},
        {"scalars": {"eps": 1e-6}},
        {"scalars": {"eps": 1e-5, "is_causal": True}},
        {"layouts": {"x": "row_contiguous"}},
    ]
    with filled(*(trace(**changes) for changes in variants)) as store:
        assert len(best_rows(store)) == len(variants)


def test_the_order_of_keys_in_a_journal_line_does_not_matter(filled, trace):
    one = trace(scalars={"a": 1, "b": 2}, latency_us=2.0)
    two = trace(scalars={"b": 2, "a": 1}, axes={"N": 4096, "M": 4096}, latency_us=1.0)
    with filled(one, two) as store:
        assert [row["trace_id"] for row in best_rows(store)] == [two.trace_id]


@pytest.mark.parametrize("status", REVOKING)
def test_a_later_failure_takes_back_earlier_passes_of_that_source_and_config(filled, trace, status):
    passed, config = trace(m=1), {"BLOCK_M": 4}
    tuned = trace(config=config)
    elsewhere = trace(gpu="l4")
    failed = trace(m=4096, status=status)
    again = trace(m=4096, latency_us=99.0)
    kept = {again.trace_id} if status == "REJECTED" else {tuned.trace_id}  # the tuned one is faster than `again`
    with filled(passed, tuned, elsewhere, failed, again) as store:
        assert set(verified_ids(store)) == kept
        assert verified_ids(store, "l4") == [elsewhere.trace_id]


def test_an_earlier_failure_takes_nothing_back(filled, trace):
    failed, passed = trace(status="RUNTIME_ERROR"), trace()
    with filled(failed, passed) as store:
        assert verified_ids(store) == [passed.trace_id]


def test_a_failure_at_the_same_instant_counts_as_later(filled, trace):
    passed = trace()
    with filled(passed, trace(status="TIMEOUT", timestamp=passed.timestamp)) as store:
        assert verified_ids(store) == []


def test_a_compile_error_takes_back_its_own_workload_only(filled, trace):
    small, large = trace(m=1), trace(m=4096)
    with filled(small, large, trace(m=4096, status="COMPILE_ERROR")) as store:
        assert verified_ids(store) == [small.trace_id]


def test_an_honest_limit_takes_nothing_back(filled, trace):
    passed = trace()
    with filled(passed, trace(status="UNSUPPORTED")) as store:
        assert verified_ids(store) == [passed.trace_id]


def test_only_the_catalogs_own_source_and_definition_are_verified(filled, trace):
    with filled(trace(solution_digest="0" * 64), trace("shift", definition_digest="0" * 64)) as store:
        assert verified_ids(store) == []
        assert len(traces_of(store, "scale_triton")) == 1


def test_speedup_is_against_the_least_favourable_stock_code(filled, trace):
    comparisons = [
        {"with": "a", "provides": "stock", "ratio": 3.0, "ci_low": 2.9, "ci_high": 3.1},
        {"with": "b", "provides": "stock", "ratio": 1.2, "ci_low": 1.1, "ci_high": 1.3},
        {"with": "c", "provides": "library", "ratio": 0.5, "ci_low": 0.4, "ci_high": 0.6},
    ]
    performance = {"latency_us": 1.0, "ci_low_us": 1.0, "ci_high_us": 1.0, "samples": 9, "timer": "events"}
    with filled(trace(performance=performance | {"comparisons": comparisons}), trace("shift")) as store:
        assert [(row["speedup"], row["speedup_ci_low"]) for row in verified_rows(store, "h200")] == [
            (1.2, 1.1),
            (None, None),
        ]


def test_the_leaderboard_counts_wins_and_takes_geometric_means(filled, trace):
    with filled(
        trace(m=1, latency_us=1.0, speedup=4.0, sol_ratio=0.5),
        trace(m=4096, latency_us=3.0, speedup=1.0, sol_ratio=0.125),
        trace(m=1, kind="tilelang", latency_us=2.0, speedup=2.0),
        trace(m=4096, kind="tilelang", latency_us=2.0, speedup=1.5),
        trace(m=4096, kind="tilelang", latency_us=2.5, speedup=1.2),
        trace(m=4096, kind="stock", latency_us=3.0),
    ) as store:
        rows = {row["solution"]: row for row in leaderboard_rows(store, definition="scale", gpu="h200")}
    assert list(rows) == ["scale_triton", "scale_tilelang", "scale_stock"]
    assert [(row["shapes"], row["wins"]) for row in rows.values()] == [(2, 1), (2, 1), (1, 0)]
    assert rows["scale_triton"]["geomean_speedup"] == pytest.approx(2.0)
    assert rows["scale_triton"]["geomean_sol_ratio"] == pytest.approx(0.25)
    assert rows["scale_tilelang"]["geomean_speedup"] == pytest.approx(3.0**0.5)
    assert rows["scale_stock"]["geomean_speedup"] is None


def test_verified_rows_are_ordered_by_shape_then_latency(filled, trace):
    with filled(
        trace("shift", latency_us=1.0),
        trace(kind="stock", latency_us=9.0),
        trace(config={"BLOCK_M": 4}, latency_us=5.0),
    ) as store:
        rows = verified_rows(store, "h200")
    assert [row["solution"] for row in rows] == ["scale_triton", "scale_stock", "shift_triton"]
    assert (rows[0]["config"], rows[0]["scalars"]) == ({"BLOCK_M": 4}, {"eps": 1e-5})


def test_done_covers_every_verdict_on_that_gpu_and_tier(filled, trace):
    passed, failed = trace(), trace(kind="tilelang", status="TIMEOUT")
    with filled(passed, failed, trace("shift", gpu="l4"), trace("shift", tier="promotion")) as store:
        keys = {(item.solution_digest, item.definition_digest, item.workload_uuid) for item in (passed, failed)}
        assert done_keys(store, "h200", "screen") == keys
        assert len(done_keys(store, "h200")) == 3


def test_traces_of_a_solution_come_newest_first(filled, trace):
    first, second = trace(), trace(status="TIMEOUT")
    with filled(first, second, trace(kind="stock")) as store:
        assert [row["trace_id"] for row in traces_of(store, "scale_triton")] == [second.trace_id, first.trace_id]
