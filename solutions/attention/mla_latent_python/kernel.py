"""Latent attention of one position in PyTorch: scaled_dot_product_attention with the heads as queries of one head."""

import torch


def run(
    q_nope: torch.Tensor, q_pe: torch.Tensor, kv_nope: torch.Tensor, k_rot: torch.Tensor, scale: float
) -> torch.Tensor:
    """q_nope [B, H, R], q_pe [B, H, E], kv_nope [B, L, R], k_rot [B, L, E] -> [B, H, R]. Keys are a copy of both caches."""
    queries, keys = torch.cat((q_nope, q_pe), dim=-1), torch.cat((kv_nope, k_rot), dim=-1)
    values = kv_nope.contiguous()
    found = torch.nn.functional.scaled_dot_product_attention(
        queries[:, None], keys[:, None], values[:, None], scale=scale
    )
    return found[:, 0]
