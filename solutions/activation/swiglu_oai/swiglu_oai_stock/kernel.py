"""The gate of gpt-oss's experts as transformers runs it: eager, rounded after every step."""

import torch


def run(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """x [M, 2 I], gate and up in alternating columns -> [M, I]."""
    gate, up = x[..., ::2], x[..., 1::2]
    gate = gate.clamp(min=None, max=limit)
    up = up.clamp(min=-limit, max=limit)
    glu = gate * torch.sigmoid(gate * alpha)
    return (up + 1) * glu
