"""The gates that one output must pass against the oracle: tensors in, a comparison with figures and a reason out."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilegym_db.records.definition import MIN_ELEMENTS_FOR_NORMS, TAU_CAP, WORST_ROW_FACTOR, Limits

# ---- distance -------------------------------------------------------------------------------------
# Errors of a result against the oracle's, as a whole and per element.

SHORT_ROW = 32
"""Minimum elements for a meaningful rms of a row; shorter rows use at least the median over all rows."""
NEAR_ZERO_ROW = 1e-4
FLUSHED = 2.0**24
"""Allowed error in units of float32's smallest normal number, 1.2e-38: up to 2e-31. Hardware may flush a subnormal
intermediate to zero, which inputs of up to thousands may then scale, and as many terms may add up."""
SHORT_RANGE = 1e6
"""Dtypes with a smaller maximum keep their subnormals: float16, e4m3 and e5m2."""


class ReferenceDeviation(NamedTuple):
    """The error of the reference as written, in the output dtype.

    ``rel_fro``: relative Frobenius error. ``row``: that of the worst row. ``element``: the largest error of an element, in
    units of its bound. ``bias``: the mean signed error of its elements (:func:`bias_of`); inf if contents say nothing about it.
    """

    rel_fro: float = 0.0
    row: float = 0.0
    element: float = 0.0
    bias: float = 0.0

    @property
    def plain(self) -> ReferenceDeviation:
        """The overall error and bias alone, so that the worst row and element widen no bound."""
        return ReferenceDeviation(self.rel_fro, bias=self.bias)


EXACTLY = ReferenceDeviation()
"""The error of a reference that rounds nothing."""


@dataclass(frozen=True)
class Rows:
    """A result against the oracle's as rows of their last axis, ``[rows, columns]``, fp64; zero if either is not finite.

    ``scale``: the norm of each row that its error is relative to, ``[rows]``; ``rms`` the same per element, ``[rows, 1]``.
    ``bound``: the allowed error of each element. ``finite``: True for elements that are finite in both in the output dtype, in
    the output's shape; None if all are. ``want`` may share the oracle's memory and must not be changed.
    """

    want: torch.Tensor
    error: torch.Tensor
    scale: torch.Tensor
    rms: torch.Tensor
    bound: torch.Tensor
    finite: torch.Tensor | None

    @property
    def relative(self) -> torch.Tensor:
        """The relative error of each row, ``[rows]``."""
        share = torch.linalg.vector_norm(self.error, dim=1) / self.scale
        return torch.where(self.scale > 0, share, 0.0).nan_to_num_(nan=math.inf, posinf=math.inf)

    @property
    def norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The Frobenius norms of the error and of the oracle."""
        return torch.linalg.vector_norm(self.error), torch.linalg.vector_norm(self.want)

    @property
    def rel_fro(self) -> float:
        """Relative Frobenius error of all rows; inf if the oracle is zero and the result is not."""
        return _ratio(*numbers(*self.norms))

    @property
    def deviation(self) -> ReferenceDeviation:
        """The error of the result as a :class:`ReferenceDeviation`, if the result is the reference's."""
        of_bound = (self.error / self.bound).nan_to_num_(nan=0.0, posinf=math.inf)  # 0 / 0 counts as no error
        norm, scale, row, element = numbers(*self.norms, self.relative.max(), of_bound.max())
        return ReferenceDeviation(_ratio(norm, scale), row, element)


def compare_rows(actual: torch.Tensor, oracle: torch.Tensor, limits: Limits) -> Rows:
    """Return every element's error and bound; a result has at least one element, any strides and the oracle's shape."""
    finite = _finite_in_both(actual, oracle, rounded=True)
    columns = actual.shape[-1] if actual.dim() else 1
    want = oracle.double() if finite is None else torch.where(finite, oracle.double(), 0.0)
    error = _absolute_error(actual, want, finite, limits.atol).reshape(-1, columns)
    want = want.reshape(-1, columns)
    row_norm = torch.linalg.vector_norm(want, dim=1)
    median = row_norm.median()
    scale = torch.maximum(row_norm, median if columns < SHORT_ROW else median * NEAR_ZERO_ROW)
    rms = (scale / math.sqrt(columns))[:, None]
    return Rows(want, error, scale, rms, want.abs().mul_(limits.rtol).add_(limits.a * rms), finite)


