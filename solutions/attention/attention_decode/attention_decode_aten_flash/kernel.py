"""FlashAttention in PyTorch's build, by its own operator: nothing of the process is set."""

import torch

ALIGNMENT = 8
"""Elements of 16 bits that a load of the library's kernels takes at once: rows must start at multiples of it."""


def _aligned(x: torch.Tensor) -> torch.Tensor:
    if all(start % ALIGNMENT == 0 for start in (x.storage_offset(), *x.stride()[:-1])):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [B, Hq, 1, D], k and v [B, Hkv, L, D] -> [B, Hq, 1, D].

    For one position the operator takes the query heads that share a key head as its rows, so that keys are read once, and splits
    the positions among programs.
    """
    out = torch.ops.aten._scaled_dot_product_flash_attention.default(
        _aligned(q), _aligned(k), _aligned(v), 0.0, False, scale=scale
    )[0]
    return out.transpose(1, 2).contiguous().transpose(1, 2)
