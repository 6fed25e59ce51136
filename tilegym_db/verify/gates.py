"""The gates that one output must pass against the oracle. Pure: tensors in, a verdict with figures and a reason out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tilegym_db.verify.tolerance import Limits

__all__ = ["MIN_ELEMENTS_FOR_NORMS", "OutputVerdict", "check_output", "relative_error"]

MIN_ELEMENTS_FOR_NORMS = 1024
"""Below this many elements a norm over the output is too noisy to gate on; the element-wise bound stays."""

WORST_ROW_FACTOR = 3.0
E_BASE_FACTOR = 2.0
TAU_CAP = 10.0
SHORT_ROW = 32
"""Rows with fewer elements have no meaningful rms of their own; the median over all rows stands in."""
NEAR_ZERO_ROW = 1e-4
CODES_EQUAL = 0.99


@dataclass(frozen=True)
class OutputVerdict:
    """How one output compares with the oracle. ``gate`` names the one that failed, or is None where all hold.

    ``rel_fro``, ``worst_row_rel``: relative, no unit. ``max_abs``: in the output's own units. ``reason``: for a person,
    with the first wrong index, what was expected and what was there.
    """

    gate: str | None
    reason: str
    rel_fro: float
    worst_row_rel: float
    max_abs: float
    matched_ratio: float

    @property
    def passed(self) -> bool:
        """True where every gate holds."""
        return self.gate is None


def relative_error(actual: torch.Tensor, oracle: torch.Tensor) -> float:
    """Relative Frobenius error over the elements that are finite in both; inf where the oracle is zero and actual is not."""
    expected = oracle.double()
    finite = torch.isfinite(expected) & torch.isfinite(actual.double())
    error = torch.where(finite, actual.double() - expected, 0.0)
    scale = float(torch.linalg.vector_norm(torch.where(finite, expected, 0.0)))
    norm = float(torch.linalg.vector_norm(error))
    if scale == 0.0:
        return 0.0 if norm == 0.0 else math.inf
    return norm / scale


def check_output(
    name: str, actual: torch.Tensor, oracle: torch.Tensor, limits: Limits | None, e_base: float = 0.0
) -> OutputVerdict:
    """Compare one output with the oracle.

    Args:
        name: the output's name, for the reason.
        actual: what the Solution wrote, in the output dtype, any strides.
        oracle: the reference in fp64 (or, for integer and quantised outputs, as written), same shape.
        limits: bounds of the output dtype; None demands equality.
        e_base: the relative Frobenius error that the reference itself makes in the output dtype.
    """
    if actual.numel() == 0:
        return OutputVerdict(None, "", 0.0, 0.0, 0.0, 1.0)
    if limits is None:
        return _check_exact(name, actual, oracle)
    if limits.codes:
        return _check_codes(name, actual, oracle)
    return _check_close(name, actual, oracle, limits, e_base)


def _check_close(name: str, actual: torch.Tensor, oracle: torch.Tensor, limits: Limits, e_base: float) -> OutputVerdict:
    got = actual.double()
    # Rounded to the output dtype first, so that a value that overflows there is expected to be infinite.
    want_rounded = oracle.to(actual.dtype).double()
    mask_wrong = _mask_mismatch(got, want_rounded)
    finite = torch.isfinite(want_rounded) & torch.isfinite(got)
    want = torch.where(finite, oracle.double(), 0.0)
    error = torch.where(finite, got - want, 0.0).abs()

    columns = actual.shape[-1] if actual.dim() else 1
    want_rows, error_rows = want.reshape(-1, columns), error.reshape(-1, columns)
    row_norm = torch.linalg.vector_norm(want_rows, dim=1)
    median = row_norm.median()
    floor = median if columns < SHORT_ROW else median * NEAR_ZERO_ROW
    scale = torch.maximum(row_norm, floor)
    row_rel = torch.where(scale > 0, torch.linalg.vector_norm(error_rows, dim=1) / scale, 0.0)
    row_rms = scale / math.sqrt(columns)

    bound = limits.rtol * want_rows.abs() + limits.a * row_rms[:, None]
    bound += _smallest_honest_error(actual.dtype)
    wrong = (error_rows > bound).reshape(actual.shape) | mask_wrong

    rel_fro = relative_error(actual, oracle)
    worst_row = float(row_rel.max())
    limit = min(max(limits.tau, E_BASE_FACTOR * e_base), TAU_CAP * limits.tau)
    figures = (rel_fro, worst_row, float(error.max()), 1.0 - float(wrong.double().mean()))

    def failed(gate: str, what: str) -> OutputVerdict:
        shown = wrong if bool(wrong.any()) else _worst(row_rel, actual.shape, columns)
        return OutputVerdict(gate, f"{name}: {what}; {_first(shown, actual, oracle)}", *figures)

    if bool(mask_wrong.any()):
        return failed(
            "nan_inf_mask",
            f"{int(mask_wrong.sum())} elements are NaN or infinite where they should not be, or not where they should",
        )
    if actual.numel() >= MIN_ELEMENTS_FOR_NORMS:
        if rel_fro > limit:
            return failed("rel_fro", f"relative Frobenius error {rel_fro:.3g} exceeds {limit:.3g}")
        if worst_row > WORST_ROW_FACTOR * limit:
            row = int(row_rel.argmax())
            return failed(
                "worst_row", f"row {row} has relative error {worst_row:.3g}, more than {WORST_ROW_FACTOR * limit:.3g}"
            )
    if bool(wrong.any()):
        return failed(
            "elementwise",
            f"{int(wrong.sum())} of {actual.numel()} elements exceed rtol {limits.rtol:g} and {limits.a:g} of the row's rms",
        )
    return OutputVerdict(None, "", *figures)


def _smallest_honest_error(dtype: torch.dtype) -> float:
    """What an element may be off by where the bound itself is next to nothing: the row is zero, or close to it.

    Hardware may flush what is subnormal in float32 (and so in bfloat16) to zero. It keeps the subnormals of float16,
    which start at 6e-5, where probabilities over a vocabulary lie: there only a step of their grid is allowed.
    """
    finfo = torch.finfo(dtype)
    return finfo.tiny * finfo.eps if dtype == torch.float16 else finfo.tiny


def _mask_mismatch(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    nan = torch.isnan(got) != torch.isnan(want)
    infinite = (torch.isinf(got) | torch.isinf(want)) & (got != want)
    return nan | (infinite & ~torch.isnan(got) & ~torch.isnan(want))


def _check_exact(name: str, actual: torch.Tensor, oracle: torch.Tensor) -> OutputVerdict:
    want = oracle.to(actual.dtype)
    is_scale = actual.dtype.is_floating_point  # e8m0, whose NaN must equal itself
    wrong = actual.view(torch.uint8) != want.view(torch.uint8) if is_scale else actual != want
    count = int(wrong.sum())
    matched = 1.0 - count / actual.numel()
    error = float((actual.double() - oracle.double()).abs().max())
    if count:
        reason = f"{name}: {count} of {actual.numel()} values differ, where all must be equal; {_first(wrong, actual, oracle)}"
        return OutputVerdict("exact", reason, math.inf, math.inf, error, matched)
    return OutputVerdict(None, "", 0.0, 0.0, 0.0, 1.0)


def _check_codes(name: str, actual: torch.Tensor, oracle: torch.Tensor) -> OutputVerdict:
    want = oracle if oracle.dtype == actual.dtype else oracle.to(actual.dtype)
    got_code, want_code = _ordered_codes(actual), _ordered_codes(want)
    apart = (got_code - want_code).abs()
    equal = float((apart == 0).double().mean())
    rel = relative_error(actual.float(), want.float())
    error = float(torch.nan_to_num(actual.float() - want.float()).abs().max())
    mask_wrong = _mask_mismatch(actual.float(), want.float())
    if bool(mask_wrong.any()):
        what = f"{int(mask_wrong.sum())} codes are NaN or infinite where they should not be, or not where they should"
        return OutputVerdict(
            "nan_inf_mask", f"{name}: {what}; {_first(mask_wrong, actual, want)}", rel, rel, error, equal
        )
    if equal < CODES_EQUAL or int(apart.max()) > 1:
        what = f"{equal:.2%} of the codes are equal (at least {CODES_EQUAL:.0%} must be, the rest within one)"
        return OutputVerdict("codes", f"{name}: {what}; {_first(apart > 0, actual, want)}", rel, rel, error, equal)
    return OutputVerdict(None, "", rel, rel, error, equal)


def _ordered_codes(value: torch.Tensor) -> torch.Tensor:
    """Codes as integers in the order of the values they stand for, so that neighbours differ by one."""
    code = value.contiguous().view(torch.uint8).to(torch.int32)
    return torch.where(code >= 128, 127 - code, code)


def _worst(row_rel: torch.Tensor, shape: torch.Size, columns: int) -> torch.Tensor:
    flagged = torch.zeros(row_rel.shape[0], columns, dtype=torch.bool, device=row_rel.device)
    flagged[int(row_rel.argmax())] = True
    return flagged.reshape(shape)


def _first(wrong: torch.Tensor, actual: torch.Tensor, oracle: torch.Tensor) -> str:
    index = tuple(int(i) for i in torch.nonzero(wrong)[0]) if wrong.dim() else ()
    got, want = actual[index], oracle[index]
    return f"first at {list(index)}: expected {float(want.double()):.6g}, got {float(got.double()):.6g}"
