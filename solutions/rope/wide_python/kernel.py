"""Rotary embeddings that transformers computes in float32, and the one of a single tensor: eager."""

import torch


def _halves(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _neighbours(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


def run_rope_neox_fp32(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Hq, S, D], k [B, Hkv, S, D], cos and sin [1 or B, S, D] in any dtype -> rotated q and k."""
    dtype, q, k = q.dtype, q.float(), k.float()
    cos, sin = cos.unsqueeze(1).float(), sin.unsqueeze(1).float()
    q_out = (q * cos) + (_halves(q) * sin)
    return q_out.to(dtype), ((k * cos) + (_halves(k) * sin)).to(dtype)


def run_rope_neox_single(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, H, S, D], cos and sin [1 or B, S, D] -> rotated x."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (x * cos) + (_halves(x) * sin)


def run_rope_interleaved_fp32(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Hq, S, D], k [B, Hkv, S, D], cos and sin [1 or B, S, D] in any dtype -> q and k with their pairs rotated."""
    dtype, q, k = q.dtype, q.float(), k.float()
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q_out = (q * cos) + (_neighbours(q) * sin)
    return q_out.to(dtype), ((k * cos) + (_neighbours(k) * sin)).to(dtype)


def run_rope_pairs_fp32(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As run_rope_interleaved_fp32, but entry i of the first half of cos and sin is that of pair i."""
    half = cos.shape[-1] // 2
    return run_rope_interleaved_fp32(
        q, k, cos[..., :half].repeat_interleave(2, dim=-1), sin[..., :half].repeat_interleave(2, dim=-1)
    )
