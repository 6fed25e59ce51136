"""Softmax by PyTorch's own kernel, which is what models call."""

import torch


def run(x: torch.Tensor) -> torch.Tensor:
    """x [M, N] -> [M, N]."""
    return torch.softmax(x, dim=-1)
