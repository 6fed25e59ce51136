from __future__ import annotations

from contextlib import contextmanager

import pytest

from tilegym_db.published.table import revoked_passes
from tilegym_db.records.solution import config_id
from tilegym_db.records.verdicts import VERIFIED_TIERS
from tilegym_db.store.filling import ingest
from tilegym_db.store.queries.measured import (
    Promotable,
    best_rows,
    count_unverified,
    done_keys,
    failed_screen,
    find_traces,
    leaderboard_rows,
    likely_fastest_of,
    measured_gpus,
    promotable,
    read_traces,
    traces_of,
    tuned_configs,
)
from tilegym_db.store.queries.publishing import promoted_rows, publishable_rows, verified_rows
from tilegym_db.store.statements import views_sql

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
        trace(latency_us=9.0, config={"BLOCK_M": 4}),
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
        {"dtypes": {"T": "float16"}},
        {"scalars": {"eps": 1e-6}},
        {"scalars": {"eps": 1e-5, "is_causal": True}},
        {"layouts": {"x": "row_contiguous"}},
        {"blobs": {"x": "ab" * 32}},
        {"blobs": {"x": "cd" * 32}},
    ]
    with filled(*(trace(**changes) for changes in variants)) as store:
        assert len(best_rows(store)) == len(variants)


def test_result_on_file_contents_is_ranked_but_not_published(filled, trace):
    of_file = trace(latency_us=3.0, blobs={"x": "ab" * 32})
    beside = trace(kind="tilelang", latency_us=5.0, blobs={"x": "ab" * 32})
    drawn = trace(latency_us=9.0)
    with filled(of_file, beside, drawn) as store:
        assert [row["trace_id"] for row in best_rows(store)] == [drawn.trace_id, of_file.trace_id]
        assert [row["trace_id"] for row in publishable_rows(store, "h200")] == [drawn.trace_id]
        assert promoted_rows(store, "h200")[1] == {"of_files": 2}
        assert read_traces(store, [of_file.trace_id]) == {of_file.trace_id: of_file}


def test_the_order_of_keys_in_a_journal_line_does_not_matter(filled, trace):
    one = trace(scalars={"a": 1, "b": 2}, latency_us=2.0)
    two = trace(scalars={"b": 2, "a": 1}, axes={"N": 4096, "M": 4096}, latency_us=1.0)
    with filled(one, two) as store:
        assert [row["trace_id"] for row in best_rows(store)] == [two.trace_id]


@pytest.mark.parametrize("tier", ["screen", "interpreter"])
def test_a_pass_of_a_lesser_tier_is_never_verified(filled, trace, tier):
    with filled(trace(tier=tier)) as store:
        store.connection.execute(views_sql(("promotion",)))
        assert verified_ids(store) == []
        assert best_rows(store) == leaderboard_rows(store) == measured_gpus(store) == []


def test_a_promotion_is_verified_and_an_interpreter_never():
    assert "promotion" in VERIFIED_TIERS
    assert "interpreter" not in VERIFIED_TIERS


def test_the_newest_pass_counts_however_fast_an_older_one_was(filled, trace):
    lucky, slower, other = trace(latency_us=1.0), trace(latency_us=9.0), trace(kind="tilelang", latency_us=5.0)
    tuned, other_shape = trace(latency_us=8.0, config={"BLOCK_M": 4}), trace(m=1, latency_us=2.0)
    with filled(other, other_shape, slower, tuned, lucky) as store:
        assert {row["trace_id"] for row in store.rows("FROM verified")} == {
            item.trace_id for item in (slower, other, tuned, other_shape)
        }
        assert verified_ids(store) == [other_shape.trace_id, other.trace_id, tuned.trace_id]
        assert [row["trace_id"] for row in best_rows(store)] == [other_shape.trace_id, other.trace_id]


def test_readers_see_the_same_of_several_simultaneous_passes(filled, trace):
    first = trace()
    twins = [first, trace(latency_us=1.0, timestamp=first.timestamp)]
    for order in (twins, twins[::-1]):
        with filled(*order) as store:
            assert verified_ids(store) == [max(item.trace_id for item in twins)]


