"""Attention over pages in PyTorch: pages are copied into one tensor for each sequence, then scaled_dot_product_attention."""

import torch


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """q [B, Hq, D], caches [N, P, Hkv, D], table [B, M], lengths [B] -> [B, Hq, D].

    Slots without a position are zeros in the copies: a weight of zero times NaN would be NaN.
    """
    if q.data_ptr() % 16:
        q = q.clone()  # cuDNN fails on a query at such an address
    places = torch.arange(table.shape[1] * k_cache.shape[1], device=q.device)
    seen = places < lengths[:, None]
    pages = torch.where(seen[:, :: k_cache.shape[1]], table, 0)
    keys, values = (
        cache[pages].flatten(1, 2).masked_fill(~seen[:, :, None, None], 0).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    out = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, None], keys, values, attn_mask=seen[:, None, None], scale=scale, enable_gqa=q.shape[1] != keys.shape[1]
    )
    return out[:, :, 0].masked_fill(lengths[:, None, None] == 0, 0)
