"""Keys of latent attention from the part of each head and the part that heads share, eager PyTorch."""

import torch


def run(k_nope: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    """k_nope [B, H, L, Dn], k_rope [B, 1, L, Dr] -> [B, H, L, Dn + Dr]."""
    width = k_nope.shape[3]
    keys = k_nope.new_empty(*k_nope.shape[:3], width + k_rope.shape[3])
    keys[..., :width].copy_(k_nope)
    keys[..., width:].copy_(k_rope.expand(-1, k_nope.shape[1], -1, -1))
    return keys
