"""cuDNN's attention, called directly."""

import torch

ALIGNMENT = 8
"""Elements of 16 bits that a load of the library's kernels takes at once: rows must start at multiples of it."""


def _aligned(x: torch.Tensor) -> torch.Tensor:
    if all(start % ALIGNMENT == 0 for start in (x.storage_offset(), *x.stride()[:-1])):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [B, Hq, S, D], k and v [B, Hkv, S, D] -> [B, Hq, S, D]."""
    return torch.ops.aten._scaled_dot_product_cudnn_attention(
        _aligned(q), _aligned(k), _aligned(v), None, False, 0.0, True, scale=scale
    )[0]
