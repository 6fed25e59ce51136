"""GPT-2's GELU by PyTorch's own fused kernel. It rounds once where stock code rounds eight times."""

import torch


def run(x: torch.Tensor) -> torch.Tensor:
    """x [M, I] -> [M, I]."""
    return torch.nn.functional.gelu(x, approximate="tanh")