def relative_error(actual: torch.Tensor, oracle: torch.Tensor) -> float:
    """Return the relative Frobenius error over elements that are finite in both; inf if only the oracle is zero.

    Values that hardware may flush to zero in the dtype of ``actual`` count as no error.
    """
    finite = _finite_in_both(actual, oracle)
    want = oracle.double() if finite is None else torch.where(finite, oracle.double(), 0.0)
    error = _absolute_error(actual, want, finite)
    return _ratio(*numbers(torch.linalg.vector_norm(error), torch.linalg.vector_norm(want)))


def numbers(*values: torch.Tensor) -> list[float]:
    """Return the numbers that tensors of one element hold, by one question to the device.

    A GPU answers after all its earlier work, and later if other processes use it: a promotion asks thousands of times.
    """
    found: list[float] = torch.stack([value.double() for value in values]).tolist()
    return found


def _ratio(norm: float, scale: float) -> float:
    if scale == 0.0 or not math.isfinite(norm):
        return 0.0 if norm == 0.0 else math.inf
    return norm / scale


def _finite_in_both(actual: torch.Tensor, oracle: torch.Tensor, *, rounded: bool = False) -> torch.Tensor | None:
    """Return a mask of the elements that are finite in both; None if all are.

    With ``rounded``, the oracle must also be finite in the dtype of ``actual``. The largest numbers mostly decide at once,
    because full masks would dominate the time of a comparison on a CPU.
    """
    most = torch.finfo(actual.dtype if rounded else torch.float64).max
    if not actual.numel():
        return None
    largest, of_oracle = numbers(_largest(actual), _largest(oracle))
    if largest < math.inf and of_oracle <= most:
        return None
    return torch.isfinite(_wide(actual)) & torch.isfinite(_wide(oracle.to(actual.dtype) if rounded else oracle))


