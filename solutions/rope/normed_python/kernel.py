"""RMSNorm of the heads of q and k and the rotary embedding behind it, eager PyTorch."""

import torch


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    values = x.to(torch.float32)
    mean_square = values.pow(2).mean(-1, keepdim=True)
    return weight * (values * torch.rsqrt(mean_square + eps)).to(x.dtype)


def _norm_gemma(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    values = x.float()
    normed = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + weight.float())).type_as(x)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def run_qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, S, Hq, D], k [B, S, Hkv, D], q_weight, k_weight [D], cos and sin [1 or B, S, D] -> q and k, normed and rotated."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return _rotate(_norm(q, q_weight, eps), cos, sin), _rotate(_norm(k, k_weight, eps), cos, sin)


def run_qk_norm_rope_gemma(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, S, Hq, D], k [B, S, Hkv, D], q_weight, k_weight [D], cos and sin [1 or B, S, D] -> q and k, normed and rotated."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return _rotate(_norm_gemma(q, q_weight, eps), cos, sin), _rotate(_norm_gemma(k, k_weight, eps), cos, sin)
