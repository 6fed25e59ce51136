"""Rotary embedding as transformers runs it, and its gradients as autograd computes them behind that code: eager.

Autograd pads the two halves of a turned gradient with zeros and adds them up; here they are concatenated, which gives the same
and moves less.
"""

import torch


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos) + (turned * sin)


def _rotated_back(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = grad.shape[-1] // 2
    turned = grad * sin
    return (grad * cos) + torch.cat((turned[..., half:], -turned[..., :half]), dim=-1)


def run_rope_neox(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Hq, S, D], k [B, Hkv, S, D], cos and sin [1 or B, S, D] -> rotated q and k."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def run_rope_partial(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Hq, S, D], k [B, Hkv, S, D], cos and sin [1 or B, S, R] -> q and k, their first R elements rotated.

    As in Phi-3 and Qwen3-Next.
    """
    size = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q_out = torch.cat([_rotated(q[..., :size], cos, sin), q[..., size:]], dim=-1)
    return q_out, torch.cat([_rotated(k[..., :size], cos, sin), k[..., size:]], dim=-1)


def run_rope_neox_backward(
    grad_q_out: torch.Tensor, grad_k_out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """grad_q_out [B, Hq, S, D], grad_k_out [B, Hkv, S, D], cos and sin [1 or B, S, D] -> the gradients of q and k."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotated_back(grad_q_out, cos, sin), _rotated_back(grad_k_out, cos, sin)
