"""Softmax of rows by Liger-Kernel."""

import torch
from liger_kernel.ops.softmax import LigerSoftmaxFunction


def run_softmax(x: torch.Tensor) -> torch.Tensor:
    """x [M, N] -> [M, N]."""
    return LigerSoftmaxFunction.apply(x)
