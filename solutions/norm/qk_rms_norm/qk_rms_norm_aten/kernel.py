"""The per-head RMSNorms of q and k by PyTorch's fused kernel. It rounds once where the Definition rounds twice."""

import torch


def run(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [M, Hq, D], k [M, Hkv, D], q_weight and k_weight [D] -> q and k normalised head by head."""
    size = (q.shape[-1],)
    return (
        torch.nn.functional.rms_norm(q, size, q_weight, eps),
        torch.nn.functional.rms_norm(k, size, k_weight, eps),
    )
