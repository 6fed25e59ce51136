"""Layer norm and its gradients as PyTorch and transformers run them: eager ATen kernels."""

import torch


def run_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """x [M, N], weight, bias [N] -> [M, N]; as torch.nn.LayerNorm."""
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def run_layer_norm_no_bias(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [M, N], weight [N] -> [M, N]; as torch.nn.LayerNorm with bias=False."""
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, None, eps)


def run_fused_add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """x, residual [M, N], weight, bias [N] -> [M, N]; residual is overwritten with the sum."""
    residual.add_(x)
    return torch.nn.functional.layer_norm(residual, (x.shape[-1],), weight, bias, eps)


def run_layer_norm_backward(
    x: torch.Tensor, weight: torch.Tensor, grad_out: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, grad_out [M, N], weight [N] -> the gradients of x [M, N], of weight [N] and of bias [N].

    Autograd has kept the mean and the deviation of each row. They are computed again here, which reads x once more.
    """
    shape = (x.shape[-1],)
    if x.is_cuda and x.numel():
        mean, rstd = torch.batch_norm_stats(x[None], eps)
        return torch.ops.aten.native_layer_norm_backward(
            grad_out, x, shape, mean[:, None], rstd[:, None], weight, weight, (True, True, True)
        )
    # The CPU's statistics have the dtype of x, so they are too coarse in half precision.
    wide, scale = x.float(), weight.float()
    _, mean, rstd = torch.native_layer_norm(wide, shape, scale, None, eps)
    found = torch.ops.aten.native_layer_norm_backward(
        grad_out.float(), wide, shape, mean, rstd, scale, scale, (True, True, True)
    )
    return found[0].to(x.dtype), found[1].to(x.dtype), found[2].to(x.dtype)
