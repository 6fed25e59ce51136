"""Hyper-connections forward in eager PyTorch, operation by operation, as models run them."""

import torch
import torch.nn.functional as F


def run_expand(x: torch.Tensor, streams: int) -> torch.Tensor:
    """x [M, H] -> [M, streams, H]."""
    return x.unsqueeze(1).expand(-1, streams, -1).contiguous()


def run_norm_fn(residual: torch.Tensor, fn: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """residual [M, C, H], fn [J, C * H] -> the projection of the normalised streams [M, J], and the factor of the norm [M]."""
    flat = residual.flatten(1).float()
    rstd = torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    return F.linear(flat * rstd, fn), rstd.squeeze(1)


def run_pre_split_mixes(
    mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, streams: int, post_mult: float, pre_eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """mixes [M, C * (C + 2)] -> pre [M, C], post [M, C], raw comb [M, C, C]."""
    sizes = [streams, streams, streams * streams]
    pre, post, comb = mixes.split(sizes, dim=-1)
    pre_base, post_base, comb_base = base.split(sizes)
    pre_scale, post_scale, comb_scale = scale.unbind(0)
    pre = torch.sigmoid(pre * pre_scale + pre_base) + pre_eps
    post = post_mult * torch.sigmoid(post * post_scale + post_base)
    comb = comb.view(-1, streams, streams) * comb_scale + comb_base.view(streams, streams)
    return pre, post, comb


def run_sinkhorn(z: torch.Tensor, repeat: int, eps: float) -> torch.Tensor:
    """z [M, C, C] -> mixing matrices of the same shape."""
    mixing = torch.softmax(z, dim=-1) + eps
    mixing = mixing / (mixing.sum(dim=-2, keepdim=True) + eps)
    for _ in range(repeat - 1):
        mixing = mixing / (mixing.sum(dim=-1, keepdim=True) + eps)
        mixing = mixing / (mixing.sum(dim=-2, keepdim=True) + eps)
    return mixing


def run_pre_apply_mix(residual: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """residual [M, C, H], mix [M, C] -> [M, H]."""
    return (mix.unsqueeze(-1) * residual).sum(dim=1).to(residual.dtype)


def run_post(y: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """y [M, H], residual [M, C, H], post [M, C], comb [M, C, C] -> [M, C, H]."""
    mixed = torch.matmul(comb.transpose(-1, -2), residual.float())
    return (post.unsqueeze(-1) * y.float().unsqueeze(-2) + mixed).to(residual.dtype)


def run_post_hf(y: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """As run_post, everything in the dtype of the streams."""
    dtype = residual.dtype
    return post.to(dtype).unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(comb.to(dtype).transpose(-1, -2), residual)


def run_head_compute_mix(mix: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, eps: float) -> torch.Tensor:
    """mix [M, C], scale [1], base [C] -> [M, C]."""
    return torch.sigmoid(mix * scale + base) + eps


def run_pre_fused(
    residual: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    rms_eps: float,
    pre_eps: float,
    sinkhorn_eps: float,
    post_mult: float,
    repeat: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """residual [M, C, H] -> post [M, C], comb [M, C, C] after its Sinkhorn steps, input of the sublayer [M, H]."""
    mixes, _ = run_norm_fn(residual, fn, rms_eps)
    pre, post, comb = run_pre_split_mixes(mixes, scale, base, residual.shape[1], post_mult, pre_eps)
    return post, run_sinkhorn(comb, repeat, sinkhorn_eps), run_pre_apply_mix(residual, pre)


def run_head_fused(
    residual: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, rms_eps: float, eps: float
) -> torch.Tensor:
    """residual [M, C, H], fn [C, C * H], scale [1], base [C] -> the collapsed streams [M, H]."""
    mixes, _ = run_norm_fn(residual, fn, rms_eps)
    return run_pre_apply_mix(residual, run_head_compute_mix(mixes, scale, base, eps))


def run_recompute(
    residual: torch.Tensor, pre: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual [M, C, H] and the coefficients and outputs of L sublayers -> their inputs [L, M, H], streams after them."""
    layer_inputs, residuals = [], []
    for layer, mix in enumerate(pre):
        layer_inputs.append(run_pre_apply_mix(residual, mix))
        if layer < len(y):
            residual = run_post(y[layer], residual, post[layer], comb[layer])
            residuals.append(residual)
    return torch.stack(layer_inputs), torch.stack(residuals)
