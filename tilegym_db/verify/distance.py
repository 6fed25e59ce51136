"""How far a result is from the oracle's, as a whole and element by element beside its bound. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilegym_db.records.tolerance import Limits

__all__ = ["EXACTLY", "BaseError", "Rows", "absolute_error", "base_error", "compare_rows", "relative_error"]

SHORT_ROW = 32
"""Rows with fewer elements have no meaningful rms of their own; the median over all rows stands in."""
NEAR_ZERO_ROW = 1e-4
FLUSHED = 2.0**24
"""Hardware may flush an intermediate that is subnormal in float32 to zero, and it may then be multiplied by inputs of up to
thousands and summed over as many terms. The error of a result may therefore be this many times float32's smallest normal number,
1.2e-38: up to 2e-31."""


class BaseError(NamedTuple):
    """What the reference as written is off by itself, in the output dtype.

    ``rel_fro``: relative Frobenius error. ``row``: that of the worst row. ``element``: the largest error of an element, in units
    of its bound.
    """

    rel_fro: float = 0.0
    row: float = 0.0
    element: float = 0.0

    @property
    def plain(self) -> BaseError:
        """The error as a whole alone: the worst row and element widen no bound."""
        return BaseError(self.rel_fro)


EXACTLY = BaseError()
"""Of a reference that rounds nothing."""


@dataclass(frozen=True)
class Rows:
    """A result beside the oracle's as rows of their last axis, ``[rows, columns]``, fp64; zero where either is not finite.

    ``scale``: the norm of each row that its error is measured by, ``[rows]``; ``rms`` the same for an element, ``[rows, 1]``.
    ``bound``: what each element may be off by. ``finite``: where both are finite in the output dtype, in the output's shape.
    """

    want: torch.Tensor
    error: torch.Tensor
    scale: torch.Tensor
    rms: torch.Tensor
    bound: torch.Tensor
    finite: torch.Tensor

    @property
    def relative(self) -> torch.Tensor:
        """Of each row, ``[rows]``."""
        return torch.where(self.scale > 0, torch.linalg.vector_norm(self.error, dim=1) / self.scale, 0.0)


def compare_rows(actual: torch.Tensor, oracle: torch.Tensor, limits: Limits) -> Rows:
    """Every element's error and bound.

    Args:
        actual: a result in the output dtype, any strides.
        oracle: the oracle's, same shape.
        limits: bounds of the output dtype.
    """
    finite = torch.isfinite(oracle.to(actual.dtype)) & torch.isfinite(actual)
    want = torch.where(finite, oracle.double(), 0.0)
    columns = actual.shape[-1] if actual.dim() else 1
    want_rows = want.reshape(-1, columns)
    error_rows = absolute_error(actual.double(), want, finite, actual.dtype, limits.atol).reshape(-1, columns)
    row_norm = torch.linalg.vector_norm(want_rows, dim=1)
    median = row_norm.median()
    scale = torch.maximum(row_norm, median if columns < SHORT_ROW else median * NEAR_ZERO_ROW)
    rms = (scale / math.sqrt(columns))[:, None]
    return Rows(want_rows, error_rows, scale, rms, limits.rtol * want_rows.abs() + limits.a * rms, finite)


def base_error(as_written: torch.Tensor, truth: torch.Tensor, limits: Limits) -> BaseError:
    """What a result of the reference is off by."""
    if not as_written.numel():
        return EXACTLY
    rows = compare_rows(as_written, truth, limits)
    of_bound = torch.where(rows.error > 0, rows.error / rows.bound, 0.0)
    return BaseError(relative_error(as_written, truth), float(rows.relative.max()), float(of_bound.max()))


def relative_error(actual: torch.Tensor, oracle: torch.Tensor, atol: float = 0.0) -> float:
    """Relative Frobenius error over the elements that are finite in both; inf where the oracle is zero and actual is not.

    What hardware may flush to zero in the dtype of ``actual`` is no error, nor is what is at most ``atol``.
    """
    expected, got = oracle.double(), actual.double()
    finite = torch.isfinite(expected) & torch.isfinite(got)
    scale = float(torch.linalg.vector_norm(torch.where(finite, expected, 0.0)))
    norm = float(torch.linalg.vector_norm(absolute_error(got, expected, finite, actual.dtype, atol)))
    if scale == 0.0:
        return 0.0 if norm == 0.0 else math.inf
    return norm / scale


def absolute_error(
    got: torch.Tensor, want: torch.Tensor, finite: torch.Tensor, dtype: torch.dtype, atol: float
) -> torch.Tensor:
    """Absolute error where both are finite, less what no honest kernel can be blamed for."""
    error = torch.where(finite, got - want, 0.0).abs()
    return torch.where(error <= max(_smallest_honest_error(dtype), atol), 0.0, error)


def _smallest_honest_error(dtype: torch.dtype) -> float:
    """What an element may be off by where the bound itself is next to nothing: the row is zero, or close to it.

    Hardware may flush what is subnormal in float32 (and so in bfloat16) to zero, and so may a kernel's terms be. It keeps the
    subnormals of float16, which start at 6e-5, where probabilities over a vocabulary lie: there only a step of their grid is
    allowed.
    """
    finfo = torch.finfo(dtype)
    return finfo.tiny * (finfo.eps if dtype == torch.float16 else FLUSHED)
