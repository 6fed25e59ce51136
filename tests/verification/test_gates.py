"""Each gate must reject its planted failure and pass the honest result that lies next to it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tilegym_db.records.definition import LIMITS
from tilegym_db.verification.gates import (
    SMALL_IN_ROW,
    OutputComparison,
    ReferenceDeviation,
    bias_of,
    check_output,
    compare_rows,
    is_well_conditioned,
    must_be_exact,
    relative_error,
)


def judge(
    actual: torch.Tensor, oracle: torch.Tensor, dtype: str | None = None, e_base: float = 0.0, *, exact: bool = False
) -> OutputComparison:
    name = dtype or str(actual.dtype).removeprefix("torch.")
    return check_output("out", actual, oracle, LIMITS.get(name), ReferenceDeviation(e_base), exact=exact)


def honest(dtype: torch.dtype, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rounded once, exact)."""
    exact = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return exact.to(dtype), exact


def softmax_over_a_vocabulary(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, float]:
    scores = torch.randn(2, 131_072, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = torch.softmax(scores.double(), dim=-1)
    as_written = torch.softmax(scores.float(), dim=-1).to(dtype)
    return as_written, exact, relative_error(as_written, exact)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 128), (1, 5000), (2000, 3), (7,), (3, 0), ()])
def test_one_rounding_passes_in_every_dtype_and_shape(dtype, shape):
    actual, exact = honest(dtype, *shape)
    assert judge(actual, exact).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_all_zero_softmax_over_a_vocabulary_fails(dtype):
    as_written, exact, e_base = softmax_over_a_vocabulary(dtype)
    assert judge(as_written, exact, e_base=e_base).passed
    assert torch.allclose(torch.zeros_like(exact), exact, atol=1e-2)  # the rule that was fooled by it
    assert judge(torch.zeros_like(as_written), exact, e_base=e_base).gate == "rel_fro"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_missing_probability_among_a_vocabulary_fails(dtype):
    as_written, exact, e_base = softmax_over_a_vocabulary(dtype)
    as_written[1, 77] = 0
    verdict = judge(as_written, exact, e_base=e_base)
    assert not verdict.passed
    assert "first at [1, 77]" in verdict.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [512, 8])
def test_one_dropped_row_of_many_fails(dtype, columns):
    actual, exact = honest(dtype, 4096, columns)
    actual[1234] = 0
    verdict = judge(actual, exact)
    assert verdict.gate in ("worst_row", "rel_fro")
    assert "[1234, 0]" in verdict.reason


@pytest.mark.parametrize("columns", [512, 8])
def test_one_dropped_row_whose_values_are_small_fails(columns):
    actual, exact = honest(torch.bfloat16, 4096, columns)
    exact[1234] *= 0.05
    actual = exact.to(torch.bfloat16)
    assert judge(actual, exact).passed
    actual[1234] = 0
    assert not judge(actual, exact).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_wrong_element_of_a_million_fails(dtype):
    actual, exact = honest(dtype, 1000, 1000)
    actual[700, 3] += 0.5
    verdict = judge(actual, exact)
    assert not verdict.passed
    assert "first at [700, 3]" in verdict.reason
    assert verdict.matched_ratio == pytest.approx(1 - 1e-6)


@pytest.mark.parametrize(("wrong", "right"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (math.inf, -math.inf)])
def test_a_nan_or_infinity_that_differs_from_the_oracle_fails(wrong, right):
    actual, exact = honest(torch.float32, 64, 64)
    actual[3, 5], exact[3, 5] = wrong, right
    verdict = judge(actual, exact)
    assert verdict.gate == "nan_inf_mask"
    assert "first at [3, 5]" in verdict.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [1.0, 300.0])
def test_weight_that_hardware_flushes_is_no_error_at_any_factor(dtype, value):
    """In attention a sink of 88 more than every score leaves weights of 1e-38, times values."""
    exact = torch.full((64, 64), 2.0**-127 * value, dtype=torch.float64)
    assert judge(torch.zeros(64, 64, dtype=dtype), exact).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_numbers_that_nothing_flushes_are_missed(dtype):
    exact = torch.full((64, 64), 1e-30, dtype=torch.float64)
    assert judge(torch.zeros(64, 64, dtype=dtype), exact).gate == "rel_fro"


