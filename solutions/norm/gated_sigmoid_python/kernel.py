"""RMSNorm of each head's output, times its weight and the sigmoid of a gate, eager PyTorch."""

import torch


def run(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x and gate [M, N], weight [N] -> [M, N]; all of it in float32, with one rounding."""
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(variance + eps)
    wide = weight.to(torch.float32) * wide
    return (wide * torch.sigmoid(gate.to(torch.float32))).to(x.dtype)
