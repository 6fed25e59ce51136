"""SiLU of the first half of the columns times the second, by FlashInfer."""

import torch
from flashinfer.activation import silu_and_mul

ALIGNMENT = 8
"""Elements of 16 bits that a load of the library's kernels takes at once: rows must start at multiples of it."""


def _aligned(x: torch.Tensor) -> torch.Tensor:
    if all(start % ALIGNMENT == 0 for start in (x.storage_offset(), *x.stride()[:-1])):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def run_silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [M, 2 * I] -> [M, I]."""
    return silu_and_mul(_aligned(x))