@pytest.mark.parametrize(
    ("own", "other", "gate"),
    [
        pytest.param(0.0, 1.02, "elementwise", id="beside a reference that is exact"),
        pytest.param(0.3, 1.02, "elementwise", id="beside a reference with room to spare"),
        pytest.param(0.9, 1.02, None, id="beside a reference that is as far off"),
        pytest.param(0.9, 1.7, None, id="less than twice as far off as the reference"),
        pytest.param(0.9, 1.9, "elementwise", id="more than twice as far off as the reference"),
        pytest.param(5.0, 2.1, "elementwise", id="never more than twice the bound"),
    ],
)
def test_an_element_may_be_off_by_twice_what_the_reference_is(own, other, gate):
    """Where the reference passes by a hair, others that are as right would pass or fail by chance."""
    exact = torch.ones(64, 64, dtype=torch.float64)
    limits = LIMITS["bfloat16"]
    bound = limits.rtol + limits.a

    def off(share):
        value = exact.float()
        value[3, 5] += share * bound
        return value

    written = compare_rows(off(own), exact, limits).deviation
    assert written.element == pytest.approx(own, rel=1e-3)
    assert check_output("out", off(other), exact, limits, written).gate == gate


@pytest.mark.parametrize(
    ("own", "other", "gate"),
    [
        pytest.param(0.0, 1.2, "worst_row", id="beside a reference that is exact"),
        pytest.param(0.9, 1.2, None, id="beside a reference that is as far off"),
        pytest.param(0.9, 1.9, "worst_row", id="more than twice as far off as the reference"),
    ],
)
def test_a_row_may_be_off_by_twice_what_the_reference_is(own, other, gate):
    exact = torch.ones(64, 64, dtype=torch.float64)
    limits = LIMITS["bfloat16"]
    most = 3 * limits.tau

    def off(share):
        value = exact.float()
        value[3] += share * most
        return value

    written = compare_rows(off(own), exact, limits).deviation
    assert written.row == pytest.approx(own * most, rel=1e-3)
    assert check_output("out", off(other), exact, limits, written).gate == gate


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_a_nan_or_infinity_that_the_oracle_has_too_passes(special):
    actual, exact = honest(torch.float32, 64, 64)
    actual[3], exact[3] = special, special
    verdict = judge(actual, exact)
    assert verdict.passed
    assert verdict.rel_fro < 1e-7


def test_an_overflow_that_the_output_dtype_forces_is_expected():
    exact = torch.full((64, 64), 1e5, dtype=torch.float64)
    assert judge(torch.full((64, 64), math.inf, dtype=torch.float16), exact).passed
    assert judge(torch.full((64, 64), 65504.0, dtype=torch.float16), exact).gate == "nan_inf_mask"


def test_half_precision_sum_fails_under_a_contract_of_float32():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(64, 4096, generator=generator).half()
    b = torch.randn(4096, 64, generator=generator).half()
    exact = a.double() @ b.double()
    in_float32 = (a.float() @ b.float()).half()
    in_half = torch.zeros(64, 64, dtype=torch.float16)
    for start in range(0, 4096, 32):  # partial sums kept in half precision
        in_half += (a[:, start : start + 32].float() @ b[start : start + 32].float()).half()
    e_base = relative_error(in_float32, exact)
    assert judge(in_float32, exact, e_base=e_base).passed
    assert judge(in_half, exact, e_base=e_base).gate == "rel_fro"


