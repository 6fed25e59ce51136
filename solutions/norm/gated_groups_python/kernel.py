"""The gated norm of groups at the end of a Mamba-2 layer, as transformers runs it: eager, rounded before the weight."""

import torch


def run(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, group_size: int, eps: float) -> torch.Tensor:
    """x, gate [M, N], weight [N] -> [M, N]; as Mamba-2, Bamba, Granite-4, Nemotron-H and Zamba-2."""
    wide = x.to(torch.float32) * torch.nn.functional.silu(gate.to(torch.float32))
    groups = wide.view(*wide.shape[:-1], wide.shape[-1] // group_size, group_size)
    normed = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.view(wide.shape).to(x.dtype)
