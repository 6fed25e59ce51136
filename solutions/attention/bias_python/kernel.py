"""Attention with a bias of its scores in PyTorch: scaled_dot_product_attention as transformers calls it for T5."""

import torch
from _lib.python.attention_heads import aligned, repeated


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, causal: bool, scale: float
) -> torch.Tensor:
    """q [B, Hq, S, D], k and v [B, Hkv, L, D], bias [1 or B, Hq, S, L] -> [B, Hq, S, D]."""
    group = q.shape[1] // k.shape[1]
    if causal:
        places = [torch.arange(size, device=q.device) for size in bias.shape[2:]]
        bias = torch.where(places[0][:, None] >= places[1], bias, torch.finfo(q.dtype).min)
    out = torch.nn.functional.scaled_dot_product_attention(
        aligned(q),
        repeated(aligned(k), group),
        repeated(aligned(v), group),
        attn_mask=bias.contiguous(),
        scale=scale,
    )
    # Heads after tokens in memory, which is how the model goes on.
    return out.transpose(1, 2).contiguous().transpose(1, 2)
