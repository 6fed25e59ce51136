"""The per-head RMSNorms of q and k as transformers runs them in Qwen3: eager, operation by operation."""

import torch


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def run(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [M, Hq, D], k [M, Hkv, D], q_weight and k_weight [D] -> q and k normalised head by head."""
    return _normed(q, q_weight, eps), _normed(k, k_weight, eps)
