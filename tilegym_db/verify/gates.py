"""The gates that one output must pass against the oracle. Pure: tensors in, a verdict with figures and a reason out."""

from __future__ import annotations

import math

import torch

from tilegym_db.records.tolerance import MIN_ELEMENTS_FOR_NORMS, TAU_CAP, WORST_ROW_FACTOR, Limits
from tilegym_db.verify.codes import code_values, ordered_codes
from tilegym_db.verify.distance import EXACTLY, BaseError, Rows, compare_rows, relative_error
from tilegym_db.verify.share import share_problem
from tilegym_db.verify.verdicts import PASSED, OutputVerdict, failed, row_of_most

__all__ = [
    "MIN_ELEMENTS_FOR_NORMS",
    "OutputVerdict",
    "check_output",
    "is_well_conditioned",
    "must_be_exact",
]

MIN_ELEMENTS_FOR_EXACT = 64
"""Fewer results may all be exact by luck (a mean of three numbers), which says nothing about another kernel's luck."""

E_BASE_FACTOR = 2.0
"""What the reference itself is off by, as a whole, in its worst row or element, another one may be off by so many times."""
RELATIVE_OF_REFERENCE, RELATIVE_OF_SOLUTION = 0.5, 4.0
"""In units of ``rtol``: where the reference as written is that close everywhere, a Solution must be so close to a probability."""
NEGLIGIBLE = 1e-4
"""Of a row's rms: an element below may be all rounding error of the terms that it is the sum of."""
NEGLIGIBLE_PROBABILITY = 1e-9
PROBABILITIES_SUM_TO = 1e-5
MOST_CUT = 0.01
"""Share of the elements that count which may be zero where the oracle is not: terms that cancel exactly are that rare."""

_ROUNDING_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def must_be_exact(as_written: torch.Tensor, truth: torch.Tensor) -> bool:
    """True where no step of an operator rounds on these inputs, so that every Solution must give the very same values.

    That is so where the fp64 oracle is a float32 number everywhere, which a result that rounds on the way is not, and the
    reference as written gives it, rounded once to the output dtype.

    Args:
        as_written: the reference's output in the output dtype.
        truth: the same output of the fp64 oracle.
    """
    if truth.dtype != torch.float64 or as_written.dtype not in _ROUNDING_DTYPES:
        return False
    if truth.numel() < MIN_ELEMENTS_FOR_EXACT or not torch.equal(truth.float().double(), truth):
        return False
    return torch.equal(as_written, truth.to(as_written.dtype))


def is_well_conditioned(as_written: torch.Tensor, truth: torch.Tensor, limits: Limits, rows: Rows) -> bool:
    """True where the reference as written gives every element to a relative error of its own, however small it is.

    Then a Solution has no excuse for cutting small ones to zero: a probability of a thousandth of the largest, say, which no norm
    over the row can see. It may still round more on the way than the reference did by luck, so only probabilities, which are
    no difference of anything, are judged by their own size.

    Args:
        as_written: the reference's output in the output dtype.
        truth: the same output of the fp64 oracle.
        limits: bounds of the output dtype.
        rows: the two, compared.
    """
    if truth.dtype != torch.float64 or as_written.dtype not in _ROUNDING_DTYPES:
        return False
    if truth.numel() < MIN_ELEMENTS_FOR_EXACT:
        return False
    size, judged, _ = _by_size(rows, as_written.dtype)
    return bool(judged.any()) and not bool(
        (judged & (rows.error > size.mul_(RELATIVE_OF_REFERENCE * limits.rtol))).any()
    )