def test_unsandboxed_pass_counts_but_supersedes_no_public_one(filled, trace):
    confined, unconfined = trace(latency_us=9.0), trace(latency_us=1.0, sandbox_level=1)
    tuned, alone = trace(sandbox_level=0, latency_us=2.0, config={"BLOCK_M": 4}), trace("shift", sandbox_level=1)
    with filled(confined, unconfined, tuned, alone) as store:
        assert verified_ids(store) == [tuned.trace_id, alone.trace_id]
        assert [row["trace_id"] for row in publishable_rows(store, "h200")] == [confined.trace_id]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("status", REVOKING)
def test_later_failure_takes_back_passes_of_source_and_config(filled, trace, status):
    passed, config = trace(m=1), {"BLOCK_M": 4}
    tuned = trace(config=config)
    elsewhere = trace(gpu="l4")
    failed = trace(m=4096, status=status)
    again = trace(m=4096, latency_us=99.0)
    kept = set() if status == "REJECTED" else {tuned.trace_id}  # the tuned one is faster than `again`
    with filled(passed, tuned, elsewhere, failed, again) as store:
        assert set(verified_ids(store)) == kept
        assert verified_ids(store, "l4") == [elsewhere.trace_id]


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("status", "gate", "counts"),
    [
        ("INCORRECT_NUMERICAL", None, False),
        ("INCORRECT_SHAPE", "shape", False),
        ("REJECTED", "fresh contents", False),
        ("REJECTED", "state", False),
        ("REJECTED", "wall clock", True),
        ("REJECTED", "physics floor", True),
        ("REJECTED", "scan", True),
        ("COMPILE_ERROR", None, True),
        ("TIMEOUT", None, True),
    ],
)
@pytest.mark.parametrize("tier", ["screen", "promotion"])
def test_no_later_pass_outweighs_a_wrong_number(filled, trace, status, gate, counts, tier):
    point = {"axes": {"M": 1}, "contents": "normal", "seed": "1", "command": "none"}
    failed = trace(status=status, tier=tier, failure=None if gate is None else {"gate": gate, **point})
    again = trace()
    with filled(failed, again) as store:
        assert verified_ids(store) == ([again.trace_id] if counts else [])
    assert (revoked_passes([failed.to_dict(), again.to_dict()]) == frozenset()) is counts


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


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "UNSUPPORTED"},
        {"status": "UNSUPPORTED", "tier": "screen"},
        {"status": "INCORRECT_NUMERICAL", "tier": "interpreter"},
        {"status": "INCORRECT_NUMERICAL", "gpu": "l4"},
        {"status": "REJECTED", "solution_digest": "0" * 64},
        {"status": "REJECTED", "definition_digest": "0" * 64},
    ],
)
def test_unrelated_failure_takes_no_pass_back(filled, trace, changes):
    passed = trace()
    with filled(passed, trace(**changes)) as store:
        assert verified_ids(store) == [passed.trace_id]


@pytest.mark.parametrize("failure", [{"tier": "screen"}, {"tier": "promotion", "sandbox_level": 0}])
@pytest.mark.parametrize("status", ["REJECTED", "INCORRECT_NUMERICAL"])
def test_failure_counts_from_any_tier_and_sandbox(filled, trace, status, failure):
    with filled(trace(), trace(status=status, **failure)) as store:
        assert verified_ids(store) == []
        assert best_rows(store) == []


def test_only_the_catalogs_source_and_definition_are_verified(filled, trace):
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
        trace(m=4096, kind="tilelang", latency_us=2.5, speedup=1.2, config={"BLOCK_M": 4}),
        trace(m=4096, kind="stock", latency_us=3.0),
    ) as store:
        rows = {row["solution"]: row for row in leaderboard_rows(store, definition="scale", gpu="h200")}
    assert list(rows) == ["scale_triton", "scale_tilelang", "scale_stock"]
    assert [(row["shapes"], row["wins"]) for row in rows.values()] == [(2, 1), (2, 1), (1, 0)]
    assert rows["scale_triton"]["geomean_speedup"] == pytest.approx(2.0)
    assert rows["scale_triton"]["geomean_sol_ratio"] == pytest.approx(0.25)
    for mean in ("speedup", "sol_ratio"):
        low, middle, high = (rows["scale_triton"][f"{end}_{mean}"] for end in ("lowest", "geomean", "highest"))
        assert low < middle < high
    assert rows["scale_tilelang"]["geomean_speedup"] == pytest.approx(3.0**0.5)
    assert rows["scale_stock"]["geomean_speedup"] is None


