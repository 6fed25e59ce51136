"""RMSNorm by PyTorch's own fused kernel. It rounds once where the Definition rounds twice; both are within tolerance."""

import torch


def run(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [M, N], weight [N] -> [M, N]."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
