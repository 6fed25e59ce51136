"""Rows and heads as PyTorch's attention takes them.

``masked_python`` and others have copies of these functions. Their files stay as they were measured.
"""

import torch

ALIGNMENT = 16
"""Bytes that a load of PyTorch's kernels takes at once: on a GPU some of them stop at rows that start elsewhere."""


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a copy of it if its rows do not all begin at multiples of 16 bytes of its storage."""
    if all(start * x.element_size() % ALIGNMENT == 0 for start in (x.storage_offset(), *x.stride()[:-1])):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """Return keys or values [B, H, L, D] as [B, H * times, L, D], each head ``times`` times in a row."""
    batch, heads, length, size = x.shape
    if times == 1:
        return x
    return x[:, :, None].expand(batch, heads, times, length, size).reshape(batch, heads * times, length, size)
