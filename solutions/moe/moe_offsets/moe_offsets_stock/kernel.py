"""Sorted order, its inverse and the experts' ends, as transformers' grouped experts find them: two sorts, a histogram, a sum."""

import torch

EXPERTS = 256


def run(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids [M, K] -> perm [M K], offs [EXPERTS], inverse [M K]."""
    flat = ids.reshape(-1)
    keys = torch.where((flat >= 0) & (flat < EXPERTS), flat, EXPERTS)
    ordered, perm = torch.sort(keys, stable=True)
    inverse = torch.argsort(perm, stable=True)
    # histc and not bincount, which waits for the GPU; on the CPU it takes floating point alone.
    values = ordered.float() if ids.device.type == "cpu" else ordered.int()
    counts = torch.histc(values, bins=EXPERTS, min=0, max=EXPERTS - 1)
    return perm, torch.cumsum(counts, dim=0, dtype=torch.int32), inverse
