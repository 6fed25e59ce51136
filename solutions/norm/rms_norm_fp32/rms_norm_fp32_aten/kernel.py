"""RMSNorm by PyTorch's own fused kernel, which rounds once, as the Definition does."""

import torch


def run(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [M, N], weight [N] -> [M, N]."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
