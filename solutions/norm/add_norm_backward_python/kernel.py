"""Gradients of a residual sum and its norm as autograd computes them behind transformers' code: eager, the sum last.

Autograd has kept the normalised rows and their statistics; here they are computed again.
"""

import torch


def _of_sum(
    total: torch.Tensor, grad_normed: torch.Tensor, grad_total: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of the sum, and the normalised sum in float32."""
    wide, size = total.to(torch.float32), total.shape[-1]
    rstd = torch.rsqrt(torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / size + eps)
    grad_mean = (grad_normed * wide).sum(-1, keepdim=True) * rstd.pow(3) / -size
    return torch.addcmul(grad_normed * rstd, wide, grad_mean).to(total.dtype) + grad_total, wide * rstd


def run_add_rms_norm_backward(
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    grad_residual_out: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual_out, both gradients [M, N], weight [N] -> the gradients of the sum [M, N] and of weight [N]."""
    grad_normed = (grad_out * weight).to(torch.float32)
    grad_sum, normed = _of_sum(residual_out, grad_normed, grad_residual_out, eps)
    return grad_sum, (grad_out * normed.to(weight.dtype)).sum(0)


def run_add_rms_norm_fp32_backward(
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    grad_residual_out: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual_out, both gradients [M, N], weight [N] -> the gradients of the sum [M, N] and of weight [N]."""
    grad = grad_out.to(torch.float32)
    grad_sum, normed = _of_sum(residual_out, grad * weight.to(torch.float32), grad_residual_out, eps)
    return grad_sum, (grad * normed).sum(0).to(weight.dtype)


def run_add_rms_norm_gemma_backward(
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    grad_residual_out: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual_out, both gradients [M, N], weight [N] -> the gradients of the sum [M, N] and of weight [N]."""
    grad = grad_out.to(torch.float32)
    grad_sum, normed = _of_sum(residual_out, grad * (1 + weight.to(torch.float32)), grad_residual_out, eps)
    return grad_sum, (grad * normed).sum(0).to(weight.dtype)


def run_add_layer_norm_backward(
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    grad_residual_out: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """residual_out, both gradients [M, N], weight [N] -> the gradients of the sum [M, N], of weight [N] and of bias [N]."""
    shape, dtype = (residual_out.shape[-1],), residual_out.dtype
    if residual_out.is_cuda and residual_out.numel():
        mean, rstd = torch.batch_norm_stats(residual_out[None], eps)
        found = torch.ops.aten.native_layer_norm_backward(
            grad_out, residual_out, shape, mean[:, None], rstd[:, None], weight, weight, (True, True, True)
        )
        return found[0] + grad_residual_out, found[1], found[2]
    # The CPU's statistics have the dtype of the sum, so they are too coarse in half precision.
    wide, scale = residual_out.float(), weight.float()
    _, mean, rstd = torch.native_layer_norm(wide, shape, scale, None, eps)
    found = torch.ops.aten.native_layer_norm_backward(
        grad_out.float(), wide, shape, mean, rstd, scale, scale, (True, True, True)
    )
    return found[0].to(dtype) + grad_residual_out, found[1].to(dtype), found[2].to(dtype)
