"""Sorted order, its inverse and the experts' ends, as transformers' grouped experts find them: two sorts, a histogram, a sum."""

import torch


def run(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids [M, K] -> perm [M K], offs [num_experts], inverse [M K]."""
    flat = ids.reshape(-1)
    keys = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    ordered, perm = torch.sort(keys, stable=True)
    inverse = torch.argsort(perm, stable=True)
    # histc and not bincount, which waits for the GPU; on the CPU it takes floating point alone.
    values = ordered.float() if ids.device.type == "cpu" else ordered.int()
    # One bin more for ids of no expert, without which the bounds of a single expert's would be equal, and taken for absent.
    counts = torch.histc(values, bins=num_experts + 1, min=0, max=num_experts)[:num_experts]
    return perm, torch.cumsum(counts, dim=0, dtype=torch.int32), inverse