def test_range_is_over_the_ratios_of_the_mean(filled, trace):
    with filled(
        trace(m=1, speedup=4.0, sol_ratio=0.0),
        trace(m=4096, sol_ratio=0.25),
        trace(m=1, kind="tilelang"),
    ) as store:
        rows = {row["solution"]: row for row in leaderboard_rows(store, definition="scale", gpu="h200")}
    ends = ("lowest", "geomean", "highest")
    assert [rows["scale_triton"][f"{end}_speedup"] for end in ends] == pytest.approx([4.0] * 3)
    assert [rows["scale_triton"][f"{end}_sol_ratio"] for end in ends] == pytest.approx([0.25] * 3)
    assert {rows["scale_tilelang"][f"{end}_speedup"] for end in ends} == {None}


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
    passed, failed = trace(tier="screen"), trace(kind="tilelang", tier="screen", status="TIMEOUT")
    with filled(passed, failed, trace("shift", gpu="l4"), trace("shift", tier="promotion")) as store:
        keys = {(item.solution_digest, item.definition_digest, item.workload_uuid, "{}") for item in (passed, failed)}
        assert done_keys(store, "h200", "screen") == keys
        assert len(done_keys(store, "h200")) == 3


def test_each_config_is_done_or_failed_for_itself(filled, trace):
    with filled(trace(tier="screen"), trace(tier="screen", config={"B": 2, "A": "x"}, status="TIMEOUT")) as store:
        assert {key[3] for key in done_keys(store, "h200", "screen")} == {"{}", config_id({"A": "x", "B": 2})}
        assert {key[3]: status for key, status in failed_screen(store, "h200").items()} == {
            '{"A":"x","B":2}': "TIMEOUT"
        }


def test_traces_of_a_solution_come_newest_first(filled, trace):
    first, second = trace(), trace(status="TIMEOUT")
    with filled(first, second, trace(kind="stock")) as store:
        assert [row["trace_id"] for row in traces_of(store, "scale_triton")] == [second.trace_id, first.trace_id]


def pair(trace):
    return Promotable(
        trace.solution, trace.solution_digest, trace.definition_digest, trace.workload_uuid, dict(trace.config)
    )


def test_what_passed_its_newest_screen_can_be_promoted(filled, trace):
    passed = trace(tier="screen", config={"BLOCK_M": 4, "fast": True})
    worse = [trace(m=1, tier="screen"), trace(m=1, tier="screen", status="TIMEOUT")]
    better = [trace("shift", tier="screen", status="TIMEOUT"), trace("shift", tier="screen")]
    with filled(
        passed,
        *worse,
        *better,
        trace(kind="tilelang", tier="interpreter"),
        trace(kind="tilelang", tier="screen", status="UNSUPPORTED"),
        trace(kind="stock", tier="screen", gpu="l4"),
        trace(kind="stock", tier="screen", solution_digest="0" * 64),
        trace(kind="stock", tier="screen", definition_digest="0" * 64),
    ) as store:
        assert promotable(store, "h200") == [pair(passed), pair(better[1])]
        assert set(failed_screen(store, "h200").values()) == {"TIMEOUT", "UNSUPPORTED"}


@pytest.mark.parametrize(
    ("status", "then"), [("PASSED", []), ("REJECTED", ["scale_triton"]), ("UNSUPPORTED", ["scale_triton"])]
)
def test_promotion_verdict_settles_a_pair_until_the_next_screen(filled, trace, status, then):
    first = trace(tier="screen")
    with filled(first, trace(status=status)) as store:
        assert promotable(store, "h200") == []
    with filled(first, trace(status=status), trace(tier="screen")) as store:
        assert promotable(store, "h200") == [pair(first) for _ in then]
    with filled(trace("shift", tier="screen"), trace("shift", config={"BLOCK_M": 4})) as store:
        assert [item.solution for item in promotable(store, "h200")] == [*then, "shift_triton"]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([{}], []),
        ([{"tier": "interpreter", "config": {"B": 1}}], []),
        ([{"config": {"B": 2}, "gpu": "l4"}], []),
        ([{"config": {"B": 2}}, {"config": {"B": 4}}, {}], [{"B": 4}]),
        ([{"config": {"B": 2}}, {"config": {"B": 4}}, {"config": {"B": 2}}], [{"B": 4}]),
        ([{"config": {"B": 4}}, {"config": {"B": 2}}, {"config": {"B": 2}, "status": "TIMEOUT"}], [{"B": 4}]),
        ([{"config": {"B": 2}}, {"config": {"B": 2}, "tier": "promotion", "status": "INCORRECT_NUMERICAL"}], []),
        ([{"config": {"B": 2}}, {"config": {"B": 2}, "m": 1, "status": "INCORRECT_NUMERICAL"}], []),
        ([{"config": {"B": 2}}, {"config": {"B": 2}, "m": 1, "status": "COMPILE_ERROR"}], [{"B": 2}]),
        ([{"config": {"B": 2}}, {"config": {"B": 4}, "status": "INCORRECT_NUMERICAL"}], [{"B": 2}]),
        ([{"config": {"B": 2}}, {"config": {"B": 2}, "status": "UNSUPPORTED"}], []),
    ],
)
def test_tuned_config_is_the_last_one_that_passed_and_stands(filled, trace, given, found):
    with filled(*(trace(**{"tier": "screen", **changes}) for changes in given)) as store:
        assert list(tuned_configs(store, "h200").values()) == found


