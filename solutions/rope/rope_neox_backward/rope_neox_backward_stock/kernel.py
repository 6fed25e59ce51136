"""The gradients of rotary embedding as autograd computes them behind transformers' code: eager.

Autograd pads the two halves of a turned gradient with zeros and adds them up; here they are concatenated, which gives the same
and moves less.
"""

import torch


def _rotated_back(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = grad.shape[-1] // 2
    turned = grad * sin
    return (grad * cos) + torch.cat((turned[..., half:], -turned[..., :half]), dim=-1)


def run(
    grad_q_out: torch.Tensor, grad_k_out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """grad_q_out [B, Hq, S, D], grad_k_out [B, Hkv, S, D], cos and sin [1 or B, S, D] -> the gradients of q and k."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotated_back(grad_q_out, cos, sin), _rotated_back(grad_k_out, cos, sin)
