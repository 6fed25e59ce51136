"""Attention with a bias of its scores in PyTorch: scaled_dot_product_attention as transformers calls it for T5."""

import torch

ALIGNMENT = 16
"""Bytes that a load of PyTorch's kernels takes at once: on a GPU some of them stop at rows that start elsewhere."""


def _aligned(x: torch.Tensor) -> torch.Tensor:
    if all(start * x.element_size() % ALIGNMENT == 0 for start in (x.storage_offset(), *x.stride()[:-1])):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    batch, heads, length, size = x.shape
    if times == 1:
        return x
    return x[:, :, None].expand(batch, heads, times, length, size).reshape(batch, heads * times, length, size)


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, causal: bool, scale: float
) -> torch.Tensor:
    """q [B, Hq, S, D], k and v [B, Hkv, L, D], bias [1 or B, Hq, S, L] -> [B, Hq, S, D]."""
    group = q.shape[1] // k.shape[1]
    if causal:
        places = [torch.arange(size, device=q.device) for size in bias.shape[2:]]
        bias = torch.where(places[0][:, None] >= places[1], bias, torch.finfo(q.dtype).min)
    out = torch.nn.functional.scaled_dot_product_attention(
        _aligned(q),
        _repeated(_aligned(k), group),
        _repeated(_aligned(v), group),
        attn_mask=bias.contiguous(),
        scale=scale,
    )
    # Heads after tokens in memory, which is how the model goes on.
    return out.transpose(1, 2).contiguous().transpose(1, 2)
