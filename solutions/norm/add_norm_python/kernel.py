"""Residual add and norm as models run them in training: eager, one after the other, each into a new tensor."""

import torch


def _normed(total: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the normalised sum in float32."""
    wide = total.to(torch.float32)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def run_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [M, N], weight [N] -> the norm and the sum, [M, N] each. As Llama."""
    total = residual + x
    return weight * _normed(total, eps).to(x.dtype), total


def run_add_rms_norm_fp32(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [M, N], weight [N] -> the norm and the sum, [M, N] each. As gpt-oss."""
    total = residual + x
    return (weight * _normed(total, eps)).to(x.dtype), total


def run_add_rms_norm_gemma(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [M, N], weight [N] -> the norm and the sum, [M, N] each. As Gemma-3."""
    total = residual + x
    return (_normed(total, eps) * (1.0 + weight.float())).to(x.dtype), total


def run_add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [M, N], weight, bias [N] -> the norm and the sum, [M, N] each. As GPT-2."""
    total = residual + x
    return torch.nn.functional.layer_norm(total, (x.shape[-1],), weight, bias, eps), total
