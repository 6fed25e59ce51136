"""Scores of a light indexer, eager PyTorch: products of all heads in float32, then their weighted sum."""

import torch


def run(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, scale: float) -> torch.Tensor:
    """q [B, S, H, D], k [B, L, D], weights [B, S, H] float32 -> [B, S, L] float32."""
    products = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1)) * scale
    products = torch.nn.functional.relu(products)
    return torch.matmul(weights.unsqueeze(-2), products).squeeze(-2)