def test_a_product_in_tf32_passes_only_where_it_is_declared():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))

    def tf32(value: torch.Tensor) -> torch.Tensor:
        return ((value.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)  # ten bits of mantissa

    exact = a.double() @ b.double()
    actual = tf32(a) @ tf32(b)
    assert judge(actual, exact, "tf32").passed
    assert judge(actual, exact, "float32").gate == "rel_fro"


def test_references_error_widens_norms_at_most_to_ten_times_tau():
    exact = torch.ones(64, 64, dtype=torch.float64)
    off = (exact * (1 + 8e-6)).float()
    assert judge(off, exact).passed
    worse = (exact * (1 + 4e-5)).float()
    assert judge(worse, exact).gate == "rel_fro"
    assert judge(worse, exact, e_base=3e-5).gate != "rel_fro"
    hopeless = (exact * (1 + 2e-4)).float()
    assert judge(hopeless, exact, e_base=math.inf).gate == "rel_fro"


def test_a_few_elements_are_held_to_the_elementwise_bound_alone():
    exact = torch.ones(4, 8, dtype=torch.float64)
    assert judge((exact * 1.005).bfloat16(), exact).passed
    assert judge((exact * 1.1).bfloat16(), exact).gate == "elementwise"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_zero_output_passes_only_if_zero_is_right(dtype):
    exact = torch.zeros(64, 64, dtype=torch.float64)
    actual = torch.zeros(64, 64, dtype=dtype)
    assert judge(actual, exact).passed
    actual[5, 5] = 1e-3
    assert not judge(actual, exact).passed


def test_a_short_row_near_zero_is_measured_by_its_neighbours():
    actual, exact = honest(torch.float32, 1000, 4)
    exact[10] = 1e-9
    actual[10] = 1e-7  # a hundred times off, and nothing beside the other rows
    assert judge(actual, exact).passed


def test_integers_must_be_equal():
    oracle = torch.arange(5000).reshape(50, 100)
    assert judge(oracle.int(), oracle, "int32").passed
    wrong = oracle.int()
    wrong[7, 9] += 1
    verdict = judge(wrong, oracle, "int32")
    assert verdict.gate == "exact"
    assert "1 of 5000 values differ" in verdict.reason
    assert "first at [7, 9]: expected 709, got 710" in verdict.reason


def test_booleans_must_be_equal():
    oracle = torch.tensor([[True, False], [False, True]])
    assert judge(oracle.clone(), oracle).passed
    assert judge(~oracle, oracle).gate == "exact"


def quantised(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    exact = torch.randn(100, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 30
    return exact.to(dtype), exact


def neighbours(codes: torch.Tensor, count: int, step: int) -> torch.Tensor:
    """The first ``count`` codes moved ``step`` codes away from zero."""
    moved = codes.clone().view(torch.uint8)
    moved.view(-1)[:count] += step
    return moved.view(codes.dtype)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_one_percent_of_the_codes_may_be_next_to_the_right_one(dtype):
    codes, exact = quantised(dtype)
    assert judge(codes, exact).passed
    assert judge(neighbours(codes, 100, 1), exact).passed
    assert judge(neighbours(codes, 101, 1), exact).gate == "codes"
    assert judge(neighbours(codes, 1, 2), exact).gate == "codes"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_sign_is_many_codes_away(dtype):
    codes, exact = quantised(dtype)
    codes.view(torch.uint8)[50, 50] ^= 0x80
    assert judge(codes, exact).gate == "codes"


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)])
def test_a_nan_or_infinity_is_no_neighbour_of_the_largest_code(dtype, largest):
    exact = torch.full((100, 100), largest, dtype=torch.float64)
    codes = exact.to(dtype)
    assert judge(codes, exact).passed
    assert judge(neighbours(codes, 1, 1), exact).gate == "nan_inf_mask"


