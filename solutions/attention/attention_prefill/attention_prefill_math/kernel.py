"""PyTorch's attention in plain steps: two products and a softmax, the scores in memory."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [B, Hq, S, D], k and v [B, Hkv, S, D] -> [B, Hq, S, D]."""
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
