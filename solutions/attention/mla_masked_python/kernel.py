"""Latent attention with a mask of flags in PyTorch: scaled_dot_product_attention as transformers calls it."""

import torch

ALIGNMENT = 16
"""Bytes that a load of PyTorch's kernels takes at once: on a GPU some of them stop at rows that start elsewhere."""


def _aligned(x: torch.Tensor) -> torch.Tensor:
    if all(start * x.element_size() % ALIGNMENT == 0 for start in (x.storage_offset(), *x.stride()[:-1])):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """q [B, H, S, D], k [B, H, L, D], v [B, H, L, Dv], mask [B, 1, S, L] -> [B, H, S, Dv], heads after tokens in memory."""
    out = torch.nn.functional.scaled_dot_product_attention(
        _aligned(q), _aligned(k), _aligned(v), attn_mask=mask, scale=scale
    )
    return out.transpose(1, 2).contiguous().transpose(1, 2)
