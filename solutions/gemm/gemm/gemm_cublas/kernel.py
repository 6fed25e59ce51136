"""The linear layer as models call it: cuBLAS on a GPU."""

import torch


def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K], b [N, K] -> [M, N]."""
    return torch.nn.functional.linear(a, b)
