"""Relative frequency of each expert in eager PyTorch, without a mask that depends on the data, which would wait for the GPU."""

import torch

EXPERTS = 256


def run(ids: torch.Tensor, num_aux_topk: int) -> torch.Tensor:
    """ids [M, K] -> frequency [EXPERTS]."""
    if ids.shape[0] == 0:
        return torch.zeros(EXPERTS, dtype=torch.float32, device=ids.device)
    flat = ids.reshape(-1)
    bins = torch.where((flat >= 0) & (flat < EXPERTS), flat, EXPERTS)
    counts = torch.zeros(EXPERTS + 1, dtype=torch.int64, device=ids.device)
    counts = counts.scatter_add_(0, bins, torch.ones_like(bins))[:EXPERTS]
    return counts.float() * EXPERTS / (ids.shape[0] * num_aux_topk)
