"""Random values for probing code that casts to FP8 and multiplies codes.

No order of adding, and no way to divide, changes a bit of what is computed of them: a kernel of the hub and PyTorch operations
give the same. A kernel may divide by 448 with an error of a unit in the last place, and then its scale has that error. So each
output is one product that bfloat16 holds exactly: with such an error it is rounded to the same number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilegym_db.integrations.transformers.probe import Draw

__all__ = ["CODES", "WEIGHTS", "WEIGHT_SCALES", "activation", "choice", "single"]

CODES = torch.float8_e4m3fn
MANTISSA_BITS = 3
LARGEST, SMALLEST = 448.0, 16.0
"""Magnitudes of codes, of four bits."""
ACTIVATION_SCALES = (0.5, 0.75, 1.0, 1.5)
WEIGHT_SCALES = (0.5, 0.75, 1.5, 1.0)
WEIGHTS = (1.0, 2.0, 4.0)
"""A scale has two significant bits and a weight is a power of two, so that a product with a code of four has eight at most."""


def activation(draw: Draw, rows: int, columns: int, width: int) -> torch.Tensor:
    """A bf16 activation [rows, columns] whose blocks of some width have scales of few bits, and no value near a tie."""
    shape = (rows, columns // width, width)
    codes = (SMALLEST + (LARGEST - SMALLEST) * draw(*shape).float().abs().clamp(max=1.0)).to(CODES).float()
    between = (
        codes + torch.exp2(codes.log2().floor() - MANTISSA_BITS) / 4
    )  # far from a tie, so that any cast gives the code
    x = torch.where(codes < LARGEST, between, codes) * draw(*shape).float().sign()
    x[..., 0] = LARGEST
    x = x * choice(draw, ACTIVATION_SCALES, *shape[:2]).float().unsqueeze(-1)
    return x.view(rows, columns).to(torch.bfloat16)


def choice(draw: Draw, values: Sequence[float], *shape: int) -> torch.Tensor:
    """One of some values everywhere, bf16."""
    order = draw(*shape).float().flatten().argsort() % len(values)
    return torch.tensor(values, dtype=torch.bfloat16, device=order.device)[order].view(shape)


def single(draw: Draw, rows: int, columns: int) -> torch.Tensor:
    """A matrix with one entry of -1 or 1 in each row."""
    matrix = torch.zeros_like(draw(rows, columns))
    places = draw(rows).float().argsort() % columns
    matrix[torch.arange(rows, device=matrix.device), places] = draw(rows).sign()
    return matrix
