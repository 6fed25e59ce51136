"""Decays of Kimi Delta Attention, eager PyTorch."""

import torch


def run(x: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """x [M, H, K], A_log [H], dt_bias [H, K] -> [M, H, K] float32."""
    step = x.float() + dt_bias.float()
    softplus = torch.where(step > 20.0, step, torch.log(1.0 + torch.exp(step)))
    return -torch.exp(A_log.float())[:, None] * softplus
