"""scaled_dot_product_attention as transformers calls it; PyTorch picks its kernel by shape."""

import torch


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [B, Hq, 1, D], k and v [B, Hkv, L, D] -> [B, Hq, 1, D]."""
    grouped = q.shape[1] != k.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, dropout_p=0.0, is_causal=False, scale=scale, enable_gqa=grouped
    )
    # Heads after tokens in memory, which is how the model goes on.
    return out.transpose(1, 2).contiguous().transpose(1, 2)