def test_scales_must_be_equal_bit_for_bit():
    scales = torch.tensor([0x00, 0x7F, 0x80, 0xFF], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert judge(scales.clone(), scales).passed
    assert judge(neighbours(scales, 1, 1), scales).gate == "exact"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_figures_do_not_change_beside_a_rightly_infinite_row(dtype, special):
    exact = torch.randn(64, 96, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    rounded, limits = (exact * 1.00001).to(dtype), LIMITS[str(dtype).removeprefix("torch.")]
    row = torch.full((1, 96), special, dtype=torch.float64)
    more, more_rounded = torch.cat([exact, row]), torch.cat([rounded, row.to(dtype)])
    assert relative_error(more_rounded, more) == pytest.approx(relative_error(rounded, exact), rel=1e-12)
    alone, beside = compare_rows(rounded, exact, limits), compare_rows(more_rounded, more, limits)
    assert alone.finite is None
    assert beside.finite is not None
    assert int((~beside.finite).sum()) == 96
    assert beside.deviation == pytest.approx(alone.deviation, rel=1e-12)
    assert torch.equal(beside.error[:-1], alone.error)
    assert not beside.error[-1].any()


def test_number_that_overflows_only_in_rounding_must_be_infinite():
    exact = torch.ones(8, 64, dtype=torch.float64)
    exact[3, 5] = 7e4  # float16 ends at 65,504
    rounded = exact.half()
    assert judge(rounded, exact).passed
    assert judge(rounded.nan_to_num(posinf=65504.0), exact).gate == "nan_inf_mask"


def test_forgiven_difference_is_no_error_of_the_reference_either():
    exact = torch.randn(64, 96, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    off, limits = (exact + 5e-7).float(), LIMITS["float32"]
    assert compare_rows(off, exact, limits).deviation.rel_fro > 1e-7
    assert compare_rows(off, exact, replace(limits, atol=1e-6)).deviation == ReferenceDeviation()


def test_a_comparison_changes_neither_side():
    exact = torch.softmax(torch.randn(64, 96, generator=torch.Generator().manual_seed(5), dtype=torch.float64), dim=-1)
    actual = exact * 1.0001
    before = actual.clone(), exact.clone()
    for value in (actual, actual.float()):
        rows = compare_rows(value, exact, LIMITS["float32"])
        is_well_conditioned(value, exact, LIMITS["float32"], rows)
        check_output("out", value, exact, LIMITS["float32"], conditioned=True)
        relative_error(value, exact)
        assert rows.deviation.rel_fro > 0
    assert torch.equal(actual, before[0])
    assert torch.equal(exact, before[1])


def test_a_norm_that_overflows_proves_nothing_right():
    exact = torch.full((64, 96), 1.5e308, dtype=torch.float64)
    assert check_output("out", exact.clone(), exact, LIMITS["float64"]).passed
    assert not check_output("out", -exact, exact, LIMITS["float64"]).passed


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_of_eight_bits_have_an_error_too(dtype):
    exact = torch.randn(64, 96, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    right, wrong = exact.to(dtype), (2 * exact).to(dtype)
    assert relative_error(right, exact) == pytest.approx(
        float((right.double() - exact).norm() / exact.norm()), rel=1e-3
    )
    assert relative_error(wrong, exact) == pytest.approx(1.0, rel=0.01)
    assert relative_error(right, right) == 0
    lacking = right.clone()
    lacking[0, 0] = math.nan
    assert relative_error(lacking, exact) == pytest.approx(relative_error(right, exact), rel=0.1)


def test_relative_error_of_something_against_nothing_is_infinite():
    zero = torch.zeros(4, 4, dtype=torch.float64)
    assert relative_error(zero.float(), zero) == 0
    assert relative_error(torch.ones(4, 4), zero) == math.inf


def test_a_wrong_zero_dimensional_output_fails():
    verdict = judge(torch.tensor(1.5), torch.tensor(1.0, dtype=torch.float64))
    assert verdict.gate == "elementwise"
    assert "expected 1, got 1.5" in verdict.reason


def product(dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands of a product with a long inner axis."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((64, 4096), (4096, 64)))
    return a, b


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("splits", [1, 2, 8, 64])
def test_an_honest_order_of_summation_passes(dtype, splits):
    a, b = product(dtype)
    exact = a.double() @ b.double()
    partial = [x.float() @ y.float() for x, y in zip(a.chunk(splits, 1), b.chunk(splits, 0), strict=True)]
    actual = torch.stack(partial).sum(0).to(dtype)
    assert judge(actual, exact, e_base=relative_error((a.float() @ b.float()).to(dtype), exact)).passed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_kept_in_half_precision_fail(dtype):
    a, b = product(dtype)
    exact = a.double() @ b.double()
    actual = torch.zeros(64, 64, dtype=dtype)
    for x, y in zip(a.chunk(128, 1), b.chunk(128, 0), strict=True):
        actual += (x.float() @ y.float()).to(dtype)
    e_base = relative_error((a.float() @ b.float()).to(dtype), exact)
    assert judge(actual, exact, e_base=e_base).gate == "rel_fro"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_product_of_inputs_rounded_to_eight_bits_fails(dtype):
    a, b = product(dtype)
    exact = a.double() @ b.double()
    actual = (a.to(torch.float8_e4m3fn).float() @ b.to(torch.float8_e4m3fn).float()).to(dtype)
    e_base = relative_error((a.float() @ b.float()).to(dtype), exact)
    assert judge(actual, exact, e_base=e_base).gate == "rel_fro"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_error_of_four_percent_fails_despite_a_good_cosine(dtype):
    _, exact = honest(dtype, 64, 128)
    noise = torch.randn(exact.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    actual = (exact + noise * 0.045 * exact.norm() / noise.norm()).to(dtype)
    got = actual.double()
    similarity = float(2 * (got * exact).sum() / (got.square() + exact.square()).sum())
    assert 1 - similarity < 1.1e-3  # the rule that was fooled by it
    assert judge(actual, exact).gate == "rel_fro"


def test_two_garbage_tokens_of_forty_fail_despite_many_matches():
    actual, exact = honest(torch.bfloat16, 40, 512)
    actual[[7, 31]] = torch.randn(2, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    verdict = judge(actual, exact)
    assert verdict.matched_ratio >= 0.95  # the rule that was fooled by it
    assert not verdict.passed
    assert verdict.worst_row in (7, 31)


def test_indices_off_by_five_fail_though_they_are_close():
    indices = torch.randint(1000, 2000, (64, 8), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    assert torch.allclose((indices + 5).double(), indices.double(), rtol=1e-2)  # the rule that was fooled by it
    assert judge(indices.clone(), indices, "int32").passed
    assert judge(indices + 5, indices, "int32").gate == "exact"


def test_a_failure_says_where_and_what_as_fields_too():
    actual, exact = honest(torch.float32, 2, 32, 64)
    actual[1, 3, 5], exact[1, 3, 5] = 9.0, 0.5
    verdict = judge(actual, exact)
    assert (verdict.index, verdict.expected, verdict.got) == ((1, 3, 5), "0.5", "9")
    assert verdict.worst_row == 32 + 3
    assert "first at [1, 3, 5]: expected 0.5, got 9" in verdict.reason


@pytest.mark.parametrize("kind", ["mask", "exact", "codes"])
def test_worst_row_has_most_wrong_elements_without_an_error(kind):
    dtype = {"mask": torch.float32, "exact": torch.int32, "codes": torch.float8_e4m3fn}[kind]
    actual, exact = honest(torch.float32, 64, 64)
    actual, exact = (actual * 10).to(dtype), (exact * 10).to(dtype)
    wrong = {"mask": math.nan, "exact": 77, "codes": 300.0}[kind]
    actual[3, 5] = actual[9, 1] = actual[9, 2] = wrong
    verdict = judge(actual, exact)
    assert (verdict.index, verdict.worst_row) == ((3, 5), 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_hardware_may_flush_to_zero_is_no_error(dtype):
    exact = torch.full((64, 64), torch.finfo(dtype).tiny / 2, dtype=torch.float64)
    assert judge(torch.zeros(64, 64, dtype=dtype), exact).passed
    assert relative_error(torch.zeros(64, 64, dtype=dtype), exact) == 0.0


def test_cancelled_element_may_differ_up_to_the_absolute_bound():
    limits = replace(LIMITS["bfloat16"], atol=1e-6)
    oracle = torch.zeros(1, 1, dtype=torch.float64)
    found = check_output("out", torch.full((1, 1), 7.6e-29, dtype=torch.bfloat16), oracle, limits)
    assert found.passed
    assert found.rel_fro == 0.0
    assert not check_output("out", torch.full((1, 1), 7.6e-29, dtype=torch.bfloat16), oracle, LIMITS["bfloat16"]).passed
    assert not check_output("out", torch.full((1, 1), 2e-6, dtype=torch.bfloat16), oracle, limits).passed


def test_the_subnormals_of_half_precision_must_be_there():
    exact = torch.full((64, 64), 2.0**-16, dtype=torch.float64)
    assert judge(exact.half(), exact).passed
    assert judge(torch.zeros(64, 64, dtype=torch.float16), exact).gate == "rel_fro"


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_product_of_small_integers_must_be_exact(dtype):
    truth = integers(32, 512) @ integers(512, 32)
    as_written = truth.to(dtype)  # nothing is rounded before the output
    assert must_be_exact(as_written, truth)
    assert judge(as_written, truth, exact=True).passed
    off = as_written.clone()
    off[3, 5] = torch.nextafter(off[3, 5].float(), torch.tensor(1e9)).to(dtype) + off[3, 5].abs() * 2**-7
    assert judge(off, truth).gate != "exact"
    verdict = judge(off, truth, exact=True)
    assert (verdict.gate, verdict.index) == ("exact", (3, 5))


def test_sign_of_zero_does_not_matter_if_values_must_be_exact():
    assert judge(torch.full((64, 64), -0.0), torch.zeros(64, 64, dtype=torch.float64), exact=True).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (2, 40)])
def test_rounding_function_need_not_be_exact_despite_agreement(dtype, shape):
    truth = torch.softmax(integers(*shape), dim=-1)
    assert not must_be_exact(truth.to(dtype), truth)


def test_few_results_that_happen_to_be_exact_impose_no_exactness():
    truth = torch.full((3, 1), 2.0, dtype=torch.float64)
    assert not must_be_exact(truth.float(), truth)


def test_an_operator_that_rounds_on_its_way_need_not_be_exact():
    truth = integers(64, 64) + 256.0
    rounded_twice = (truth + 0.5).bfloat16()
    assert not must_be_exact(rounded_twice, truth)


def test_oracle_that_equals_the_reference_proves_nothing_exact():
    value = integers(64, 64).float()
    assert not must_be_exact(value, value)


def test_float32_scales_must_be_bit_equal_but_any_nan_matches():
    scales = torch.tensor([1.0, 0.0, math.nan, 2.0**-120])
    other_nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert check_output("scale", torch.cat([scales[:2], other_nan, scales[3:]]), scales, None).passed
    for index, value in ((0, 1.0000001), (1, -0.0), (2, 1.0), (3, 0.0)):
        wrong = scales.clone()
        wrong[index] = value
        verdict = check_output("scale", wrong, scales, None)
        assert (verdict.gate, verdict.index) == ("exact", (index,))


def packed(low: int, high: int) -> torch.Tensor:
    return torch.full((50, 64), high << 4 | low, dtype=torch.uint8)


def test_four_bit_codes_are_compared_one_by_one():
    codes = packed(3, 10)  # 1.5 and -1.0
    assert judge(codes.clone(), codes, "float4_e2m1").passed
    few = codes.clone()
    few.view(-1)[:32] = (11 << 4) | 3  # half a percent of the codes, one step on
    assert judge(few, codes, "float4_e2m1").passed
    few[7, 9] = (10 << 4) | 5  # two steps
    verdict = judge(few, codes, "float4_e2m1")
    assert (verdict.gate, verdict.index) == ("codes", (7, 18))
    assert (verdict.expected, verdict.got) == ("1.5", "3")
    assert judge(packed(3, 2), codes, "float4_e2m1").gate == "codes"  # another sign


def probabilities(rows: int = 8, columns: int = 4096) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    scores[:, 0] = 18.0  # one that takes nearly everything, as a sure model's does
    return torch.softmax(scores, dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_probabilities_cut_to_zero_fail_beyond_the_norms(dtype):
    truth, limits = probabilities(), LIMITS[str(dtype).removeprefix("torch.")]
    right = truth.to(dtype)
    cut = torch.where(right < 1e-3 * right.amax(), 0, right) if dtype == torch.bfloat16 else right * 1.0002
    conditioned = is_well_conditioned(right, truth, limits, compare_rows(right, truth, limits))
    assert conditioned
    assert check_output("out", right, truth, limits, conditioned=conditioned).passed
    if dtype == torch.bfloat16:
        assert check_output("out", cut, truth, limits).passed, "another gate sees it, and this one is not needed"
    verdict = check_output("out", cut, truth, limits, conditioned=conditioned)
    assert not verdict.passed


def test_elements_cut_to_zero_are_counted_for_any_operator():
    truth = torch.randn(64, 4096, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    truth[:, 0] = 1024.0  # so that a row's rms is 16
    right = truth.bfloat16()
    cut = torch.where(right.abs() < 0.15, 0, right)
    assert check_output("out", cut, truth, LIMITS["bfloat16"]).passed
    assert check_output("out", cut, truth, LIMITS["bfloat16"], conditioned=True).gate == "relative"


def test_cancelling_sum_is_not_judged_by_the_size_of_its_rest():
    a, b = (torch.randn(64, 256, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    truth = a.double() @ b.double().T
    right, limits = a @ b.T, LIMITS["float32"]
    assert not is_well_conditioned(right, truth, limits, compare_rows(right, truth, limits))


def towards_zero(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    near = exact.to(dtype)
    return torch.where(near.double().abs() > exact.abs(), torch.nextafter(near, torch.zeros_like(near)), near)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16, 64), (2, 8, 32, 64), (2048, 1024), (1000,)])
def test_truncation_is_refused_for_its_bias_only(dtype, shape):
    near, exact = honest(dtype, *shape)
    assert judge(near, exact).passed
    assert judge(towards_zero(exact, dtype), exact).gate == "bias"
    assert judge(towards_zero(exact, dtype), exact, e_base=0.0).reason.startswith("out: elements are off by -0.5 steps")


def test_truncation_in_a_quarter_of_the_columns_is_a_bias():
    near, exact = honest(torch.bfloat16, 128, 256)
    one_quarter = torch.arange(256) // 64 == 2
    assert judge(torch.where(one_quarter, towards_zero(exact, torch.bfloat16), near), exact).gate == "bias"


@pytest.mark.parametrize("lane", range(8))
@pytest.mark.parametrize("of_rows", [False, True])
def test_truncation_in_one_lane_of_eight_is_a_bias(lane, of_rows):
    exact = torch.randn(256, 512, generator=torch.Generator().manual_seed(lane), dtype=torch.float64)
    near, cut = exact.to(torch.bfloat16), towards_zero(exact, torch.bfloat16)
    part = (slice(lane, None, 8), slice(None)) if of_rows else (slice(None), slice(lane, None, 8))
    near[part] = cut[part]
    assert judge(near, exact).gate == "bias"


def test_bias_of_one_axis_counts_whole_lines_and_finite_values():
    exact = torch.randn(64 * 64 + 63, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    near = exact.to(torch.bfloat16)
    near[-63:] = towards_zero(exact[-63:], torch.bfloat16)
    exact[::7] = math.inf
    near[::7] = math.inf
    assert judge(near, exact).passed
    assert judge(towards_zero(exact, torch.bfloat16), exact).gate == "bias"


def test_stochastic_rounding_has_no_bias():
    _, exact = honest(torch.bfloat16, 64, 64)
    low = towards_zero(exact, torch.bfloat16)
    high = torch.nextafter(low, torch.full_like(low, torch.inf) * exact.sign().bfloat16())
    share = (exact - low.double()) / (high.double() - low.double())
    drawn = torch.rand(exact.shape, generator=torch.Generator().manual_seed(1)) < share
    assert judge(torch.where(drawn, high, low), exact).passed


@pytest.mark.parametrize("axis", [(64, 1), (1, 64)])
def test_shared_rounding_of_rows_or_columns_is_no_bias(axis):
    _, exact = honest(torch.bfloat16, 64, 64)
    factor = 1 + 0.1 * torch.rand(axis, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert judge((exact * factor.bfloat16().double()).bfloat16(), exact * factor).passed


def test_contents_that_say_nothing_about_bias_allow_any():
    _, exact = honest(torch.bfloat16, 64, 64)
    cut = towards_zero(exact, torch.bfloat16)
    assert check_output("out", cut, exact, LIMITS["bfloat16"], ReferenceDeviation(bias=math.inf)).passed


@pytest.mark.parametrize("shape", [(64, 128), (3, 16, 64), (130, 257)])
def test_bias_is_the_mean_error_of_what_counts(shape):
    exact = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    cut = towards_zero(exact, torch.bfloat16)
    rows = compare_rows(cut, exact, LIMITS["bfloat16"])
    steps = 2.0 ** exact.abs().log2().floor() * torch.finfo(torch.bfloat16).eps
    counts = (exact.abs() >= SMALL_IN_ROW * rows.rms.reshape(*shape[:-1], 1)).double()
    mean = ((cut.double() - exact) / steps * exact.sign() * counts).sum() / counts.sum()
    found, error = bias_of(cut, rows)
    assert abs(found - float(mean)) < 3 * error + 0.02
    assert -0.55 < found < -0.45