def test_passes_of_a_screen_are_counted_until_they_are_verified(filled, trace):
    promoted = [trace(tier="screen"), trace()]
    waiting = [trace("shift", tier="screen"), trace("shift", tier="screen", gpu="h100-pcie")]
    screened_again = trace(tier="screen")
    with filled(*promoted, *waiting, screened_again) as store:
        store.connection.execute(views_sql(("promotion",)))
        assert count_unverified(store) == 2
        assert count_unverified(store, definition="scale") == 0
        assert count_unverified(store, op_type="activation", gpu="h100") == 1


def test_trace_is_found_by_a_prefix_of_its_id_with_its_standing(filled, trace):
    passed, changed = trace(), trace("shift", solution_digest="0" * 64)
    failed = trace(status="TIMEOUT")
    again = trace()
    with filled(passed, changed, failed, again) as store:
        (row,) = find_traces(store, passed.trace_id[:8])
        assert (row["trace_id"], row["is_verified"], row["is_current"]) == (passed.trace_id, False, True)
        assert row["revoked_by"] == failed.trace_id
        (row,) = find_traces(store, changed.trace_id)
        assert (row["is_verified"], row["is_current"], row["revoked_by"]) == (False, False, None)
        (row,) = find_traces(store, again.trace_id)
        assert (row["is_verified"], row["revoked_by"]) == (True, None)
        assert len(find_traces(store, "", most=3)) == 3
        assert find_traces(store, "no such trace") == []


def test_likely_fastest_include_possible_winners_on_other_hosts(filled, trace, catalog):
    traces = [
        trace(latency_us=12.1, kind="stock"),
        trace(latency_us=10.0, config={"B": 2}),
        trace(latency_us=10.5),
        trace(latency_us=11.9, kind="tilelang"),
        trace(latency_us=400.0, m=1, kind="stock"),
        trace(latency_us=407.0, m=1),
        trace(latency_us=409.0, m=1, kind="tilelang"),
        trace(latency_us=1.0, kind="tilelang", gpu="l4"),
    ]
    large, small = (trace(m=m) for m in (4096, 1))
    with filled(*traces) as store:
        assert likely_fastest_of(store, "h200") == {
            (large.definition_digest, large.workload_uuid): [("scale_triton", {"B": 2}), ("scale_tilelang", {})],
            (small.definition_digest, small.workload_uuid): [("scale_stock", {}), ("scale_triton", {})],
        }


def test_row_names_its_strongest_baseline_and_share_as_it_is(filled, trace):
    """An incumbent is no baseline, and a share above 1 stays."""
    comparisons = [
        {"with": "slow", "provides": "stock", "ratio": 3.0, "ci_low": 2.9, "ci_high": 3.1},
        {"with": "fast", "provides": "library", "ratio": 1.2, "ci_low": 1.1, "ci_high": 1.3},
        {"with": "before", "provides": "incumbent", "ratio": 0.9, "ci_low": 0.8, "ci_high": 1.0},
    ]
    performance = {
        "latency_us": 1.0,
        "ci_low_us": 1.0,
        "ci_high_us": 1.0,
        "samples": 9,
        "timer": "events",
        "sol_ratio": 1.2,
    }
    with filled(trace(performance=performance | {"comparisons": comparisons}), trace("shift")) as store:
        columns = "strongest_baseline, strongest_ratio, sol_ratio"
        first, second = store.rows(f"SELECT {columns} FROM traces ORDER BY definition")
    assert list(first.values()) == ["fast", 1.2, 1.2]
    assert list(second.values()) == [None, None, None]
