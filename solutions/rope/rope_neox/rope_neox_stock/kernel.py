"""Rotary embedding as transformers runs it: eager."""

import torch


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos) + (turned * sin)


def run(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Hq, S, D], k [B, Hkv, S, D], cos and sin [1 or B, S, D] -> rotated q and k."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotated(q, cos, sin), _rotated(k, cos, sin)
