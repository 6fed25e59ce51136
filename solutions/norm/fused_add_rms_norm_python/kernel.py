"""Residual add, and the norms with one rounding of the sum, as transformers runs them: eager, one after the other."""

import torch


def _normed_sum(x: torch.Tensor, residual: torch.Tensor, eps: float) -> torch.Tensor:
    """Add x to the residual, in place; the normalised sum in float32."""
    residual.add_(x)
    wide = residual.to(torch.float32)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def run_fused_add_rms_norm_fp32(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """x, residual [M, N], weight [N] -> [M, N]; residual is overwritten with the sum. As gpt-oss."""
    return (weight * _normed_sum(x, residual, eps)).to(x.dtype)


def run_fused_add_rms_norm_gemma(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """x, residual [M, N], weight [N] -> [M, N]; residual is overwritten with the sum. As Qwen3-Next and Gemma-3."""
    return (_normed_sum(x, residual, eps) * (1.0 + weight.float())).to(x.dtype)
