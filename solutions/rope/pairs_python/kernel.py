"""Rotary embeddings of pairs, and by tables of half a head's width, as transformers runs them: eager."""

import torch


def _turned_by_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = torch.chunk(x, 2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def run_rope_half_tables(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Hq, S, D], k [B, Hkv, S, D], cos and sin [1 or B, S, D/2] -> rotated q and k, as gpt-oss does."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _turned_by_halves(q, cos, sin), _turned_by_halves(k, cos, sin)


def _neighbours_swapped(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def _turned_first(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    size = cos.shape[-1]
    turning, passing = x[..., :size], x[..., size:]
    return torch.cat([(turning * cos) + (_neighbours_swapped(turning) * sin), passing], dim=-1)


def run_rope_pairs(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Hq, S, D], k [B, Hkv, S, D], cos and sin [1 or B, S, R] -> their first R elements rotated, as GLM-4 does."""
    half = cos.shape[-1] // 2
    cos, sin = (table.unsqueeze(1)[..., :half].repeat_interleave(2, dim=-1) for table in (cos, sin))
    return _turned_first(q, cos, sin), _turned_first(k, cos, sin)


def _turned_to_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)


def run_rope_pairs_to_halves(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Hq, S, D], k [B, Hkv, S, D], cos and sin [1 or B, S, D] -> pairs rotated into halves, as DeepSeek-V3 does."""
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half].unsqueeze(1), sin[..., :half].unsqueeze(1)
    return _turned_to_halves(q, cos, sin), _turned_to_halves(k, cos, sin)


def _as_complex(x: torch.Tensor) -> torch.Tensor:
    pairs = x.float().reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    if pairs.storage_offset() % 2 or any(stride % 2 for stride in pairs.stride()[:-1]):
        pairs = pairs.clone(memory_format=torch.contiguous_format)  # PyTorch has no view of such numbers
    return torch.view_as_complex(pairs)


def run_rope_complex_pairs(q: torch.Tensor, k: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Hq, S, D], k [B, Hkv, S, D], turns [1 or B, S, D] -> rotated q and k, as DeepSeek-V2 does.

    There the table is complex, which is what the float32 one is in memory.
    """
    table = _as_complex(turns).unsqueeze(1)
    q_out, k_out = (torch.view_as_real(_as_complex(x) * table).flatten(3).type_as(x) for x in (q, k))
    return q_out, k_out


def run_rope_tail_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, H, S, D], cos and sin [1 or B, S, P] -> the last 2P elements of x rotated, as DeepSeek-V4 does."""
    cos, sin = (table.repeat_interleave(2, dim=-1).unsqueeze(1) for table in (cos, sin))
    size = cos.shape[-1]
    passing, turning = x[..., :-size], x[..., -size:]
    turned = ((turning.float() * cos) + (_neighbours_swapped(turning).float() * sin)).to(x.dtype)
    return torch.cat([passing, turned], dim=-1)