def _largest(value: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value; NaN if one is NaN."""
    low, high = torch.aminmax(_wide(value))
    return torch.maximum(low.abs(), high.abs())


def _wide(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor in a dtype for which PyTorch has these operations; 8-bit floats have none."""
    return value if value.element_size() > 1 else value.float()


def _absolute_error(
    actual: torch.Tensor, want: torch.Tensor, finite: torch.Tensor | None, atol: float = 0.0
) -> torch.Tensor:
    """Return the absolute error in fp64, 0 if not finite in both, and 0 up to ``atol``.

    ``finite`` masks the elements that are finite in both; None stands for all.
    """
    error = actual.to(torch.float64, copy=True).sub_(want)  # in place: a new block of memory per step is slower
    if finite is not None:
        error = torch.where(finite, error, 0.0)
    return torch.threshold_(error.abs_(), max(_negligible_error(actual.dtype), atol), 0.0)


def _negligible_error(dtype: torch.dtype) -> float:
    """Return the allowed error of an element whose bound is almost zero, because its row is.

    Hardware may flush subnormals of float32 (and so of bfloat16) to zero, and terms of a kernel too. It keeps subnormals of
    shorter dtypes: those of float16 start at 6e-5, which is the size of probabilities over a vocabulary. There, only one step
    of the subnormal grid is allowed.
    """
    finfo = torch.finfo(dtype)
    return finfo.tiny * (finfo.eps if finfo.max < SHORT_RANGE else FLUSHED)


MIN_ELEMENTS_FOR_EXACT = 64
"""Minimum number of results that are all exact; fewer may be so by luck (a mean of three numbers)."""

E_BASE_FACTOR = 2.0
"""Factor on the error of the reference, as a whole and of its worst row or element, that a Solution may reach."""
AVERAGING_ROWS, FACTOR_BELOW_THEM = 8, 2.0
"""A rounded intermediate may scale a whole row. Fewer rows average too few such errors for the bound of many."""
RELATIVE_OF_REFERENCE, RELATIVE_OF_SOLUTION = 0.5, 4.0
"""In units of ``rtol``: if the reference as written is this accurate everywhere, a Solution must be so for probabilities."""
NEGLIGIBLE = 1e-4
"""Size in units of a row's rms below which an element may be all rounding error of its terms."""
NEGLIGIBLE_PROBABILITY = 1e-9
PROBABILITIES_SUM_TO = 1e-5
MAX_CUT_SHARE = 0.01
"""Maximum share of counted elements that may be zero if the oracle is not; exact cancellation is this rare."""

_ROUNDING_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def must_be_exact(as_written: torch.Tensor, truth: torch.Tensor) -> bool:
    """Return True if no step of an operator rounds on these inputs, so that every Solution must give the same values.

    That holds if the fp64 oracle is a float32 number everywhere, and the reference as written is the oracle rounded once to the
    output dtype.
    """
    if truth.dtype != torch.float64 or as_written.dtype not in _ROUNDING_DTYPES:
        return False
    if truth.numel() < MIN_ELEMENTS_FOR_EXACT or not torch.equal(truth.float().double(), truth):
        return False
    return torch.equal(as_written, truth.to(as_written.dtype))


def is_well_conditioned(as_written: torch.Tensor, truth: torch.Tensor, limits: Limits, rows: Rows) -> bool:
    """Return True if the reference as written gives every element to a small relative error, however small the element is.

    A Solution must then not cut small elements to zero, such as a probability of a thousandth of the largest, which norms over
    the row miss. It may still round more often than the reference, so only probabilities are checked by their own size: they
    are not differences.
    """
    if truth.dtype != torch.float64 or as_written.dtype not in _ROUNDING_DTYPES:
        return False
    if truth.numel() < MIN_ELEMENTS_FOR_EXACT:
        return False
    size, judged, _ = _by_size(rows, as_written.dtype)
    off = judged & (rows.error > size.mul_(RELATIVE_OF_REFERENCE * limits.rtol))
    has_judged, has_off = numbers(judged.any(), off.any())
    return bool(has_judged) and not has_off


def _by_size(rows: Rows, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the size of each element, whether it is large enough to count, and whether its row is probabilities."""
    probable = _are_probabilities(rows.want)
    norms = torch.linalg.vector_norm(rows.want, dim=1, keepdim=True)
    smallest = torch.where(probable, NEGLIGIBLE_PROBABILITY, NEGLIGIBLE * norms / math.sqrt(rows.want.shape[1]))
    size = rows.want.abs()
    return size, size > smallest.clamp_min_(torch.finfo(dtype).tiny), probable


def _are_probabilities(rows: torch.Tensor) -> torch.Tensor:
    """Return True for each row of non-negative numbers that sum to one; ``[rows, 1]``."""
    sums = rows.sum(dim=1, keepdim=True)
    return ((sums - 1).abs() < PROBABILITIES_SUM_TO) & (rows.amin(dim=1, keepdim=True) >= 0) & (rows.shape[1] > 1)


def check_output(
    name: str,
    actual: torch.Tensor,
    oracle: torch.Tensor,
    limits: Limits | None,
    e_base: ReferenceDeviation = EXACTLY,
    *,
    exact: bool = False,
    conditioned: bool = False,
) -> OutputComparison:
    """Compare one output with the oracle.

    Args:
        oracle: the reference in fp64 (or, for integer and quantised outputs, as written), same shape.
        limits: bounds of the output dtype; None requires equal bits.
        e_base: error of the reference itself in the output dtype.
        exact: require the oracle's value, rounded to the output dtype, of every element (see :func:`must_be_exact`). Zeros
            may differ in sign, because an accumulator that starts from zero loses it.
        conditioned: limit the relative error of every element that is not negligible (see :func:`is_well_conditioned`).
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
    if close.passed and conditioned:
        close = _check_relative(name, actual, oracle, limits, close, rows)
    return _check_bias(name, actual, oracle, e_base, close, rows) if close.passed else close


def _check_relative(
    name: str, actual: torch.Tensor, oracle: torch.Tensor, limits: Limits, close: OutputComparison, rows: Rows
) -> OutputComparison:
    size, judged, probable = _by_size(rows, actual.dtype)
    cut = judged & (actual.reshape(size.shape) == 0) & (rows.error > 0)
    off = judged & probable & (rows.error > size.mul_(RELATIVE_OF_SOLUTION * limits.rtol))
    judged_count, off_count, cut_count = (int(number) for number in numbers(judged.sum(), off.sum(), cut.sum()))
    counted = max(judged_count, 1)
    if off_count:
        wrong = off
        what = f"of {counted} probabilities are off by more than {RELATIVE_OF_SOLUTION * limits.rtol:g} of themselves"
    elif cut_count > MAX_CUT_SHARE * counted:
        wrong, what = cut, f"of {counted} elements are zero, which the reference gives to their last digits"
    else:
        return close
    count, wrong = int(wrong.sum()), wrong.reshape(actual.shape)
    figures = (close.rel_fro, close.worst_row_rel, close.max_abs, 1.0 - count / actual.numel())
    return failed("relative", f"{name}: {count} {what}", figures, wrong, actual, oracle, row_of_most(wrong))


def _check_close(
    name: str, actual: torch.Tensor, oracle: torch.Tensor, limits: Limits, e_base: ReferenceDeviation, rows: Rows
) -> OutputComparison:
    row_rel = rows.relative
    # If the reference passes barely, equally correct results would pass or fail by chance, so twice its error passes.
    slack = min(max(1.0, E_BASE_FACTOR * e_base.element), E_BASE_FACTOR) if limits.share == 1 else 1.0
    bound = rows.bound if slack == 1.0 else slack * rows.bound
    wrong = (rows.error > bound).reshape(actual.shape)
    mask_wrong = None
    if rows.finite is not None:
        # Round to the output dtype first: a value that overflows there is expected to be infinite.
        mask_wrong = _mask_mismatch(actual, oracle.to(actual.dtype))
        wrong |= mask_wrong
    worst, at = row_rel.max(dim=0)
    norm, scale, worst_row_rel, place, largest, exceeding = numbers(
        *rows.norms, worst, at, rows.error.max(), wrong.sum()
    )
    rel_fro, worst_row, count = _ratio(norm, scale), int(place), int(exceeding)
    few = actual.dim() > 1 and rows.want.shape[0] < AVERAGING_ROWS
    limit, most = _max_errors(limits, e_base, few=few)
    figures = (rel_fro, worst_row_rel, largest, 1.0 - count / actual.numel())

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
        return OutputComparison(None, "", *figures, worst_row=worst_row)
    if shown is None:
        shown = wrong if count else _whole_row(worst_row, actual)
    return failed(gate, f"{name}: {what}", figures, shown.reshape(actual.shape), actual, oracle, worst_row)


def _max_errors(limits: Limits, e_base: ReferenceDeviation, *, few: bool) -> tuple[float, float]:
    """Return the maximum relative error of an output, and of one of its rows. ``few`` rows do not average their errors out."""
    allowed, cap = E_BASE_FACTOR * e_base.rel_fro, TAU_CAP * limits.tau
    of_output = min(max(FACTOR_BELOW_THEM * limits.tau if few else limits.tau, allowed), cap)
    of_row = WORST_ROW_FACTOR * min(max(limits.row_tau or limits.tau, allowed), cap)
    of_row = min(
        max(of_row, E_BASE_FACTOR * e_base.row),
        E_BASE_FACTOR * of_row,
        WORST_ROW_FACTOR * max(cap, TAU_CAP * limits.row_tau),
    )
    return of_output, of_row


def _mask_mismatch(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    nan = torch.isnan(got) != torch.isnan(want)
    infinite = (torch.isinf(got) | torch.isinf(want)) & (got != want)
    return nan | (infinite & ~torch.isnan(got) & ~torch.isnan(want))


def _mask_text(wrong: torch.Tensor, what: str) -> str:
    return f"{int(wrong.sum())} {what} are NaN or infinite where they should not be, or not where they should"


def _check_exact(name: str, actual: torch.Tensor, want: torch.Tensor, *, bitwise: bool) -> OutputComparison:
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
    """Return the bits as integers; all NaNs have the same pattern."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    bits = value.contiguous().view(integer)
    return torch.where(torch.isnan(value), torch.full_like(bits, -1 if integer != torch.uint8 else 255), bits)


def _check_codes(name: str, actual: torch.Tensor, oracle: torch.Tensor, limits: Limits) -> OutputComparison:
    bits, least = limits.codes, limits.codes_equal
    want_codes = oracle if oracle.dtype == actual.dtype else oracle.to(actual.dtype)
    order_got, order_want = (ordered_codes(codes, bits, signed_zeros=least == 1) for codes in (actual, want_codes))
    apart = (order_got - order_want).abs()
    got, want = code_values(actual, bits), code_values(want_codes, bits)
    differing = int((apart > 0).sum())
    equal = 1.0 - differing / apart.numel()  # a mean of ones is not exactly one on every device
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
    return OutputComparison(None, "", *figures)


def _whole_row(row: int, actual: torch.Tensor) -> torch.Tensor:
    columns = actual.shape[-1] if actual.dim() else 1
    flagged = torch.zeros(actual.numel() // columns, columns, dtype=torch.bool, device=actual.device)
    flagged[row] = True
    return flagged.reshape(actual.shape)


# ---- bias -----------------------------------------------------------------------------------------
# Rounding to nearest errs to both sides. Truncation errs by half a step to one side, which passes all norms, and adds up in
# the sums of the operators after it.

MAX_BIAS = 0.2
"""Maximum mean error in steps of the dtype; truncation gives 0.5, and correct code was below 0.05 (0061)."""
BIAS_ERRORS = 6.0
"""Standard errors of the mean that are allowed in addition."""
MAX_STEPS = 4.0
"""An element counts with at most this error, in steps, so that a few elements do not decide."""
SMALL_IN_ROW = 1 / 16
"""Size in units of the row's rms below which an element does not count, because it may be a difference of large terms."""
MIN_BIAS_SIDE = 8
"""Minimum rows, columns and heads, because the elements of each may share the rounding of a factor."""
MIN_BIAS_VALUES = 256
"""Minimum different values of the oracle; equal values have equal errors."""
BIAS_PARTS = 4
"""Parts of the columns whose mean errors count one by one, if each has twice the minimum of columns."""
LANES = 8
"""Columns whose remainders differ: as many elements of half precision as a vector of 16 bytes has."""
LINE = 64
"""Elements of a line of a result with one axis. It has no rows, so its lines stand for them."""
_BIAS_ELEMENTS = 1 << 18
_EXPONENT_BITS = 0x7FF << 52
"""Of a float64; alone, they are the largest power of two up to a number."""


def bias_of(actual: torch.Tensor, rows: Rows) -> tuple[float, float]:
    """Return the mean error away from zero or upwards, of all columns or a quarter of them, in steps of the dtype; 0 if unknown.

    It is the most significant of these means: a kernel may work on a part of the columns in another way than on the others.

    The second number is its standard error. It counts the means along each axis, because the elements of a token, a head or a
    column may share the rounding of a factor. Outputs with few tokens, heads, columns or different values have no bias.
    """
    if actual.dim() == 1:
        actual, rows = _in_lines(actual, rows)
    count, columns = rows.want.shape
    few = min(count, *actual.shape[1:]) < MIN_BIAS_SIDE if actual.dim() > 1 else True
    if actual.dtype not in (torch.float16, torch.bfloat16) or few:
        return 0.0, 0.0
    every = max(1, count * columns // _BIAS_ELEMENTS)
    shape = actual.shape if every == 1 else (-(-count // every), columns)
    want, info = rows.want[::every], torch.finfo(actual.dtype)
    counted = (want.abs() >= (SMALL_IN_ROW * rows.rms[::every]).clamp_min(info.tiny)) & (want.abs() <= info.max)
    if rows.finite is not None:
        counted &= rows.finite.reshape(count, columns)[::every]
    steps = (want.view(torch.int64) & _EXPONENT_BITS).view(torch.float64).mul_(info.eps)
    error = actual.reshape(count, columns)[::every].double().sub_(want).div_(steps).clamp_(-MAX_STEPS, MAX_STEPS)
    elements = torch.empty(3, *want.shape, dtype=torch.float64, device=want.device)
    elements[1] = torch.where(counted, error, 0.0)
    torch.mul(elements[1], want.sign(), out=elements[0])
    elements[2] = counted
    # Rows of more dimensions are of several heads, each with another factor.
    means = _means(elements.view(3, *shape), of_rows=actual.dim() == 2 and every == 1)
    found, part = max(means, key=lambda one: _significance(one[0]))
    several = want[:, part][counted[:, part]].sort().values.diff() > 0 if abs(found[0]) > MAX_BIAS else None
    return (0.0, 0.0) if several is not None and int(several.sum()) < MIN_BIAS_VALUES else found


def _in_lines(actual: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, Rows]:
    """Return a result of one axis as lines one after the other, and its comparison; what is left over is left out."""
    count = actual.numel() // LINE

    def lines(value: torch.Tensor) -> torch.Tensor:
        return value.reshape(-1)[: count * LINE].reshape(count, LINE)

    finite = None if rows.finite is None else lines(rows.finite)
    scale, rms = rows.scale.expand(count), rows.rms.expand(count, 1)
    return lines(actual), Rows(lines(rows.want), lines(rows.error), scale, rms, lines(rows.bound), finite)


class _Sums(NamedTuple):
    """Sums over the lines of an axis: of their errors, their counted elements, the lines that have some, and products of these.

    The means of any lines and their standard errors follow from such sums, so a few sums of the elements serve all of them.
    """

    error: float
    counted: float
    lines: float
    squares: float
    products: float
    squared_counts: float

    def plus(self, other: _Sums) -> _Sums:
        """Return the sums over the lines of both."""
        return _Sums(*map(operator.add, self, other))

    def minus(self, part: _Sums) -> _Sums:
        """Return the sums over the lines that are in this and not in a part of it."""
        return _Sums(*map(operator.sub, self, part))

    def variance(self, mean: float, total: float) -> float:
        """Return the variance of a mean over ``total`` elements, if the lines of this axis are independent."""
        spread = self.squares - 2 * mean * self.products + mean * mean * self.squared_counts
        return max(spread, 0.0) / (total * total)


_Mean = tuple[tuple[float, float], slice]
"""A mean error with its standard error, and its columns."""


def _means(elements: torch.Tensor, *, of_rows: bool) -> list[_Mean]:
    """Return the means of all columns, of quarters of them, and of lanes, for errors of two kinds of signs.

    A lane is all columns, or with ``of_rows`` all rows of a matrix, whose numbers are equal modulo 8, 4 or 2.

    Args:
        elements: the errors away from zero, the errors upwards, and 1 for each element that counts, in the shape of the result,
            ``[3, ..., columns]``. The errors of elements that do not count are zero.
        of_rows: the rows of a matrix are one after the other.
    """
    shape, last = elements.shape[1:], elements.dim() - 2
    step = shape[-1] // BIAS_PARTS
    quarters = [slice(part * step, (part + 1) * step) for part in range(BIAS_PARTS if step >= 2 * MIN_BIAS_SIDE else 0)]
    parts = [slice(None), *quarters]
    axes = [axis for axis, size in enumerate(shape) if size >= MIN_BIAS_SIDE]
    asked, lines = list[torch.Tensor](), dict[int, torch.Tensor]()
    for axis in axes:
        lines[axis], sums_of_parts = _along(elements, axis, len(quarters), step)
        asked += sums_of_parts
    grouped = []
    for axis in (last, 0) if of_rows else (last,):
        groups = shape[axis] // LANES
        if groups >= MIN_BIAS_SIDE and elements[0].numel() >= MIN_BIAS_SIDE * shape[-1]:
            grouped.append(axis)
            asked.append(_sums_of(lines[axis][:, : groups * LANES].reshape(3, groups, LANES).transpose(1, 2)))
    answers = torch.cat(asked, dim=-1).permute(0, 2, 1).tolist()  # one question to the device for all means
    found = list[_Mean]()
    for kind in range(2):
        sums = [_Sums(*answer) for answer in answers[kind]]
        found += [
            (_mean(sums[number : len(axes) * len(parts) : len(parts)]), part) for number, part in enumerate(parts)
        ]
        for number, axis in enumerate(grouped):
            start = len(axes) * len(parts) + number * LANES
            lanes = _of_lanes(sums[start : start + LANES])
            found += lanes if axis == last else [(mean, slice(None)) for mean, _ in lanes]
    return found


def _along(elements: torch.Tensor, axis: int, quarters: int, step: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the sum of each line of an axis, ``[3, lines]``, and :func:`_sums_of` all columns and of each quarter.

    Args:
        quarters: their number; 0 if the columns are too few.
        step: the columns of a quarter.
    """
    last = elements.dim() - 2
    others = [1 + other for other in range(last) if other != axis]
    columns = elements.sum(dim=others) if others else elements
    parts = [columns[..., : quarters * step].reshape(*columns.shape[:-1], quarters, step)] if quarters else []
    if axis == last:  # the lines are the columns
        return columns, [_sums_of(columns)[..., None], *map(_sums_of, parts)]
    lines = columns.sum(dim=-1)
    summed = torch.cat([lines[..., None], *(part.sum(dim=-1) for part in parts)], dim=-1)
    return lines, [_sums_of(summed.transpose(1, 2))]


def _sums_of(lines: torch.Tensor) -> torch.Tensor:
    """Return the six numbers of :class:`_Sums` over the lines of both errors and their counts, ``[2, 6, ...]``.

    Args:
        lines: both errors and the counts of each line, ``[3, ..., lines]``.
    """
    errors, counts = lines[:2], lines[2:].expand(2, *lines.shape[1:])
    terms = (errors, counts, (counts > 0).double(), errors.square(), errors * counts, counts.square())
    return torch.stack(terms, dim=1).sum(dim=-1)


def _mean(by_axis: Sequence[_Sums]) -> tuple[float, float]:
    """Return the mean of the counted elements and its standard error, by every axis; 0 if an axis has too few."""
    if not by_axis or any(one.lines < MIN_BIAS_SIDE for one in by_axis):
        return 0.0, 0.0
    total = max(by_axis[0].counted, 1.0)
    mean = by_axis[0].error / total
    return mean, math.sqrt(sum(one.variance(mean, total) for one in by_axis))


def _of_lanes(sums: Sequence[_Sums]) -> list[_Mean]:
    """Return for each lane ((difference of its mean from that of the other lanes, standard error), its columns).

    Other code may round one lane of a vector than the others. Errors that all lanes share cancel in the difference.
    """
    found, lanes, whole = list[_Mean](), sums, functools.reduce(_Sums.plus, sums)
    while len(lanes) > 1:
        for lane, part in enumerate(lanes):
            others = whole.minus(part)
            if part.lines >= MIN_BIAS_SIDE and others.lines >= MIN_BIAS_SIDE:
                mean, of_others = part.error / part.counted, others.error / others.counted
                variance = part.variance(mean, part.counted) + others.variance(of_others, others.counted)
                found.append(((mean - of_others, math.sqrt(variance)), slice(lane, None, len(lanes))))
        half = len(lanes) // 2
        lanes = [one.plus(two) for one, two in zip(lanes[:half], lanes[half:], strict=True)]
    return found


def _significance(found: tuple[float, float]) -> float:
    return abs(found[0]) - BIAS_ERRORS * found[1]


def _check_bias(
    name: str,
    actual: torch.Tensor,
    oracle: torch.Tensor,
    e_base: ReferenceDeviation,
    close: OutputComparison,
    rows: Rows,
) -> OutputComparison:
    allowed = max(MAX_BIAS, E_BASE_FACTOR * abs(e_base.bias))
    mean, error = bias_of(actual, rows) if allowed < math.inf else (0.0, 0.0)
    if abs(mean) <= allowed + BIAS_ERRORS * error:
        return close
    what = f"{name}: elements are off by {mean:+.2g} steps of the dtype on average, more than {allowed:.2g}; round to nearest"
    figures = (close.rel_fro, close.worst_row_rel, close.max_abs, close.matched_ratio)
    wrong = (actual.double() != oracle.to(actual.dtype).double()).reshape(actual.shape)
    return failed("bias", what, figures, wrong, actual, oracle, row_of_most(wrong))


# ---- share ----------------------------------------------------------------------------------------
# A few elements of a low-precision product may exceed the element-wise bound if they are spread out and not far off.
#
# If rounding moves a sum across a border between two codes, only results of that code change. Elements that a kernel
# leaves out are neighbours instead: a row, a column, a tile or a head.

CAP = 8.0
"""Maximum error in units of the bound; a code that is one step off moved elements of correct products by up to 4 (0036)."""
_OF_ITSELF, _OF_ROW = 0.25, 0.5
"""Maximum error as shares of the element and of the row's rms, however wide the bound is: a missing element exceeds it."""
WINDOWS = ((16, 16), (64, 1))
"""Rows and columns of windows of which at most half may exceed the bound: the smallest tile, and a piece of a column."""
_HALF = 0.5
_MIN_WINDOW = 64
"""Minimum elements of a window, because a smaller one may be full by chance; with few rows it is wider."""


def share_problem(
    error: torch.Tensor, bound: torch.Tensor, size: torch.Tensor, rms: torch.Tensor, share: float
) -> tuple[str, str, torch.Tensor] | None:
    """Return the gate, a reason and the elements to show if too many exceed the bound, are too close together, or one too far."""
    beyond = error > bound
    count, total = int(beyond.sum()), beyond.numel()
    if not count:
        return None
    within = 1.0 - count / total
    reached = f"{within:.3%} of {total} elements are within the bound"
    if within < share:
        return "share", f"{reached}; at least {share:.4g} of them must be", beyond
    far = error > torch.maximum(bound, torch.minimum(CAP * bound, _OF_ITSELF * size + _OF_ROW * rms))
    if bool(far.any()):
        return (
            "elementwise",
            f"{reached}, but {int(far.sum())} are off by more than {CAP:g} times that, or missing",
            far,
        )
    for height, width in WINDOWS:
        crowded = _crowded(beyond, height, width)
        if crowded is not None:
            (row, column), piece = crowded
            flagged = torch.zeros_like(beyond)
            flagged[row : row + piece.shape[0], column : column + piece.shape[1]] = piece
            what = f"{int(piece.sum())} of the {piece.numel()} from row {row} and column {column} on are not"
            return "share", f"{reached}, but {what}: strays must lie apart", flagged
    return None


def _crowded(beyond: torch.Tensor, height: int, width: int) -> tuple[tuple[int, int], torch.Tensor] | None:
    """Return the first row and column, and the contents, of the fullest window if it is more than half full; else None."""
    rows, columns = beyond.shape
    height = min(height, rows)
    width = min(max(width, _MIN_WINDOW // height), columns)
    if height * width < min(_MIN_WINDOW, beyond.numel()):
        return None
    # Windows that cross an edge are moved inside, because a smaller window may be full by chance.
    tops, lefts = (_starts(size, step) for size, step in ((rows, height), (columns, width)))
    down = (tops[:, None] + torch.arange(height)).reshape(-1).to(beyond.device)
    along = (lefts[:, None] + torch.arange(width)).reshape(-1).to(beyond.device)
    inside = beyond[down][:, along].reshape(len(tops), height, len(lefts), width)
    shares = inside.sum(dim=(1, 3)) / (height * width)
    worst = int(shares.argmax())
    top, left = divmod(worst, len(lefts))
    if float(shares[top, left]) <= _HALF:
        return None
    return (int(tops[top]), int(lefts[left])), inside[top, :, left, :]


def _starts(size: int, step: int) -> torch.Tensor:
    return torch.cat([torch.arange(0, size - step, step), torch.tensor([size - step])])


# ---- codes ----------------------------------------------------------------------------------------
# Quantised formats as ordered integers: neighbours on the number line differ by one in every format.

_FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def ordered_codes(value: torch.Tensor, bits: int, *, signed_zeros: bool) -> torch.Tensor:
    """Return codes as int32 in the order of their values; each byte gives two codes of 4 bits, the low one first.

    Args:
        signed_zeros: order -0 one below 0. Otherwise both are one code: a value that is too small for a code loses its sign
            if a product underflows to 0 before it is added to 0, which depends on fused operations.
    """
    code = _split(value, bits)
    sign = 1 << (bits - 1)
    return torch.where(code >= sign, sign - int(signed_zeros) - code, code)


def code_values(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values of the codes as float32, in the layout of :func:`ordered_codes`."""
    if bits == 8:
        return value.float()
    magnitudes = torch.tensor(_FP4_MAGNITUDES, device=value.device)
    code = _split(value, bits)
    return magnitudes[(code & 7).long()] * torch.where(code >= 8, -1.0, 1.0)


def _split(value: torch.Tensor, bits: int) -> torch.Tensor:
    code = value.contiguous().view(torch.uint8).to(torch.int32)
    return code if bits == 8 else torch.stack([code & 15, code >> 4], dim=-1).flatten(-2)


# ---- comparisons ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputComparison:
    """The comparison of one output with the oracle. ``gate`` names the failed gate, or is None if all pass.

    ``rel_fro``, ``worst_row_rel``: relative, no unit. ``max_abs``: in the output's unit. ``reason``: a sentence with the first
    wrong index, the expected and the actual value; the fields after it hold the same for a report. ``worst_row`` counts rows
    over all axes except the last.
    """

    gate: str | None
    reason: str
    rel_fro: float
    worst_row_rel: float
    max_abs: float
    matched_ratio: float
    index: tuple[int, ...] = ()
    expected: str = ""
    got: str = ""
    worst_row: int | None = None

    @property
    def passed(self) -> bool:
        """True if every gate passes."""
        return self.gate is None


PASSED = OutputComparison(None, "", 0.0, 0.0, 0.0, 1.0)


def failed(
    gate: str,
    what: str,
    figures: tuple[float, float, float, float],
    wrong: torch.Tensor,
    actual: torch.Tensor,
    oracle: torch.Tensor,
    worst_row: int,
) -> OutputComparison:
    """Return a comparison with a failed gate that shows the first element in ``wrong``, which marks at least one."""
    index = tuple(int(i) for i in torch.nonzero(wrong)[0]) if wrong.dim() else ()
    expected, got = (f"{float(value[index].double()):.6g}" for value in (oracle, actual))
    reason = f"{what}; first at {list(index)}: expected {expected}, got {got}"
    return OutputComparison(gate, reason, *figures, index=index, expected=expected, got=got, worst_row=worst_row)


def row_of_most(wrong: torch.Tensor) -> int:
    """Return the row, counted over all axes except the last, with the most flagged elements."""
    columns = wrong.shape[-1] if wrong.dim() else 1
    return int(wrong.reshape(-1, columns).sum(dim=1).argmax())
