"""PyTorch's memory-efficient attention for float32, by its own operator: scores stay on the chip."""

import torch

ALIGNMENT = 4
"""Elements of 32 bits that a load of the library's kernels takes at once: rows must start at multiples of it."""


def _aligned(x: torch.Tensor) -> torch.Tensor:
    if all(start % ALIGNMENT == 0 for start in (x.storage_offset(), *x.stride()[:-1])):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _per_query_head(x: torch.Tensor, group: int) -> torch.Tensor:
    """[B, Hkv, S, D] -> [B, Hkv * group, S, D], each head repeated.

    A copy: the operator wants as many key heads as query heads, and one stride cannot repeat them. It writes group * Hkv * S * D
    values, which is little beside the S * S products of every head.
    """
    if group == 1:
        return _aligned(x)
    return x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2).contiguous()  # one key head would be a view


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [B, Hq, S, D], k and v [B, Hkv, S, D] -> [B, Hq, S, D]."""
    group = q.shape[1] // k.shape[1]
    out = torch.ops.aten._scaled_dot_product_efficient_attention.default(
        _aligned(q), _per_query_head(k, group), _per_query_head(v, group), None, False, 0.0, True, scale=scale
    )[0]
    # Heads after tokens in memory, which is how the model goes on, and how the operator leaves it.
    return out.transpose(1, 2).contiguous().transpose(1, 2)
