"""Residual add and RMSNorm as transformers runs them: eager, one after the other."""

import torch


def run(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x, residual [M, N], weight [N] -> [M, N]; residual is overwritten with the sum."""
    residual.add_(x)
    wide = residual.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)
