"""Rotary embedding by FlashInfer, from tables as transformers hands them over."""

import torch
from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """[B, H, S, D] -> a copy as [B * S, H * D], which FlashInfer overwrites."""
    batch, heads, length, size = x.shape
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).view(batch * length, heads * size)


def run_rope_neox(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Hq, S, D], k [B, Hkv, S, D], cos and sin [1 or B, S, D] -> rotated q and k.

    FlashInfer reads one float32 table, with a row for each position and the cosines of half a head before its sines; the two
    halves of a head have the same angles. The table is made here, in each call.
    """
    batch, _, length, size = q.shape
    half = size // 2
    table = torch.cat((cos[..., :half], sin[..., :half]), dim=-1).float().flatten(0, 1)
    positions = torch.arange(batch * length, device=q.device, dtype=torch.int32) % table.shape[0]
    queries, keys = _by_token(q), _by_token(k)
    apply_rope_with_cos_sin_cache_inplace(positions, queries, keys, size, table)
    return (
        queries.view(batch, length, -1, size).transpose(1, 2),
        keys.view(batch, length, -1, size).transpose(1, 2),
    )
