from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from shipped_records import CATALOG

from tilegym_db.measurement.run_setup import extent_of
from tilegym_db.records import Definition, Solution
from tilegym_db.records.call import Call, scalars_with_axes
from tilegym_db.records.workload import Case
from tilegym_db.verification.expected import is_affordable, make_large_case
from tilegym_db.verification.large import INDEX_LIMIT, WHOLE_LENGTHS, large_cases, sampled_rows, varying_axes
from tilegym_db.verification.verifier import Failure, judge_large


def solution(*constraints: str) -> Solution:
    spec = {"language": "python", "entry_point": "kernel.py::run", "constraints": list(constraints)}
    return Solution.from_dict(
        {"name": "any", "definition": "row_scale", "author": "tests", "spec": spec, "sources": [{"path": "kernel.py"}]}
    )


def large(definition: Definition, *constraints: str, seed: int = 1, **changes: Any) -> list[Any]:
    given = {"budget_bytes": 24 << 20, "on_gpu": False, **changes}
    return large_cases(definition, solution(*constraints), {"T": "float32"}, {"factor": 2.0}, seed=seed, **given)


@pytest.mark.parametrize("seed", range(5))
def test_large_cases_have_few_and_many_and_long_rows(seed, operator):
    axes = [case.case.call.axes for case in large(operator(independent_axes=["M"]), seed=seed)]
    assert {octave for octave in range(10, 17) if any(one["M"] >> octave == 1 for one in axes)} == {*range(10, 17)}
    assert 1 << 10 <= axes[0]["M"] <= (1 << 17) + 1
    assert axes[1]["M"] > 1 << 17
    assert axes[2]["N"] >= 1 << 10
    assert axes[3]["N"] > 1 << 16
    assert axes[4]["M"] * axes[4]["N"] >= 1 << 20


def test_a_limit_within_any_factor_of_two_has_rows(operator):
    drawn, hits = random.Random(1), []
    for seed in range(8):
        rows = [one.case.call.axes["M"] for one in large(operator(independent_axes=["M"]), seed=seed)]
        starts = [2 ** drawn.uniform(10, 16) for _ in range(100)]
        hits += [any(start < count < 2 * start for count in rows) for start in starts]
    assert sum(hits) / len(hits) >= 0.92


def test_large_sizes_are_whole_batches_and_odd_ones(operator):
    sizes = [
        case.case.call.axes["M"] for seed in range(5) for case in large(operator(independent_axes=["M"]), seed=seed)
    ]
    assert sum(size > 1 << 10 and size % 512 == 0 for size in sizes) >= 5
    assert sum(size > 1 << 10 and size % 2 for size in sizes) >= 5


@pytest.mark.parametrize("seed", range(5))
def test_octaves_share_two_widths_so_that_little_compiles(seed, operator):
    axes = [case.case.call.axes for case in large(operator(independent_axes=["M"]), seed=seed)]
    thin = [one for one in axes if 1 << 10 <= one["M"] < 1 << 17 and one["N"] <= 3]
    assert len(thin) >= 6
    assert len({one["N"] for one in thin}) == 2


def test_fewer_rows_are_tried_where_very_many_are_not_allowed(operator):
    definition = operator(independent_axes=["M"])
    rows = [case.case.call.axes["M"] for case in large(definition, "M <= 131072")]
    assert 1 << 16 < max(rows) <= 1 << 17


def test_a_gpu_gets_a_tensor_beyond_31_bits_if_memory_allows(operator):
    definition = operator(independent_axes=["M"])
    axes = large(definition, on_gpu=True, budget_bytes=24 << 30)[-1].case.call.axes
    assert axes["M"] * axes["N"] > INDEX_LIMIT
    smaller = [case.case.call.axes for case in large(definition, on_gpu=True, budget_bytes=8 << 30)]
    assert max(one["M"] * one["N"] for one in smaller) <= 1 << 30


def test_sizes_of_constrained_axes_stay_within_them(operator):
    cases = large(operator(independent_axes=["M"]), "M <= 5000", "N % 8 == 0")
    assert cases
    assert all(case.case.call.axes["M"] <= 5000 and case.case.call.axes["N"] % 8 == 0 for case in cases)


