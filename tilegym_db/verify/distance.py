"""How far a result is from the oracle's, as a whole and element by element beside its bound. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilegym_db.records.tolerance import Limits

__all__ = ["EXACTLY", "BaseError", "Rows", "compare_rows", "relative_error"]

SHORT_ROW = 32
"""Rows with fewer elements have no meaningful rms of their own; the median over all rows stands in."""
NEAR_ZERO_ROW = 1e-4
FLUSHED = 2.0**24
"""Hardware may flush an intermediate that is subnormal in float32 to zero, and it may then be multiplied by inputs of up to
thousands and summed over as many terms. The error of a result may therefore be this many times float32's smallest normal number,
1.2e-38: up to 2e-31."""
SHORT_RANGE = 1e6
"""Dtypes that end below it keep their subnormals: float16, e4m3 and e5m2."""


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
    ``bound``: what each element may be off by. ``finite``: where both are finite in the output dtype, in the output's shape;
    None where that is everywhere. ``want`` may be the oracle's own memory: nobody may write to it.
    """

    want: torch.Tensor
    error: torch.Tensor
    scale: torch.Tensor
    rms: torch.Tensor
    bound: torch.Tensor
    finite: torch.Tensor | None

    @property
    def relative(self) -> torch.Tensor:
        """Of each row, ``[rows]``."""
        share = torch.linalg.vector_norm(self.error, dim=1) / self.scale
        return torch.where(self.scale > 0, share, 0.0).nan_to_num_(nan=math.inf, posinf=math.inf)

    @property
    def rel_fro(self) -> float:
        """Relative Frobenius error of all rows; inf where the oracle is zero and the result is not."""
        return _ratio_of_norms(self.error, self.want)

    @property
    def base_error(self) -> BaseError:
        """What the result is off by, where it is the reference's."""
        of_bound = (self.error / self.bound).nan_to_num_(nan=0.0, posinf=math.inf)  # no error of no bound is none
        return BaseError(self.rel_fro, float(self.relative.max()), float(of_bound.max()))


def compare_rows(actual: torch.Tensor, oracle: torch.Tensor, limits: Limits) -> Rows:
    """Every element's error and bound.

    Args:
        actual: a result in the output dtype, any strides; one element at least.
        oracle: the oracle's, same shape.
        limits: bounds of the output dtype.
    """
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
    """Relative Frobenius error over the elements that are finite in both; inf where the oracle is zero and actual is not.

    What hardware may flush to zero in the dtype of ``actual`` is no error.
    """
    finite = _finite_in_both(actual, oracle)
    want = oracle.double() if finite is None else torch.where(finite, oracle.double(), 0.0)
    return _ratio_of_norms(_absolute_error(actual, want, finite), want)


def _ratio_of_norms(error: torch.Tensor, want: torch.Tensor) -> float:
    norm, scale = (float(torch.linalg.vector_norm(value)) for value in (error, want))
    if scale == 0.0 or not math.isfinite(norm):
        return 0.0 if norm == 0.0 else math.inf
    return norm / scale


def _finite_in_both(actual: torch.Tensor, oracle: torch.Tensor, *, rounded: bool = False) -> torch.Tensor | None:
    """Where both are finite, and with ``rounded`` the oracle in the dtype of ``actual`` too; None where that is everywhere.

    The largest number of each mostly says so at once: on a CPU, masks of everything take longer than all else in a comparison.
    """
    most = torch.finfo(actual.dtype if rounded else torch.float64).max
    if not actual.numel() or (_largest(actual) < math.inf and _largest(oracle) <= most):
        return None
    return torch.isfinite(_wide(actual)) & torch.isfinite(_wide(oracle.to(actual.dtype) if rounded else oracle))


def _largest(value: torch.Tensor) -> float:
    """Of the absolute values; NaN where one is NaN."""
    low, high = torch.aminmax(_wide(value))
    return float(torch.maximum(low.abs(), high.abs()))


def _wide(value: torch.Tensor) -> torch.Tensor:
    """In a dtype that PyTorch has these operations for, which 8-bit floats are not."""
    return value if value.element_size() > 1 else value.float()


def _absolute_error(
    actual: torch.Tensor, want: torch.Tensor, finite: torch.Tensor | None, atol: float = 0.0
) -> torch.Tensor:
    """Absolute error where both are finite, in fp64, less what no honest kernel can be blamed for.

    Args:
        actual: a result in the output dtype.
        want: the oracle's in fp64.
        finite: where both are finite; None for everywhere.
        atol: up to which an error is none.
    """
    error = actual.to(torch.float64, copy=True).sub_(want)  # one block of memory: a new one for each step takes longer
    if finite is not None:
        error = torch.where(finite, error, 0.0)
    return torch.threshold_(error.abs_(), max(_smallest_honest_error(actual.dtype), atol), 0.0)


def _smallest_honest_error(dtype: torch.dtype) -> float:
    """What an element may be off by where the bound itself is next to nothing: the row is zero, or close to it.

    Hardware may flush what is subnormal in float32 (and so in bfloat16) to zero, and so may a kernel's terms be. It keeps the
    subnormals of shorter dtypes, which start at 6e-5 in float16, where probabilities over a vocabulary lie: there only a step of
    their grid is allowed.
    """
    finfo = torch.finfo(dtype)
    return finfo.tiny * (finfo.eps if finfo.max < SHORT_RANGE else FLUSHED)
