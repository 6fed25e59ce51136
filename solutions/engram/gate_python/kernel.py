"""The gate of n-gram memory in eager PyTorch, operation by operation."""

import torch

Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def run_fused_weight(weight_hidden: torch.Tensor, weight_embed: torch.Tensor) -> torch.Tensor:
    """Both [C, H] -> their product in float32."""
    return weight_hidden.float() * weight_embed.float()


def run_gate_fwd_save(
    hidden: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight_hidden: torch.Tensor,
    weight_embed: torch.Tensor,
    clamp: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden, k [M, C, H], v [M, H], weights [C, H] -> out [M, C, H]; dot, gate and both factors of the norms [M, C]."""
    x, key = hidden.float(), k.float()
    rstd_hidden = torch.rsqrt(x.pow(2).mean(-1) + eps)
    rstd_key = torch.rsqrt(key.pow(2).mean(-1) + eps)
    dot = ((x * weight_hidden.float()) * (key * weight_embed.float())).sum(-1)
    score = dot * rstd_hidden * rstd_key * hidden.shape[-1] ** -0.5
    gate = torch.sigmoid(score.abs().clamp_min(clamp).sqrt() * score.sign())
    out = (x + gate.unsqueeze(-1) * v.float().unsqueeze(-2)).to(hidden.dtype)
    return out, dot, gate, rstd_hidden, rstd_key


def run_gate_fwd(
    hidden: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight_hidden: torch.Tensor,
    weight_embed: torch.Tensor,
    clamp: float,
    eps: float,
) -> torch.Tensor:
    """As run_gate_fwd_save, without what a gradient needs."""
    return run_gate_fwd_save(hidden, k, v, weight_hidden, weight_embed, clamp, eps)[0]


def run_gate_hf(
    hidden: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight_hidden: torch.Tensor,
    weight_embed: torch.Tensor,
    clamp: float,
    eps: float,
) -> torch.Tensor:
    """hidden, k [M, C, H], v [M, H], weights [C, H] about zero -> gate * v [M, C, H], rounded as Qwen4-Exp rounds."""

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (wide * (1.0 + weight.float())).type_as(x)

    score = (normed(k, weight_embed) * normed(hidden, weight_hidden)).sum(dim=-1, keepdim=True) / hidden.shape[
        -1
    ] ** 0.5
    root = score.abs().clamp_min(clamp).sqrt() * score.sign()
    return torch.sigmoid(root) * v.unsqueeze(-2)


def run_grad_w_reduce(
    grad_w_partial: torch.Tensor,
    weight_hidden: torch.Tensor,
    weight_embed: torch.Tensor,
    grad_weight_hidden: torch.Tensor,
    grad_weight_embed: torch.Tensor,
) -> tuple[()]:
    """The sum of the parts [B, C, H] times the other weight is added to both gradients [C, H], in place."""
    total = grad_w_partial.sum(0)
    grad_weight_hidden += total * weight_embed.float()
    grad_weight_embed += total * weight_hidden.float()
    return ()


def run_gate_backward_saved(
    grad_out: torch.Tensor,
    hidden: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight_hidden: torch.Tensor,
    weight_embed: torch.Tensor,
    dot: torch.Tensor,
    gate: torch.Tensor,
    rstd_hidden: torch.Tensor,
    rstd_key: torch.Tensor,
    clamp: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of hidden, k, v and both weights, from what the forward kept."""
    size = hidden.shape[-1]
    grad, x, key = grad_out.float(), hidden.float(), k.float()
    wide_hidden, wide_embed = weight_hidden.float(), weight_embed.float()
    factor = rstd_hidden * rstd_key * size**-0.5
    score = (dot * factor).abs()
    grad_gate = (grad * v.float().unsqueeze(-2)).sum(-1)
    slope = grad_gate * gate * (1 - gate) * factor * 0.5 / score.sqrt()
    slope = torch.where(score < clamp, torch.zeros_like(slope), slope)
    weight = wide_hidden * wide_embed
    grad_hidden = grad + slope[..., None] * (key * weight - x * (dot * rstd_hidden.square() / size)[..., None])
    grad_key = slope[..., None] * (x * weight - key * (dot * rstd_key.square() / size)[..., None])
    grad_value = (grad * gate[..., None]).sum(dim=1)
    grad_weight = (slope[..., None] * x * key).sum(dim=0)
    dtype = hidden.dtype
    return (
        grad_hidden.to(dtype),
        grad_key.to(dtype),
        grad_value.to(dtype),
        grad_weight * wide_embed,
        grad_weight * wide_hidden,
    )


def run_gate_backward(
    grad_out: torch.Tensor,
    hidden: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight_hidden: torch.Tensor,
    weight_embed: torch.Tensor,
    clamp: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As run_gate_backward_saved; what the forward kept there is computed again."""
    saved = run_gate_fwd_save(hidden, k, v, weight_hidden, weight_embed, clamp, eps)[1:]
    return run_gate_backward_saved(grad_out, hidden, k, v, weight_hidden, weight_embed, *saved, clamp)
