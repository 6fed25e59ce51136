"""Weights over their sum in eager PyTorch, in the order that the Definition states."""

import torch


def run(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weights [M, K] -> denominator [M], weights / denominator [M, K]."""
    denominator = torch.full((weights.shape[0],), 1e-20, dtype=torch.float32, device=weights.device)
    for choice in range(weights.shape[1]):
        denominator = denominator + weights[:, choice]
    return denominator, weights / denominator.unsqueeze(1)