def _by_size(rows: Rows, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(size of each element, whether it is large enough to count, whether its row is one of probabilities, ``[rows, 1]``)."""
    probable = _are_probabilities(rows.want)
    norms = torch.linalg.vector_norm(rows.want, dim=1, keepdim=True)
    smallest = torch.where(probable, NEGLIGIBLE_PROBABILITY, NEGLIGIBLE * norms / math.sqrt(rows.want.shape[1]))
    size = rows.want.abs()
    return size, size > smallest.clamp_min_(torch.finfo(dtype).tiny), probable


def _are_probabilities(rows: torch.Tensor) -> torch.Tensor:
    """True for each row of numbers that are not negative and sum to one; ``[rows, 1]``."""
    sums = rows.sum(dim=1, keepdim=True)
    return ((sums - 1).abs() < PROBABILITIES_SUM_TO) & (rows.amin(dim=1, keepdim=True) >= 0) & (rows.shape[1] > 1)


def check_output(
    name: str,
    actual: torch.Tensor,
    oracle: torch.Tensor,
    limits: Limits | None,
    e_base: BaseError = EXACTLY,
    *,
    exact: bool = False,
    conditioned: bool = False,
) -> OutputVerdict:
    """Compare one output with the oracle.

    Args:
        name: the output's name, for the reason.
        actual: what the Solution wrote, in the output dtype, any strides.
        oracle: the reference in fp64 (or, for integer and quantised outputs, as written), same shape.
        limits: bounds of the output dtype; None demands equality, bit for bit.
        e_base: what the reference itself is off by in the output dtype.
        exact: demand the oracle's value, rounded to the output dtype, of every element (see :func:`must_be_exact`). Zeros
            may differ in sign, since an accumulator that starts from zero loses it.
        conditioned: demand a relative error of every element that is not negligible (see :func:`is_well_conditioned`).
    """
    if actual.numel() == 0:
        return PASSED
    if limits is None:
        return _check_exact(name, actual, oracle.to(actual.dtype), bitwise=True)
    if exact:
        return _check_exact(name, actual, oracle.to(actual.dtype), bitwise=False)
    if limits.codes:
        return _check_codes(name, actual, oracle, limits)
    rows = compare_rows(actual, oracle, limits)
    close = _check_close(name, actual, oracle, limits, e_base, rows)
    if not conditioned or not close.passed:
        return close
    return _check_relative(name, actual, oracle, limits, close, rows)


def _check_relative(
    name: str, actual: torch.Tensor, oracle: torch.Tensor, limits: Limits, close: OutputVerdict, rows: Rows
) -> OutputVerdict:
    size, judged, probable = _by_size(rows, actual.dtype)
    cut = judged & (actual.reshape(size.shape) == 0) & (rows.error > 0)
    off = judged & probable & (rows.error > size.mul_(RELATIVE_OF_SOLUTION * limits.rtol))
    counted = max(int(judged.sum()), 1)
    if bool(off.any()):
        wrong = off
        what = f"of {counted} probabilities are off by more than {RELATIVE_OF_SOLUTION * limits.rtol:g} of themselves"
    elif int(cut.sum()) > MOST_CUT * counted:
        wrong, what = cut, f"of {counted} elements are zero, which the reference gives to their last digits"
    else:
        return close
    count, wrong = int(wrong.sum()), wrong.reshape(actual.shape)
    figures = (close.rel_fro, close.worst_row_rel, close.max_abs, 1.0 - count / actual.numel())
    return failed("relative", f"{name}: {count} {what}", figures, wrong, actual, oracle, row_of_most(wrong))


def _check_close(
    name: str, actual: torch.Tensor, oracle: torch.Tensor, limits: Limits, e_base: BaseError, rows: Rows
) -> OutputVerdict:
    row_rel = rows.relative
    # Where the reference passes by a hair, others that are as right would pass or fail by chance: twice its error passes too.
    slack = min(max(1.0, E_BASE_FACTOR * e_base.element), E_BASE_FACTOR) if limits.share == 1 else 1.0
    bound = rows.bound if slack == 1.0 else slack * rows.bound
    wrong = (rows.error > bound).reshape(actual.shape)
    mask_wrong = None
    if rows.finite is not None:
        # Rounded to the output dtype first, so that a value that overflows there is expected to be infinite.
        mask_wrong = _mask_mismatch(actual, oracle.to(actual.dtype))
        wrong |= mask_wrong
    count = int(wrong.sum()) if bool(wrong.any()) else 0

    rel_fro, worst_row = rows.rel_fro, int(row_rel.argmax())
    allowed, cap = E_BASE_FACTOR * e_base.rel_fro, TAU_CAP * limits.tau
    limit = min(max(limits.tau, allowed), cap)
    most = WORST_ROW_FACTOR * min(max(limits.row_tau or limits.tau, allowed), cap)
    most = min(
        max(most, E_BASE_FACTOR * e_base.row),
        E_BASE_FACTOR * most,
        WORST_ROW_FACTOR * max(cap, TAU_CAP * limits.row_tau),
    )
    worst_row_rel = float(row_rel[worst_row])
    figures = (rel_fro, worst_row_rel, float(rows.error.max()), 1.0 - count / actual.numel())

    shown: torch.Tensor | None = None
    gate, what = None, ""
    if mask_wrong is not None and bool(mask_wrong.any()):
        gate, what = "nan_inf_mask", _mask_text(mask_wrong, "elements")
        worst_row = row_of_most(mask_wrong)
    elif actual.numel() >= MIN_ELEMENTS_FOR_NORMS and rel_fro > limit:
        gate, what = "rel_fro", f"relative Frobenius error {rel_fro:.3g} exceeds {limit:.3g}"
    elif (actual.numel() >= MIN_ELEMENTS_FOR_NORMS or limits.share < 1) and worst_row_rel > most:
        gate, what = "worst_row", f"row {worst_row} has relative error {worst_row_rel:.3g}, more than {most:.3g}"
    elif limits.share < 1:
        problem = share_problem(rows.error, bound, rows.want.abs(), rows.rms, limits.share)
        if problem is not None:
            gate, what, shown = problem
    elif count:
        rule = f"rtol {slack * limits.rtol:.3g} and {slack * limits.a:.3g} of the row's rms"
        gate, what = "elementwise", f"{count} of {actual.numel()} elements exceed {rule}"
    if gate is None:
        return OutputVerdict(None, "", *figures, worst_row=worst_row)
    if shown is None:
        shown = wrong if count else _whole_row(worst_row, actual)
    return failed(gate, f"{name}: {what}", figures, shown.reshape(actual.shape), actual, oracle, worst_row)


def _mask_mismatch(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    nan = torch.isnan(got) != torch.isnan(want)
    infinite = (torch.isinf(got) | torch.isinf(want)) & (got != want)
    return nan | (infinite & ~torch.isnan(got) & ~torch.isnan(want))


def _mask_text(wrong: torch.Tensor, what: str) -> str:
    return f"{int(wrong.sum())} {what} are NaN or infinite where they should not be, or not where they should"


def _check_exact(name: str, actual: torch.Tensor, want: torch.Tensor, *, bitwise: bool) -> OutputVerdict:
    wrong = _bits(actual) != _bits(want) if bitwise and actual.dtype.is_floating_point else actual != want
    count = int(wrong.sum())
    if not count:
        return PASSED
    both_finite = torch.isfinite(actual.double()) & torch.isfinite(want.double())
    error = float(torch.where(both_finite, actual.double() - want.double(), 0.0).abs().max())
    figures = (math.inf, math.inf, error, 1.0 - count / actual.numel())
    what = f"{name}: {count} of {actual.numel()} values differ, where all must be equal"
    return failed("exact", what, figures, wrong, actual, want, row_of_most(wrong))


def _bits(value: torch.Tensor) -> torch.Tensor:
    """The bits as integers; of NaN one pattern, since which one it is says nothing."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    bits = value.contiguous().view(integer)
    return torch.where(torch.isnan(value), torch.full_like(bits, -1 if integer != torch.uint8 else 255), bits)


def _check_codes(name: str, actual: torch.Tensor, oracle: torch.Tensor, limits: Limits) -> OutputVerdict:
    bits, least = limits.codes, limits.codes_equal
    want_codes = oracle if oracle.dtype == actual.dtype else oracle.to(actual.dtype)
    order_got, order_want = (ordered_codes(codes, bits, signed_zeros=least == 1) for codes in (actual, want_codes))
    apart = (order_got - order_want).abs()
    got, want = code_values(actual, bits), code_values(want_codes, bits)
    differing = int((apart > 0).sum())
    equal = 1.0 - differing / apart.numel()  # a mean of ones is not one on every device
    finite = torch.isfinite(got) & torch.isfinite(want)
    error = torch.where(finite, got - want, 0.0).abs()
    rel = relative_error(got, want)
    mask_wrong = _mask_mismatch(got, want)
    worst_row = row_of_most(mask_wrong if bool(mask_wrong.any()) else apart > 0)
    figures = (rel, rel, float(error.max()), equal)
    if bool(mask_wrong.any()):
        what = f"{name}: {_mask_text(mask_wrong, 'codes')}"
        return failed("nan_inf_mask", what, figures, mask_wrong, got, want, worst_row)
    if equal < least or int(apart.max()) > 1:
        rule = "all must be" if least == 1 else f"at least {least:.0%} must be, the rest within one"
        what = f"{name}: {differing} of {apart.numel()} codes differ, {equal:.2%} are equal ({rule})"
        return failed("codes", what, figures, apart > (0 if equal < least else 1), got, want, worst_row)
    return OutputVerdict(None, "", *figures)


def _whole_row(row: int, actual: torch.Tensor) -> torch.Tensor:
    columns = actual.shape[-1] if actual.dim() else 1
    flagged = torch.zeros(actual.numel() // columns, columns, dtype=torch.bool, device=actual.device)
    flagged[row] = True
    return flagged.reshape(actual.shape)
