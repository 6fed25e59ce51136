"""Clamped SwiGLU on a packed product, as transformers' DeepSeek-V4 experts run it."""

import torch


def run(x: torch.Tensor, limit: float) -> torch.Tensor:
    """x [M, 2 I] -> [M, I]."""
    gate, up = x.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    return torch.nn.functional.silu(gate) * up
