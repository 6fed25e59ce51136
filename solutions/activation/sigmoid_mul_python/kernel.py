"""The gate on the output of attention, as transformers runs it: eager, two kernels."""

import torch


def run(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x, gate [M, N] -> [M, N]; as Qwen3.5 and Qwen3-Next."""
    return x * torch.sigmoid(gate)
