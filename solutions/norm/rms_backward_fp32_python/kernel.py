"""The gradients of RMSNorm with its weight in float32, as autograd computes them behind transformers' code: eager.

Autograd has kept the normalised rows and their statistics; here they are computed again.
"""

import torch


def _gradients(
    x: torch.Tensor, scale: torch.Tensor, grad_out: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    wide, grad = x.to(torch.float32), grad_out.to(torch.float32)
    size = x.shape[-1]
    rstd = torch.rsqrt(torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / size + eps)
    grad_weight = (grad * (wide * rstd)).sum(0)
    grad_normed = grad * scale
    grad_mean = (grad_normed * wide).sum(-1, keepdim=True) * rstd.pow(3) / -size
    return torch.addcmul(grad_normed * rstd, wide, grad_mean).to(x.dtype), grad_weight.to(x.dtype)


def run_rms_norm_fp32_backward(
    x: torch.Tensor, weight: torch.Tensor, grad_out: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, grad_out [M, N], weight [N] -> the gradients of x [M, N] and of weight [N]."""
    return _gradients(x, weight.to(torch.float32), grad_out, eps)


def run_rms_norm_gemma_backward(
    x: torch.Tensor, weight: torch.Tensor, grad_out: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, grad_out [M, N], weight [N] -> the gradients of x [M, N] and of weight [N]."""
    return _gradients(x, 1 + weight.to(torch.float32), grad_out, eps)