@pytest.mark.parametrize("seed", range(5))
def test_lengths_that_rows_depend_on_are_compared_whole(seed, operator):
    cases = large(operator(serving={"lengths": ["M"]}), seed=seed)
    rows = [case.case.call.axes["M"] for case in cases]
    assert all(any(low <= size <= high + 1 for size in rows) for low, high in WHOLE_LENGTHS)
    assert all(case.rows == {} and case.base == case.case for case in cases)


def test_axes_of_an_operator_that_is_not_served_are_tried_too(operator):
    cases = large(operator())
    assert any(case.case.call.axes["M"] >= 1 << 10 for case in cases)
    assert any(case.case.call.axes["N"] >= 1 << 10 for case in cases)


def test_widths_and_heads_with_a_ratio_do_not_vary() -> None:
    assert varying_axes(CATALOG.definition("attention_prefill")) == ["S", "B"]
    assert varying_axes(CATALOG.definition("moe_grouped_gemm")) == ["S"]
    assert "L" in varying_axes(CATALOG.definition("attention_decode"))


@pytest.mark.parametrize(
    ("name", "long", "affordable"),
    [
        ("moe_offsets", {"M": 100_000, "K": 2, "E": 3}, True),
        ("attention_sink_prefill", {"B": 1, "Hq": 1, "Hkv": 1, "S": 100_000, "D": 8, "W": 3}, False),
        ("attention_sink_prefill", {"B": 1, "Hq": 1, "Hkv": 1, "S": 2_000, "D": 8, "W": 3}, True),
        ("gated_delta_rule_chunk", {"B": 1, "T": 20_000, "Hk": 1, "Hv": 1, "K": 1, "V": 1}, False),
    ],
)
def test_square_of_a_length_or_a_long_loop_is_left_out(name: str, long: dict[str, int], affordable: bool) -> None:
    definition, workload = CATALOG.definition(name), CATALOG.workloads_for(name)[0]
    axes = definition.bind_axes(long)
    scalars = scalars_with_axes(definition, workload.scalars(), axes)
    call = Call(name, axes, definition.bind_dtypes(workload.dtypes), scalars=scalars)
    assert is_affordable(definition, Case(call), "cpu") == affordable


def test_ends_and_limits_of_rows_are_always_compared():
    rows = sampled_rows(70_000, 40_000, 64, random.Random(1))
    assert {0, 1023, 1024, 1025, 65535, 65536, 65537, 69_999, INDEX_LIMIT // 40_000, INDEX_LIMIT // 40_000 + 1} <= {
        *rows
    }
    assert len(rows) == 64
    assert sampled_rows(3, 1, 64, random.Random(1)) == (0, 1, 2)


@pytest.fixture
def judged(operator):
    """Judge an output of the second large case, which has more than 65,536 rows."""
    definition = operator(independent_axes=["M"])
    case = make_large_case(definition, large(definition)[1], "cpu")
    assert case is not None
    right = case.given.inputs["x"] * case.given.inputs["weight"] * case.given.inputs["factor"]

    def judge(change: Any) -> Failure | None:
        return judge_large(definition, solution(), case, {"out": change(right.clone())})

    return judge


def test_a_right_output_of_many_rows_passes(judged):
    assert judged(lambda out: out) is None


def test_rows_that_begin_anew_after_65536_are_refused(judged):
    failure = judged(lambda out: out[torch.arange(len(out)) % (1 << 16)])
    assert failure is not None
    assert failure.gate != "poison"


def test_a_row_that_is_not_compared_must_be_written(judged):
    def change(out: torch.Tensor) -> torch.Tensor:
        out[33333].view(torch.int32).fill_(-1)
        return out

    failure = judged(change)
    assert failure is not None
    assert failure.gate == "poison"


def test_extent_is_that_of_the_largest_cases_that_passed() -> None:
    definition = CATALOG.definition("rms_norm")
    passed = [{"M": 70_001, "N": 16}, {"M": 5_003, "N": 4096}]
    assert extent_of(definition, passed) == ({"M": 70_001}, 5_003 * 4096)
    assert extent_of(definition, []) == ({}, 0)


@pytest.mark.parametrize("seed", range(3))
def test_positions_before_heads_are_many_without_a_loop(seed):
    definition = CATALOG.definition("kv_cache_prefill")
    record = next(one.record for one in CATALOG.solutions_for(definition.name) if one.record.spec.language == "triton")
    made = large_cases(definition, record, {"T": "bfloat16"}, {}, seed=seed, budget_bytes=24 << 20, on_gpu=False)
    assert max(one.case.call.axes["S"] for one in made) > 4096
