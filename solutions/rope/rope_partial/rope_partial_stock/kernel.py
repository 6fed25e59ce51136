"""Rotary embedding of a part of each head as transformers runs it in Phi-3 and Qwen3-Next: eager."""

import torch


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    size = cos.shape[-1]
    turning, passing = x[..., :size], x[..., size:]
    half = size // 2
    turned = torch.cat((-turning[..., half:], turning[..., :half]), dim=-1)
    return torch.cat([(turning * cos) + (turned * sin), passing], dim=-1)


def run(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Hq, S, D], k [B, Hkv, S, D], cos and sin [1 or B, S, R] -> q and k, their first R elements rotated."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotated(q, cos, sin), _rotated(k, cos, sin)
