"""The gated norm at the end of a Gated DeltaNet layer, as transformers runs it: eager, rounded twice before the gate."""

import torch


def run(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x, gate [M, N], weight [N] -> [M, N]; as Qwen3.5 and Qwen3-Next."""
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    scaled = weight * normed.to(x.dtype)
    return (scaled * torch.nn.functional.silu(gate.to(torch.float32))).to(x.dtype)
