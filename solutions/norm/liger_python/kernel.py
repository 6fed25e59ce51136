"""Norms by Liger-Kernel, rounded as the code of Llama or of Gemma rounds."""

import torch
from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward
from liger_kernel.ops.rms_norm import rms_norm_forward


def run_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [M, N], weight [N] -> [M, N]."""
    return rms_norm_forward(x, weight, eps, 0.0, "llama", None)[0]


def run_rms_norm_fp32(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [M, N], weight [N] -> [M, N], multiplied by the weight before it is rounded."""
    return rms_norm_forward(x, weight, eps, 0.0, "gemma", None)[0]


def run_rms_norm_gemma(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [M, N], weight [N] -> [M, N], with 1 + weight for a factor."""
    return rms_norm_forward(x, weight, eps, 1.0, "gemma", None)[0]


def run_fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x, residual [M, N], weight [N] -> [M, N]; residual is overwritten with the sum, which Liger-Kernel returns."""
    found = fused_add_rms_norm_forward(x, residual, weight, eps, 0.0, "llama")
    residual.copy_(found[1])
    return found[0]
