"""Group norm and its gradients as PyTorch runs them: eager ATen kernels."""

import torch


def run_group_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """x [B, G, D, S], weight, bias [G, D] -> [B, G, D, S]; as torch.nn.GroupNorm of [B, G * D, S]."""
    B, G, D, S = x.shape
    return torch.nn.functional.group_norm(x.reshape(B, G * D, S), G, weight.flatten(), bias.flatten(), eps).view(
        x.shape
    )


def run_group_norm_backward(
    x: torch.Tensor, weight: torch.Tensor, grad_out: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, grad_out [B, G, D, S], weight [G, D] -> the gradients of x, of weight and of bias.

    Autograd has kept the mean and the deviation of each group. They are computed again here, which reads x once more.
    """
    B, G, D, S = x.shape
    given, wide, scale = grad_out.contiguous(), x.contiguous(), weight.flatten()
    if not x.is_cuda:  # the CPU's statistics have the dtype of x, so they are too coarse in half precision
        given, wide, scale = given.float(), wide.float(), scale.float()
    groups = wide.view(B * G, D * S)
    if x.is_cuda and x.numel():
        mean, rstd = torch.batch_norm_stats(groups[None], eps)
        mean, rstd = mean.to(x.dtype), rstd.to(x.dtype)  # as ATen's forward keeps them
    else:
        var, mean = torch.var_mean(groups, dim=1, correction=0)
        rstd = torch.rsqrt(var + eps)
    found = torch.ops.aten.native_group_norm_backward(
        given, wide, mean.view(B, G), rstd.view(B, G), scale, B, G * D, S, G, [True, True, True]
    )
    return found[0].to(x.dtype), found[1].view(G, D).to(x.dtype), found[2].view(G, D).to(x.dtype)
