"""Relative frequency of each expert in eager PyTorch, without a mask that depends on the data, which would wait for the GPU."""

import torch


def run(ids: torch.Tensor, num_experts: int, num_aux_topk: int) -> torch.Tensor:
    """ids [M, K] -> frequency [num_experts]."""
    if ids.shape[0] == 0:
        return torch.zeros(num_experts, dtype=torch.float32, device=ids.device)
    flat = ids.reshape(-1)
    bins = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts = counts.scatter_add_(0, bins, torch.ones_like(bins))[:num_experts]
    return counts.float() * num_experts / (ids.shape[0] * num_aux_topk)
