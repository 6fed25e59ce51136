"""Two solutions side by side: the faster one if that is known, and how often it is faster."""

from __future__ import annotations

import math

import pytest

from tilegym_db.store.queries.measured import winner


def row(a: tuple[float, float, float], b: tuple[float, float, float], *, same_run: bool) -> dict[str, object]:
    found: dict[str, object] = {"same_run": same_run}
    for name, (time, low, high) in (("a", a), ("b", b)):
        found |= {f"{name}_us": time, f"{name}_low_us": low, f"{name}_high_us": high}
    return found


FAST, SLOW, NEAR = (10.0, 9.9, 10.1), (20.0, 19.0, 21.0), (10.3, 10.2, 10.4)


@pytest.mark.parametrize("same_run", [True, False])
def test_distant_intervals_have_a_winner_in_either_order(same_run):
    assert winner(row(FAST, SLOW, same_run=same_run))[0] == "a"
    assert winner(row(SLOW, FAST, same_run=same_run))[0] == "b"


def test_difference_as_between_hosts_counts_only_within_one_run():
    assert winner(row(FAST, NEAR, same_run=True)) == ("a", "timed in turns, intervals apart")
    assert winner(row(FAST, NEAR, same_run=False)) == ("neither", "of two runs, which may differ by as much")


def test_intervals_that_overlap_or_are_missing_have_no_winner():
    wide = (10.3, 9.0, 12.0)
    assert winner(row(FAST, wide, same_run=True)) == ("neither", "their intervals overlap")
    assert winner({**row(FAST, SLOW, same_run=True), "b_low_us": None})[1] == "a trace without an interval"


def test_shipped_solutions_are_compared_at_every_common_size(cli):
    result = cli("compare", "rms_norm_triton", "rms_norm_stock", "--gpu", "h200", "--json")
    rows = result.json()
    assert len(rows) > 10
    for one in rows:
        assert one["ratio"] == pytest.approx(one["b_us"] / one["a_us"])
        assert one["faster"] in ("rms_norm_triton", "rms_norm_stock", None)
    wins = sum(one["faster"] == "rms_norm_triton" for one in rows)
    table = cli("compare", "rms_norm_triton", "rms_norm_stock", "--gpu", "h200")
    told = " ".join(table.err.split())
    assert f"a = rms_norm_triton is faster at {wins} of {len(rows)} sizes" in told
    mean = math.exp(sum(math.log(one["ratio"]) for one in rows) / len(rows))
    assert f"geometric mean: {mean:.3f}" in told


@pytest.mark.parametrize(
    ("arguments", "code", "cause", "fact"),
    [
        (["rms_norm_triton", "rms_norm_triton"], 2, "solution_repeated", "'rms_norm_triton'"),
        (["rms_norm_triton", "swiglu_triton"], 2, "definitions_differ", "tilegym-db best rms_norm --rank"),
        (["rms_norm_triton", "rms_norm_trito"], 2, "", "'rms_norm_triton'"),
        (["rms_norm_triton", "rms_norm_stock", "--gpu", "b200"], 3, "sizes_disjoint", "b200"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_a_reason(arguments, code, cause, fact, cli):
    result = cli("compare", *arguments)
    assert (result.code, result.out) == (code, "")
    assert cause in ("", result.cause)
    assert fact in " ".join(result.err.split())
