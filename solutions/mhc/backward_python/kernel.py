"""The gradients of hyper-connections in eager PyTorch, operation by operation, as autograd runs them behind the stock code."""

import torch


def run_expand_backward(grad_out: torch.Tensor) -> torch.Tensor:
    """grad_out [M, C, H] -> [M, H]."""
    return grad_out.sum(dim=1)


def run_norm_fn_backward(
    residual: torch.Tensor,
    fn: torch.Tensor,
    mixes: torch.Tensor,
    rstd: torch.Tensor,
    grad_mixes: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual [M, C, H], fn [J, C * H], grad_mixes [M, J] -> gradients of residual and fn."""
    flat = residual.flatten(1).float()
    factor = rstd.unsqueeze(1)
    normed = flat * factor
    grad_fn = grad_mixes.T @ normed
    grad_normed = grad_mixes @ fn
    along = (grad_normed * flat).sum(-1, keepdim=True) * factor.pow(3) / -flat.shape[1]
    grad = torch.addcmul(grad_normed * factor, flat, along)
    return grad.to(residual.dtype).view_as(residual), grad_fn


def run_pre_split_mixes_backward(
    mixes: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    streams: int,
    post_mult: float,
    grad_pre: torch.Tensor,
    grad_post: torch.Tensor,
    grad_comb: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """mixes [M, C * (C + 2)] and the gradients of its three parts -> gradients of mixes, scale [3] and base."""
    sizes = [streams, streams, streams * streams]
    factor = scale.repeat_interleave(torch.tensor(sizes, device=scale.device))
    z = (mixes * factor + base)[:, : 2 * streams]
    grad_gates = torch.cat([grad_pre, grad_post * post_mult], dim=1)
    slope = torch.sigmoid(z) * torch.sigmoid(-z)
    grad = torch.cat([grad_gates * slope, grad_comb.flatten(1)], dim=1)
    grad_scale = torch.stack([part.sum() for part in (grad * mixes).split(sizes, dim=1)])
    return grad * factor, grad_scale, grad.sum(0)


def run_sinkhorn_backward(z: torch.Tensor, grad_out: torch.Tensor, repeat: int, eps: float) -> torch.Tensor:
    """z and grad_out [M, C, C] -> gradient of z, through the steps of the forward, which are kept."""
    soft = torch.softmax(z, dim=-1)
    mixing, steps = soft + eps, []
    for step in range(2 * repeat - 1):
        dim = -2 if step % 2 == 0 else -1
        divisor = mixing.sum(dim=dim, keepdim=True) + eps
        mixing = mixing / divisor
        steps.append((mixing, divisor, dim))
    grad = grad_out
    for mixing, divisor, dim in reversed(steps):
        grad = (grad - (grad * mixing).sum(dim=dim, keepdim=True)) / divisor
    return soft * (grad - (grad * soft).sum(dim=-1, keepdim=True))


def run_pre_apply_mix_backward(
    residual: torch.Tensor, mix: torch.Tensor, grad_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual [M, C, H], mix [M, C], grad_out [M, H] -> gradients of residual and mix."""
    grad = grad_out.float().unsqueeze(1)
    return (mix.unsqueeze(-1) * grad).to(residual.dtype), (residual * grad).sum(-1)


def run_post_backward(
    y: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, grad_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y [M, H], residual and grad_out [M, C, H], post [M, C], comb [M, C, C] -> the four gradients."""
    grad, streams = grad_out.float(), residual.float()
    grad_y = (post.unsqueeze(-1) * grad).sum(dim=1).to(y.dtype)
    grad_post = (grad * y.float().unsqueeze(1)).sum(-1)
    grad_residual = torch.matmul(comb, grad).to(residual.dtype)
    return grad_y, grad_residual, grad_post, torch.matmul(streams, grad.transpose(-1, -2))


def run_head_compute_mix_backward(
    mix: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, grad_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """mix and grad_out [M, C] -> gradients of mix, scale [1] and base [C]."""
    z = mix * scale + base
    grad = grad_out * torch.sigmoid(z) * torch.sigmoid(-z)
    return grad * scale, (grad * mix).sum().view(1), grad.sum(0)
