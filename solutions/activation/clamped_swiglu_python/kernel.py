"""Gated activations of clamped operands as transformers runs them: eager, rounded after every step."""

import torch


def run_swiglu_clamp(x: torch.Tensor, limit: float) -> torch.Tensor:
    """x [M, 2 I], gate and up in halves -> [M, I]: DeepSeek-V4's experts."""
    gate, up = x.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    return torch.nn.functional.silu(gate) * up


def run_swiglu_oai(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """x [M, 2 I], gate and up in alternating columns -> [M, I]: gpt-oss's experts."""
    gate, up = x[..., ::2], x[..., 1::2]
    gate = gate.clamp(min=None, max=limit)
    up = up.clamp(min=-limit, max=limit)
    glu = gate * torch.sigmoid(gate * alpha)
    return (up + 1) * glu
