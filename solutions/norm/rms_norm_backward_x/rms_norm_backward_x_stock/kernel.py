"""The gradient of RMSNorm's activation as autograd computes it behind transformers' code: eager, operation by operation.

Autograd has kept the rows in float32 and their statistics; here they are computed again. What is saved elsewhere (a norm
instead of a mean of squares, a fused product and sum) makes up for it.
"""

import torch


def run(x: torch.Tensor, weight: torch.Tensor, grad_out: torch.Tensor, eps: float) -> torch.Tensor:
    """x, grad_out [M, N], weight [N] -> the gradient of x [M, N]."""
    wide = x.to(torch.float32)
    size = x.shape[-1]
    rstd = torch.rsqrt(torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / size + eps)
    grad_normed = (grad_out * weight).to(torch.float32)
    grad_mean = (grad_normed * wide).sum(-1, keepdim=True) * rstd.pow(3) / -size
    return torch.addcmul(grad_normed * rstd, wide, grad_mean).to(x.dtype)
