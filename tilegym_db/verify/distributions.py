"""What the contents of a floating-point input can look like: each distribution brings out another kind of mistake."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

__all__ = ["DISTRIBUTIONS", "EXACT", "PLANTED", "REFERENCE_MAY_FAIL", "plant"]

Shape = tuple[int, ...]
Draw = Callable[[torch.Generator, Shape, torch.dtype], torch.Tensor]

PLANTED = "planted_special_values"
EXACT = "small_integers"
REFERENCE_MAY_FAIL = frozenset({"max_quarter", "row_scale"})
"""Distributions on which the reference as written may overflow itself, so that the case is dropped."""

_SPECIAL: dict[str, tuple[float, ...]] = {"nan": (math.nan,), "inf": (math.inf, -math.inf)}
_ROWS_TO_SPARE_ONE = 4
_ZERO_ROWS = 0.125


def _normal(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)


def _row_scale(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    # 2**±10 where the dtype has room; half precision ends at 2**16, and products of two such tensors at half of that.
    reach = min(10.0, math.log2(torch.finfo(dtype).max) / 4)
    exponent = torch.rand((*shape[:-1], 1), generator=generator, device=generator.device) * (2 * reach) - reach
    return _normal(generator, shape, dtype) * torch.exp2(exponent)


def _outliers(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    value = _normal(generator, shape, dtype)
    rare = torch.rand(shape, generator=generator, device=generator.device) < 1e-3
    return torch.where(rare, value * 100, value)


def _small_integers(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=generator, device=generator.device).float()


def _constant_rows(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    row = torch.randn((*shape[:-1], 1), generator=generator, device=generator.device)
    return row.expand(shape).clone()


def _one_hot(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """A single 1 in each row, anywhere; some rows are all zero, where a norm has only its epsilon to divide by."""
    rows = (*shape[:-1], 1)
    place = torch.randint(0, shape[-1], rows, generator=generator, device=generator.device)
    hot = torch.rand(rows, generator=generator, device=generator.device) >= _ZERO_ROWS
    return torch.zeros(shape, device=generator.device).scatter_(-1, place, hot.float())


def _max_quarter(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    sign = torch.randint(0, 2, shape, generator=generator, device=generator.device) * 2 - 1
    return sign * (torch.finfo(dtype).max / 4)


def _subnormals(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Half the elements subnormal; all of them in half precision, whose subnormals no hardware flushes in fp32 maths.

    Hardware may flush those of float32 and bfloat16 to zero, which must cost nothing beside the other half of a row.
    """
    small = (torch.rand(shape, generator=generator, device=generator.device) * 2 - 1) * torch.finfo(dtype).tiny
    if dtype == torch.float16:
        return small
    kept = torch.rand(shape, generator=generator, device=generator.device) < 0.5
    return torch.where(kept, _normal(generator, shape, dtype), small)


def _ties(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(3, generator=generator, device=generator.device)
    return values[torch.randint(0, 3, shape, generator=generator, device=generator.device)]


def plant(value: torch.Tensor, generator: torch.Generator, specials: tuple[str, ...]) -> torch.Tensor:
    """Put one of each special value that the operator is defined for at a random place, and mask a whole row.

    The masked row is what an attention mask leaves of a query that may see nothing; it takes rows to spare.
    """
    rows = value.reshape(-1, value.shape[-1])  # contiguous, so that this is a view

    def somewhere(size: int) -> int:
        return int(torch.randint(0, size, (1,), generator=generator, device=generator.device))

    if "inf" in specials and rows.shape[0] >= _ROWS_TO_SPARE_ONE:
        rows[somewhere(rows.shape[0])] = -math.inf
    for special in (number for name in specials for number in _SPECIAL[name]):
        rows[somewhere(rows.shape[0]), somewhere(rows.shape[1])] = special
    return value


DISTRIBUTIONS: dict[str, Draw] = {
    "normal": _normal,
    "row_scale": _row_scale,
    "outliers": _outliers,
    EXACT: _small_integers,
    "constant_rows": _constant_rows,
    "one_hot": _one_hot,
    "max_quarter": _max_quarter,
    "subnormals": _subnormals,
    "ties": _ties,
    PLANTED: _normal,  # then plant, which needs to know what the Definition allows
}
"""What fills a floating-point tensor of two or more dimensions that has no generator of its own."""
